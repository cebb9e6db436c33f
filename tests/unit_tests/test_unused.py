"""Parameters without a gradient, on every rank or on some: no deadlock, and the same update as without sharding."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import FSDPConfig, MegatronFSDP, fully_shard
from tests.models import (
    STRATEGIES,
    Block,
    TinyModel,
    adamw,
    assert_same_training,
    assert_same_weights,
    batches,
    device,
    loss_of,
)
from tests.ranks import RankPool


class WithUnused(TinyModel):
    """Has a parameter inside a unit, one in the root, and a whole unit that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].spare = nn.Linear(5, 3)
        self.spare = nn.Parameter(torch.ones(7))
        self.spare_block = Block(13)


def _unused_everywhere(strategy: str) -> None:
    data = batches(steps=3, per_step=2 * dist.get_world_size())
    sharded = assert_same_training(WithUnused(), data, adamw, zero_dp_strategy=strategy)
    assert all(e.main.grad is None for e in sharded.engine.params() if "spare" in e.name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unused_on_all_ranks_gets_no_gradient_and_no_weight_decay(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _unused_everywhere, strategy)


class Skipping(nn.Module):
    """Skips the block whose number is the first token modulo 5, if there is such a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 13)
        self.blocks = nn.ModuleList(Block(13) for _ in range(4))
        self.head = nn.Linear(13, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if int(tokens[0, 0]) % 5 != number:
                x = block(x)
        return self.head(x)


def _skipping(strategy: str, rows: list[list[int]]) -> None:
    """Train with different blocks left out on every rank: rows[step][rank] names the one (4: none)."""
    data = batches(steps=len(rows), per_step=len(rows[0]))
    for step, row in enumerate(rows):
        for micro_batch, skipped in enumerate(row):
            data[step, micro_batch, 0, 0] = skipped
    torch.manual_seed(3)
    model = Skipping().to(device())
    reference = copy.deepcopy(model)
    sharded, optimizer = fully_shard(
        model, adamw(model.parameters()), fsdp_unit_modules=[Block], zero_dp_strategy=strategy
    )
    reference_optimizer = adamw(reference.parameters())
    for step in data:
        for tokens in step:
            (loss_of(reference, tokens) / len(step)).backward()
        reference_optimizer.step()
        reference_optimizer.zero_grad()
        loss_of(sharded, step[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(sharded, reference)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "rows",
    [
        [[1, 4, 4]] * 3,  # one rank leaves one block out, from the first step on
        [
            [4, 4, 4],
            [0, 1, 2],
            [3, 3, 3],
            [3, 4, 0],
        ],  # all ranks run all blocks in the first step, and different ones later
        [[3, 0, 3], [0, 0, 0]],  # the last block is missing on some ranks, the first on another
    ],
)
def test_blocks_that_some_ranks_skip(ranks: RankPool, strategy: str, rows: list[list[int]]) -> None:
    ranks.run(3, _skipping, strategy, rows)


def _zeros_where_they_are_asked_for() -> None:
    model = MegatronFSDP(WithUnused(), config=FSDPConfig(zero_unused_gradients=True), fsdp_unit_modules=[Block])
    loss_of(model, batches(1, 1)[0, 0]).backward()
    for entry in model.engine.params():
        assert entry.main.grad is not None
        if "spare" in entry.name:
            assert not local_shard(entry.main.grad).any()


def test_unused_gets_zeros_on_request(ranks: RankPool) -> None:
    ranks.run(2, _zeros_where_they_are_asked_for)


def _output_without_backward() -> None:
    """A unit runs, but on rank 0 nothing of it reaches the loss."""

    class TwoHeads(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.extra = Block(13)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            other = self.extra(x)
            return self.head(self.norm(x if int(tokens[0, 0]) == 0 else x + other))

    data = batches(steps=3, per_step=2)
    data[:, 0, 0, 0], data[:, 1, 0, 0] = 0, 1
    assert_same_training(TwoHeads(), data, adamw)


def test_unit_whose_output_some_ranks_do_not_use(ranks: RankPool) -> None:
    ranks.run(2, _output_without_backward)
