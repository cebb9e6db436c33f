"""The whole model on every rank, with torch's DDP or without any communication."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.job import Job
from benchmarks.model import build_model, compute_in_bf16
from benchmarks.peers import Built, Trainable, adamw

MIB = 1 << 20


def build(job: Job, together: bool) -> Trainable:
    """Build the model; with ``together``, wrap it in DDP with buckets of about one block."""
    plain = build_model(job.shape, job.low_precision, job.device)
    block = sum(p.numel() * p.element_size() for p in plain.blocks[0].parameters())
    if job.low_precision:
        compute_in_bf16(plain)
    model: nn.Module = plain
    if together:
        model = DistributedDataParallel(plain, bucket_cap_mb=block / MIB, gradient_as_bucket_view=True)
    return Built(model, adamw(model.parameters()))
