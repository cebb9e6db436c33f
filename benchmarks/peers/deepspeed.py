"""DeepSpeed's ZeRO-3, if it is installed: ``DS_BUILD_OPS=0 pip install --target FOLDER deepspeed``, on PYTHONPATH."""

import os
from typing import Any

import torch

from benchmarks.job import Job
from benchmarks.model import Block, build_model
from benchmarks.peers import Trainable, adamw


class _Engine:
    """A :class:`Trainable`: DeepSpeed's engine runs backward and step."""

    def __init__(self, engine: Any) -> None:
        self.model, self.optimizer = engine, engine.optimizer

    def backward(self, loss: torch.Tensor) -> None:
        """Compute and reduce gradients."""
        self.model.backward(loss)

    def step(self) -> None:
        """Update the weights and drop the gradients."""
        self.model.step()


def build(job: Job, limited: bool = False) -> Trainable:
    """Initialize the engine.

    Args:
        job: The training job.
        limited: Whether to limit buckets and prefetching to one unit, and to reshard after forward. By default, the
            buckets have half a billion elements, and weights that are used again within a billion elements stay.
    """
    if job.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # An extension for inference on CPUs, which would be compiled here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = build_model(job.shape, job.low_precision, job.device)
    unit = max(sum(p.numel() for p in m.parameters()) for m in model.modules() if isinstance(m, Block))
    zero: dict[str, Any] = {"stage": 3}
    if limited:
        zero |= {"reduce_bucket_size": unit, "stage3_prefetch_bucket_size": unit}
        zero |= {"stage3_max_live_parameters": 2 * unit, "stage3_max_reuse_distance": 0}
    # No peer clips gradients; by default, DeepSpeed does.
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": zero}
    if job.low_precision:
        config |= {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    engine = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)[0]
    return _Engine(engine)
