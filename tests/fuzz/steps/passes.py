"""Steps that run forwards and backwards."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..network import Output, Result, value_of
from ..sides import Side, full
from .kinds import ORDERS, PARTS, step


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
    side.reordered |= order not in ((0, 1), (0,), ())
    with modes[mode](), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = side.loss(side.model(side.batch(batch), order))
    side.losses += [loss] if mode == "grad" else []
    return loss


@step(2, orders=(((0, 1), (0,)), ((0,), (1,)), ((0, 1), ()), ((0, 1), (1, 0))))
def apart(side: Side, orders: tuple[tuple[int, ...], ...]) -> Any:
    """Ranks that run other blocks."""
    if side.setting.features.embedded:
        # docs/limits.md: until a plan has it, ranks cannot gather weights again for a unit that runs twice on some.
        orders = ((0,), (1,))
    forces = side.setting.features.forces != "no"  # the gradients in the forward gather units again, as above
    gathered = side.setting.strategy == 3 or side.setting.double_buffer
    fine = gathered and side.setting.units in ("fine", "nested")
    recomputed = fine and side.setting.features.checkpoint != "no"
    in_order = gathered or side.setting.interface == "fsdp2"
    reordered = in_order and (side.reordered or orders[1] == (1, 0))
    # The first pass takes units in the order in which they are registered. Extra layers are registered last.
    reordered |= fine and side.setting.features.extra != "no"
    if forces or recomputed or reordered:  # docs/limits.md
        orders = (orders[0], orders[0])
    side.uneven = True
    loss = side.loss(side.model(side.batch(1), orders[side.place.rank % 2]))
    side.losses.append(loss)
    return loss


@step(2, index=(0, 1), batch=(0, 1))
def part(side: Side, index: int, batch: int) -> Any:
    """A block that is called directly."""
    outside = side.setting.units in ("none", "whole") or side.setting.features.tied == "blocks"  # in a unit around it
    side.copied |= outside and (side.setting.strategy == 0 or side.setting.replicated)
    loss = side.loss(value_of(side.net.blocks[index](side.batch(batch))))
    side.losses.append(loss)
    return loss


@step(2, train=(False, True))
def mode(side: Side, train: bool) -> None:
    side.model.train(train)


# Backward ----------------------------------------------------------------------------------------------------------


@step(2, detach=(False, True), sync=(True, True, False))
def both_models(side: Side, detach: bool, sync: bool) -> Any:
    """A loss of one model's output of another one's output, as in a GAN."""
    output = side.model(side.batch(1))
    side.switch()
    loss = side.loss(side.model(output.detach() if detach else output))
    with contextlib.nullcontext() if sync else side.no_sync():
        side.backward(loss)
    return loss


@step(1, when=("before", "after"), grad=(True, False))
def write_inside(side: Side, when: str, grad: bool) -> Any:
    """A module's weight is written in the forward."""
    up = side.net.blocks[0].up

    def write(*unused: Any) -> None:
        with torch.no_grad():
            up.weight.mul_(0.75)

    handle = up.register_forward_pre_hook(write) if when == "before" else up.register_forward_hook(write)
    try:
        with torch.set_grad_enabled(grad):
            loss = side.loss(side.model(side.batch(1)))
    finally:
        handle.remove()
    side.written()
    # As written() says, the plain side of mixed precision has saved a cast: full precision raises in backward.
    side.losses += [loss] if grad and not (when == "after" and side.setting.mixed) else []
    return loss


@step(2, how=("in place", "data", "data ="))
def write_in_forward(side: Side, how: str) -> Any:
    """The model's forward writes a weight of a block that runs later, as of a momentum encoder."""

    def write(*unused: Any) -> None:
        handle.remove()  # it may be called again, behind the block
        weight = side.net.blocks[1].up.weight
        with torch.no_grad():
            if how == "data =":
                weight.data = weight.data * 0.75
            else:
                (weight if how == "in place" else weight.data).mul_(0.75)

    if side.setting.mesh == "tp":
        how = "in place"  # torch's DTensor takes no other .data
    side.written(hidden=how != "in place")
    handle = side.net.inp.register_forward_hook(write)
    loss = side.loss(side.model(side.batch(1)))
    side.losses.append(loss)
    return loss


@step(1)
def kept_weight(side: Side) -> Any:
    """A weight that a hook has kept in the forward is read."""
    kept: list[torch.Tensor] = []
    handle = side.net.blocks[0].up.register_forward_hook(lambda module, *unused: kept.append(module.weight))
    with torch.no_grad():
        side.model(side.batch(0))
    handle.remove()
    # With a double buffer, the memory is another unit's by now: docs/limits.md.
    return None if side.setting.double_buffer else full(kept[0].detach()).double().sum()


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


@step(index=(0, 1), after=("nothing", "backward"))
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


@step(index=(0, 1), together=(True, False))
def auxiliary(side: Side, index: int, together: bool) -> Any:
    """A loss that a block keeps in an attribute, with or without the model's own, of a batch that takes gradients."""
    x = side.batch(1).requires_grad_()
    loss = side.loss(side.model(x))
    loss = side.net.blocks[index].aux + (loss if together else 0)
    side.backward(loss)
    # A forward that adds forces detaches its batch.
    return loss.detach() if x.grad is None else loss.detach() + x.grad.to(loss.dtype).pow(2).sum()


@step(forward=(False, True))
def penalty(side: Side, forward: bool) -> Any:
    """A gradient penalty, with or without another forward before its backward."""
    x = side.batch(1).requires_grad_()
    y = side.model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    loss = side.loss(y) + (gradient.float().norm(dim=1) - 1).pow(2).mean()
    if forward:
        side.model(side.batch(2))
    side.backward(loss)
    return loss


@step(0.5, what=("all", "block"))
def gradients_of(side: Side, what: str) -> Any:
    """torch.autograd.grad of parameters, which are then assigned."""
    parameters = side.parameters(what)
    gradients = torch.autograd.grad(side.loss(side.model(side.batch(1))), parameters)
    side.read()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    side.pending = True
    side.synchronized()


@step(
    3,
    kind=("pow", "norm", "columns", "abs", "full"),
    what=(*PARTS, "old"),
    alone=(False, False, True),
    later=(False, False, True),
)
def regularized(side: Side, kind: str, what: str, alone: bool, later: bool) -> Any:
    """A loss with a penalty on weights, whose backward may come later."""
    tp = side.setting.mesh == "tp"
    measures: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "pow": lambda p: p.pow(2).sum(),
        "norm": lambda p: p.norm(),
        # Plain torch adds norms of tensor-parallel shards.
        "columns": lambda p: torch.linalg.vector_norm(p, dim=0).sum() if p.dim() and not tp else p.norm(),
        "abs": lambda p: p.abs().mean(),
        "full": lambda p: full(p).pow(3).sum(),
    }
    loss = 0.1 * sum(measures[kind](parameter) for parameter in side.parameters(what) if parameter.numel())
    loss = loss if alone else loss + side.loss(side.model(side.batch(2)))
    if later:
        side.copied |= kind in ("norm", "columns", "full")  # of the gathered weight
        side.losses.append(loss)
    else:
        side.backward(loss)
    return loss


@step(4, kind=("output", "parameter", "accumulated", "module", "forward"))
def hooked(side: Side, kind: str) -> Any:
    """A backward with a user's hook, which is removed afterwards."""
    block, parameter = side.net.blocks[0], side.net.blocks[0].up.weight

    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    register: dict[str, Callable[[], Any]] = {
        "parameter": lambda: parameter.register_hook(lambda gradient: gradient * 0.5),
        "accumulated": lambda: parameter.register_post_accumulate_grad_hook(halve),
        "module": lambda: block.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,)),
        "forward": lambda: block.register_forward_hook(_scaled),
    }
    features = side.setting.features
    if features.tied == "blocks" and features.reentrant and features.checkpoint != "no":
        # Each block's backward is one of its own. Plain torch calls the hook after each, with a part of the gradient.
        register.pop("accumulated")
    side.read()
    handle = register[kind]() if kind in register else None
    output = side.model(side.batch(1))
    if kind == "output":
        handle = output.register_hook(lambda gradient: gradient * 3)
    side.backward(side.loss(output))
    side.read()
    if handle is not None:
        handle.remove()


def _scaled(module: nn.Module, inputs: Any, output: Output) -> Output:
    return output * 1.5 if isinstance(output, torch.Tensor) else Result(value_of(output) * 1.5)


@step(3, kind=("parameter", "forward", "tensor", "module"))
def lasting_hook(side: Side, kind: str) -> None:
    """A hook that stays until the next such step."""
    side.read()
    # Hooks see gradients when they are synchronized: docs/limits.md. Reading .grad does that.
    handle, hooked = side.kept.pop("hook", (None, []))
    _ = [parameter.grad for parameter in (*hooked, *side.parameters())]
    if handle is not None:
        handle.remove()
        return
    block = side.net.blocks[0]

    def watch(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 3)

    register: dict[str, Callable[[], Any]] = {
        "parameter": lambda: block.up.bias.register_hook(lambda gradient: gradient * 0.5),
        "forward": lambda: block.register_forward_hook(_scaled),
        "tensor": lambda: block.up.register_forward_hook(watch),
        "module": lambda: block.up.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,)),
    }
    side.kept["hook"] = register[kind](), side.parameters()  # another model may be in use at its end


@step(where=("forward", "backward"), interrupt=(False, True), direct=(False, True))
def fail(side: Side, where: str, interrupt: bool, direct: bool) -> Any:
    """An exception or Ctrl-C on all ranks, of a model that is called with its wrapper or directly."""

    def raise_error(*unused: Any) -> None:
        raise KeyboardInterrupt if interrupt else ArithmeticError("injected")

    # docs/limits.md: nothing tells the wrapper that Ctrl-C has ended a forward of the model in it.
    direct &= not interrupt
    side.read()
    block = side.net.blocks[1]
    before = [None if p.grad is None else full(p.grad).clone() for p in side.parameters()]
    hook = block.register_forward_pre_hook if where == "forward" else block.up.register_full_backward_hook
    handle = hook(raise_error)
    with contextlib.suppress(ArithmeticError, KeyboardInterrupt):
        side.backward(side.loss((side.net if direct else side.model)(side.batch(1))))
    handle.remove()
    if where == "backward":
        # What an unfinished backward leaves in .grad is nobody's concern.
        side.model.zero_grad()
        side.pending = False
    return before[0]
