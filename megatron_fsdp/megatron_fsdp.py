"""The class of sharded models."""

from megatron.fsdp.module import MegatronFSDP

__all__ = ["MegatronFSDP"]
