"""Steps that call methods of sharded models, most of which must not change the answer."""

from collections.abc import Callable
from typing import Any

import torch

from ..sides import Side, full
from .kinds import step

METHODS = ("prefetch", "unshard", "reshard", "changed", "keep", "reduce", "finish", "scale", "full", "generate")


@step(3, name=METHODS)
def method(side: Side, name: str) -> Any:
    """One of both interfaces' methods, or what it stands for without sharding."""
    if name in ("finish", "scale"):
        side.read()
    if not side.plain:
        calls = _marked(side) if side.setting.interface == "fsdp2" else _wrapped(side)
        calls.get(name, lambda: None)()
    elif name == "finish":
        side.synchronized()
    if name == "scale" and (side.plain or side.setting.interface == "fsdp2"):
        for parameter in (p for p in side.parameters() if p.grad is not None):
            parameter.grad.mul_(0.5)
    if name == "full":
        return _sums(side)
    if name in ("prefetch", "unshard", "generate"):
        with torch.no_grad():
            if name == "generate" and hasattr(side.model, "unsharded") and not side.setting.double_buffer:
                with side.model.unsharded():
                    return side.loss(side.model(side.batch(1)))
            return side.loss(side.model(side.batch(1)))
    return None


def _wrapped(side: Side) -> dict[str, Callable[[], Any]]:
    model = side.model
    return {
        "prefetch": model.start_param_sync,
        "unshard": lambda: model.all_gather_and_wait_parameters_ready(side.parameters("block")),
        "reshard": model.synchronize_param_gather,
        "changed": model.mark_weights_changed,
        "keep": model.broadcast_params,
        "reduce": lambda: (model.start_grad_sync(), model.synchronize_gradient_reduce()),
        "finish": model.finish_grad_sync,
        "scale": lambda: model.scale_gradients(0.5),
    }


def _marked(side: Side) -> dict[str, Callable[[], Any]]:
    model = side.model
    units = [module for module in model.modules() if hasattr(module, "unshard")]
    return {
        "prefetch": lambda: [unit.unshard(async_op=True) for unit in units],
        "unshard": lambda: [unit.unshard() for unit in units],
        "reshard": lambda: [unit.reshard() for unit in units],
        "changed": model.mark_weights_changed,
        "keep": lambda: model.set_reshard_after_forward(False),
        "reduce": lambda: model.set_reshard_after_forward(True),
    }


def _sums(side: Side) -> torch.Tensor:
    if hasattr(side.model, "full_weights") and side.setting.mesh != "tp":  # there, of each rank's part
        buckets = side.model.full_weights(bucket_bytes=1 << 10)
        found = {name: value.double().sum().item() for bucket in buckets for name, value in bucket.items()}
    else:
        found = {name: full(value).double().sum().item() for name, value in side.net.named_parameters()}
    return torch.tensor([found[name] for name, _ in side.net.named_parameters()], dtype=torch.float64)
