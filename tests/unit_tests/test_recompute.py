"""Recomputation and backward of a unit share one gather; that training is equal is in test_training.py."""

import functools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from megatron_fsdp import fully_shard_model
from tests import training_models
from tests.exchanges import seen
from tests.models import Block, adamw, assert_same_training, batches, loss_of
from tests.ranks import RankPool, on_ranks
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


class Selective(Recomputing):
    """Recomputes two blocks at a time, except for their matmuls."""

    context = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    def __init__(self) -> None:
        super().__init__(False, "pairs")


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads", "optim_grads_params"])
def test_selective_recomputation_of_several_units(strategy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        original: Any = training_models.checkpoint
        patch.setattr(training_models, "checkpoint", functools.partial(original, context_fn=Selective.context))
        assert_same_training(Selective(), batches(3, 2), adamw, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
