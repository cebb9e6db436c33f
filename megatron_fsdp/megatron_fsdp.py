"""The class of sharded models."""

from megatron.fsdp.megatron_fsdp import MegatronFSDP

__all__ = ["MegatronFSDP"]
