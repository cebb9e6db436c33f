"""Experts may be sharded by strategies and over instances of their own; training stays that of the unsharded model."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp import FSDPConfig
from megatron.fsdp.comm.journal import JOURNAL
from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from tests.models import DEVICE, Block, TinyModel, adamw, assert_same_training, batches, device, logged, loss_of
from tests.ranks import RankFailure, RankPool

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


def _doubts() -> None:
    dense, experts = init_device_mesh(DEVICE, (4,)), init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("shard", "ep"))
    meshes: dict[str, Any] = {"device_mesh": dense, "expt_device_mesh": experts["shard"]}
    model = fully_shard_model(_model(), fsdp_unit_modules=[Block], device=device(), **meshes)
    JOURNAL.doubted = True
    model(batches(1, 1)[0, 0]).sum().backward()
    assert JOURNAL._has_settled


def test_logs_of_ranks_with_different_experts_are_equal(ranks: RankPool) -> None:
    ranks.run(4, _doubts)


def _apart(strategy: int) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """A model whose ranks with an even and an odd number have different experts, in one unit, and its optimizer."""
    dense, experts = init_device_mesh(DEVICE, (4,)), init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("shard", "ep"))
    model = _model().to(device())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 + dist.get_rank() % 2 if ".experts." in name else 1)
    for block in list(model.blocks)[:2]:
        block.experts[1].register_buffer("load", torch.full((2,), float(dist.get_rank())))
    meshes: dict[str, Any] = {"device_mesh": dense, "expt_device_mesh": experts["shard"], "dp_shard_dim": None}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    return fully_shard(
        model, optimizer, fsdp_unit_modules=[Block], zero_dp_strategy=strategy, sync_module_states=False, **meshes
    )


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


def _reset_by_its_holders(strategy: int) -> list[torch.Tensor]:
    """Outputs after each of some writes to an expert, by the ranks that have it, and then to all weights."""
    model, optimizer = _apart(strategy)
    tokens, found = batches(1, 1)[0, 0], []
    for step in range(3):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(tokens)
            if dist.get_rank() % 2 == step % 2:
                model.module.blocks[step % 2].experts[1].weight.mul_(0.5)
            found.append(model(tokens))
            for parameter in model.parameters():
                parameter.mul_(0.9)
            found.append(model(tokens))
    return found


@pytest.mark.parametrize("strategy", [0, 1, 2])
def test_ranks_that_have_an_expert_may_write_it_alone(ranks: RankPool, strategy: int) -> None:
    for found, expected in zip(*(ranks.run(4, _reset_by_its_holders, number) for number in (strategy, 3)), strict=True):
        torch.testing.assert_close(found, expected)


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
