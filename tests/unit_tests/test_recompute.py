"""Activation recomputation in both implementations: around a unit, inside units and around several."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.exchanges import seen
from tests.models import STRATEGIES, Block, TinyModel, adamw, assert_same_training, batches, device
from tests.ranks import RankPool


class Recomputing(TinyModel):
    """Recomputes its blocks one by one, two by two, or the modules inside them."""

    def __init__(self, reentrant: bool, what: str) -> None:
        super().__init__(depth=4)
        self.reentrant, self.what = reentrant, what
        if what == "inside":
            for block in self.blocks:
                up = block.up
                block.forward = lambda x, b=block, u=up: (
                    x + b.down(checkpoint(lambda y: torch.nn.functional.gelu(u(b.norm(y))), x, use_reentrant=reentrant))
                )

    def _run(self, function: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, x, use_reentrant=self.reentrant) if self.what != "inside" else function(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.what == "pairs":
            for i in range(0, len(self.blocks), 2):
                x = self._run(nn.Sequential(*self.blocks[i : i + 2]), x)
        else:
            for block in self.blocks:
                x = self._run(block, x)
        return self.head(self.norm(x))


def _train(strategy: str, reentrant: bool, what: str) -> None:
    # The lambdas inside a block would keep working on the original after copy.deepcopy: build it twice.
    data = batches(steps=3, per_step=2 * dist.get_world_size())
    if what != "inside":
        assert_same_training(Recomputing(reentrant, what), data, adamw, zero_dp_strategy=strategy)
        return
    from tests.models import main_weights, train_reference, train_sharded

    torch.manual_seed(3)
    reference = Recomputing(reentrant, what).to(device())
    torch.manual_seed(3)
    expected = train_reference(reference, data, adamw)
    sharded, losses = train_sharded(Recomputing(reentrant, what), data, adamw, zero_dp_strategy=strategy)
    torch.testing.assert_close(losses, expected, rtol=2e-5, atol=2e-5)
    weights = main_weights(sharded)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach().cpu(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ["units", "pairs", "inside"])
def test_recompute(ranks: RankPool, strategy: str, reentrant: bool, what: str) -> None:
    ranks.run(2, _train, strategy, reentrant, what)


class SharedAndRecomputed(nn.Module):
    """One block called twice, each call recomputed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 13)
        self.block = Block(13)
        self.head = nn.Linear(13, 31)
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.block, x, use_reentrant=self.reentrant))
        return self.head(x)


def _shared(reentrant: bool) -> None:
    assert_same_training(SharedAndRecomputed(reentrant), batches(3, 2 * dist.get_world_size()), adamw)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_of_a_unit_that_is_called_twice(ranks: RankPool, reentrant: bool) -> None:
    ranks.run(2, _shared, reentrant)


def _count_unshards(what: str) -> int:
    """Number of unshards in one step after the first."""
    from megatron_fsdp import fully_shard_model
    from tests.models import loss_of

    with seen("all_gather") as gathers:
        model = fully_shard_model(Recomputing(True, what), fsdp_unit_modules=[Block])
        tokens = batches(1, 1)[0, 0]
        loss_of(model, tokens).backward()
        before = len(gathers)
        loss_of(model, tokens).backward()
        return len(gathers) - before


def test_recompute_and_backward_of_a_unit_share_one_gather(ranks: RankPool) -> None:
    # The root; four blocks in forward, which saves nothing; four in backward, for recomputation and backward at once.
    assert ranks.run(2, _count_unshards, "units") == [9, 9]
    # Two blocks at a time: to recompute the first of two again, the second's weights have to go and come back.
    assert ranks.run(2, _count_unshards, "pairs") == [11, 11]
