"""PyTorch's FSDP2, ``torch.distributed.fsdp.fully_shard``."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.job import Job
from benchmarks.model import build_model
from benchmarks.peers import Built, Trainable, adamw


def build(job: Job, reshard: bool, streams: bool = False) -> Trainable:
    """Shard every block and the root.

    Args:
        job: The training job.
        reshard: Whether weights are resharded after forward.
        streams: Whether collectives on side streams are asynchronous, as on a GPU, and the next block is prefetched.
    """
    if streams:
        from benchmarks.peers import streams as emulation

        emulation.install(torch.cpu)
        emulation.make_collectives_asynchronous(dist)
    mesh = init_device_mesh(job.device, (job.ranks,))
    model = build_model(job.shape, job.low_precision, job.device)
    policy = MixedPrecisionPolicy()
    if job.low_precision:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = list(model.blocks)
    sharded = [fully_shard(b, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard) for b in blocks]
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if streams:
        for block, following in zip(sharded[:-1], sharded[1:], strict=True):
            block.set_modules_to_forward_prefetch([following])
    return Built(model, adamw(model.parameters()))
