"""Recomputation and backward of a unit share one gather; that training is equal is in test_training.py."""

from megatron_fsdp import fully_shard_model
from tests.exchanges import seen
from tests.models import Block, batches, loss_of
from tests.ranks import RankPool
from tests.training_models import Recomputing


def _count_unshards(what: str) -> int:
    """Number of unshards in one step after the first."""
    with seen("all_gather") as gathers:
        model = fully_shard_model(Recomputing(True, what), fsdp_unit_modules=[Block])
        tokens = batches(1, 1)[0, 0]
        loss_of(model, tokens).backward()
        before = len(gathers)
        loss_of(model, tokens).backward()
        return len(gathers) - before


def test_recompute_and_backward_of_a_unit_share_one_gather(ranks: RankPool) -> None:
    # The root; four blocks in forward, which saves nothing; three in backward, for recomputation and backward at once.
    # The last is still unsharded.
    assert ranks.run(2, _count_unshards, "units") == [8, 8]
    # Two blocks at a time: to recompute the first of two again, the second's weights have to go and come back.
    assert ranks.run(2, _count_unshards, "pairs") == [11, 11]
