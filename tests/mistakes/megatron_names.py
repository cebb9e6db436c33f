"""The names that the code of mistakes with Megatron-Core may use."""
# ruff: noqa: F401 - the code of README.md uses what is imported here

from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.megatron_models import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    ddp_config,
    forward_backward,
    gpt,
    megatron,
    parallel_state,
    tokens,
    transformer_config,
)

# What surrounds the code: Megatron's process groups and random numbers, and the plugin.
context = megatron


def check_flags(**flags: object) -> None:
    """Check the parsed command line, as the training script does before the model is built."""
    from megatron.fsdp.mcore.limits import Settings, check  # after Megatron is on the CPU

    check(Settings(SimpleNamespace(use_megatron_fsdp=True, **flags)))
