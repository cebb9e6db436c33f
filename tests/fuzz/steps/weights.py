"""Steps that read and write weights."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..sides import Side, full, full_local, is_sharded
from .kinds import PARTS, step

WRITES = ("zero_", "copy_", "data_mul_", "data", "init", "random", "full", "foreach", "to_local", "old", "broadcast")


@step(6, how=WRITES, what=PARTS)
def write(side: Side, how: str, what: str) -> None:
    if how in ("random", "full") and side.setting.mesh == "tp":
        how = "copy_"  # torch draws other numbers for its DTensors, and does not copy plain tensors into them
    if how == "init" and what == "all":
        what = "block"  # a model of equal weights has activations without variance, and norms of nothing but rounding
    parameters = side.old if how == "old" else side.parameters(what)
    # Writes to a local tensor of a shard count as writes through .data, which autograd does not see. Of torch's own
    # DTensors, it does not see writes by _foreach functions either.
    unseen = how == "foreach" and side.setting.mesh == "tp"
    side.written(hidden=how.startswith("data") or how == "to_local" or unseen)
    with torch.no_grad():
        if how == "foreach":
            torch._foreach_mul_(parameters, 0.5)
        for parameter in parameters:
            # torch loses an assignment to .data of its own DTensors, as before a marked model is sharded.
            lost = how == "data" and hasattr(parameter, "to_local") and not is_sharded(parameter)
            _write("data_mul_" if lost else how, parameter)


def _write(how: str, parameter: nn.Parameter) -> None:
    ways: dict[str, Callable[[], Any]] = {
        "zero_": parameter.zero_,
        "copy_": lambda: parameter.copy_(parameter * 0.5),
        "full": lambda: parameter.copy_(full(parameter) * 0.5),
        "data_mul_": lambda: parameter.data.mul_(0.5),
        "data": lambda: setattr(parameter, "data", parameter.data * 0.5),
        "init": lambda: nn.init.constant_(parameter, 0.125),
        "random": lambda: _draw(parameter),
        "to_local": lambda: full_local(parameter).mul_(0.5),
        "old": lambda: parameter.mul_(0.75),
        # Without sharding, all ranks have the same weights already.
        "broadcast": lambda: dist.broadcast(parameter.detach(), 0),
        "foreach": lambda: None,  # all at once
    }
    ways[how]()


def _draw(parameter: nn.Parameter) -> None:
    """Initialize a parameter with numbers that are the same on all ranks, which have seeds of their own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        # A transposed weight is contiguous after sharding, where draws fill it in a different order.
        drawn = nn.init.normal_(
            parameter if parameter.is_contiguous() else torch.empty(parameter.shape, dtype=parameter.dtype), std=0.3
        )
        if drawn is not parameter:
            parameter.copy_(drawn)


@step(3, use=("descend", "data", "sharpness"))
def write_gradients(side: Side, use: str) -> Any:
    """Weights change by their gradients without an optimizer: descent, or sharpness-aware minimization."""
    side.read()
    parameters = [parameter for parameter in side.parameters() if parameter.grad is not None]
    before = [parameter.detach().clone() for parameter in parameters]
    side.written(hidden=use == "data")
    with torch.no_grad():
        for parameter in parameters:
            (parameter.data if use == "data" else parameter).sub_(parameter.grad, alpha=0.1)
    if use != "sharpness":
        return None
    side.model.zero_grad()
    loss = side.loss(side.model(side.batch(1)))
    side.backward(loss)
    side.written()
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
    return loss


@step(3, what=PARTS, frozen=(True, False))
def freeze(side: Side, what: str, frozen: bool) -> None:
    for parameter in side.parameters(what):
        parameter.requires_grad_(not frozen)


@step(4, use=("update", "apply", "swap", "forward", "graph", "data"))
def average(side: Side, use: str) -> Any:
    """An exponential moving average of the weights; "forward" gives it to functional_call, "graph" all but one weight.

    "data" evaluates with it as the .data of the parameters, which then get back their own.
    """
    parameters = dict(side.net.named_parameters())
    if "average" not in side.kept:
        side.kept["average"] = {name: p.detach().clone() for name, p in parameters.items()}
    averages = side.kept["average"]
    side.written(hidden=use == "data")
    with torch.no_grad():
        if use == "data":
            own = {name: parameter.data for name, parameter in parameters.items()}
            if lost := side.plain and side.setting.mesh == "tp":  # see "write"
                own = {name: value.clone() for name, value in own.items()}
            _assign(parameters, averages, lost)
            loss = side.loss(side.model(side.batch(1)))
            _assign(parameters, own, lost)
            return loss
        if use == "forward":
            given = {name: full(value) for name, value in averages.items()}
            return side.loss(torch.func.functional_call(side.net, given, (side.batch(1),)))
        for name, parameter in parameters.items() if use != "graph" and averages.keys() == parameters.keys() else ():
            if use == "update":
                averages[name].lerp_(parameter.detach(), 0.5)
            elif use == "apply":
                parameter.copy_(averages[name])
            else:
                before = parameter.detach().clone()
                parameter.copy_(averages[name])
                averages[name].copy_(before)
    if use != "graph":
        return None
    # Copies, as the gathered ones are: a later update of the average does not change the graph.
    given = {name: full(value).clone() for name, value in averages.items() if name != "blocks.0.up.weight"}
    loss = side.loss(torch.func.functional_call(side.net, given, (side.batch(1),)))
    side.losses.append(loss)
    return loss


def _assign(parameters: dict[str, nn.Parameter], values: dict[str, torch.Tensor], copy: bool) -> None:
    for name, parameter in parameters.items():
        if copy:
            parameter.data.copy_(values[name])
        else:
            parameter.data = values[name]


@step(3, kind=("sum", "norm", "full", "old", "data", "out"), what=PARTS)
def read(side: Side, kind: str, what: str) -> Any:
    """Weights are read."""
    measures = {
        "norm": torch.norm,
        "full": lambda p: full(p).double().pow(3).sum(),
        "data": _sum_of_data,
        "out": lambda p: torch.exp(p.detach(), out=torch.empty(p.shape, dtype=p.dtype)).sum(),
    }
    measure = measures.get(kind, lambda p: p.sum())
    return torch.stack([full(measure(p)).double() for p in (side.old if kind == "old" else side.parameters(what))])


def _sum_of_data(parameter: nn.Parameter) -> torch.Tensor:
    """Read through a plain parameter that was given another one's data."""
    if type(parameter.data) is DTensor:
        raise TypeError("torch's DTensor has no memory that a plain parameter could take: reading it would crash.")
    plain = nn.Parameter(torch.zeros(1, dtype=parameter.dtype))
    plain.data = parameter.data
    return plain.detach().sum()
