"""Sharded training equals unsharded training: every strategy, every world size."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.exchanges import both_exchanges
from tests.models import DEVICE, STRATEGIES, TinyModel, adamw, assert_same_training, batches
from tests.ranks import RankPool

pytestmark = pytest.mark.every_strategy


def _train(strategy: str, unit_modules: list | None) -> None:
    assert_same_training(
        TinyModel(),
        batches(steps=4, per_step=dist.get_world_size()),
        adamw,
        zero_dp_strategy=strategy,
        **({} if unit_modules is None else {"fsdp_unit_modules": unit_modules}),
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@both_exchanges("strategy", STRATEGIES)
def test_parity(ranks: RankPool, strategy: str, world_size: int) -> None:
    ranks.run(world_size, _train, strategy, None)


@both_exchanges("strategy", STRATEGIES)
def test_parity_of_one_unit_for_everything(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _train, strategy, [])


def _replicate(strategy: int, outer: str) -> None:
    mesh = init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    sharded = assert_same_training(
        TinyModel(),
        batches(steps=3, per_step=dist.get_world_size()),
        adamw,
        fsdp_unit_modules=None,
        zero_dp_strategy=strategy,
        outer_dp_sharding_strategy=outer,
        device_mesh=mesh,
        dp_shard_dim="inner",
        dp_outer_dim="outer",
    )
    assert sharded.engine.unit_names == [""]
    for group in sharded.engine.groups:
        assert not group.weights.temporary
        assert group.weights.compute.flat.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("strategy", "outer"),
    [("no_shard", "no_shard"), ("optim_grads_params", "no_shard"), ("optim_grads_params", "optim")],
)
def test_without_units_weights_are_replicated(ranks: RankPool, strategy: int, outer: str) -> None:
    ranks.run(4, _replicate, strategy, outer)
