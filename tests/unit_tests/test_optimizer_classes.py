"""Optimizers update shards in the same way as full parameters, or raise an error with their name."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp import fsdp2
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.optim.classes import looks_at
from megatron_fsdp import fully_shard, fully_shard_model, fully_shard_optimizer, register_optimizer
from tests.models import (
    STRATEGIES,
    Block,
    Pair,
    TinyModel,
    adamw,
    assert_same_training,
    batches,
    device,
    load_from,
    loss_of,
    main_weights,
    save_to,
    train_step,
)
from tests.ranks import RankPool, on_ranks

Make = Callable[[Any], torch.optim.Optimizer]


class Normalized(torch.optim.Optimizer):
    """Divides each parameter's gradient by its norm, as LAMB and LARS do; fails at a parameter without elements."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["lr"] * float(parameter.norm()) / parameter.numel()
                    parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=rate)


class Blockwise(torch.optim.Optimizer):
    """Momentum in 8 bits with one scale per 8 elements, like 8-bit Adam, which uses larger blocks."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, blocks = self.state[parameter], -(-parameter.numel() // 8)
                if not state:
                    state["codes"] = torch.zeros(parameter.shape, dtype=torch.int8, device=parameter.device)
                    state["scales"] = torch.ones(blocks, device=parameter.device)
                scales = state["scales"].repeat_interleave(8)[: parameter.numel()].view(parameter.shape)
                momentum = 0.9 * state["codes"] * scales + parameter.grad
                padded = nn.functional.pad(momentum.flatten(), (0, blocks * 8 - parameter.numel())).view(blocks, 8)
                largest = padded.abs().amax(1).clamp(min=1e-12) / 127
                state["scales"].copy_(largest)
                state["codes"].copy_(
                    (padded / largest[:, None]).round().flatten()[: parameter.numel()].view_as(momentum)
                )
                parameter.sub_(momentum, alpha=group["lr"])


register_optimizer(Normalized, "parameter")
register_optimizer(Blockwise, "parameter")


class Lion(torch.optim.Optimizer):
    """An element-wise optimizer that is not registered."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    parameter.sub_(momentum.mul(0.9).add(parameter.grad, alpha=0.1).sign(), alpha=group["lr"])
                    momentum.lerp_(parameter.grad, 0.01)


class RegisteredLion(Lion):
    """A registered element-wise optimizer."""


register_optimizer(RegisteredLion, "element")


class Renamed(torch.optim.AdamW):
    """Updates as AdamW does."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


class Changed(torch.optim.SGD):
    """Overrides the step."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)


class Prepared(torch.optim.SGD):
    """Changes the update without overriding the step."""

    def _init_group(self, *args: Any) -> bool:
        return super()._init_group(*args)


def test_known_optimizer_classes() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2))]
    for _ in range(2):  # torch changes a class when its first object is made
        assert looks_at(torch.optim.AdamW(parameters)) == looks_at(Renamed(parameters)) == "element"
        assert looks_at(RegisteredLion(parameters)) == "element"
        assert looks_at(Blockwise(parameters, 0.1)) == looks_at(torch.optim.Adafactor(parameters)) == "parameter"
        for unknown in (Lion, Changed, Prepared, torch.optim.LBFGS, torch.optim.SparseAdam):
            assert looks_at(unknown(parameters)) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("transformer_engine.pytorch.optimizers.fused_adam.FusedAdam", "element"),
        ("apex.optimizers.fused_adam.FusedAdam", "element"),
        ("bitsandbytes.optim.adamw.AdamW8bit", "parameter"),
        ("transformers.optimization.Adafactor", "parameter"),
        ("elsewhere.fused_adam.FusedAdam", None),
    ],
)
def test_classes_of_other_packages_are_known_by_name(name: str, kind: str | None) -> None:
    module, _, cls = name.rpartition(".")
    made = type(cls, (torch.optim.Optimizer,), {"__module__": module, "step": lambda self: None})
    assert looks_at(made([nn.Parameter(torch.ones(2))], {})) == kind


def _hybrid(parameters: Any) -> torch.optim.Optimizer:
    name = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
    return type("HybridDeviceOptimizer", (torch.optim.Optimizer,), {"__module__": name})(parameters, {})


REFUSED: dict[str, tuple[Make, str]] = {
    "LBFGS": (torch.optim.LBFGS, r"LBFGS \(torch.optim.lbfgs\) does not work with sharded parameters: .*Use AdamW"),
    "SparseAdam": (torch.optim.SparseAdam, "SparseAdam .*reduced gradients are dense"),
    "hybrid": (_hybrid, "HybridDeviceOptimizer .*offload_optimizer=True"),
    "Lion": (Lion, r"Lion \(tests.*\) is not known .*megatron_fsdp.register_optimizer\(Lion, 'element'\)"),
    "Changed": (lambda p: Changed(p, lr=0.1), "Changed .* is not known"),
}


@on_ranks("world_size")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("world_size", [1, 2])
def test_unsupported_optimizers_raise(world_size: int, name: str) -> None:
    make, message = REFUSED[name]
    model = TinyModel()
    optimizer = make(model.parameters())
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    with pytest.raises(NotImplementedError, match=message):
        fully_shard(model, optimizer, fsdp_unit_modules=[Block])
    for name, parameter in model.named_parameters():  # the model is as it was
        assert before[name][0] == id(parameter) and torch.equal(before[name][1], parameter)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block])
    with pytest.raises(NotImplementedError, match=message):
        fully_shard_optimizer(optimizer)
    with pytest.raises(NotImplementedError, match=message):
        fully_shard_optimizer(make(sharded.parameters()))


@on_ranks(2)
@pytest.mark.parametrize("name", ["LBFGS", "Lion", "Changed"])
def test_unsupported_optimizers_raise_in_fsdp2(name: str) -> None:
    make, message = REFUSED[name]
    model = TinyModel()
    fsdp2.fully_shard(model)
    optimizer = make(model.parameters())
    loss_of(model, batches(1, 1)[0, 0]).backward()
    before = [local_shard(p).clone() for p in model.parameters()]
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=message):
            optimizer.step(lambda: 0.0) if name == "LBFGS" else optimizer.step()
    assert all(torch.equal(local_shard(p), b) for p, b in zip(model.parameters(), before, strict=True))


WHOLE: dict[str, Make] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "Normalized": lambda p: Normalized(p, lr=0.5),
    "Blockwise": lambda p: Blockwise(p, lr=0.3),
}
MATRICES: dict[str, Make] = {"Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.05)}


@on_ranks(4)
def test_vectors_must_be_whole_for_optimizers_of_full_parameters() -> None:
    """A granularity that keeps matrices whole may still split long vectors."""
    model = nn.LayerNorm(999)
    optimizer = torch.optim.Adafactor(model.parameters())
    sharded = fully_shard_model(model, shard_granularity="tensor")
    with pytest.raises(ValueError, match="2 of its parameters are split between ranks: weight, bias."):
        fully_shard_optimizer(optimizer)
    assert sharded.module is model


def _trains(name: str, strategy: str) -> None:
    data = batches(steps=4, per_step=dist.get_world_size())
    granularity = {"shard_granularity": "parameter"} if name in WHOLE else {}
    make: Make = WHOLE.get(name, lambda p: RegisteredLion(p))
    sharded = assert_same_training(TinyModel(), data, make, zero_dp_strategy=strategy, tolerance=1e-3, **granularity)
    if dist.get_world_size() == 4 and strategy != "no_shard" and granularity:
        assert any(not local_shard(entry.main).numel() for entry in sharded.engine.params())


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_trains_as_unsharded(ranks: RankPool, name: str, strategy: str, world_size: int) -> None:
    ranks.run(world_size, _trains, name, strategy)


def test_registered_class_trains_as_unsharded(ranks: RankPool) -> None:
    ranks.run(3, _trains, "RegisteredLion", "optim_grads_params")


@on_ranks(4)
@pytest.mark.parametrize("granularity", ["tensor", "parameter"])
def test_fsdp2_respects_the_granularity(granularity: str) -> None:
    torch.manual_seed(3)
    model = TinyModel().to(device())
    reference = copy.deepcopy(model)
    for block in model.blocks:
        fsdp2.fully_shard(block, shard_granularity=granularity)
    fsdp2.fully_shard(model, shard_granularity=granularity)
    make = MATRICES["Muon"] if granularity == "tensor" else WHOLE["Adafactor"]
    optimizer, expected = make(model.parameters()), make(reference.parameters())
    for (tokens,) in batches(steps=3, per_step=1):
        for each, each_optimizer in ((model, optimizer), (reference, expected)):
            loss_of(each, tokens).backward()
            each_optimizer.step()
            each.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), reference.state_dict()[name], rtol=1e-5, atol=1e-5)


@on_ranks(3)
def test_fsdp2_raises_for_divided_matrices() -> None:
    model = TinyModel()
    with pytest.raises(ValueError, match="expected row, whole_row, tensor, parameter"):
        fsdp2.fully_shard(model, shard_granularity="rows")
    fsdp2.fully_shard(model)
    optimizer = MATRICES["Muon"](model.parameters())
    loss_of(model, batches(1, 1)[0, 0]).backward()
    for _ in range(2):
        with pytest.raises(ValueError, match="Muon looks at full matrices"):
            optimizer.step()


# State of a different shape than its parameter's ----------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("name", ["Adafactor", "Blockwise"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_dict_equals_that_of_the_unsharded_optimizer(name: str, strategy: str) -> None:
    """Every rank's state dict contains the same information as that of the unsharded optimizer."""
    pair = Pair(TinyModel(), WHOLE[name], zero_dp_strategy=strategy, shard_granularity="parameter")
    for tokens in batches(steps=2, per_step=1):
        pair.backward(tokens.expand(dist.get_world_size(), -1, -1))
        pair.update()
    found, wanted = (optimizer.state_dict()["state"] for _, optimizer in pair.sides)
    assert found.keys() == wanted.keys()
    for number, state in wanted.items():
        assert found[number].keys() == state.keys()
        for key, value in state.items():
            got = found[number][key]
            got = got.full_tensor() if hasattr(got, "full_tensor") else got
            assert got.shape == value.shape and got.dtype == value.dtype
            torch.testing.assert_close(got.float(), value.float(), rtol=1e-3, atol=1.1 if key == "codes" else 1e-6)


def _start(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = TinyModel().to(device())
    make = WHOLE[name]
    return fully_shard(model, make(model.parameters()), fsdp_unit_modules=[Block], shard_granularity="parameter")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    train_step(model, optimizer, batches(number + 1, 1)[number, 0])


def _save(name: str, folder: str) -> dict[str, torch.Tensor]:
    model, optimizer = _start(name)
    _step(model, optimizer, 0)
    save_to(folder, model, optimizer)
    _step(model, optimizer, 1)
    return main_weights(model)


def _resume(name: str, folder: str) -> dict[str, torch.Tensor]:
    model, optimizer = _start(name)
    _step(model, optimizer, 7)
    load_from(folder, model, optimizer)
    _step(model, optimizer, 1)
    # State that a rank has loaded for another rank's parameters is out of date, so all ranks return the owner's.
    plain = [
        {key: value for key, value in values.items() if isinstance(value, torch.Tensor) and type(value) is torch.Tensor}
        for values in optimizer.state_dict()["state"].values()
    ]
    of_all_ranks: list[list[dict[str, torch.Tensor]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_all_ranks, plain)
    for other in of_all_ranks:
        for mine, theirs in zip(plain, other, strict=True):
            assert mine and mine.keys() == theirs.keys()
            assert all(torch.equal(value, theirs[key]) for key, value in mine.items())
    return main_weights(model)


@pytest.mark.parametrize("name", ["Adafactor", "Blockwise"])
@pytest.mark.parametrize("ranks_loaded", [1, 2, 4])
def test_resuming_on_other_ranks(ranks: RankPool, tmp_path: Path, name: str, ranks_loaded: int) -> None:
    expected = ranks.run(4, _save, name, str(tmp_path))[0]
    found = ranks.run(ranks_loaded, _resume, name, str(tmp_path))[0]
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5)


# Optimizers that were not attached --------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_optimizers_are_attached_at_their_first_step(strategy: str) -> None:
    model = TinyModel()
    optimizer = adamw(model.parameters())
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    loss_of(sharded, batches(1, 1)[0, 0]).backward()
    before = main_weights(sharded)
    optimizer.step()
    assert all(not torch.equal(value, before[name]) for name, value in main_weights(sharded).items())
    late = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [late]})  # belongs to no model
    optimizer.step()
    # An optimizer without sharded parameters.
    torch.optim.SGD([late], lr=0.1).step()


class Custom(torch.optim.SGD):
    """Descends by itself, and does something with its parameters that users do."""

    how = ""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if self.how == "sets .grad":
                p.grad = p.grad * 0.5
            rate = {"attribute": getattr(p, "rate", 0.0), "thawed": float(p.requires_grad)}.get(self.how, 1.0)
            if self.how == "sets .data":
                p.data = p.data - 0.1 * p.grad
            else:
                p.sub_(p.grad, alpha=0.1 * rate)
            if self.how == "drops .grad":
                p.grad = None
        if self.how == "zero_grad":
            self.zero_grad()


CUSTOM = ["attribute", "thawed", "sets .data", "sets .grad", "drops .grad", "zero_grad"]


def _built(how: str) -> tuple[nn.Module, Custom]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)).to(device())
    net[0].requires_grad_(how != "thawed")
    for number, parameter in enumerate(net.parameters()):
        parameter.rate = 0.5 + number  # type: ignore[attr-defined]
    optimizer = Custom(list(net.parameters()))
    optimizer.how = how
    return net, optimizer


@on_ranks(2)
@pytest.mark.parametrize("how", CUSTOM)
def test_what_a_step_does_with_parameters_is_kept(how: str) -> None:
    register_optimizer(Custom, "element")
    (plain, reference), (net, own) = _built(how), _built(how)
    model, optimizer = fully_shard(net, own, fsdp_unit_modules=[nn.Linear])
    for step in range(3):
        grads: list[Any] = []
        for each, inner, updater in ((plain, plain, reference), (model, net, optimizer)):
            inner[0].requires_grad_(step > 0 or how != "thawed")
            each(torch.ones(2, 4, device=device())).pow(2).mean().backward()
            updater.step()
            gradients = [p.grad for p in each.parameters()]
            grads.append([g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients])
            if how not in ("drops .grad", "zero_grad"):
                updater.zero_grad()
        torch.testing.assert_close(grads[1], grads[0])
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), wanted)


KEPT: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "a set": set,
    "ids": lambda params: {id(p): 1.0 for p in params},
    "copies": lambda params: [p.detach().clone() for p in params],
}


@on_ranks(2)
@pytest.mark.parametrize("what", KEPT)
def test_parameters_that_an_optimizer_keeps_itself_raise(what: str) -> None:
    register_optimizer(Custom, "element")
    net, optimizer = _built("")
    optimizer.kept = KEPT[what](list(net.parameters()))  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match=r"Custom\.kept has parameters, their id\(\), or tensors"):
        fully_shard(net, optimizer, fsdp_unit_modules=[nn.Linear])
