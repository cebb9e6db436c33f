"""One FSDP unit: the parameters of a module that are unsharded and resharded together, with their state and hooks."""

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.buffers.pool import Slot
from megatron.fsdp.comm.journal import Channel, Log, report_on_failure
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.helpers.labels import profiled
from megatron.fsdp.helpers.weak import not_compiled, weak_method

logger = logging.getLogger(__name__)


class WeightState(Enum):
    """State of a unit's weights. Gradients are independent of it: a sharded unit's may still be reduced."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded, not in use"
    FORWARD = "forward"
    BACKWARD = "backward"


_W = WeightState
# From each state on the left to those on the right. SHARDED may follow every state, since a pass may be abandoned.
TRANSITIONS: dict[WeightState, tuple[WeightState, ...]] = {
    _W.SHARDED: (_W.UNSHARDING, _W.SHARDED),
    _W.UNSHARDING: (_W.FORWARD, _W.BACKWARD, _W.UNSHARDED, _W.SHARDED),
    _W.UNSHARDED: (_W.FORWARD, _W.BACKWARD, _W.SHARDED),
    # Backward may begin before forward has ended: a recomputation stops as soon as it has the tensors that are needed.
    _W.FORWARD: (_W.UNSHARDED, _W.BACKWARD, _W.SHARDED),
    _W.BACKWARD: (_W.SHARDED,),
}


class UnitListener(Protocol):
    """Is called by a unit's hooks (the schedule)."""

    def before_forward(self, unit: "Unit") -> bool:
        """The module is about to run. Returns whether to watch its inputs for the end of its backward."""

    def after_forward(self, unit: "Unit") -> bool:
        """The module has run. Returns whether to watch its outputs for the beginning of its backward."""

    def forward_failed(self) -> None:
        """The root's forward has raised."""

    def before_backward(self, unit: "Unit") -> None:
        """The gradient of an output has arrived."""

    def after_backward(self, unit: "Unit") -> None:
        """The gradients of the inputs of one call are complete."""


class Unit:
    """A module's parameters, unsharded and resharded together.

    Args:
        name: Name of the module in the wrapped model; empty for the root.
        groups: Its parameters. May be empty.
        children: Units inside this one, in the order of registration.
        slot: Memory for unsharded weights that it shares with other units; None if it shares none.

    Attributes:
        temporary: An unshard allocates memory that a reshard frees.
        calls: Forward calls of the latest pass whose inputs are watched for the end of their backward.
        calls_done: How many of those have ended their backward.
        took_part: The gradient of an output has arrived in this backward.
        reduced: The reduction of this backward's gradients was issued.
        keeps_weights: The weights stay unsharded from a forward until its backward, as the root's do.
        channel: Records what the unit communicates.
    """

    def __init__(
        self, name: str, groups: list[ParameterGroup], children: list["Unit"], slot: Slot | None = None
    ) -> None:
        self.name = name
        self.groups = groups
        self.children = children
        self.temporary = any(group.weights.temporary for group in groups)
        self._slot = slot
        self.calls = 0
        self.calls_done = 0
        self.took_part = False
        self.reduced = False
        self.keeps_weights = False
        self.channel = Channel(Log([]))
        self._listener: Callable[[], UnitListener | None] = lambda: None
        self._before: Callable[..., Any] = weak_method(self.pre_forward)
        self._after: Callable[..., Any] = weak_method(self.post_forward)
        self._state = WeightState.SHARDED
        self._shows_compute = False
        self._depth = 0

    def __repr__(self) -> str:
        return f"Unit({self.label}, {self._state.value})"

    @property
    def is_root(self) -> bool:
        """True for the unit of all parameters that are in no other unit."""
        return self.name == ""

    @property
    def label(self) -> str:
        """Name for messages."""
        return self.name or "<root>"

    @functools.cached_property
    def _unsharding(self) -> str:
        size = sum(group.unshard_bytes for group in self.groups)
        return f"unshard {self.label}, {size:,} bytes"

    @property
    def state(self) -> WeightState:
        """State of the weights."""
        return self._state

    def to(self, state: WeightState) -> None:
        """Change the state.

        Raises:
            RuntimeError: The change is not in ``TRANSITIONS``.
        """
        if state not in TRANSITIONS[self._state]:
            allowed = ", ".join(s.value for s in TRANSITIONS[self._state])
            raise RuntimeError(
                f"FSDP unit {self.label}: cannot go from '{self._state.value}' to '{state.value}'; "
                f"expected one of: {allowed}. Was a forward or backward called out of order?"
            )
        self._state = state

    @property
    def trainable(self) -> bool:
        """True if any parameter takes gradients."""
        return any(group.requires_grad for group in self.groups)

    @property
    def reducing_frees_memory(self) -> bool:
        """False if gradients stay whole, as with ``no_shard``: waiting for a reduction then frees nothing."""
        return any(group.sharding.inner.shards_optimizer for group in self.groups)

    def invalidate(self) -> None:
        """The main weights have changed: unshard before the next use."""
        for group in self.groups:
            group.weights.invalidate()

    @profiled("unshard")
    def unshard(self) -> None:
        """Start to unshard compute weights that have no memory or are out of date."""
        self.to(WeightState.UNSHARDING)
        with self._reshard_after_errors():
            if self._slot is not None:
                if (rival := self._other_holder()) is not None:
                    rival.yield_slot(self)
                self._slot.holder = weakref.ref(self)
            handles = [handle for group in self.groups if (handle := group.weights.unshard()) is not None]
        if handles:
            self.channel.note(self._unsharding, handles)

    @property
    def slot_is_taken(self) -> bool:
        """True if another unit's weights are in the memory that this unit would be unsharded to."""
        rival = self._other_holder()
        return rival is not None and rival.state is not WeightState.SHARDED

    def _other_holder(self) -> "Unit | None":
        """The unit that used this one's slot last; None if that was this unit."""
        holder: Unit | None = None if self._slot is None else self._slot.holder()
        return None if holder is self else holder

    def yield_slot(self, other: "Unit") -> None:
        """Reshard, because ``other`` needs the slot now.

        Its unshard is a task behind those that use the slot for this unit, and waits for the compute issued so far. So
        it cannot overwrite weights that are still read.

        Raises:
            RuntimeError: The weights are in use.
        """
        if self._state is WeightState.UNSHARDING:
            self.reshard_unused()
        elif self._state is WeightState.UNSHARDED:
            self.reshard()
        elif self._state is not WeightState.SHARDED:
            raise RuntimeError(
                f"FSDP units {self.label} and {other.label} share a buffer (double buffer) and are needed at the same "
                "time. Leave fsdp_double_buffer off for this model."
            )

    @profiled("wait for unshard")
    def use(self, state: WeightState) -> None:
        """Make the compute wait for the unshard, and the compute weights the module's parameters."""
        with report_on_failure(), self._reshard_after_errors():
            for group in self.groups:
                group.weights.wait()
        self.to(state)
        self.show(compute=True)

    @contextmanager
    def _reshard_after_errors(self) -> Iterator[None]:
        """Context in which an exception leaves the unit sharded: no state must claim that its weights are complete."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    @profiled("reshard")
    def reshard(self) -> None:
        """Free the compute weights, which nothing reads after the compute issued so far."""
        for group in self.groups:
            group.weights.reshard()
        self.to(WeightState.SHARDED)
        self.show(compute=False)

    @profiled("reshard")
    def reshard_unused(self) -> None:
        """Free weights whose unshard nothing has waited for."""
        for group in self.groups:
            group.weights.reshard_unused()
        self.to(WeightState.SHARDED)

    def show(self, compute: bool) -> None:
        """Make compute weights, or main weights, the module's parameters."""
        if self._shows_compute != compute:
            self._shows_compute = compute
            for group in self.groups:
                group.show(compute)

    def follow_freezing(self) -> bool:
        """Freeze and unfreeze parameters as the user has; True if that changes anything."""
        return any([group.follow_freezing() for group in self.groups])

    def has_gradients(self) -> bool:
        """True if gradients of this micro-batch wait to be collected."""
        return any(group.has_gradients() for group in self.groups if group.requires_grad)

    @profiled("reduce")
    def reduce_gradients(self, last: bool) -> bool:
        """Reduce or accumulate this micro-batch's gradients.

        Args:
            last: Reduce all gradients over all axes. If False, gradients that are not sharded are accumulated, and
                others are reduced over the inner axis only.

        Returns:
            Whether a reduction was started.
        """
        handles, size = [], 0
        for group in self.groups:
            if group.requires_grad and (handle := group.reduce_gradients(last)) is not None:
                handles.append(handle)
                size += group.reduce_bytes
        if handles:
            self.channel.note(f"reduce {self.label}, {size:,} bytes", handles)
        return bool(handles)

    def rescale_gradients(self, ratio: float) -> None:
        """Multiply the factor that reductions apply to gradients by ``ratio``."""
        for group in self.groups:
            group.gradients.rescale(ratio)

    @profiled("reduce")
    def reduce_waiting(self) -> None:
        """Start reducing gradients that earlier micro-batches left unreduced."""
        for group in self.groups:
            group.gradients.reduce_waiting()

    @profiled("wait for reduction")
    def wait_for_gradients(self) -> None:
        """Make the compute wait for the reductions that were started."""
        with report_on_failure():
            for group in self.groups:
                group.gradients.wait()

    def new_pass(self) -> None:
        """A forward pass of the model begins."""
        self.calls = self.calls_done = 0

    def new_backward(self) -> None:
        """A backward begins."""
        self.calls_done = 0
        self.took_part = self.reduced = False

    def abandon_gradients(self) -> None:
        """Drop gradients that are not synchronized yet."""
        for group in self.groups:
            group.abandon_gradients()

    # Hooks -----------------------------------------------------------------------------------------------------

    def install_hooks(self, modules: list[nn.Module], listener: UnitListener) -> None:
        """Hook the unit's module.

        Args:
            listener: Decides what the hooks lead to; held weakly.
            modules: The module; for the root also the modules directly inside that hold all its parameters, since
                any of them may be the one that is called.
        """
        self._listener = weakref.ref(listener)
        self._before, self._after = not_compiled(self._before), not_compiled(self._after)
        for module in modules:
            if module._compiled_call_impl is not None:
                # The compiled function would trace the hooks into its graph. Run it between them instead.
                module._compiled_call_impl = as_forward(self, module, module._compiled_call_impl)
                continue
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            # Called after an exception as well: checkpointing ends a recomputed forward by raising one.
            module.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Hook: the module is about to run."""
        listener = self._listener()
        if listener is None:
            return None
        self._depth += 1
        if self._depth > 1 or not listener.before_forward(self):
            return None
        watched = _watch_inputs(self, args, kwargs)
        if watched is not None:
            self.calls += 1
        return watched

    def post_forward(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Hook: the module has run, or raised (``output`` is then None)."""
        self._depth = max(self._depth - 1, 0)
        listener = self._listener()
        if listener is None or self._depth:
            return None
        given_away = self._copy_own_weights(output)
        output = output if given_away is None else given_away
        if listener.after_forward(self):
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(weak_method(self.pre_backward))
        return given_away

    def _copy_own_weights(self, output: Any) -> Any:
        """The output with copies of those of the unit's weights that are in it; None if there are none.

        The memory of the weights is freed after the forward. Megatron-Core's linear layers, for example, return their
        bias, which the caller adds later.
        """
        memory = {_storage(group.weights.compute.flat) for group in self.groups if group.weights.temporary}
        if not memory or not any(_storage(tensor) in memory for tensor in tensors_in(output)):
            return None

        def copy(value: Any) -> Any:
            return value.clone() if isinstance(value, torch.Tensor) and _storage(value) in memory else value

        output = tree_map(copy, output)
        if any(_storage(tensor) in memory for tensor in tensors_in(output)):
            raise NotImplementedError(
                f"FSDP unit {self.label} returns one of its own parameters, in a {type(output).__name__}. The memory "
                "of parameters is freed after the unit's forward: return a copy (.clone())."
            )
        return output

    def call(self, module: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run another function of the module between the hooks that run around its forward."""
        try:
            args, kwargs = self._before(module, args, kwargs) or (args, kwargs)
            output = function(*args, **kwargs)
        except BaseException:
            self._after(module, args, kwargs, None)
            listener = self._listener()
            if listener is not None and self.is_root and not self._depth:
                listener.forward_failed()
            raise
        given_away = self._after(module, args, kwargs, output)
        return output if given_away is None else given_away

    def pre_backward(self, grad: torch.Tensor) -> None:
        """Hook: the gradient of an output has arrived."""
        listener = self._listener()
        if listener is not None:
            listener.before_backward(self)

    def post_backward(self) -> None:
        """Hook: the gradients of the inputs of one call are complete."""
        listener = self._listener()
        if listener is not None:
            listener.after_backward(self)

    def abandon(self) -> None:
        """Reshard in any state, and forget the pass, which did not end."""
        self._depth = 0
        self.new_pass()
        if self._state is not WeightState.SHARDED:
            for group in self.groups:
                group.weights.abandon()
            self.to(WeightState.SHARDED)
            self.show(compute=False)


def as_forward(unit: Unit, module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of a module inside the unit, run as a forward of the unit. It keeps neither of them alive."""
    unit_of, module_of = weakref.ref(unit), weakref.ref(module)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        unit, module = unit_of(), module_of()
        if unit is None or module is None:
            return function(*args, **kwargs)
        return unit.call(module, function, args, kwargs)

    return call


class _EndOfBackward(torch.autograd.Function):
    """Returns its inputs. Its backward runs when their gradients are complete; FSDP2 marks units in the same way."""

    @staticmethod
    def forward(ctx: Any, notify: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.notify = notify
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.notify()
        return None, *grads


def _watch_inputs(unit: Unit, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Pass inputs that need gradients through :class:`_EndOfBackward`; None if there are none."""
    values, structure = tree_flatten((args, kwargs))
    found = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor) and value.requires_grad]
    if not found:
        return None
    passed = _EndOfBackward.apply(weak_method(unit.post_backward), *(values[i] for i in found))
    for i, value in zip(found, passed, strict=True):
        values[i] = value
    watched: tuple[tuple, dict] = tree_unflatten(values, structure)
    return watched


def _storage(tensor: torch.Tensor) -> int:
    """Identity of the storage of a tensor, whether it has memory at the moment or not; 0 for sparse tensors."""
    local = local_shard(tensor) if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata if local.layout is torch.strided else 0


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested containers and dataclasses."""
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
