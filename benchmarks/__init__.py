"""The benchmark suite: compares this project's FSDP with PyTorch's FSDP2, the original Megatron-FSDP and DDP.

    python -m benchmarks --help

docs/performance.md describes the method; its tables and plots are generated from the results.
"""
