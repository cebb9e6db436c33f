"""Steps that read and change gradients, or use the optimizer."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import OptState

from ..sides import Side, full, full_local
from .kinds import PARTS, step


@step(3, kind=("norm", "inf", "value", "old"))
def clip(side: Side, kind: str) -> Any:
    """Clip gradients, those of parameters listed before sharding, too."""
    side.read()
    parameters = side.old if kind == "old" else side.parameters()
    if kind != "value":
        return _clip_norm(side, parameters, 0.05, float("inf") if kind == "inf" else 2.0)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients and _by_hand(side):
        return [full_local(gradient).clamp_(-0.05, 0.05) for gradient in gradients].clear()
    return nn.utils.clip_grad_value_(parameters, 0.05)


def _by_hand(side: Side) -> bool:
    """Whether torch refuses the gradients of one model together: some are DTensors over the tensor-parallel ranks."""
    return side.plain and side.setting.mesh == "tp"


def _clip_norm(side: Side, parameters: list[nn.Parameter], most: float, order: float = 2.0) -> torch.Tensor:
    if not _by_hand(side):
        return nn.utils.clip_grad_norm_(parameters, most, order)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([full(gradient).norm(order) for gradient in gradients] or [torch.tensor(0.0)]).norm(order)
    for gradient in gradients:
        full_local(gradient).mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm


GRADIENTS = ("norm", "finite", "mul_", "foreach", "assign", "none", "zeros", "decay", "masked")


@step(4, how=GRADIENTS, what=PARTS)
def gradient(side: Side, how: str, what: str) -> Any:
    """.grad is read or assigned."""
    side.read()
    parameters = [parameter for parameter in side.parameters(what) if parameter.grad is not None]
    if how in ("norm", "finite"):
        read = torch.norm if how == "norm" else lambda gradient: gradient.isfinite().all()
        return torch.stack([full(read(p.grad)).double() for p in parameters]) if parameters else None
    if how == "foreach" and parameters:
        torch._foreach_mul_([p.grad for p in parameters], 0.5)
    for parameter in parameters:
        if how == "mul_":
            parameter.grad.mul_(0.5)
        elif how == "assign":
            parameter.grad = parameter.grad.clone() * 0.5
        elif how == "decay":
            parameter.grad = parameter.grad + 0.1 * parameter.detach()
        elif how == "masked":
            parameter.grad.masked_fill_(parameter.detach() > 0, 0.0)
        elif how == "none":
            parameter.grad = None
        elif how == "zeros":
            parameter.grad = torch.zeros_like(parameter)
    return None


def _has_gradients(side: Side) -> bool:
    side.synchronized()
    return side.decide(lambda: any(p.grad is not None for g in side.optimizer.param_groups for p in g["params"]))


@step(8)
def optimize(side: Side) -> None:
    if _has_gradients(side):
        side.optimizer.step()
        side.written()


@step()
def step_hook(side: Side) -> None:
    """A hook of the optimizer's step that clips each gradient, until the next such step."""
    if "step hook" in side.kept:
        side.kept.pop("step hook").remove()
        return

    def clip(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad.div_(1 + full(torch.norm(parameter.grad)).item())

    side.kept["step hook"] = side.optimizer.register_step_pre_hook(clip)


@step()
def closure(side: Side) -> Any:
    def compute() -> Any:
        side.optimizer.zero_grad()
        loss = side.loss(side.model(side.batch(2)))
        side.backward(loss)
        side.synchronized()
        return loss

    loss = side.optimizer.step(compute)
    side.written()
    return loss


@step(overflow=("no", "all", "one"))
def scaled(side: Side, overflow: str) -> Any:
    """A step with GradScaler; "one" parameter overflows, under tensor parallelism on the first of its ranks."""
    scaler = side.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
    side.read()
    side.optimizer.zero_grad()
    factor = float("inf") if overflow == "all" else 1.0
    side.backward(scaler.scale(side.loss(side.model(side.batch(1))) * factor))
    side.read()
    gradient = side.net.blocks[1].up.bias.grad
    if overflow == "one" and gradient is not None and not (side.setting.mesh == "tp" and dist.get_rank() % 2):
        full_local(gradient).fill_(float("inf"))
    _unscale(side, scaler)
    norm = _clip_norm(side, side.parameters(), 1.0)
    scaler.step(side.optimizer)
    scaler.update()
    side.written()
    side.optimizer.zero_grad()
    return torch.stack([full(norm).double(), torch.tensor(scaler.get_scale()).double()])


def _unscale(side: Side, scaler: torch.amp.GradScaler) -> None:
    if not _by_hand(side):
        scaler.unscale_(side.optimizer)
        return
    gradients = [full_local(p.grad) for g in side.optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.zeros(())
    if gradients:
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor(1.0 / scaler.get_scale()))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    found_inf = {found.device: found} if gradients else {}
    scaler._per_optimizer_states[id(side.optimizer)] = {"stage": OptState.UNSCALED, "found_inf_per_device": found_inf}


@step(4, who=("optimizer", "model"), to_none=(True, True, False))
def zero_grad(side: Side, who: str, to_none: bool) -> None:
    side.synchronized()
    getattr(side, who).zero_grad(set_to_none=to_none)


@step(4, kind=("group", "rate", "second", "new", "state", "clear"))
def change_optimizer(side: Side, kind: str) -> None:
    """A new group for parameters that no group has, another learning rate, another optimizer, another state."""
    optimizer = side.optimizer
    if kind == "rate":
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    elif kind == "state":
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.dim():
                    value.mul_(0.5)
    elif kind == "clear":
        optimizer.state.clear()
    elif kind == "group" and side.setting.groups == "part" and not side.kept.get("grouped"):
        side.kept["grouped"] = True
        optimizer.add_param_group({"params": side.parameters("head"), "lr": 0.05})
    elif kind in ("new", "second"):
        part = side.parameters("block" if kind == "second" else "all")
        side.optimizer = torch.optim.SGD(part, lr=0.05, momentum=0.5)
        side.optimizers.append(side.optimizer)
