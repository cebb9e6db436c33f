"""This project's FSDP."""

import torch

from benchmarks.job import Job
from benchmarks.model import Block, build_model
from benchmarks.peers import Built, Trainable, adamw
from benchmarks.peers.fused import fuse
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer


def build(job: Job, zero: int, double: bool = False, fused: bool = False) -> Trainable:
    """Shard with ZeRO stage ``zero``, optionally with a double buffer, or with kernels that write weight gradients."""
    model = build_model(job.shape, job.low_precision, job.device)
    if job.low_precision:
        model.bfloat16()
    if fused:
        fuse(model)
    sharded = fully_shard_model(
        model,
        fsdp_unit_modules=[Block],
        zero_dp_strategy=zero,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32),
        fsdp_double_buffer=double,
        fused_weight_gradients=fused,
    )
    return Built(sharded, fully_shard_optimizer(adamw(sharded.parameters())))
