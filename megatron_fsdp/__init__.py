"""The public API of ``megatron.fsdp`` under the import name that users of Megatron-FSDP know."""

from megatron.fsdp import (
    FSDPConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    __version__,
    deferred_init,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    register_forward_method,
    register_optimizer,
)

__all__ = [
    "FSDPConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "__version__",
    "deferred_init",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "register_forward_method",
    "register_optimizer",
]
