"""``fully_shard`` and its parts, and the enumeration of sharding strategies."""

from enum import IntEnum

from megatron.fsdp.api.fully_shard import fully_shard, fully_shard_model, fully_shard_optimizer
from megatron.fsdp.api.index import FSDPDistributedIndex
from megatron.fsdp.api.megatron_fsdp import MegatronFSDP
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy


class ShardingStrategy(IntEnum):
    """Values of ``zero_dp_strategy``, and the first two of ``outer_dp_sharding_strategy``."""

    NO_SHARD = 0
    OPTIM = 1
    OPTIM_GRADS = 2
    OPTIM_GRADS_PARAMS = 3


__all__ = [
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "ShardingStrategy",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
]
