"""An optimizer sees plain tensors during its step, and DTensors in between."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import MegatronFSDP, fully_shard, register_optimizer
from tests.fused_adam import ApexAdam, FusedAdam
from tests.models import (
    DEVICE,
    STRATEGIES,
    Block,
    TinyModel,
    adamw,
    assert_same_weights,
    batches,
    device,
    load_from,
    loss_of,
    save_to,
)
from tests.ranks import RankPool, on_ranks

Sharded = tuple[MegatronFSDP, torch.optim.Optimizer]
Unsharded = tuple[nn.Module, torch.optim.Optimizer]


class SeenTypes:
    """Records which kinds of tensors the optimizer updates, and how often."""

    def __init__(self, optimizer: Any) -> None:
        self.types: set[type] = set()
        self.count = 0
        self._read = optimizer._init_group
        optimizer._init_group = self._record

    def _record(self, options: dict[str, Any], *rest: Any) -> Any:
        self.types |= {type(parameter.data) for parameter in options["params"]}
        self.count += len(options["params"])
        return self._read(options, *rest)


def _both(make: Callable[[nn.Module], torch.optim.Optimizer], **settings: Any) -> tuple[Sharded, Unsharded]:
    torch.manual_seed(3)
    model = TinyModel().to(device())
    reference = copy.deepcopy(model)
    if "tp_dim" in settings:
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, settings["device_mesh"][settings["tp_dim"]], plan)
    sharded = fully_shard(model, make(model), fsdp_unit_modules=[Block], **settings)
    return sharded, (reference, make(reference))


def _step(each: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    loss_of(each, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def _parameters(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model.parameters())


def _decay_matrices_only(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": matrices, "lr": 2e-2}], lr=1e-2)


@on_ranks("number")
@pytest.mark.parametrize("make", [_parameters, _decay_matrices_only])
@pytest.mark.parametrize("number", [1, 2])
def test_optimizer_sees_a_plain_tensor_per_parameter(
    number: int, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    (sharded, optimizer), unsharded = _both(make)
    seen = SeenTypes(optimizer)
    for tokens in batches(3, 1)[:, 0]:
        _step(sharded, optimizer, tokens)
        _step(*unsharded, tokens)
        assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())
    assert_same_weights(sharded, unsharded[0])
    parameters = list(sharded.parameters())
    assert set(optimizer.state) == set(parameters)
    assert seen.types == {torch.Tensor} and seen.count == 3 * len(parameters)


@on_ranks(2)
def test_state_that_is_loaded_changed_replaced_or_dropped() -> None:
    (sharded, optimizer), (reference, reference_optimizer) = _both(_parameters)
    data = batches(6, 1)[:, 0]
    for tokens in data[:2]:
        _step(sharded, optimizer, tokens)
        _step(reference, reference_optimizer, tokens)
    state_dict = optimizer.state_dict()
    steps = [state["step"] for state in state_dict["state"].values()]
    assert len({step.data_ptr() for step in steps}) == len(steps)
    kept = copy.deepcopy(state_dict)
    for state in kept["state"].values():
        local_shard(state["exp_avg"]).mul_(0.25)
        state["step"] += 3
    for state in reference_optimizer.state.values():
        state["exp_avg"].mul_(0.25)
        state["step"] += 3
    optimizer.load_state_dict(kept)
    for tokens in data[2:4]:
        _step(sharded, optimizer, tokens)
        _step(reference, reference_optimizer, tokens)
    # Change one tensor of the state in place, and replace another.
    changed = "blocks.0.up.weight"
    for entry in sharded.engine.params():
        if entry.name == changed:
            optimizer.state[entry.main]["exp_avg"].zero_()
            optimizer.state[entry.main]["exp_avg_sq"] = optimizer.state[entry.main]["exp_avg_sq"] * 2
    state = reference_optimizer.state[reference.get_parameter(changed)]
    state["exp_avg"].zero_()
    state["exp_avg_sq"] = state["exp_avg_sq"] * 2
    for tokens in data[4:]:
        _step(sharded, optimizer, tokens)
        _step(reference, reference_optimizer, tokens)
    assert_same_weights(sharded, reference)
    optimizer.state.clear()
    reference_optimizer.state.clear()
    _step(sharded, optimizer, data[0])
    _step(reference, reference_optimizer, data[0])
    assert_same_weights(sharded, reference)


@on_ranks(2)
def test_parameters_that_are_added_or_get_other_options() -> None:
    """Parameter groups that are added later, and parameters that move to another group."""

    def first(model: nn.Module) -> torch.optim.Optimizer:
        return adamw([p for name, p in model.named_parameters() if "blocks" in name])

    (sharded, optimizer), (reference, reference_optimizer) = _both(first)
    for number, tokens in enumerate(batches(4, 1)[:, 0]):
        for each, each_optimizer in ((sharded.module, optimizer), (reference, reference_optimizer)):
            if number == 1:
                rest = [p for name, p in each.named_parameters() if "blocks" not in name]
                each_optimizer.add_param_group({"params": rest, "lr": 2e-2})
            if number == 2:
                options = each_optimizer.param_groups
                options[1]["params"] = [*options[1]["params"], *options[0]["params"][:2]]
                options[0]["params"] = options[0]["params"][2:]
            _step(sharded if each is sharded.module else each, each_optimizer, tokens)
        dist.barrier()
    assert_same_weights(sharded, reference)


def _fused_groups(kind: Any, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]
    return kind(groups, lr=1e-2, **options)


_FUSED = {"apex": ApexAdam, "transformer_engine": FusedAdam}


def _settings(name: str) -> dict[str, Any]:
    half = dist.get_world_size() // 2
    if name == "hybrid":
        mesh = init_device_mesh(DEVICE, (2, half), mesh_dim_names=("outer", "inner"))
        return {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer", "outer_dp_sharding_strategy": 1}
    if name == "tensor parallel":
        mesh = init_device_mesh(DEVICE, (half, 2), mesh_dim_names=("dp", "tp"))
        return {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp"}
    return {"zero_dp_strategy": name}


def _steps_with_fused(library: str, folder: str, setting: str, first: bool, dtype: torch.dtype | None) -> None:
    """Two steps, and in other processes, on a different number of ranks, two more from a checkpoint of the first."""
    kind = _FUSED[library]
    options = {} if dtype is None else {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    (sharded, optimizer), (reference, reference_optimizer) = _both(
        lambda model: _fused_groups(kind, model, **options), **_settings(setting)
    )
    data = batches(4, 1)[:, 0]
    for tokens in data[:2]:
        _step(reference, reference_optimizer, tokens)
        if first:
            _step(sharded, optimizer, tokens)
    if first:
        dcp.save(
            dict(zip(("model", "optimizer"), get_state_dict(sharded, optimizer), strict=True)), checkpoint_id=folder
        )
    else:
        state = dict(zip(("model", "optimizer"), get_state_dict(sharded, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(sharded, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    # A second time what was saved, so that all moments are compared with those of unsharded training.
    expected = reference_optimizer.state_dict()["state"]
    found = optimizer.state_dict()["state"]
    assert found.keys() == expected.keys()
    for number, moments in expected.items():
        for name, moment in moments.items():
            # FP8 has three bits, and ranks other scales.
            atol = 0.1 * float(moment.abs().max()) if dtype is torch.uint8 else 1e-6
            rtol = 1e-2 if dtype else 1e-4
            torch.testing.assert_close(found[number][name].full_tensor(), moment, rtol=rtol, atol=atol)
    for tokens in data[2:]:
        _step(reference, reference_optimizer, tokens)
        _step(sharded, optimizer, tokens)
    for entry in sharded.engine.params() if dtype is None else ():
        weight = reference.get_parameter(entry.name)
        torch.testing.assert_close(entry.main.full_tensor(), weight, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("setting", [*STRATEGIES, "hybrid", "tensor parallel"])
@pytest.mark.parametrize(
    ("library", "dtype"),
    [("apex", None), *(("transformer_engine", dtype) for dtype in (None, torch.bfloat16, torch.float16, torch.uint8))],
)
def test_fused_optimizers_of_other_libraries_save_load_and_reshard(
    ranks: RankPool, tmp_path: object, library: str, dtype: torch.dtype | None, setting: str
) -> None:
    ranks.run(3 if setting in STRATEGIES else 4, _steps_with_fused, library, str(tmp_path), setting, True, dtype)
    ranks.run(2, _steps_with_fused, library, str(tmp_path), setting, False, dtype)


@on_ranks(2)
def test_a_step_counts_writes_alike_on_ranks_without_elements() -> None:
    torch.manual_seed(0)
    # Each rank has one of the two weights, alone in its unit.
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(device())
    optimizer: Any = torch.optim.Adafactor(model.parameters(), lr=0.1)
    arguments: dict[str, Any] = {"zero_dp_strategy": 2, "shard_granularity": "parameter"}
    model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[nn.Linear], **arguments)
    x = torch.ones(1, 4, device=device())
    model(x).sum().backward()
    before = model(x)
    optimizer.step(install_optimized_model_weights=False)
    assert not torch.equal(model(x), before)


class OwnSGD(torch.optim.SGD):
    """An optimizer of the user's own."""


def _state_before_the_first_step() -> list[int]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1, bias=False)).to(device())
    model, optimizer = fully_shard(
        model, OwnSGD(model.parameters(), lr=0.1, momentum=0.9), fsdp_unit_modules=[nn.Linear]
    )
    state = optimizer.state_dict()
    for values in state["state"].values():
        values["momentum_buffer"].copy_(values["momentum_buffer"].clone())  # as a load into it does
    optimizer.load_state_dict(state)
    return sorted(optimizer.state_dict()["state"])


def test_initial_state_is_kept_alike_on_ranks_without_elements(ranks: RankPool) -> None:
    assert ranks.run(2, _state_before_the_first_step) == [[0, 1, 2]] * 2


class OwnAdamW(torch.optim.AdamW):
    """Another optimizer of the user's own."""


class Averaging(torch.optim.Optimizer):
    """Keeps a sequence that starts at the weights, as schedule-free optimizers do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state |= {"z": p.clone(), "step": 0}
                    state["step"] += 1
                    state["z"].sub_(p.grad, alpha=group["lr"])
                    p.lerp_(state["z"], 1 / state["step"])


class TwoParts(nn.Module):
    """A part that every step trains, and one that the first steps do not."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.later = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.always(x)
        return (self.later(x) if both else x).pow(2).sum()


OWN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: OwnSGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "AdamW": lambda params: OwnAdamW(params, lr=0.1),
    "Averaging": lambda params: Averaging(params, lr=0.1),
}


@on_ranks(3)
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("name", OWN)
def test_optimizers_of_ones_own_resume_before_they_have_all_of_their_state(
    tmp_path: Path, name: str, before: int
) -> None:
    """Train, with a save and a load into a new model and optimizer after ``before`` steps."""
    if name == "Averaging":
        register_optimizer(Averaging, "element")
    torch.manual_seed(0)
    reference = TwoParts().to(device())
    model = copy.deepcopy(reference)
    plain, optimizer = OWN[name](reference.parameters()), OWN[name](model.parameters())
    model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[nn.Linear])
    x = torch.ones(2, 4, device=device())
    for step in range(4):
        if step == before:
            save_to(tmp_path, model, optimizer)
            fresh = TwoParts().to(device())
            model, optimizer = fully_shard(fresh, OWN[name](fresh.parameters()), fsdp_unit_modules=[nn.Linear])
            load_from(tmp_path, model, optimizer)
        for each, update in ((reference, plain), (model, optimizer)):
            each(x, step > 1).backward()
            update.step()
            update.zero_grad()
    assert_same_weights(model, reference)
