"""This project's FSDP."""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.job import Job
from benchmarks.model import Block, build_model
from benchmarks.peers import Built, Trainable, adamw
from benchmarks.peers.fused import fuse
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer


def settings_of(zero: int, double: bool = False, fused: bool = False) -> dict[str, Any]:
    """The settings of the engine for ZeRO stage ``zero``."""
    return {
        "zero_dp_strategy": zero,
        "mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32),
        "fsdp_double_buffer": double,
        "fused_weight_gradients": fused,
    }


def build(job: Job, zero: int, double: bool = False, fused: bool = False, outer: int = 1) -> Trainable:
    """Shard with ZeRO stage ``zero``, optionally with a double buffer, or with kernels that write weight gradients.

    With ``outer`` > 1, the model is replicated over that many groups of ranks.
    """
    model = build_model(job.shape, job.low_precision, job.device)
    if job.low_precision:
        model.bfloat16()
    if fused:
        fuse(model)
    mesh: dict[str, Any] = {}
    if outer > 1:
        names = ("replicas", "shards")
        made = init_device_mesh(job.device, (outer, job.ranks // outer), mesh_dim_names=names)
        mesh = {"device_mesh": made, "dp_outer_dim": names[0], "dp_shard_dim": names[1]}
    settings = settings_of(zero, double, fused)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block], **mesh, **settings)
    return Built(sharded, fully_shard_optimizer(adamw(sharded.parameters())))
