"""Sharded training equals unsharded training: every strategy, every world size."""

import pytest

from tests.models import STRATEGIES, TinyModel, adamw, assert_same_training, batches
from tests.ranks import RankPool


def _train(strategy: str, unit_modules: list | None) -> None:
    import torch.distributed as dist

    assert_same_training(
        TinyModel(),
        batches(steps=4, per_step=dist.get_world_size()),
        adamw,
        zero_dp_strategy=strategy,
        **({} if unit_modules is None else {"fsdp_unit_modules": unit_modules}),
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parity(ranks: RankPool, strategy: str, world_size: int) -> None:
    ranks.run(world_size, _train, strategy, None)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parity_of_one_unit_for_everything(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _train, strategy, [])
