"""Adjusts Megatron's command line for a CPU: arguments that need a GPU get a value that works, which is logged."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adjustment:
    """An argument whose value needs a GPU.

    Attributes:
        argument: The attribute's name in Megatron's argument namespace.
        value: The value for a CPU; for an enum, the member's name.
        reason: Why other values do not work.
        only: The one value that needs a GPU; None if all values but ``value`` do.
    """

    argument: str
    value: Any
    reason: str
    only: Any = None


# What Transformer Engine does, besides layers.
TRANSFORMER_ENGINE: tuple[Adjustment, ...] = (
    Adjustment("fp8", None, "Transformer Engine needs CUDA"),
    Adjustment("fp8_param_gather", False, "Transformer Engine needs CUDA"),
    Adjustment("fp4", None, "Transformer Engine needs CUDA"),
    Adjustment("fp4_param_gather", False, "Transformer Engine needs CUDA"),
    Adjustment("te_rng_tracker", False, "Transformer Engine needs CUDA"),
    Adjustment("delay_wgrad_compute", False, "Transformer Engine needs CUDA"),
    Adjustment("tp_comm_overlap", False, "Transformer Engine needs CUDA"),
)
# What libraries with CUDA kernels do.
LIBRARIES: tuple[Adjustment, ...] = (
    Adjustment("gradient_accumulation_fusion", False, "the fused weight gradient is a CUDA kernel"),
    Adjustment("masked_softmax_fusion", False, "the fused softmax is a CUDA kernel"),
    Adjustment("no_persist_layer_norm", True, "the persistent layer norm is a CUDA kernel"),
    Adjustment("apply_rope_fusion", False, "the fused rotary embedding is a CUDA kernel"),
    Adjustment("moe_permute_fusion", False, "the fused permutation is a CUDA kernel"),
    Adjustment("moe_token_dispatcher_type", "alltoall", "the flex dispatcher's libraries need CUDA", only="flex"),
    Adjustment("moe_router_fusion", False, "the fused router is a CUDA kernel"),
)
ADJUSTMENTS: tuple[Adjustment, ...] = (
    Adjustment("distributed_backend", "gloo", "NCCL connects GPUs only"),
    Adjustment("transformer_impl", "local", "Transformer Engine needs CUDA"),
    *TRANSFORMER_ENGINE,
    *LIBRARIES,
    Adjustment("cuda_graph_impl", "none", "CUDA graphs need CUDA"),
    Adjustment("gradient_reduce_div_fusion", False, "only NCCL can scale during a reduction"),
    Adjustment("nccl_ub", False, "buffers are registered with NCCL"),
    Adjustment("fsdp_manual_registration", False, "buffers are registered with NCCL"),
    Adjustment("num_workers", 0, "workers would use the cores that compute"),
)


def adjust(args: Namespace) -> list[Adjustment]:
    """Give every argument in the table its value for a CPU. Return the rows that changed an argument."""
    changed = []
    for row in ADJUSTMENTS:
        current = getattr(args, row.argument)
        value = type(current)[row.value] if isinstance(current, Enum) else row.value
        if current != value and row.only in (None, current):
            setattr(args, row.argument, value)
            changed.append(row)
            if args.rank == 0:
                logger.info("CPU: %s = %s instead of %s: %s", row.argument, row.value, current, row.reason)
    if changed and args.rank == 0:  # on a machine with GPUs, nothing else would tell
        names = ", ".join(row.argument for row in changed)
        logger.warning("No CUDA device was found: Megatron runs on the CPU. Arguments that were changed: %s.", names)
    return changed


def validate_adjusted(original: Callable[..., Any], args: Namespace, *rest: Any, **kwargs: Any) -> Any:
    """Adjust the arguments, then validate them."""
    adjust(args)
    return original(args, *rest, **kwargs)
