"""Fully sharded data parallelism for PyTorch models and Megatron-Core, under the import name of Megatron-FSDP.

Scripts written for NVIDIA's package ``megatron-fsdp`` run unchanged: functions, classes and submodules have the same
names and arguments. The engine behind them is :mod:`megatron.fsdp`.
"""

# Functions below have the names of these submodules: importing a submodule later would replace the function.
import megatron_fsdp.fully_shard  # noqa: F401
from megatron.fsdp import (
    DistributedDataParallelConfig,
    FSDPConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    deferred_init,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    register_forward_method,
    register_optimizer,
    save_safetensors,
)
from megatron.fsdp.helpers.import_name import warn_of_conflict
from megatron_fsdp.package_info import (
    __contact_names__,
    __description__,
    __keywords__,
    __license__,
    __package_name__,
    __shortversion__,
    __version__,
)

__all__ = [
    "DistributedDataParallelConfig",
    "FSDPConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "__contact_names__",
    "__description__",
    "__keywords__",
    "__license__",
    "__package_name__",
    "__shortversion__",
    "__version__",
    "deferred_init",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "register_forward_method",
    "register_optimizer",
    "save_safetensors",
]

warn_of_conflict()
