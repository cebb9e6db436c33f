"""The sections of the page of tables: their order, titles and explanations."""

from typing import NamedTuple


class Section(NamedTuple):
    """One section: its title, and a paragraph that explains the tables."""

    title: str
    text: str = ""


SECTIONS: dict[str, Section] = {
    "targets": Section(
        "Targets",
        "Ratios of medians, and what this project aims for.",
    ),
    "step": Section("Step time"),
    "network": Section(
        "On a slow network",
        "Each rank is in a network namespace with 1 Gbit/s in both directions. *exposed* is the time that forward\n"
        "and backward take longer than without communication. *communication alone* is the time of the\n"
        "collectives over the same units without compute (gloo's; for this engine, its sends and receives):\n"
        "an all-gather and a reduction per unit for ZeRO-1 and 2, two all-gathers and a reduction for ZeRO-3, an\n"
        "all-reduce for DDP. *hidden* is 1 - exposed / communication alone. *could be hidden* is compute /\n"
        "communication alone, which no schedule can exceed.",
    ),
    "memory": Section(
        "Memory",
        "Bytes of all tensors that a rank holds, counted at the allocator. With 8 ranks and more, one process\n"
        "acts as rank 0 on the fake process group, which moves no data and takes no memory; 2 and 4 ranks are\n"
        "real, over gloo. *floor* is 12 bytes per parameter, divided by the ranks. *bound* is the formula of\n"
        "docs/memory.md.",
    ),
    "copies": Section(
        "Copies, collectives, operations",
        "One step as torch's dispatcher sees it, on the fake process group. Copies that the plain model makes are\n"
        "subtracted. Casts do not count as copies.",
    ),
    "optimizer": Section(
        "Optimizer step",
        "1,000 parameters. The weights of all peers agree afterwards.",
    ),
    "host": Section(
        "Host time",
        "CPU time of the process in forward and backward, beyond that of the plain model, per unit. The model is\n"
        "tiny and nothing is communicated. On a GPU this time leaves gaps between kernels.",
    ),
    "startup": Section(
        "Start-up",
        "A model of 2 billion parameters built on the meta device, as one of 64 ranks. FSDP2 fills each rank's\n"
        "shards with independent random numbers. The others give every rank the values of the unsharded model,\n"
        "unit by unit: a rank draws the numbers of all units, holds one unsharded unit at a time, and keeps its\n"
        "shard.",
    ),
    "scale": Section(
        "Scale",
        "One rank of 8 to 4,096, on the fake process group.",
    ),
    "growth": Section(
        "Growth",
        "2,000 steps of a small model on 2 ranks, with slopes by least squares and their standard errors. *heap*\n"
        "counts the blocks that the process has allocated. *resident* is the system's figure and includes what\n"
        "the allocator keeps. torch's record of recent collectives is kept short (`TORCH_FR_BUFFER_SIZE=16`): at\n"
        "its default size, a process that issues few collectives grows by some 400 bytes with each of the first\n"
        "2,000.",
    ),
    "loop": Section(
        "Megatron's training loop",
        "`pretrain_gpt.py` of this repository. NVIDIA's here is the one inside megatron-core.",
    ),
    "prediction": Section(
        "The planner's step times",
        "Turns in network namespaces, 1,024 tokens per rank; *rate* is in Mbit/s, *latency* in milliseconds one way.\n"
        "Of 5 to 15 turns, those 5 count that took least CPU time, as the CPU's speed changes.\n"
        "*spread* is the distance of the quartiles over the median. A case is judged if it is at most 3 % and if\n"
        "gloo's CPU time is less than the time on the wire. 10 Gbit/s is never judged: two cores bound it. The\n"
        "calibration uses a network of 750 Mbit/s and 0.3 ms.",
    ),
    "predicted-memory": Section(
        "The planner's memory",
        "Live bytes of tensors of rank 0 of four, over gloo; the peak is the most of five steps. By category, the\n"
        "largest at any operation. *rest* is temporary memory, communication buffers and memory kept for reuse.\n"
        "*heap overhead* is the growth of all other heap memory since before sharding.",
    ),
    "published": Section("Published figures", "Of others, with their sources, to compare the planner with."),
    "gpu": Section("GPU"),
    "machine": Section("Machines and versions"),
}
