"""The benchmark suite: this project's FSDP beside PyTorch's FSDP2, the original Megatron-FSDP and DDP, on the same
work.

    python -m benchmarks --help

What is measured and how is told in docs/performance.md, whose tables and plots are made of the results.
"""
