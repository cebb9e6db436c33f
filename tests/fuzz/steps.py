"""The kinds of steps. Each is one function that does the same on both sides, and returns what has to agree."""

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from .sides import Side, full, full_local


class Kind(NamedTuple):
    """A kind of step: its function, the choices of its arguments (the plainest first), and how often it is chosen."""

    run: Callable[..., Any]
    choices: dict[str, tuple[Any, ...]]
    weight: int


KINDS: dict[str, Kind] = {}
ORDERS = ((0, 1), (0, 1), (0,), (1, 0), (1, 1, 0), ())
PARTS = ("all", "block", "head", "up")


def step(weight: int = 2, **choices: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        KINDS[function.__name__] = Kind(function, choices, weight)
        return function

    return register


def _loss(side: Side) -> torch.Tensor:
    """The oldest loss, or a new one."""
    return side.losses.pop(0) if side.losses else side.loss(side.model(side.batch(0)))


# Forward -----------------------------------------------------------------------------------------------------------


@step(
    8,
    batch=(0, 1, 2),
    order=ORDERS,
    mode=("grad", "grad", "grad", "no_grad", "inference"),
    autocast=(False,) * 4 + (True,),
)
def forward(side: Side, batch: int, order: tuple[int, ...], mode: str, autocast: bool) -> Any:
    modes: dict[str, Any] = {
        "grad": contextlib.nullcontext,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
    }
    with modes[mode](), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = side.loss(side.model(side.batch(batch), order))
    side.losses += [loss] if mode == "grad" else []
    return loss


@step(2, index=(0, 1), batch=(0, 1))
def part(side: Side, index: int, batch: int) -> Any:
    """A block that is called directly."""
    loss = side.loss(side.net.blocks[index](side.batch(batch)))
    side.losses.append(loss)
    return loss


@step(2, train=(False, True))
def mode(side: Side, train: bool) -> None:
    side.model.train(train)


# Backward ----------------------------------------------------------------------------------------------------------


@step(8, sync=(True, True, True, False), retain=(False, False, True))
def backward(side: Side, sync: bool, retain: bool) -> Any:
    loss = _loss(side)
    with contextlib.nullcontext() if sync else side.no_sync():
        side.backward(loss, retain_graph=retain)
    side.losses += [loss] if retain else []


@step(3, count=(1, 2, 3))
def accumulate(side: Side, count: int) -> Any:
    """Micro-batches in no_sync."""
    with side.no_sync():
        for number in range(count):
            side.backward(side.loss(side.model(side.batch(number))) / count)


@step(2, index=(0, 1), after=("nothing", "backward"))
def captured(side: Side, index: int, after: str) -> Any:
    """A loss of what a user's hook sees inside the model, after or without the backward of the model's own loss."""
    seen: list[torch.Tensor] = []
    handle = side.net.blocks[index].up.register_forward_hook(lambda *call: seen.append(call[2]))
    loss = side.loss(side.model(side.batch(1)))
    handle.remove()
    if after == "backward":
        side.backward(loss, retain_graph=True)
    extra = side.loss(seen[0])
    side.backward(extra)
    return extra


# Gradients and the optimizer ---------------------------------------------------------------------------------------


@step(3, kind=("norm", "inf", "value"))
def clip(side: Side, kind: str) -> Any:
    side.read()
    if kind == "value":
        return nn.utils.clip_grad_value_(side.parameters(), 0.05)
    return nn.utils.clip_grad_norm_(side.parameters(), 0.05, float("inf") if kind == "inf" else 2.0)


@step(8)
def optimize(side: Side) -> None:
    side.read() if side.plain else side.synchronized()
    if side.decide(lambda: any(p.grad is not None for g in side.optimizer.param_groups for p in g["params"])):
        side.optimizer.step()


@step(4, who=("optimizer", "model"), to_none=(True, False))
def zero_grad(side: Side, who: str, to_none: bool) -> None:
    side.synchronized()
    getattr(side, who).zero_grad(set_to_none=to_none)


# Weights -----------------------------------------------------------------------------------------------------------

WRITES = ("zero_", "copy_", "data_mul_", "data", "init", "foreach", "to_local")


@step(5, how=WRITES, what=PARTS)
def write(side: Side, how: str, what: str) -> None:
    parameters = side.parameters(what)
    with torch.no_grad():
        if how == "foreach":
            torch._foreach_mul_(parameters, 0.5)
        for parameter in parameters:
            if how == "zero_":
                parameter.zero_()
            elif how == "copy_":
                parameter.copy_(parameter * 0.5)
            elif how == "data_mul_":
                parameter.data.mul_(0.5)
            elif how == "data":
                parameter.data = parameter.data * 0.5
            elif how == "init":
                nn.init.constant_(parameter, 0.125)
            elif how == "to_local":
                full_local(parameter).mul_(0.5)


@step(3, what=PARTS, frozen=(True, False))
def freeze(side: Side, what: str, frozen: bool) -> None:
    for parameter in side.parameters(what):
        parameter.requires_grad_(not frozen)
