"""The benchmark suite: this project's FSDP beside PyTorch's FSDP2, the original Megatron-FSDP and DDP, on the same
work.

    python -m benchmarks --help

docs/performance.md explains the method; docs/status.md has the targets. Results are in out/benchmarks.
"""
