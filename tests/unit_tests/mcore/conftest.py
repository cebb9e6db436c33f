"""Enables the tests of the adapter without CUDA. It must run before any of Megatron's modules is imported."""

from megatron.fsdp.mcore import cpu

cpu.enable()
