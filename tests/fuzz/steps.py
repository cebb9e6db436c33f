"""The kinds of steps. Each is one function that does the same on both sides, and returns what has to agree."""

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

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
    """A loss that a block keeps in an attribute, with or without the model's own."""
    loss = side.loss(side.model(side.batch(1)))
    loss = side.net.blocks[index].aux + (loss if together else 0)
    side.backward(loss)
    return loss


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


@step(what=PARTS)
def gradients_of(side: Side, what: str) -> Any:
    """torch.autograd.grad of parameters, which are then assigned."""
    parameters = side.parameters(what)
    gradients = torch.autograd.grad(side.loss(side.model(side.batch(1))), parameters)
    side.read()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    side.pending = True
    side.synchronized()


@step(3, kind=("pow", "norm", "abs", "full"), what=PARTS, alone=(False, False, True))
def regularized(side: Side, kind: str, what: str, alone: bool) -> Any:
    """A loss with a penalty on weights."""
    measures: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "pow": lambda p: p.pow(2).sum(),
        "norm": lambda p: p.norm(),
        "abs": lambda p: p.abs().mean(),
        "full": lambda p: full(p).pow(3).sum(),
    }
    loss = 0.1 * sum(measures[kind](parameter) for parameter in side.parameters(what) if parameter.numel())
    loss = loss if alone else loss + side.loss(side.model(side.batch(2)))
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
        "forward": lambda: block.register_forward_hook(lambda module, inputs, output: output * 1.5),
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


@step(where=("forward", "backward"))
def fail(side: Side, where: str) -> Any:
    """An exception on all ranks, after which the program goes on."""

    def raise_error(*unused: Any) -> None:
        raise ArithmeticError("planted")

    side.read()
    block = side.net.blocks[1]
    before = [None if p.grad is None else full(p.grad).clone() for p in side.parameters()]
    hook = block.register_forward_pre_hook if where == "forward" else block.up.register_full_backward_hook
    handle = hook(raise_error)
    with contextlib.suppress(ArithmeticError):
        side.backward(side.loss(side.model(side.batch(1))))
    handle.remove()
    if where == "backward":
        # What an unfinished backward leaves in .grad is nobody's concern.
        side.model.zero_grad()
        side.pending = False
    return before[0]


# Gradients and the optimizer ---------------------------------------------------------------------------------------


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


GRADIENTS = ("norm", "finite", "mul_", "foreach", "assign", "none", "zeros")


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


@step(kind=("group", "rate", "second"))
def change_optimizer(side: Side, kind: str) -> None:
    """A new group for parameters that no group has, another learning rate, a second optimizer."""
    if kind == "rate":
        for group in side.optimizer.param_groups:
            group["lr"] *= 0.5
        return
    if kind == "group" and side.setting.groups == "part" and not side.kept.get("grouped"):
        side.kept["grouped"] = True
        side.optimizer.add_param_group({"params": side.parameters("head"), "lr": 0.05})
    if kind == "second":
        side.optimizer = torch.optim.SGD(side.parameters("block"), lr=0.05, momentum=0.5)
        side.optimizers.append(side.optimizer)


# Weights -----------------------------------------------------------------------------------------------------------

WRITES = ("zero_", "copy_", "data_mul_", "data", "init", "foreach", "to_local", "old")


@step(5, how=WRITES, what=PARTS)
def write(side: Side, how: str, what: str) -> None:
    parameters = side.old if how == "old" else side.parameters(what)
    side.written(hidden=how.startswith("data"))
    with torch.no_grad():
        if how == "foreach":
            torch._foreach_mul_(parameters, 0.5)
        for parameter in parameters:
            # torch loses an assignment to .data of a DTensor.
            lost = how == "data" and side.plain and hasattr(parameter, "to_local")
            _write("data_mul_" if lost else how, parameter)


def _write(how: str, parameter: nn.Parameter) -> None:
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
    elif how == "old":
        parameter.mul_(0.75)


@step(3, what=PARTS, frozen=(True, False))
def freeze(side: Side, what: str, frozen: bool) -> None:
    for parameter in side.parameters(what):
        parameter.requires_grad_(not frozen)


@step(3, use=("update", "apply", "swap", "forward"))
def average(side: Side, use: str) -> Any:
    """An exponential moving average of the weights; "forward" gives it to functional_call."""
    parameters = dict(side.net.named_parameters())
    if "average" not in side.kept:
        side.kept["average"] = {name: p.detach().clone() for name, p in parameters.items()}
    averages = side.kept["average"]
    side.written()
    with torch.no_grad():
        if use == "forward":
            given = {name: full(value) for name, value in averages.items()}
            return side.loss(torch.func.functional_call(side.net, given, (side.batch(1),)))
        for name, parameter in parameters.items() if averages.keys() == parameters.keys() else ():
            if use == "update":
                averages[name].lerp_(parameter.detach(), 0.5)
            elif use == "apply":
                parameter.copy_(averages[name])
            else:
                before = parameter.detach().clone()
                parameter.copy_(averages[name])
                averages[name].copy_(before)
    return None


@step(2, kind=("sum", "norm", "full", "old"), what=PARTS)
def read(side: Side, kind: str, what: str) -> Any:
    """Weights are read."""
    measures = {"norm": torch.norm, "full": lambda p: full(p).double().pow(3).sum()}
    measure = measures.get(kind, lambda p: p.sum())
    return torch.stack([full(measure(p)).double() for p in (side.old if kind == "old" else side.parameters(what))])


# State -------------------------------------------------------------------------------------------------------------

SAVES = ("clone", "deepcopy", "pickle", "full", "get", "dcp")


@step(4, kind=SAVES, optimizer=(False, True))
def save(side: Side, kind: str, optimizer: bool) -> None:
    """Keep a state for a later load."""
    state: dict[str, Any] = {"model": side.model.state_dict()}
    if optimizer:
        state["optimizer"] = side.optimizer.state_dict()
    if kind in ("clone", "full"):
        change = full if kind == "full" else lambda value: value
        state["model"] = {name: change(value).detach().clone() for name, value in state["model"].items()}
        state = copy.deepcopy(state)
    elif kind == "deepcopy" or (kind == "dcp" and side.plain):
        # Without sharding, dcp refuses to load a state that an optimizer has not had yet.
        state = copy.deepcopy(state)
    elif kind == "pickle":
        file = io.BytesIO()
        torch.save(state, file)
        state = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    elif kind == "get":
        state["model"] = get_model_state_dict(side.model, options=StateDictOptions(full_state_dict=True))
        state = copy.deepcopy(state)
    else:
        dcp.save(state, checkpoint_id=side.folder())
    side.kept["state"] = kind, side.model, side.optimizer, state


@step(3, assign=(False, False, False, True), alike=(True,) * 5 + (False,))
def load(side: Side, assign: bool, alike: bool) -> None:
    """Load what was saved, or else a model that was trained elsewhere, of which ranks may have another one each."""
    kind, model, optimizer, state = side.kept.get("state", (None,) * 4)
    if model is not side.model or optimizer is not side.optimizer:
        kind, state = (
            "full",
            {"model": side.build(seed=99 if alike or side.plain else 99 + side.place.rank).state_dict()},
        )
    side.written()
    if kind == "dcp" and not side.plain:
        kept = state
        state = {"model": side.model.state_dict()}
        if "optimizer" in kept:
            state["optimizer"] = side.optimizer.state_dict()
        dcp.load(state, checkpoint_id=side.folder())
    if kind == "get":
        # Ranks that are not the first have nothing.
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not side.plain)
        set_model_state_dict(side.model, copy.deepcopy(state["model"]), options=options)
    else:
        side.model.load_state_dict(copy.deepcopy(state["model"]), assign=assign and not side.plain)
    if "optimizer" in state:
        side.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


@step()
def other_model(side: Side) -> None:
    """Train another model of the same kind in turn."""
    side.switch()
