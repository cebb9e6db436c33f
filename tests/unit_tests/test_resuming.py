"""Resuming in new processes by the usual recipes, state before the first step, and torch's own state functions."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.fsdp import fsdp2
from megatron_fsdp import fully_shard, fully_shard_model, register_optimizer
from tests.models import OPTIMIZERS, STRATEGIES, Block, TinyModel, adamw, batches, device, loss_of, main_weights
from tests.ranks import DEVICE, RankPool, on_ranks

KINDS = (*STRATEGIES, "hsdp", "hybrid", "in place")


def _model(kind: str, make: Callable[..., torch.optim.Optimizer], seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = TinyModel(tied=True).to(device())
    if kind == "in place":
        for block in model.blocks:
            fsdp2.fully_shard(block)
        return fsdp2.fully_shard(model), make(model.parameters())
    more: dict[str, Any] = {"zero_dp_strategy": kind}
    if kind in ("hsdp", "hybrid"):
        mesh = init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
        more = {
            "device_mesh": mesh,
            "dp_shard_dim": "inner",
            "dp_outer_dim": "outer",
            "outer_dp_sharding_strategy": "no_shard" if kind == "hsdp" else "optim",
        }
    return fully_shard(model, make(model.parameters()), fsdp_unit_modules=[Block], **more)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for tokens in batches(8, dist.get_world_size())[first:last, dist.get_rank()]:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, by_torch: bool) -> dict[str, Any]:
    if by_torch:
        weights, of_optimizer = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": of_optimizer}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _save(folder: str, kind: str, name: str, by_torch: bool) -> list[float]:
    model, optimizer = _model(kind, OPTIMIZERS[name], seed=3)
    _train(model, optimizer, 0, 3)
    dcp.save(_state(model, optimizer, by_torch), checkpoint_id=folder)
    return _train(model, optimizer, 3, 6)


def _resume(folder: str, kind: str, name: str, by_torch: bool, looks: bool = False) -> list[float]:
    model, optimizer = _model(kind, OPTIMIZERS[name], seed=4)
    for parameter in optimizer.param_groups[0]["params"] if looks else ():
        assert not optimizer.state[parameter]  # makes an entry, as train() of schedule-free optimizers does
    state = _state(model, optimizer, by_torch)
    dcp.load(state, checkpoint_id=folder)
    if by_torch:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    return _train(model, optimizer, 3, 6)


def _assert_resumes(ranks: RankPool, folder: Path, kind: str, name: str, by_torch: bool) -> None:
    world_size = 4 if kind in ("hsdp", "hybrid") else 3
    expected = ranks.run(world_size, _save, str(folder), kind, name, by_torch)
    assert ranks.run(world_size, _resume, str(folder), kind, name, by_torch) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_torch", [False, True], ids=["state_dict", "get_state_dict"])
def test_resumes_adam(ranks: RankPool, tmp_path: Path, kind: str, by_torch: bool) -> None:
    if kind in ("optim_grads_params", "in place"):
        ranks.close()  # new processes
    _assert_resumes(ranks, tmp_path, kind, "AdamW", by_torch)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumes_every_optimizer(ranks: RankPool, tmp_path: Path, name: str) -> None:
    _assert_resumes(ranks, tmp_path, "optim_grads_params", name, by_torch=False)


def test_resumes_after_a_look_at_state(ranks: RankPool, tmp_path: Path) -> None:
    for by_torch in (False, True):
        folder = str(tmp_path / str(by_torch))
        expected = ranks.run(2, _save, folder, "optim_grads_params", "AdamW", by_torch)
        assert ranks.run(2, _resume, folder, "optim_grads_params", "AdamW", by_torch, True) == expected


@on_ranks(2)
def test_saved_options_that_need_other_state(tmp_path: Path) -> None:
    for name, saved, loading in [
        ("max_exp_avg_sq", lambda p: torch.optim.AdamW(p, amsgrad=True), adamw),
        ("grad_avg", lambda p: torch.optim.RMSprop(p, centered=True), torch.optim.RMSprop),
    ]:
        model, optimizer = _model("optim_grads_params", saved, seed=3)
        _train(model, optimizer, 0, 1)
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=f"{tmp_path}/{name}")
        model, optimizer = _model("optim_grads_params", loading, seed=3)
        state = {"optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=f"{tmp_path}/{name}")
        optimizer.load_state_dict(state["optimizer"])
        with pytest.raises(ValueError, match=f"the loaded options need {name}"):
            _train(model, optimizer, 1, 2)
        for options in optimizer.param_groups:
            options |= {key: False for key in ("amsgrad", "centered") if key in options}
        _train(model, optimizer, 1, 2)


class ScheduleFree(torch.optim.Optimizer):
    """Refuses steps outside of its train mode, as the optimizers of schedulefree."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "train_mode": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            for p in (p for p in group["params"] if p.grad is not None):
                if not self.state[p]:
                    self.state[p]["z"] = p.clone()
                self.state[p]["z"].sub_(p.grad, alpha=group["lr"])
                p.lerp_(self.state[p]["z"], 0.5)


@on_ranks(2)
def test_state_of_an_optimizer_outside_of_its_train_mode(tmp_path: Path) -> None:
    register_optimizer(ScheduleFree, "element")
    model, optimizer = _model("optim_grads_params", ScheduleFree, seed=3)
    optimizer.param_groups[0]["train_mode"] = True
    _train(model, optimizer, 0, 1)
    saved = {"optimizer": optimizer.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path)
    model, optimizer = _model("optim_grads_params", ScheduleFree, seed=3)
    state = {"optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    optimizer.load_state_dict(state["optimizer"])
    for mine, theirs in zip(optimizer.state.values(), saved["optimizer"]["state"].values(), strict=True):
        assert torch.equal(mine["z"].to_local(), theirs["z"].to_local())


DELICATE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
}


@on_ranks(2)
@pytest.mark.parametrize("name", DELICATE)
@pytest.mark.parametrize("how", ["state_dict", "get_state_dict"])
def test_reading_state_changes_nothing(name: str, how: str) -> None:
    """Reading the state before the first step, or loading it back, does not change the training."""
    runs = []
    for look in (False, True):
        model, optimizer = _model("optim_grads_params", DELICATE[name], seed=3)
        if look:
            before = [option["lr"] for option in optimizer.param_groups]
            if how == "state_dict":
                state = optimizer.state_dict()
                assert len(state["state"]) == len(optimizer.param_groups[0]["params"])
                optimizer.load_state_dict(state)
            else:
                get_state_dict(model, optimizer)
            assert before == [option["lr"] for option in optimizer.param_groups]
        for options in optimizer.param_groups:
            options["lr"] *= 0.5  # as a scheduler with a warm-up does; some optimizers take it over at the first step
        runs.append(_train(model, optimizer, 0, 3))
    assert runs[0] == runs[1]


@on_ranks(4)
@pytest.mark.every_strategy  # replicated weights are plain DTensors, which PyTorch pickles differently
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights_only", [False, True])
def test_files_of_ranks(tmp_path: Path, kind: str, weights_only: bool) -> None:
    """Every rank saves its state with torch.save, and a new model resumes from it."""
    model, optimizer = _model(kind, adamw, seed=3)
    _train(model, optimizer, 0, 2)
    file = f"{tmp_path}/{dist.get_rank()}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = _train(model, optimizer, 2, 4)
    fresh, fresh_optimizer = _model(kind, adamw, seed=4)
    state = torch.load(file, weights_only=weights_only)
    fresh.load_state_dict(state["model"])
    fresh_optimizer.load_state_dict(state["optimizer"])
    assert _train(fresh, fresh_optimizer, 2, 4) == expected


@on_ranks(2)
def test_goes_on_from_before_the_first_step() -> None:
    """A new optimizer goes on with a state from before the first step; SGD then does not dampen its first gradient."""
    model, optimizer = _model("optim_grads_params", DELICATE["dampening"], seed=3)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = _train(model, optimizer, 0, 3)
    model, optimizer = _model("optim_grads_params", DELICATE["dampening"], seed=4)
    for _ in range(2):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert _train(model, optimizer, 0, 3) == expected


@on_ranks(3)
def test_values_of_fresh_state() -> None:
    model, optimizer = _model("optim_grads_params", OPTIMIZERS["Adam"], seed=3)
    state = optimizer.state_dict()["state"]
    assert list(state) == list(range(len(list(model.parameters()))))
    for values, parameter in zip(state.values(), model.parameters(), strict=True):
        assert values.keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        assert values["step"].item() == 0
        assert isinstance(values["exp_avg"], DTensor) and values["exp_avg"].shape == parameter.shape
        assert values["exp_avg"].abs().max().item() == 0
    assert not optimizer.state


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broadcast", [False, True])
def test_full_state_by_torchs_functions(kind: str, broadcast: bool) -> None:
    torch.manual_seed(9)
    source = TinyModel(tied=True)
    model, optimizer = _model(kind, adamw, seed=3)
    whole = source.state_dict() if dist.get_rank() == 0 or not broadcast else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=True)
    prefix = "" if kind == "in place" else "module."
    set_model_state_dict(model, {prefix + key: value.to(device()) for key, value in whole.items()}, options=options)
    expected = source.state_dict()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor().cpu(), expected[name.removeprefix("module.")]), name
    tokens = batches(1, 1)[0, 0]
    torch.testing.assert_close(loss_of(model, tokens), loss_of(source.to(device()), tokens))
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert all(torch.equal(found[prefix + key], value.cpu()) for key, value in expected.items())
    else:
        assert not found


@on_ranks(4)
@pytest.mark.parametrize("kind", ["optim_grads_params", "hybrid", "in place"])
@pytest.mark.parametrize("broadcast", [False, True])
def test_full_optimizer_state_by_torchs_functions(kind: str, broadcast: bool) -> None:
    model, optimizer = _model(kind, adamw, seed=3)
    _train(model, optimizer, 0, 2)
    full = StateDictOptions(full_state_dict=True)
    weights, state = (copy.deepcopy(each) for each in get_state_dict(model, optimizer, options=full))
    expected = _train(model, optimizer, 2, 4)
    fresh, fresh_optimizer = _model(kind, adamw, seed=4)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    if broadcast and dist.get_rank():
        weights, state = {}, {}
    set_model_state_dict(fresh, weights, options=options)
    set_optimizer_state_dict(fresh, fresh_optimizer, state, options=options)
    assert _train(fresh, fresh_optimizer, 2, 4) == expected


@on_ranks(2)
def test_loading_by_the_models_own_names() -> None:
    model, _ = _model("optim_grads_params", adamw, seed=3)
    source = TinyModel(tied=True).to(device())
    expected = source.state_dict()
    for load in (
        lambda: model.load_state_dict(expected),
        lambda: model.module.load_state_dict(expected),
        lambda: set_model_state_dict(model, dict(expected), options=StateDictOptions(full_state_dict=True)),
    ):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load()
        for name, weight in main_weights(model).items():
            assert torch.equal(weight, expected[name].cpu()), name
        tokens = batches(1, 1)[0, 0]
        torch.testing.assert_close(loss_of(model, tokens), loss_of(source, tokens))
    with pytest.raises(RuntimeError, match="Unexpected"):
        model.load_state_dict({**expected, "tail": torch.zeros(1)})
    mixed = {**expected, **{f"module.{name}": torch.zeros_like(value) for name, value in expected.items()}}
    given_twice = {**mixed, **{f"module.{k}": v.clone() for k, v in model.module.state_dict().items()}}
    with pytest.raises(ValueError, match="expected one of them"):
        model.load_state_dict(given_twice)


@on_ranks(3)
def test_averaged_buffers() -> None:
    model = TinyModel()
    model.blocks[0].norm = nn.BatchNorm1d(5)
    # Nothing may be recorded: autograd refuses to change such a buffer in place.
    scale = torch.full((2,), float(dist.get_rank()), device=device(), requires_grad=True)
    model.register_buffer("scale", scale)
    sharded = fully_shard_model(model.to(device()), fsdp_unit_modules=[Block], sync_module_states=False)
    loss_of(sharded, batches(1, 3)[0, dist.get_rank()])
    name = "module.blocks.0.norm.running_mean"
    own = sharded.state_dict()[name].clone()
    of_all_ranks = [torch.empty_like(own) for _ in range(3)]
    dist.all_gather(of_all_ranks, own)
    assert not torch.equal(of_all_ranks[0], of_all_ranks[1])
    sharded.average_buffers()
    torch.testing.assert_close(sharded.state_dict()[name], sum(of_all_ranks) / 3)
    assert sharded.state_dict()["module.blocks.0.norm.num_batches_tracked"].item() == 1
    assert scale.tolist() == [1.0, 1.0]
