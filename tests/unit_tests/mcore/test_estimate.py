"""The doctor's estimate from shapes equals the memory of the engine."""

import copy

import pytest
import torch

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.tools.estimate import AxisSizes, estimate
from megatron_fsdp import fully_shard_model
from tests.models import STRATEGIES, Block, TinyModel, device
from tests.ranks import RankPool


def _compare(strategy: str, dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    model = TinyModel().to(device(), dtype)
    config = FSDPConfig(zero_dp_strategy=strategy, mixed_precision_policy=policy)
    found = estimate(copy.deepcopy(model).to("meta"), (Block,), config, AxisSizes(3), AxisSizes(3))
    sharded = fully_shard_model(
        model, fsdp_unit_modules=[Block], zero_dp_strategy=strategy, mixed_precision_policy=policy
    )
    total = found.total
    assert total.elements + total.padding == sum(group.layout.numel for group in sharded.engine.groups)
    assert [unit.name for unit in found.units] == sharded.engine.unit_names
    assert found.kinds == {"Block": len(sharded.engine.unit_names) - 1}
    kept = [
        group.weights.compute.flat.untyped_storage() for group in sharded.engine.groups if not group.weights.temporary
    ]
    assert total.compute == sum(storage.nbytes() for storage in kept)
    apart = [group.weights.main for group in sharded.engine.groups if group.weights.main_is_apart]
    assert total.main == sum(main.nbytes for main in apart)
    assert total.optimizer == 2 * sum(group.weights.main.numel() * 4 for group in sharded.engine.groups)
    assert found.peak(config) > total.resting


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_estimated_bytes_equal_those_of_the_engine(ranks: RankPool, strategy: str, dtype: torch.dtype) -> None:
    ranks.run(3, _compare, strategy, dtype)
