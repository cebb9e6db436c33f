"""Megatron-Core's DDP with its distributed optimizer: full weights and sharded optimizer state."""

from megatron.fsdp.mcore import cpu

cpu.enable()  # has no effect if CUDA is available; must precede the imports of Megatron

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.job import LEARNING_RATE, WEIGHT_DECAY, Job  # noqa: E402
from benchmarks.model import build_model  # noqa: E402
from benchmarks.peers import Trainable  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402


class _MegatronDDP:
    """A :class:`Trainable` that makes the same calls as Megatron's training loop."""

    def __init__(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        self.model: nn.Module = model
        self.optimizer = optimizer

    def backward(self, loss: torch.Tensor) -> None:
        """See :meth:`Trainable.backward`."""
        loss.backward()
        self.model.finish_grad_sync()  # type: ignore[operator]

    def step(self) -> None:
        """See :meth:`Trainable.step`."""
        self.optimizer.step()
        self.model.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()


def build(job: Job) -> Trainable:
    """Wrap the model, with buckets of about one block, and with overlap of reductions and all-gathers."""
    parallel_state.initialize_model_parallel()
    plain = build_model(job.shape, job.low_precision, job.device)
    if job.low_precision:
        plain.bfloat16()
    described = TransformerConfig(
        num_layers=job.shape.depth,
        hidden_size=job.shape.width,
        num_attention_heads=job.shape.heads,
        bf16=job.low_precision,
        params_dtype=torch.bfloat16 if job.low_precision else torch.float32,
    )
    wrapping = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
        bucket_size=sum(p.numel() for p in plain.blocks[0].parameters()),
    )
    model = DistributedDataParallel(described, wrapping, plain)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        clip_grad=0.0,
        bf16=job.low_precision,
        params_dtype=described.params_dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
    )
    # By default, biases and norms would have no weight decay, in contrast to the other peers.
    optimizer = get_megatron_optimizer(settings, [model], config_overrides={})
    for group in optimizer.param_groups:
        group["foreach"] = True
    return _MegatronDDP(model, optimizer)
