"""How the forwards of units appear in autograd's graph, and which units a backward needs."""

import dataclasses
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron.fsdp.helpers.autograd import in_backward, in_forward_ad, unwrapped
from megatron.fsdp.helpers.notes import add_note
from megatron.fsdp.helpers.weak import weak_method
from megatron.fsdp.runtime.partition import owner_of

if TYPE_CHECKING:
    from megatron.fsdp.runtime.unit import Unit

# The key in the metadata of an autograd node under which outputs of units' forwards are marked: for each number of an
# output the units, and the node at the inputs of each if there is one.
_DOORS = "megatron_fsdp"
# The key under which gradients that are part of a graph are marked with the units that they went through.
_GRADIENTS = "megatron_fsdp_gradients"
# The schedules of all models.
_listening: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(schedule: Any) -> None:
    """Tell ``schedule`` which units a backward enters, and when one has failed."""
    _listening.add(schedule)


def watch_outputs(unit: "Unit", output: Any, end: Any) -> None:
    """Tell the unit when backward begins with one of the outputs of its forward, and mark these in the graph.

    Args:
        unit: The unit.
        output: What its forward returned.
        end: The node that :func:`watch_inputs` returned.
    """
    for tensor in tensors_in(output):
        if in_forward_ad():
            parts = (tensor, forward_ad.unpack_dual(tensor).tangent)
            _mark_gradients([unwrapped(part) for part in parts if part is not None], {unit})
        elif tensor.grad_fn is not None:
            tensor.register_hook(weak_method(unit.pre_backward))
            node: Any = tensor.grad_fn
            doors = node.metadata.setdefault(_DOORS, {}).setdefault(tensor.output_nr, [])
            doors.append((weakref.ref(unit), end))  # a unit may return what a unit inside has returned


class _EndOfBackward(torch.autograd.Function):
    """An identity whose backward runs when the gradients of its inputs are complete. FSDP2 uses the same technique."""

    @staticmethod
    def forward(ctx: Any, unit: "weakref.ref[Unit]", *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if (unit := ctx.unit()) is not None:
            unit.post_backward()
        return None, *grads


def watch_inputs(unit: "Unit", args: tuple, kwargs: dict) -> tuple[tuple[tuple, dict] | None, Any]:
    """Pass inputs that need gradients through :class:`_EndOfBackward`.

    Returns:
        The inputs, and the node that they come from; None for both if no input needs a gradient, or in forward-mode
        AD, which has no rule for the function.
    """
    values, _ = ((), None) if in_forward_ad() else tree_flatten((args, kwargs))
    found = {id(value): value for value in values if isinstance(value, torch.Tensor) and value.requires_grad}
    if not found:
        return None, None
    passed = _EndOfBackward.apply(weakref.ref(unit), *found.values())
    others = dict(zip(found, passed, strict=True))
    given = tuple(_exchange(each, others, unit.exchanged) for each in args)
    named = {name: _exchange(each, others, unit.exchanged) for name, each in kwargs.items()}
    return (given, named), passed[0].grad_fn


def _exchange(value: Any, others: dict[int, torch.Tensor], exchanged: list[tuple[Any, list[Any], list[Any]]]) -> Any:
    """Put other tensors in place of those with these ids.

    Lists and dictionaries stay the same objects, because the forward may add to them, as to a cache or to activations
    that are collected. They are appended to ``exchanged``, with what they hold now and what they held.
    """
    if value is None or isinstance(value, torch.Tensor):
        return others.get(id(value), value)
    top = id(value)  # tree_flatten leaves a cycle of references to is_leaf, which must not keep the inputs alive
    children, structure = tree_flatten(value, is_leaf=lambda each: id(each) != top)
    if structure.is_leaf():
        return value
    changed = [_exchange(child, others, exchanged) for child in children]
    if all(new is old for new, old in zip(changed, children, strict=True)):
        return value
    if not isinstance(value, (list, dict)):
        return tree_unflatten(changed, structure)
    for key, new in zip(_keys(value), changed, strict=True):
        value[key] = new
    exchanged.append((value, changed, children))
    return value


def _keys(value: list | dict) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(len(value)))


def give_back_inputs(unit: "Unit", failed: bool) -> None:
    """After a unit's forward: lists and dictionaries hold the caller's tensors again, and what was added."""
    if failed:
        _explain_write_to_input(unit)
    for value, changed, children in unit.exchanged:
        earlier = {id(new): old for new, old in zip(changed, children, strict=True)}
        for key in _keys(value):
            value[key] = earlier.get(id(value[key]), value[key])
    unit.exchanged.clear()


def _explain_write_to_input(unit: "Unit") -> None:
    """Name the unit, and what to write instead, if torch has refused a write to a tensor of :func:`watch_inputs`."""
    error = sys.exc_info()[1]
    if error is not None and _EndOfBackward.__name__ in str(error) and not hasattr(error, "unit"):
        error.unit = unit.label  # type: ignore[attr-defined]  # of the innermost one
        add_note(
            error,
            f"FSDP unit {unit.label}: its forward changes an input, or what a unit has returned of its own input, in "
            "place. Write x = x + 1 instead of x += 1, nn.ReLU() instead of nn.ReLU(inplace=True), or clone it first.",
        )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
    elif type(value).__module__ != "builtins" and not isinstance(value, (type, nn.Module)):
        # An object of the user's own class. What is hidden deeper is found when backward begins.
        yield from (each for each in getattr(value, "__dict__", {}).values() if isinstance(each, torch.Tensor))


def run_backward(original: Callable[..., Any], outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Run autograd's engine, and unshard the units that it enters at something else than the outputs of their forward.

    Hooks on the outputs unshard a unit when its backward begins. They do not see a loss of an activation that was
    captured inside, a tensor that a module keeps as an attribute, or the second backward of a gradient penalty.
    """
    if not in_backward():
        _check_inputs(args[3])
    else:
        # Only reentrant checkpointing runs a backward in a backward. The units' hooks see what it recomputes.
        for schedule in list(_listening):
            schedule.passes.was_nested |= schedule.passes.in_backward
    edges = [_edge(output) for output in outputs]
    passed: set[Unit] = set()
    entered = {} if in_backward() else _entered_aside(edges, passed)
    _refuse_graph_of_gradients(passed if args[2] and kwargs.get("accumulate_grad") and not args[3] else ())

    def enter(*unused: Any) -> None:
        while entered:
            schedule, units = entered.popitem()
            schedule.enter_aside(units)

    handles = [node.register_prehook(enter) for node, _ in edges if entered and node is not None]
    try:
        with _in_forwards(), _in_graph(passed):
            gradients = original(outputs, *args, **kwargs)
        if args[2]:  # create_graph
            _mark_gradients(gradients or (), passed)
        return gradients
    except BaseException as error:
        if "modified by an inplace operation" in str(error):
            add_note(error, _MODIFIED)
        # What the caller does next may write weights: the model's parameters have to be main weights again.
        for schedule in () if in_backward() else list(_listening):
            schedule.reset_if_failed()
        raise
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _in_forwards() -> Iterator[None]:
    """Context of a backward: models whose forward runs meanwhile unshard units for it as for their forward."""
    schedules = [] if in_backward() else list(_listening)
    for schedule in schedules:
        schedule.begin_inner_backward()
    try:
        yield
    finally:
        for schedule in schedules:
            schedule.end_inner_backward()


@contextmanager
def _in_graph(units: "set[Unit]") -> Iterator[None]:
    """Context of a backward whose graph has forwards of the units."""
    for unit in units:
        unit.in_graph = True
    try:
        yield
    finally:
        for unit in units:
            unit.in_graph = False


_BY_FULL_TENSORS = (
    "For gradients of gradients (create_graph, MAML), compute with torch.func.functional_call(module, {name: "
    "p.full_tensor() for name, p in module.named_parameters()}, batch), and differentiate by these full tensors. "
    "module is what was sharded, not its wrapper."
)
_MODIFIED = (
    "FSDP: if this is a weight of a sharded model, it was changed after the forward, by the optimizer or in place; or "
    "backward was not started by backward() or torch.autograd.grad, and reads a unit that is resharded."
)


def _mark_gradients(gradients: Sequence[torch.Tensor | None], units: "set[Unit]") -> None:
    """Tell a later backward of these tensors which units' weights it reads: frozen ones have no node in its graph."""
    frozen = [weakref.ref(unit) for unit in units if is_frozen(unit)]
    for gradient in gradients:
        if gradient is not None and gradient.grad_fn is not None:
            gradient.grad_fn.metadata.setdefault(_GRADIENTS, []).extend(frozen)  # type: ignore[attr-defined]


def _check_inputs(inputs: Sequence[Any]) -> None:
    """Raise if gradients of parameters of a sharded model are wanted, except in a forward of their unit."""
    for wanted in inputs:
        engine = owner_of(wanted)
        for param in () if engine is None else engine.params():
            computes = wanted is param.compute and engine.unit_with(wanted).state.name != "FORWARD"
            if wanted is param.main or computes:
                raise RuntimeError(
                    f"torch.autograd.grad or backward(inputs=...): the gradient of {param.name} is reduced over the "
                    "ranks and sharded, which only a backward of the whole model does. Call loss.backward() and read "
                    f".grad of the parameter. {_BY_FULL_TENSORS}"
                )


def _refuse_graph_of_gradients(units: "Iterable[Unit]") -> None:
    """Raise if the units get gradients in backward(create_graph=True): reduced gradients have no graph."""
    names = sorted(param.name for unit in units for group in unit.groups for param in group.params if param.trained)
    if names:
        raise RuntimeError(
            f"backward(create_graph=True): {names[0]}.grad is reduced over the ranks and has no graph, so a loss of it "
            "would change nothing. For gradients of inputs, call torch.autograd.grad(loss, inputs, create_graph=True). "
            f"{_BY_FULL_TENSORS}"
        )


def _edge(output: Any) -> tuple[Any, int]:
    """The node and its output that a tensor, or an edge of the graph, stands for."""
    return (output.grad_fn, output.output_nr) if isinstance(output, torch.Tensor) else tuple(output)


def _entered_aside(edges: list[tuple[Any, int]], passed: "set[Unit]") -> dict[Any, list["Unit"]]:
    """The units that a backward from these edges enters at something else than an output of their forward.

    The search goes around units that use only weights of their own, from their outputs to their inputs. It therefore
    visits the nodes between units only, and takes no Python call per node.

    Args:
        edges: Where it begins.
        passed: Takes all units that it comes across.

    Returns:
        The units by their schedules.
    """
    # With each edge: the units whose outputs guard it.
    stack: list[tuple[Any, int, frozenset[Unit]]] = [(*edge, frozenset()) for edge in edges]
    seen: set[tuple[Any, frozenset[Unit]]] = set()
    entered: defaultdict[Any, dict[Unit, None]] = defaultdict(dict)
    while stack:
        node, number, inside = stack.pop()
        if node is None or (node, inside) in seen:
            continue
        doors = [
            (unit, end)
            for reference, end in node.metadata.get(_DOORS, _NO_DOOR).get(number, ())
            if (unit := reference())
        ]
        passed.update(unit for unit, _ in doors)
        inside |= {unit for unit, _ in doors if unit.is_open}
        if ends := [end for unit, end in doors if not unit.is_open]:
            stack += [(*edge, inside) for end in ends if end is not None for edge in end.next_functions]
            continue
        seen.add((node, inside))
        unit = None
        if type(node) is _END:
            unit = node.unit()
        elif (weight := getattr(node, "variable", None)) is not None and (engine := owner_of(weight)) is not None:
            unit = engine.unit_with(weight)
        for each in [unit, *[reference() for reference in node.metadata.get(_GRADIENTS, ())]]:
            if each is not None and each not in inside and (schedule := each.schedule()) is not None:
                entered[schedule][each] = None
                passed.add(each)
        inside = inside - {unit} if type(node) is _END else inside
        stack += [(*edge, inside) for edge in node.next_functions]
    return {schedule: _with_outer(schedule.units, units, passed) for schedule, units in entered.items()}


def _with_outer(units: "list[Unit]", entered: "dict[Unit, None]", passed: "set[Unit]") -> "list[Unit]":
    """Add frozen units around: what is recomputed inside may share a weight of theirs, which has no node."""
    around = set(entered)
    for unit in reversed(units):
        if not around.isdisjoint(unit.children):
            around.add(unit)
            if is_frozen(unit) and unit not in passed:
                entered[unit] = None
    return list(entered)


def is_frozen(unit: "Unit") -> bool:
    """Whether some of the unit's parameters take no gradients."""
    return not all(group.requires_grad for group in unit.groups)


_NO_DOOR: dict[int, Any] = {}
_END: Any = _EndOfBackward._backward_cls
