"""Settings of data parallelism as Megatron names them."""

from megatron.fsdp.api.ddp_config import DistributedDataParallelConfig

__all__ = ["DistributedDataParallelConfig"]
