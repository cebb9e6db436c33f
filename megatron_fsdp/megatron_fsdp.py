"""The class of sharded models."""

from megatron.fsdp.api.megatron_fsdp import MegatronFSDP

__all__ = ["MegatronFSDP"]
