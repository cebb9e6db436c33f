"""Programs that plain PyTorch allows train a sharded model as an unsharded one, or raise."""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from megatron.fsdp.dtensor.unsupported import refuse_reads
from megatron_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model
from tests.models import assert_same_weights, device, sgd, shard_in_place
from tests.ranks import DEVICE, RankFailure, RankPool, on_ranks

SETTINGS: dict[str, dict[str, Any]] = {
    "no_shard": {"zero_dp_strategy": 0},
    "optim": {"zero_dp_strategy": 1},
    "optim_grads": {"zero_dp_strategy": 2},
    "optim_grads_params": {"zero_dp_strategy": 3},
    "without units": {"zero_dp_strategy": 3, "fsdp_unit_modules": None},
    "double buffer": {"zero_dp_strategy": 3, "fsdp_double_buffer": True},
}


class Block(nn.Module):
    """A residual MLP that keeps its second activation, and may return an object of a class of its own."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 17), nn.Linear(17, 8)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.up(self.norm(x)).tanh()
        if self.kind == "checkpoint":
            hidden = checkpoint(lambda y: self.up(self.norm(y)).tanh(), x, use_reentrant=False)
        if self.kind == "penalized":
            self.penalty = self.up(x + self.down(hidden)).pow(2).mean()
        result = x + self.down(hidden)
        if self.kind == "writes":
            with torch.no_grad():
                self.up.weight.clamp_(-0.05, 0.05)
        return Result(result) if self.kind == "own class" else result


class Result:
    """Results that a block may return."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Model(nn.Module):
    """Blocks between two linear layers."""

    def __init__(self, depth: int = 3, kind: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(depth))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            x = x.value if isinstance(x, Result) else x
        return self.head(x) + sum(getattr(block, "penalty", 0.0) for block in self.blocks)


class Side:
    """One of two runs of a program: with the sharded model, or with the unsharded one on the same data."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    @property
    def inner(self) -> Any:
        return self.model.module if hasattr(self.model, "module") else self.model

    def step(self) -> None:
        self.sync()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def descend(self, loss: torch.Tensor) -> torch.Tensor:
        """Take a step by the gradients of a loss, and return it."""
        loss.backward()
        self.step()
        return loss

    def sync(self) -> None:
        """Average the gradients of an unsharded model."""
        if self.inner is self.model:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()


Program = Callable[[Side], torch.Tensor]


def batch() -> torch.Tensor:
    return torch.randn(4, 6).to(device())


def same(program: Program, build: Callable[[], nn.Module], settings: list[str], optimizer: Any = sgd) -> None:
    """Run a program with both models, three times, and compare losses and weights."""
    for name in settings:
        torch.manual_seed(0)
        reference = build().to(device())
        model = copy.deepcopy(reference)
        arguments = {"fsdp_unit_modules": [Block], **SETTINGS[name]}
        sides = (
            Side(reference, optimizer(reference.parameters())),
            Side(*fully_shard(model, optimizer(model.parameters()), **arguments)),
        )
        for step in range(3):
            losses = []
            for side in sides:
                torch.manual_seed(10 * step + dist.get_rank())
                losses.append(program(side).detach())
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert_same_weights(sides[1].model, reference)


def train(side: Side) -> torch.Tensor:
    """A step of the mean square of what the model returns."""
    return side.descend(side.model(batch()).pow(2).mean())


def _freeze_forward_thaw(side: Side) -> torch.Tensor:
    """As adapters that are disabled for a reference."""
    x = batch()
    y, block = side.model(x), side.inner.blocks[0]
    block.requires_grad_(False)
    with torch.no_grad():
        reference = side.model(x)
    block.requires_grad_(True)
    return side.descend((y - reference).pow(2).mean() + y.pow(2).mean())


def _sam(side: Side) -> torch.Tensor:
    x = batch()
    side.model(x).pow(2).mean().backward()
    side.sync()
    before = [p.detach().clone() for p in side.model.parameters()]
    with torch.no_grad():
        for p in side.model.parameters():
            p.add_(p.grad, alpha=0.5)
    side.optimizer.zero_grad()
    loss = side.model(x).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        for p, q in zip(side.model.parameters(), before, strict=True):
            p.copy_(q)
    side.step()
    return loss


def _writes() -> Iterator[Callable[[nn.Parameter], object]]:
    yield lambda p: p.zero_()
    yield lambda p: p.copy_(torch.ones(p.shape))
    yield lambda p: p.data.mul_(0.5)
    yield lambda p: setattr(p, "data", torch.full_like(p, 0.25))
    yield lambda p: nn.init.constant_(p, 0.125)
    yield lambda p: torch._foreach_mul_([p], 3.0)
    yield lambda p: p.detach().add_(1.0)
    yield lambda p: (p.to_local() if hasattr(p, "to_local") else p).mul_(0.5)


def _write(side: Side) -> torch.Tensor:
    """Main weights are written in every way, between evaluations and after a forward whose loss is not used."""
    x, total = batch(), torch.zeros((), device=device())
    for grad in (False, True):
        for write in _writes():
            with torch.set_grad_enabled(grad):
                total = total + side.model(x).mean().detach()
            with torch.no_grad():
                for p in (side.inner.first.bias, side.inner.blocks[1].up.weight, side.inner.head.weight):
                    write(p)
    loss = side.model(x).pow(2).mean()
    side.inner.blocks[0].up.weight.data.mul_(0.5)  # not counted by autograd: backward reads the new values
    loss.backward()
    side.step()
    return loss + total


def _penalized(side: Side) -> torch.Tensor:
    y = side.model(batch())
    return side.descend(y.pow(2).mean() + sum(getattr(block, "penalty", 0.0) for block in side.inner.blocks))


def _gradient_penalty(side: Side) -> torch.Tensor:
    x = batch().requires_grad_()
    y = side.model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    side.model(batch())  # another forward before the backward of the penalty
    return side.descend(y.pow(2).mean() + (gradient.norm(dim=1) - 1).pow(2).mean())


def _derivative_along_the_input(side: Side) -> torch.Tensor:
    """Both kinds of forward-mode AD, a frozen block, and a loss of the derivatives and of an input with a gradient."""
    side.inner.blocks[1].requires_grad_(False)
    x, direction = batch().requires_grad_(), 0.3 * batch()
    y, derivative = torch.func.jvp(lambda given: side.model(x + given), (torch.zeros_like(x),), (direction,))
    with forward_ad.dual_level():
        _, again = forward_ad.unpack_dual(side.model(forward_ad.make_dual(x, direction)))
    return side.descend((y - derivative).pow(2).mean() + again.sin().mean())


def _captured(side: Side) -> torch.Tensor:
    """A backward, then one of an activation that a hook has captured."""
    side.model(batch()).pow(2).mean().backward()
    seen: list[torch.Tensor] = []
    handle = side.inner.blocks[0].up.register_forward_hook(lambda *given: seen.append(given[2]))
    side.model(batch())
    handle.remove()
    side.inner.blocks[1].requires_grad_(not side.inner.blocks[1].up.weight.requires_grad)
    return side.descend(seen[0].pow(2).mean())


def _given_weights(side: Side) -> torch.Tensor:
    given = {name: torch.full(p.shape, 0.01, device=device()) for name, p in side.inner.named_parameters()}
    del given["head.bias"]
    return side.descend(torch.func.functional_call(side.inner, given, (batch(),)).pow(2).mean())


def _given_average(side: Side) -> torch.Tensor:
    average = {name: p.detach().mul(0.5) for name, p in side.inner.named_parameters()}
    with torch.no_grad():
        wanted = torch.func.functional_call(side.inner, average, (batch(),))
    return side.descend((side.model(batch()) - wanted).pow(2).mean())


class Headless(Model):
    """A model that returns what its last block has returned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


PROGRAMS: dict[str, tuple[Program, Callable[[], nn.Module], list[str]]] = {
    "freeze, forward, thaw": (_freeze_forward_thaw, Model, list(SETTINGS)),
    "sharpness-aware": (_sam, Model, list(SETTINGS)),
    "write": (_write, Model, list(SETTINGS)),
    "own class": (_penalized, lambda: Model(4, "own class"), list(SETTINGS)),
    "penalty in an attribute": (_penalized, lambda: Model(4, "penalized"), list(SETTINGS)[:5]),
    "no head": (_penalized, lambda: Headless(4), list(SETTINGS)),
    "gradient penalty": (_gradient_penalty, lambda: Model(4), list(SETTINGS)[:5]),
    "forward-mode AD": (_derivative_along_the_input, lambda: Model(4), list(SETTINGS)[:5]),
    "captured": (_captured, Model, list(SETTINGS)),
    "captured, checkpointed": (_captured, lambda: Model(2, "checkpoint"), list(SETTINGS)),
    "functional_call": (_given_weights, Model, list(SETTINGS)),
    "functional_call of an average": (_given_average, Model, list(SETTINGS)),
}


@on_ranks(2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str) -> None:
    same(*PROGRAMS[program])


def _raises(kind: str, setting: str) -> None:
    model = Model(4, kind).to(device())
    model, optimizer = fully_shard(model, sgd(model.parameters()), fsdp_unit_modules=[Block], **SETTINGS[setting])
    program = _gradient_penalty if kind == "" else _penalized
    program(Side(model, optimizer))


@pytest.mark.parametrize(
    ("kind", "setting", "message"),
    [
        ("writes", "optim_grads_params", r"blocks\.0 has changed its parameter blocks\.0\.up\.weight in place"),
        ("penalized", "double buffer", "share a buffer"),
        ("", "double buffer", "share a buffer"),
    ],
)
def test_what_cannot_be_equal_raises(ranks: RankPool, kind: str, setting: str, message: str) -> None:
    with pytest.raises(RankFailure, match=message):
        ranks.run(2, _raises, kind, setting)


@on_ranks(2)
def test_writes_that_nothing_counts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4)).to(device())
    model, _ = fully_shard(model, sgd(model.parameters()), zero_dp_strategy=2, fsdp_unit_modules=[nn.Linear])
    x = torch.ones(1, 4, device=device())
    with torch.no_grad():
        model(x)
        for parameter in model.parameters():
            parameter.to_local().data.zero_()
        model.mark_weights_changed()
        assert not model(x).any()


@on_ranks(2)
@pytest.mark.parametrize("changed_by", ["step", "load"])
def test_a_pending_backward_does_not_read_newer_weights(changed_by: str) -> None:
    """As without sharding, backward does not read weights that a step or a load has changed."""
    for compute, setting in itertools.product([None, torch.bfloat16], SETTINGS.values()):
        policy = MixedPrecisionPolicy(main_params_dtype=None, compute_dtype=compute)
        arguments = {"fsdp_unit_modules": [Block], "mixed_precision_policy": policy, **setting}
        model = Model().to(device())
        model, optimizer = fully_shard(model, sgd(model.parameters()), **arguments)
        x = batch().to(compute)
        pending = model(x).mean()
        model(x).mean().backward()
        if changed_by == "step":
            optimizer.step()
        else:
            model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pending.backward()
        model(x).mean().backward()  # it is usable afterwards


@on_ranks(2)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_forward_writes_weights_that_a_pending_penalty_reads(zero: int) -> None:
    model = Model(kind="writes").to(device())
    model, _ = fully_shard(model, sgd(model.parameters()), zero_dp_strategy=zero, fsdp_unit_modules=[Block])
    penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
    with torch.no_grad():
        model(batch())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


@on_ranks(2)
def test_parameters_from_before_sharding() -> None:
    """Lists, optimizers, averages and clipping that hold parameters from before sharding act on the sharded ones."""
    for name, setting in SETTINGS.items():
        torch.manual_seed(0)
        models = [Model().to(device())]
        models.append(copy.deepcopy(models[0]))
        kept = [list(model.parameters()) for model in models]
        averages = [[p.detach().clone() for p in each] for each in kept]
        view = models[1].head.weight.detach()
        before = view.clone()
        arguments = {"fsdp_unit_modules": [Block], **setting}
        sides = Side(models[0], sgd(kept[0])), Side(fully_shard_model(models[1], **arguments), sgd(kept[1]))
        for step in range(2):
            norms = []
            for side, parameters, average in zip(sides, kept, averages, strict=True):
                torch.manual_seed(10 * step + dist.get_rank())
                (side.model(batch()).pow(2).mean() * 100).backward()
                side.sync()
                norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.1)))
                side.step()
                for p, q in zip(parameters, average, strict=True):
                    q.lerp_(p.detach(), 0.5)
            assert norms[1] == pytest.approx(norms[0], rel=1e-4), name
        assert_same_weights(sides[1].model, models[0])
        for expected, average in zip(*averages, strict=True):
            torch.testing.assert_close(average, expected, rtol=1e-4, atol=2e-5)
        assert torch.equal(view, before)
        assert kept[1][0].shape == kept[0][0].shape
        assert copy.deepcopy(kept[1][0]).full_tensor().shape == kept[0][0].shape


class Recurrent(nn.Module):
    """An LSTM, which keeps its parameters in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.lstm = nn.LSTM(6, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.lstm(x[None])[0])


def _moves_weights(lstm: nn.LSTM) -> None:
    """Move the weights to a tensor of their own, as recurrent layers do on CUDA."""
    start = torch.cat([weight.detach().flatten() for weight in lstm._flat_weights])
    with torch.no_grad():
        for weight, part in zip(lstm._flat_weights, start.split([w.numel() for w in lstm._flat_weights]), strict=True):
            weight.set_(part.view_as(weight))


@on_ranks(2)
def test_recurrent_layers_that_move_their_weights() -> None:
    with patch.object(nn.LSTM, "flatten_parameters", _moves_weights):
        same(train, Recurrent, list(SETTINGS))


@on_ranks(2)
@pytest.mark.parametrize("units", ["Block", "LSTM"])
def test_modules_that_keep_their_parameters_in_a_list(units: str) -> None:
    for name in SETTINGS:
        SETTINGS[name].setdefault("fsdp_unit_modules", [units])
    same(train, Recurrent, list(SETTINGS))


def _keep_a_weight(view: bool) -> None:
    model = Model().to(device())
    kept = []
    model.blocks[0].up.register_forward_hook(lambda m, *unused: kept.append(m.weight.t() if view else m.weight))
    model = fully_shard_model(model, fsdp_unit_modules=[Block])
    model(batch())
    kept[0].sum()


@pytest.mark.skipif(refuse_reads is None, reason="torch cannot refuse to read freed memory")
@pytest.mark.parametrize("view", [False, True])
def test_reading_a_weight_that_was_kept_from_forward_raises(ranks: RankPool, view: bool) -> None:
    with pytest.raises(RankFailure, match=r"blocks\.0\.norm\.weight or one of its group\) that was kept"):
        ranks.run(2, _keep_a_weight, view)


def _keep_a_weight_in_debug_mode(kind: str) -> None:
    def keep(module: nn.Module, *unused: Any) -> None:
        module.seen = [module.weight.detach()] if kind == "list" else module.weight.t()

    torch.manual_seed(0)
    model: nn.Module = Recurrent() if kind == "its own" else Model()
    if kind != "its own":
        model.blocks[0].up.register_forward_hook(keep)
    model = fully_shard_model(model.to(device()), fsdp_unit_modules=["Block", *(["LSTM"] if kind == "its own" else [])])
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        model(batch())
    finally:
        dist.set_debug_level(before)


@pytest.mark.parametrize("kind", ["view", "list"])
def test_debugging_names_the_module_that_has_kept_a_weight(ranks: RankPool, kind: str) -> None:
    with pytest.raises(RankFailure, match=r"Linear\.seen \(up\) keeps a weight of the unit"):
        ranks.run(2, _keep_a_weight_in_debug_mode, kind)


def test_debugging_does_not_mind_parameters_from_before_sharding(ranks: RankPool) -> None:
    ranks.run(2, _keep_a_weight_in_debug_mode, "its own")


def _take_data() -> None:
    model = fully_shard_model(Model().to(device()), fsdp_unit_modules=[Block])
    plain = nn.Linear(8, 17)
    plain.weight.data = model.module.blocks[0].up.weight.data
    plain.weight.sum()


@pytest.mark.skipif(refuse_reads is None, reason="torch cannot refuse to read memory")
def test_a_plain_parameter_with_sharded_data_raises(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="given the .data of a sharded tensor"):
        ranks.run(2, _take_data)


def _zeroed(side: Side) -> torch.Tensor:
    """Momentum and weight decay act on gradients of zeros, and not on parameters without gradients."""
    loss = train(side)
    for zero_grad in (side.optimizer.zero_grad, side.model.zero_grad):
        side.model(batch()).pow(2).mean().backward()
        zero_grad(set_to_none=False)
        side.optimizer.step()
    side.optimizer.zero_grad()
    return loss


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1)


def test_gradients_are_filled_with_zeros(ranks: RankPool) -> None:
    ranks.run(2, same, _zeroed, Model, ["optim_grads_params", "no_shard"], _momentum)


@on_ranks(2)
def test_an_evaluation_in_inference_mode_may_come_first() -> None:
    model = shard_in_place(Model().to(device()))
    with torch.inference_mode():
        model(batch())
    model(batch()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def _closure(side: Side) -> torch.Tensor:
    def closure() -> torch.Tensor:
        side.optimizer.zero_grad()
        loss = side.model(batch()).pow(2).mean()
        loss.backward()
        side.sync()
        return loss

    loss: Any = side.optimizer.step(closure)
    return loss


def _without_sync(program: Program, settings: list[str], optimizer: Any = sgd) -> None:
    """Gradients are not synchronized after each micro-batch."""
    for setting in SETTINGS.values():
        setting["sync_model_each_microbatch"] = False
    same(program, Model, settings, optimizer)


def test_gradients_of_a_closure_are_synchronized(ranks: RankPool) -> None:
    ranks.run(2, _without_sync, _closure, ["optim", "optim_grads_params"])


@on_ranks(4)
@pytest.mark.skipif(DEVICE == "cuda", reason="the mesh is one of the CPU")
def test_a_tensor_parallel_parameter_from_before_sharding() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    kept = model[0].weight
    sharded = fully_shard_model(
        model, fsdp_unit_modules=[nn.Linear], device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp", zero_dp_strategy=3
    )
    with torch.no_grad():
        kept.mul_(2.0)
    sharded(batch()).sum().backward()
    assert torch.equal(kept.full_tensor(), model[0].weight.full_tensor())
    assert torch.equal(kept.to_local(), model[0].weight.to_local())
    assert kept.grad is model[0].weight.grad


def _zeros_of_waiting_gradients(side: Side) -> torch.Tensor:
    loss = side.model(batch()).pow(2).mean()
    loss.backward()
    side.optimizer.zero_grad(set_to_none=False)
    side.optimizer.step()
    return loss


def test_waiting_gradients_are_filled_with_zeros(ranks: RankPool) -> None:
    ranks.run(2, _without_sync, _zeros_of_waiting_gradients, ["optim_grads_params"], _momentum)


@on_ranks(2)
def test_a_unit_that_is_called_alone_reads_written_weights() -> None:
    model = fully_shard_model(Model().to(device()), fsdp_unit_modules=[Block], zero_dp_strategy=2)
    pending = model(batch())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        x = torch.ones(2, 8, device=device())
        assert torch.equal(model.module.blocks[0](x), x)
    del pending


@on_ranks(2)
def test_the_first_step_may_have_a_closure() -> None:
    model = Model().to(device())
    optimizer = _momentum(model.parameters())
    side = Side(shard_in_place(model), optimizer)
    side.sync = lambda: None  # type: ignore[method-assign]
    before = model.head.weight.detach().clone()
    _closure(side)
    assert not torch.equal(before, model.head.weight.full_tensor())


@on_ranks(2)
def test_a_parameter_without_elements_is_saved(tmp_path: Path) -> None:
    model = Model()
    model.empty = nn.Parameter(torch.ones(0, 3))
    state = fully_shard_model(model.to(device()), fsdp_unit_modules=[Block]).state_dict()
    dcp.save(state, checkpoint_id=tmp_path)
    dcp.load(state, checkpoint_id=tmp_path)
