"""The API of NVIDIA's Megatron-FSDP: its signatures, method names and settings, over this engine.

All of it becomes an :class:`megatron.fsdp.config.FSDPConfig` and calls of a :class:`megatron.fsdp.module.ShardedModel`.
To understand the engine, begin there.
"""
