"""Sharding granularities: rows, matrices, parameters, blocks of rows. They do not change training or checkpoints."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model, fully_shard_optimizer
from tests.models import (
    STRATEGIES,
    Block,
    TinyModel,
    adamw,
    assert_same_weights,
    batches,
    device,
    load_from,
    loss_of,
    main_weights,
    save_to,
)
from tests.ranks import RankPool, on_ranks


class Awkward(nn.Module):
    """Parameters for which no even division keeps rows whole, so that the layout has to cut rows."""

    def __init__(self, cube: bool) -> None:
        super().__init__()
        self.tall = nn.Parameter(torch.randn(100, 7))
        self.bias = nn.Parameter(torch.randn(6))
        self.wide = nn.Parameter(torch.randn(8, 4))
        self.cube = nn.Parameter(torch.randn(3, 5, 7)) if cube else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.tall.T).tanh().sum(-1, keepdim=True) * self.bias.sum()
        y = y + self.wide.pow(2).sum()
        return y if self.cube is None else y + (self.cube * x[0]).sum()


def _sharded(
    granularity: str, cube: bool = True, strategy: str = "optim_grads_params"
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Awkward(cube).to(device())
    return fully_shard(model, adamw(model.parameters()), shard_granularity=granularity, zero_dp_strategy=strategy)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(2, 7, generator=torch.Generator().manual_seed(seed)).to(device())
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _cut(granularity: str, cube: bool) -> list[str]:
    """Names of parameters of which this rank's slice begins or ends inside a row."""
    torch.manual_seed(1)
    reference = Awkward(cube).to(device())
    optimizer = adamw(reference.parameters())
    sharded, sharded_optimizer = _sharded(granularity, cube)
    for seed in range(3):
        _step(reference, optimizer, seed)
        _step(sharded, sharded_optimizer, seed)
    assert_same_weights(sharded, reference)
    for entry in sharded.engine.params():
        assert local_shard(entry.main).shape == entry.shard_slice.shape
    return [entry.name for entry in sharded.engine.params() if not entry.shard_slice.whole_rows]


def test_rows_are_cut_only_where_necessary(ranks: RankPool) -> None:
    assert any(ranks.run(4, _cut, "row", False))
    assert any(ranks.run(3, _cut, "element", True))
    assert not any(ranks.run(4, _cut, "tensor", True))


def _save(granularity: str, strategy: str, folder: str) -> dict[str, torch.Tensor]:
    model, optimizer = _sharded(granularity, strategy=strategy)
    _step(model, optimizer, 0)
    assert set(model.state_dict()) == {f"module.{name}" for name in main_weights(model)}
    save_to(folder, model, optimizer)
    _step(model, optimizer, 1)
    return main_weights(model)


def _resume(granularity: str, folder: str) -> dict[str, torch.Tensor]:
    model, optimizer = _sharded(granularity)
    _step(model, optimizer, 7)  # makes the state to load into, and other weights
    load_from(folder, model, optimizer)
    _step(model, optimizer, 1)
    return main_weights(model)


@pytest.mark.parametrize(
    "saved, saver, ranks_saved", [("row", "optim_grads_params", 4), ("element", "optim", 3), ("tensor", "no_shard", 2)]
)
@pytest.mark.parametrize("loaded, ranks_loaded", [("row", 4), ("element", 2), ("block(4)", 3), ("row", 1)])
def test_checkpoint_is_loaded_whatever_was_cut(
    ranks: RankPool, tmp_path: Path, saved: str, saver: str, ranks_saved: int, loaded: str, ranks_loaded: int
) -> None:
    expected = ranks.run(ranks_saved, _save, saved, saver, str(tmp_path))[0]
    found = ranks.run(ranks_loaded, _resume, loaded, str(tmp_path))[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


class Split:
    """Muon for matrices and AdamW for the rest."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        self.optimizers = [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.01)]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks("world_size")
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_muon_sees_full_matrices(strategy: str, world_size: int) -> None:
    torch.manual_seed(3)
    model = TinyModel().to(device())
    reference = copy.deepcopy(model)
    split, reference_split = Split(model), Split(reference)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block], zero_dp_strategy=strategy, shard_granularity="tensor")
    split.optimizers = [fully_shard_optimizer(optimizer) for optimizer in split.optimizers]
    # Every rank has the same tokens, so that sums over a power of two ranks are exact: Muon's orthogonalization, in
    # bfloat16, would make a large difference of a small one.
    for (tokens,) in batches(steps=4, per_step=1):
        loss_of(reference, tokens).backward()
        reference_split.step()
        loss_of(sharded, tokens).backward()
        split.step()
    assert_same_weights(sharded, reference, 1e-6)
