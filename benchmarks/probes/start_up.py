"""Builds a large model from the meta device and measures memory and time. Called through ``benchmarks.worker``."""

import gc
import time
from typing import Any

import torch
from torch import nn

from benchmarks.job import Job
from benchmarks.model import Block, Transformer
from benchmarks.probes.heap import Heap


def build(job: dict[str, Any], how: str) -> dict[str, float]:
    """Shard a model that was built on the meta device. ``how`` is a key of ``WAYS``."""
    described = Job.from_json(job)
    if how.startswith("deferred"):
        from megatron_fsdp import deferred_init

        model = deferred_init(Transformer, described.shape)
    else:
        with torch.device("meta"):
            model = Transformer(described.shape)
    parameters = sum(p.numel() for p in model.parameters())
    gc.collect()
    heap = Heap()
    began = time.perf_counter()
    sharded = WAYS[how](described, model)
    seconds = time.perf_counter() - began
    gc.collect()
    main = 4 * parameters / described.ranks
    assert all(not p.is_meta for p in sharded.parameters())
    return {
        "seconds": seconds,
        "peak": heap.peak,
        "built": heap.tensors,
        "peak_over_main": heap.peak / main,
        "parameters": float(parameters),
    }


def _ours(job: Job, model: nn.Module, init_per_shard: bool = False) -> nn.Module:
    from megatron_fsdp import fully_shard_model

    return fully_shard_model(
        model, fsdp_unit_modules=[Block], init_model_with_meta_device=True, init_per_shard=init_per_shard
    )


def _ours_per_shard(job: Job, model: nn.Module) -> nn.Module:
    return _ours(job, model, init_per_shard=True)


def _original(job: Job, model: nn.Module) -> nn.Module:
    import megatron_fsdp as original

    policy = original.MixedPrecisionPolicy(main_params_dtype=None)
    sharded: Any = original.fully_shard_model(
        model,
        fsdp_unit_modules=[Block],
        init_model_with_meta_device=True,
        mixed_precision_policy=policy,
        calculate_per_token_loss=True,
    )
    sharded._replace_param_with_distributed_if_needed()
    built: nn.Module = sharded
    return built


def _fsdp2(job: Job, model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(job.device, (job.ranks,))
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=job.device)
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    return model


WAYS = {
    "ours-3": _ours,
    "ours-3 per shard": _ours_per_shard,
    "deferred": _ours,
    "deferred per shard": _ours_per_shard,
    "original-3": _original,
    "fsdp2": _fsdp2,
}
