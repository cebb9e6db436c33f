"""NVIDIA's Megatron-FSDP from PyPI. In its rank processes, ``megatron_fsdp`` is NVIDIA's package.

Comments in ``build`` explain the settings that make the comparison fair.
"""

from typing import Any

import torch

from benchmarks.job import Job
from benchmarks.model import Block, build_model
from benchmarks.peers import Built, Trainable, adamw, streams


def build(job: Job, zero: int, limited: bool = False, double: bool = False, **how: Any) -> Trainable:
    """Shard with strategy ``zero``.

    Args:
        job: The training job.
        zero: The ZeRO stage.
        limited: Whether to limit prefetching to one unit and pending reductions to two units. By default, the limits
            are half a billion and a billion elements.
        double: Whether to use its double buffer.
        how: ``streams=True`` makes reductions asynchronous, as on a GPU.
    """
    import megatron_fsdp as original

    if not hasattr(original, "__version__"):
        raise RuntimeError(f"expected NVIDIA's megatron_fsdp; got {original.__file__}")
    if how.get("streams"):
        streams.asynchronous = True
    model = build_model(job.shape, job.low_precision, job.device)
    if job.low_precision:
        model.bfloat16()
    unit = max(sum(p.numel() for p in m.parameters()) for m in model.modules() if isinstance(m, Block))
    fp32 = torch.float32
    # For an fp32 model, separate main weights would be a second copy of the weights.
    policy = original.MixedPrecisionPolicy(
        main_params_dtype=fp32 if job.low_precision else None, main_grads_dtype=fp32, grad_comm_dtype=fp32
    )
    sharded: Any = original.fully_shard_model(
        model,
        fsdp_unit_modules=[Block],
        zero_dp_strategy=zero,
        mixed_precision_policy=policy,
        # gloo does not support averaging in a reduction, so gradients are summed and the loss is divided instead.
        calculate_per_token_loss=True,
        fsdp_double_buffer=double,
        device=torch.device(job.device) if job.device == "cpu" else None,
    )
    if limited:
        # NVIDIA's rule, without its lower bound of a billion elements.
        sharded.suggested_AG_prefetch_size, sharded.suggested_RS_queue_capacity = unit, 2 * unit
    return Built(sharded, _optimizer(original, sharded), loss_divisor=job.ranks)


def _optimizer(original: Any, sharded: Any) -> torch.optim.Optimizer:
    """Build its optimizer, and undo the step that it takes to create state, which would change the losses."""
    sharded._replace_param_with_distributed_if_needed()
    optimizer = adamw(sharded.parameters())
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    original.fully_shard_optimizer(optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer
