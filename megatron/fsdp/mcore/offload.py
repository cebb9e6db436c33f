"""``--optimizer-cpu-offload``: main weights and the optimizer's state in host memory, updated there.

Gradients stay on the device until the optimizer's step, in ``.decoupled_grad`` and ``.main_grad``: Megatron-Core
reduces them over tensor- and pipeline-parallel ranks, unscales and clips them there, with kernels and process groups
that take no host memory.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron.fsdp.comm.backends import runs_ahead
from megatron.fsdp.comm.context import CommContext
from megatron.fsdp.dtensor.ragged_dtensor import local_shard, make_like
from megatron.fsdp.runtime.engine import Engine, engines_of


def build_optimizer(original: Callable[..., Any], params: Iterable[dict[str, Any]], **settings: Any) -> Any:
    """Build the optimizer for ``optimizer_cpu_offload``: torch's AdamW, if it updates sharded models.

    Args:
        original: Megatron-Core's optimizer, which makes copies of parameters on the host.
        params: The parameter groups.
        settings: Keyword arguments of ``original``.

    Raises:
        ValueError: The model was wrapped without offload.
    """
    groups = list(params)
    engines = engines_of(parameter for group in groups for parameter in group["params"])
    if not engines:
        return original(groups, **settings)
    if not all(engine.config.offload_optimizer for engine in engines):
        raise ValueError(
            "optimizer_cpu_offload: expected a model that was wrapped with it, since the wrapper allocates main "
            "weights. Set optimizer_cpu_offload and optimizer_offload_fraction on the wrapper's ddp_config too."
        )
    options = {name: settings[name] for name in ("lr", "betas", "eps", "weight_decay")}
    # On a CPU nothing is offloaded, and training equals that without the setting, to the bit.
    fused = all(runs_ahead(engine.device) for engine in engines)
    optimizer = torch.optim.AdamW(groups, fused=fused, **options)
    # Before the hooks that replace DTensors by local tensors, which are added at the first step.
    hooks = _GradientsBesideWeights(engines)
    optimizer.register_step_pre_hook(hooks.before_step)
    optimizer.register_step_post_hook(hooks.after_step)
    return optimizer


class _GradientsBesideWeights:
    """Step hooks: during the step, ``.grad`` has gradients in the dtype and on the device of their main weights.

    Args:
        engines: The engines of the models. The optimizer may outlive them.
    """

    def __init__(self, engines: list[Engine]) -> None:
        self._references = [weakref.ref(engine) for engine in engines]

    @property
    def _engines(self) -> list[Engine]:
        return [engine for reference in self._references if (engine := reference()) is not None]

    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Step pre-hook: copy gradients."""
        for engine in self._engines:
            for group in engine.groups:
                for param in group.params:
                    grad = getattr(param.main, "decoupled_grad", None)
                    if grad is not None:
                        moved = _beside(local_shard(param.main), local_shard(grad), group.gradients.reduction.context)
                        param.main.grad = make_like(moved, param.main)
        for engine in self._engines:
            # All copies were started before the host waits for them, and for unshards that read main weights.
            engine.wait_before_write()

    def after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Step post-hook: free the copies."""
        for engine in self._engines:
            for param in engine.params():
                param.main.grad = None


def _beside(main: torch.Tensor, grad: torch.Tensor, context: CommContext) -> torch.Tensor:
    """The gradient in the dtype and on the device of its main weight. A copy to the host was only started."""
    if context.offloads:
        return context.main_buffer(main.numel(), main.dtype).view(main.shape).copy_(grad, non_blocking=True)
    return grad.to(main.dtype)
