"""The benchmark suite: this project's FSDP against PyTorch's FSDP2, NVIDIA's Megatron-FSDP and DDP, on the same
work.

    python -m benchmarks --help

docs/performance.md explains the method; docs/status.md has the targets. Results are in out/benchmarks.
"""
