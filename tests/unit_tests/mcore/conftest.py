"""Lets the tests of the adapter run without CUDA: Megatron's modules must not be imported before."""

from megatron.fsdp.mcore import cpu

cpu.enable()
