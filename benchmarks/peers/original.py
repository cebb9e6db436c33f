"""The original Megatron-FSDP from PyPI. Its processes find it under ``megatron_fsdp``, before this project's.

What makes the comparison fair, each where it is done: see ``build``.
"""

from typing import Any

import torch

from benchmarks.job import Job
from benchmarks.model import Block, build_model
from benchmarks.peers import Built, Trainable, adamw, streams


def build(job: Job, zero: int, limited: bool = False, double: bool = False, **how: Any) -> Trainable:
    """Shard with strategy ``zero``.

    Args:
        job: What to build.
        zero: The strategy.
        limited: Let it gather one unit ahead and have two wait for their reduction. By default these limits are half a
            billion and a billion elements.
        double: Use its double buffer.
        how: ``streams=True`` makes reductions asynchronous, as on a GPU.
    """
    import megatron_fsdp as original

    if not hasattr(original, "__version__"):
        raise RuntimeError(f"expected the original megatron_fsdp; got {original.__file__}")
    if how.get("streams"):
        streams.asynchronous = True
    model = build_model(job.shape, job.low_precision, job.device)
    if job.low_precision:
        model.bfloat16()
    unit = max(sum(p.numel() for p in m.parameters()) for m in model.modules() if isinstance(m, Block))
    fp32 = torch.float32
    # With an fp32 model main weights of their own would be a second copy of the weights.
    policy = original.MixedPrecisionPolicy(
        main_params_dtype=fp32 if job.low_precision else None, main_grads_dtype=fp32, grad_comm_dtype=fp32
    )
    sharded: Any = original.fully_shard_model(
        model,
        fsdp_unit_modules=[Block],
        zero_dp_strategy=zero,
        mixed_precision_policy=policy,
        # gloo cannot scale in a reduction: gradients are added, and the loss is divided instead.
        calculate_per_token_loss=True,
        fsdp_double_buffer=double,
        device=torch.device(job.device) if job.device == "cpu" else None,
    )
    if limited:
        # Its own rule, without the lower bound of a billion elements that it puts on it.
        sharded.suggested_AG_prefetch_size, sharded.suggested_RS_queue_capacity = unit, 2 * unit
    return Built(sharded, _optimizer(original, sharded), loss_divisor=job.ranks)


def _optimizer(original: Any, sharded: Any) -> torch.optim.Optimizer:
    """Its optimizer, without the step that it takes to create state: losses would differ from everybody's."""
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
