"""Experts may be sharded by strategies and over instances of their own; training stays that of the unsharded model."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from megatron.fsdp import FSDPConfig
from megatron.fsdp.checkpoint.backend import save
from megatron.fsdp.checkpoint.loading import load
from megatron.fsdp.comm.journal import JOURNAL
from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model, save_safetensors
from tests.models import DEVICE, Block, TinyModel, adamw, assert_same_training, batches, device, logged, loss_of
from tests.ranks import RankFailure, RankPool, on_ranks

AXES = {"dp_shard_dim": "shard", "dp_outer_dim": "outer"}


class Mixture(Block):
    """A unit with dense parameters and two experts, which every rank has."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + sum(torch.tanh(expert(x)) for expert in self.experts)


def _model() -> nn.Module:
    torch.manual_seed(5)
    model = TinyModel()
    for i in range(2):
        model.blocks[i] = Mixture(13)
    return model


def _meshes(dense: tuple[int, int], experts: tuple[int, int]) -> dict[str, Any]:
    """Data-parallel axes (outer, inner), of the same ranks for both kinds of parameters."""
    meshes = [init_device_mesh(DEVICE, shape, mesh_dim_names=("outer", "shard")) for shape in (dense, experts)]
    return {"device_mesh": meshes[0], "expt_device_mesh": meshes[1], **AXES}


def _trains(dense: tuple[int, int], experts: tuple[int, int], strategies: dict[str, Any]) -> list[tuple[float, bool]]:
    """Train; returns of dense parameters and of experts the share of the main weights that this rank holds, and whether
    it keeps full compute weights.
    """
    arguments = {**_meshes(dense, experts), **strategies}
    sharded = assert_same_training(
        _model(), batches(3, dense[0] * dense[1]), adamw, fsdp_unit_modules=[Block], **arguments
    )
    groups = {group.params[0].key.expert: group for group in sharded.engine.units[1].groups}
    both = [groups[expert] for expert in (False, True)]
    return [(group.weights.main.numel() / group.layout.numel, not group.weights.temporary) for group in both]


CASES = {
    "dense HSDP, experts ZeRO-3": ((2, 2), (1, 4), {}, (1 / 2, 1 / 4)),
    "dense ZeRO-3, experts HSDP": ((1, 4), (2, 2), {}, (1 / 4, 1 / 2)),
    "dense hybrid, experts HSDP": (
        (2, 2),
        (2, 2),
        {"outer_dp_sharding_strategy": 1, "expert_outer_dp_sharding_strategy": 0},
        (1 / 4, 1 / 2),
    ),
    "both hybrid": ((2, 2), (4, 1), {"outer_dp_sharding_strategy": 1}, (1 / 4, 1 / 4)),
    "dense hybrid, experts replicated": (
        (2, 2),
        (1, 4),
        {"outer_dp_sharding_strategy": 1, "expert_outer_dp_sharding_strategy": 0, "expert_zero_dp_strategy": 0},
        (1 / 4, 1),
    ),
}


@on_ranks(4)
def test_logs_of_ranks_with_different_experts_are_equal() -> None:
    dense, experts = init_device_mesh(DEVICE, (4,)), init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("shard", "ep"))
    meshes: dict[str, Any] = {"device_mesh": dense, "expt_device_mesh": experts["shard"]}
    model = fully_shard_model(_model(), fsdp_unit_modules=[Block], device=device(), **meshes)
    JOURNAL.doubted = True
    model(batches(1, 1)[0, 0]).sum().backward()
    assert JOURNAL.has_settled


class Numbered(nn.ModuleDict):
    """Experts whose names have their numbers across ranks."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


def _apart(strategy: int, numbered: bool = False, offload: bool = False) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """A model whose ranks with an even and an odd number have different experts, in one unit, and its optimizer."""
    dense, experts = init_device_mesh(DEVICE, (4,)), init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("shard", "ep"))
    model = _model().to(device())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 + dist.get_rank() % 2 if ".experts." in name else 1)
    for block in list(model.blocks)[:2]:
        block.experts[1].register_buffer("load", torch.full((2,), float(dist.get_rank())))
        if numbered:
            block.experts = Numbered({str(dist.get_rank() % 2 * 2 + i): each for i, each in enumerate(block.experts)})
    arguments: dict[str, Any] = {"device_mesh": dense, "expt_device_mesh": experts["shard"], "dp_shard_dim": None}
    arguments |= {"zero_dp_strategy": strategy, "offload_optimizer": offload, "sync_module_states": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    return fully_shard(model, optimizer, fsdp_unit_modules=[Block], **arguments)


def _used_elsewhere(freeze: bool) -> tuple[bool, bool]:
    """Whether an expert that only ranks with an odd number use has a gradient, and whether a step changes it."""
    model, optimizer = _apart(3)
    block, odd = model.module.blocks[0], dist.get_rank() % 2 == 1
    before = block.experts[1].weight.full_tensor().clone()
    if freeze and not odd:
        block.experts[1].requires_grad_(False)
    used, block.experts = block.experts, block.experts if odd else block.experts[:1]
    loss_of(model, batches(1, 1)[0, 0]).backward()
    block.experts = used
    has_gradient = block.experts[1].weight.grad is not None
    optimizer.step()
    return has_gradient, not torch.equal(block.experts[1].weight.full_tensor(), before)


@pytest.mark.parametrize("freeze", [False, True])
def test_an_expert_is_unused_whether_or_not_others_use_theirs_of_its_number(ranks: RankPool, freeze: bool) -> None:
    assert ranks.run(4, _used_elsewhere, freeze) == [(False, False), (True, True)] * 2


def _averaged() -> list[float]:
    model, _ = _apart(3)
    model.average_buffers()
    return model.module.blocks[0].experts[1].load.tolist()


def test_buffers_of_an_expert_are_averaged_over_the_ranks_that_have_it(ranks: RankPool) -> None:
    assert ranks.run(4, _averaged) == [[1.0, 1.0], [2.0, 2.0]] * 2


def _reset_by_its_holders(strategy: int, offload: bool = False) -> list[torch.Tensor]:
    """Outputs after each of some writes to an expert, by the ranks that have it, and then to all weights."""
    model, optimizer = _apart(strategy, offload=offload)
    tokens, found = batches(1, 1)[0, 0], []
    for step in range(3):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if not offload:  # otherwise the step has started unshards that nothing has used
                model(tokens)
            if dist.get_rank() % 2 == step % 2:
                model.module.blocks[step % 2].experts[1].weight.mul_(0.5)
            found.append(model(tokens))
            for parameter in model.parameters():
                parameter.mul_(0.9)
            found.append(model(tokens))
    return found


@pytest.mark.parametrize(("strategy", "offload"), [(3, True), (0, False), (1, False), (2, False)])
def test_ranks_that_have_an_expert_may_write_it_alone(ranks: RankPool, strategy: int, offload: bool) -> None:
    right = ranks.run(4, _reset_by_its_holders, 3)
    for found, expected in zip(ranks.run(4, _reset_by_its_holders, strategy, offload), right, strict=True):
        torch.testing.assert_close(found, expected)


ONE = "module.blocks.0.experts.0.weight"
KEY = r"blocks\.0\.experts\.0\.(weight|bias)(\.exp_avg)?: expected a key that only the ranks with this expert use"

OTHERS = "full_state_dict=True|save_safetensors: blocks.0.experts..*: every expert-parallel rank has other experts"


def _full(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, buffers and state."""
    found = dict([*model.named_parameters(), *model.named_buffers()])
    for name, parameter in model.named_parameters():
        found |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for n, v in found.items()}


def _clear(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def _trained(numbered: bool, strategy: int) -> tuple[MegatronFSDP, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    model, optimizer = _apart(strategy, numbered)
    for buffer in model.buffers():
        buffer.fill_(1 + dist.get_rank() % 2)
    loss_of(model, batches(1, 1)[0, 0]).backward()
    optimizer.step()
    return model, optimizer, _full(model, optimizer)


def _refused(folder: str, numbered: bool) -> None:
    """Saves and loads that would lose experts of some ranks, or give them those of others, raise an error."""
    model, optimizer, full = _trained(numbered, 3)
    is_full = StateDictOptions(full_state_dict=True)
    of_one_rank = [
        lambda: save_safetensors(model, folder),
        lambda: get_model_state_dict(model, options=is_full),
        lambda: set_model_state_dict(model, full, options=replace(is_full, broadcast_from_rank0=True)),
        lambda: get_optimizer_state_dict(model, optimizer, options=is_full),
    ]
    model_state, state = get_state_dict(model, optimizer)
    by_name, one = {"model": model_state, "optimizer": state}, model_state.get(ONE)
    under_one_name = [
        lambda: dcp.save(model.state_dict(), checkpoint_id=folder),
        lambda: dcp.save(by_name, checkpoint_id=folder),
        lambda: save(by_name, folder),
        lambda: dcp.load({ONE: one}, checkpoint_id=folder),
        lambda: model.load_state_dict(full, strict=False),
    ]
    error = OTHERS if numbered else KEY
    for call in of_one_rank if numbered else [*of_one_rank, *under_one_name]:
        with pytest.raises((RuntimeError, NotImplementedError, CheckpointException), match=error):
            call()
    with pytest.raises(CheckpointException, match=r"state\.\d+\.exp_avg: expected a key that only .* state by name"):
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    assert_close(_full(model, optimizer), full, rtol=0, atol=0)


@pytest.mark.parametrize("numbered", [False, True])
def test_experts_are_not_saved_or_loaded_as_those_of_other_ranks(
    ranks: RankPool, tmp_path: Path, numbered: bool
) -> None:
    dcp.save({ONE: torch.zeros(13, 13)}, checkpoint_id=tmp_path, no_dist=True)
    ranks.run(4, _refused, str(tmp_path), numbered)


def _saved(folder: str, numbered: bool, strategy: int, writes: str) -> None:
    model, optimizer, full = _trained(numbered, strategy)
    if writes == "a file per rank":
        torch.save((model.state_dict(), optimizer.state_dict()), f"{folder}/{dist.get_rank()}")
    elif writes == "nothing":
        states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    else:
        by_name = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(by_name, checkpoint_id=folder) if writes == "dcp" else save(by_name, folder)
    _clear(model, optimizer)
    if writes == "a file per rank":
        states = torch.load(f"{folder}/{dist.get_rank()}", weights_only=True)
    if writes in ("a file per rank", "nothing"):
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    else:
        by_name = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(by_name, checkpoint_id=folder) if writes == "dcp" else load(by_name, folder)
        set_state_dict(model, optimizer, model_state_dict=by_name["model"], optim_state_dict=by_name["optimizer"])
    assert_close(_full(model, optimizer), full, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", [0, 3])
@pytest.mark.parametrize("writes", ["dcp", "files", "a file per rank", "nothing"])
def test_experts_with_names_of_their_own_are_saved(ranks: RankPool, tmp_path: Path, writes: str, strategy: int) -> None:
    ranks.run(4, _saved, str(tmp_path), True, strategy, writes)


@pytest.mark.parametrize("writes", ["a file per rank", "nothing"])
def test_each_rank_may_keep_its_own_experts_under_any_name(ranks: RankPool, tmp_path: Path, writes: str) -> None:
    ranks.run(4, _saved, str(tmp_path), False, 3, writes)


@on_ranks(4)
def test_full_experts_are_loaded_by_names_of_their_own() -> None:
    model, optimizer, full = _trained(True, 3)
    _clear(model, optimizer)
    model.load_state_dict({name: full[name] for name, _ in model.named_parameters()}, strict=False)
    assert all(torch.equal(parameter.full_tensor(), full[name]) for name, parameter in model.named_parameters())


def _fewer_experts() -> None:
    dense, experts = init_device_mesh(DEVICE, (4,)), init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("shard", "ep"))
    model = _model().to(device())
    if dist.get_rank() % 2:
        model.blocks[0].experts = model.blocks[0].experts[:1]
    meshes: dict[str, Any] = {"device_mesh": dense, "expt_device_mesh": experts["shard"], "dp_shard_dim": None}
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block], sync_module_states=False, **meshes)
    loss_of(sharded, batches(1, 1)[0, 0]).backward()


def test_ranks_with_other_numbers_of_experts_raise(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"experts of unit 1.*4 parameters"):
        ranks.run(4, _fewer_experts)


@pytest.mark.parametrize("name", CASES)
def test_axes_of_their_own(ranks: RankPool, name: str) -> None:
    dense, experts, strategies, shares = CASES[name]
    for found in ranks.run(4, _trains, dense, experts, strategies):
        assert tuple(share for share, _ in found) == shares


@pytest.mark.parametrize(("dense", "expert"), [(3, 1), (1, 3), (3, 0), (2, 3), (0, 3)])
def test_strategies_of_their_own(ranks: RankPool, dense: int, expert: int) -> None:
    strategies = {"zero_dp_strategy": dense, "expert_zero_dp_strategy": expert}
    for found in ranks.run(2, _trains, (1, 2), (1, 2), strategies):
        assert found == [(1 / 2 if stage else 1, stage < 3) for stage in (dense, expert)]


def test_strategies_are_inherited() -> None:
    config = FSDPConfig(zero_dp_strategy=2, outer_dp_sharding_strategy=1)
    assert config.sharding_of(True) == config.sharding_of(False)
    own = FSDPConfig(zero_dp_strategy=2, outer_dp_sharding_strategy=1, expert_zero_dp_strategy=1)
    assert own.expert_zero_dp_strategy == "optim" and own.sharding_of(True).outer == own.sharding.outer
    with pytest.raises(ValueError, match="expert_zero_dp_strategy: expected 0 or 'no_shard'"):
        FSDPConfig(expert_zero_dp_strategy="zero")
    with pytest.raises(ValueError, match="Experts inherit both, unless expert_zero_dp_strategy"):
        FSDPConfig(outer_dp_sharding_strategy=1, expert_zero_dp_strategy=0)


def _without_experts() -> list[str]:
    with logged() as texts:
        fully_shard_model(TinyModel().to(device()), fsdp_unit_modules=[Block], expert_zero_dp_strategy=1)
    return [text for text in texts if "expert_zero_dp_strategy" in text]


def test_strategies_that_serve_no_parameter_are_named(ranks: RankPool) -> None:
    first, second = ranks.run(2, _without_experts)
    assert len(first) == 1 and not second
