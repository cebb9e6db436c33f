"""Fully sharded data parallelism for PyTorch models and Megatron-Core, under the import name of Megatron-FSDP.

Scripts written for NVIDIA's package ``megatron-fsdp`` run unchanged: functions, classes and submodules have the same
names and arguments. The engine behind them is :mod:`megatron.fsdp`, whose public names are all here.
"""

# Functions of megatron.fsdp have the names of these submodules: importing a submodule later would replace the function.
import megatron_fsdp.fully_shard  # noqa: F401
from megatron import fsdp as _engine
from megatron.fsdp import *  # noqa: F403
from megatron.fsdp.helpers.import_name import warn_of_conflict
from megatron_fsdp.package_info import (
    __contact_names__,
    __description__,
    __keywords__,
    __license__,
    __package_name__,
    __shortversion__,
)

__all__ = ["__contact_names__", "__description__", "__keywords__", "__license__", "__package_name__"]
__all__ += ["__shortversion__", *_engine.__all__]

warn_of_conflict()
