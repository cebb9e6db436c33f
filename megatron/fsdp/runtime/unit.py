"""One FSDP unit: the parameters of a module that are unsharded and resharded together, with their state and hooks."""

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from megatron.fsdp.buffers.flat_buffer import storage_id
from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.buffers.pool import Slot
from megatron.fsdp.buffers.weights import PlaneSet, outdated
from megatron.fsdp.comm.journal import Channel, Log, report_on_failure
from megatron.fsdp.helpers.autograd import in_backward, outside_transforms, refuse_transforms
from megatron.fsdp.helpers.labels import profiled
from megatron.fsdp.helpers.weak import not_compiled, weak_method
from megatron.fsdp.quantized.storage import Direction, storage_of
from megatron.fsdp.runtime.graph import give_back_inputs, tensors_in, watch_inputs, watch_outputs

if TYPE_CHECKING:
    from megatron.fsdp.runtime.schedule import Schedule

logger = logging.getLogger(__name__)


class WeightState(Enum):
    """State of a unit's weights. It says nothing about gradients: a sharded unit's may be in reduction."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded, not in use"
    FORWARD = "forward"
    BACKWARD = "backward"
    HELD = "unsharded by the caller"


_W = WeightState
# The states that may follow each state. SHARDED may follow every state, since an exception may end a pass.
TRANSITIONS: dict[WeightState, tuple[WeightState, ...]] = {
    _W.SHARDED: (_W.UNSHARDING, _W.SHARDED),
    _W.UNSHARDING: (_W.FORWARD, _W.BACKWARD, _W.UNSHARDED, _W.HELD, _W.SHARDED),
    _W.UNSHARDED: (_W.FORWARD, _W.BACKWARD, _W.UNSHARDED, _W.HELD, _W.SHARDED),
    # Backward may follow FORWARD directly: a recomputation stops as soon as it has restored all saved tensors.
    _W.FORWARD: (_W.UNSHARDED, _W.BACKWARD, _W.SHARDED),
    _W.BACKWARD: (_W.SHARDED,),
    # The forward of one micro-batch and the backward of another may use the unit at once.
    _W.HELD: (_W.HELD, _W.SHARDED),
}


def in_forward(units: "Iterable[Unit]") -> bool:
    """Whether one of the units runs its forward. The root does while the model does; a unit may be called by itself."""
    return any(unit.state is WeightState.FORWARD for unit in units)


class Unit:
    """A module's parameters, unsharded and resharded together.

    Args:
        name: Name of the module in the wrapped model; empty for the root.
        groups: Its parameter groups; may be empty.
        index: Its place among the model's units: the root is the first, then in the order of registration.
        slot: Memory for unsharded weights that several units share; None if the unit has separate memory.

    Attributes:
        is_root: It is the unit of the outermost module, which owns all parameters outside other units.
        state: State of the weights. Only :meth:`to` changes it.
        children: Units inside this one, in the order of registration.
        ends_behind: Index of the last unit that is registered before the last of the unit's modules: often the unit.
        slot: The argument; None if no unshard allocates memory.
        temporary: Whether an unshard allocates memory that a reshard frees.
        quantized: Quantized compute weights, and how they are stored.
        is_directional: Forward and backward read different planes of quantized weights.
        calls: Number of forward calls of the latest pass whose inputs are watched for the end of their backward.
        calls_done: Number of these calls whose backward has ended.
        recomputed: Number of calls in this backward, which a later backward without a forward does not have.
        unwatched: A call of this forward had no inputs that need gradients.
        hidden: A forward ran it without gradients, as under reentrant checkpointing, whose graph does not have it.
        took_part: Whether the gradient of an output has arrived in this backward.
        reduced: Whether the reduction of this backward's gradients has been issued.
        complete: Whether this backward's gradients are complete.
        in_graph: Whether the graph of the backward that runs has a forward of the unit.
        aside: This backward enters the unit at something else than its outputs, and may leave it at any time.
        keeps_weights: Whether the weights stay unsharded from a forward until its backward; by default, the root's do.
        together: Ids of the modules that are the unit, if they are several.
        to_run: Those of them that the forward has yet to run before it reshards the weights.
        is_offloaded: Whether main weights are in host memory, away from the device of the computation.
        is_open: Its forward uses weights of other units: a search of a graph for these goes through it.
        exchanged: Lists and dictionaries among the inputs of the forward that runs; see :func:`give_back_inputs`.
        held_by: The passes that hold the unit: the caller has unsharded it for them.
        expected_by: The passes that have prefetched the unit and not used it yet.
        channel: Records the unit's collectives for reports about ranks that hang.
    """

    def __init__(self, name: str, groups: list[ParameterGroup], index: int = 0, slot: Slot | None = None) -> None:
        self.name, self.is_root = name, name == ""
        self.groups = groups
        self.index = self.ends_behind = index
        self.children: list[Unit] = []
        self.temporary = any(group.weights.temporary for group in groups)
        quantized = [(group.storage, [param.compute for param in group.params]) for group in groups]
        self.quantized = [(storage, params) for storage, params in quantized if storage is not None]
        planes = [plane for group in groups for plane in group.weights.planes]
        self.is_directional = any(len(plane.directions) < len(Direction) for plane in planes)
        self.slot = slot if self.temporary else None
        self.calls = self.calls_done = self.recomputed = 0
        self.unwatched = self.hidden = self.took_part = self.aside = False
        self.reduced = self.complete = self.in_graph = False
        self.keeps_weights, self.is_offloaded, self.is_open = self.is_root, False, False
        self.held_by, self.expected_by = set[Direction](), set[Direction]()
        self.channel = Channel(Log([]))
        self.schedule: Callable[[], Schedule | None] = lambda: None
        self._modules = weakref.WeakSet[nn.Module]()
        self.together, self.to_run = frozenset[int](), set[int]()
        self._before, self._after = weak_method(self.pre_forward), weak_method(self.post_forward)
        self.state = WeightState.SHARDED
        self._shows_compute, self._depth = False, 0
        # See [Note: versions of compute weights].
        plain = [group for group in groups if group.storage is None]
        apart = [g for g in plain if g.weights.temporary or g.weights.main_is_apart]
        self._versioned = [param for group in apart for param in group.params]
        self._sharing = [param for group in plain if group not in apart for param in group.params]
        self._versions: list[int] = []
        self._versions_of_shared: list[tuple[int, int]] = []
        self._end: Any = None
        self.exchanged: list[tuple[Any, list[Any], list[Any]]] = []

    def __repr__(self) -> str:
        return f"Unit({self.label}, {self.state.value})"

    @property
    def gathers_twice(self) -> bool:
        """Whether the weights are freed after the forward and gathered again for the backward."""
        return self.temporary and not self.is_root and not self.keeps_weights

    @property
    def ran(self) -> bool:
        """Whether this rank has run the unit in a forward, and not yet in its backward."""
        return (self.calls > 0 or self.unwatched) and not self.took_part

    @property
    def awaits_backward(self) -> bool:
        """Whether this rank's gradients of the unit are still to come in this backward, as far as it can tell."""
        return (self.in_graph or self.hidden) and not self.complete and self.trainable

    @property
    def label(self) -> str:
        """Name for messages."""
        return self.name or "<root>"

    @functools.cached_property
    def _unshard_names(self) -> dict[PlaneSet, str]:
        sizes = {planes: sum(group.unshard_bytes(planes) for group in self.groups) for planes in PlaneSet}
        return {planes: f"unshard {self.label}, {size:,} bytes" for planes, size in sizes.items()}

    def to(self, state: WeightState) -> None:
        """Change the state.

        Raises:
            RuntimeError: The change is not in ``TRANSITIONS``.
        """
        if state not in TRANSITIONS[self.state]:
            allowed = ", ".join(s.value for s in TRANSITIONS[self.state])
            raise RuntimeError(
                f"FSDP unit {self.label}: cannot go from '{self.state.value}' to '{state.value}'; "
                f"expected one of: {allowed}. Was a forward or backward called out of order?"
            )
        self.state = state
        if state is WeightState.SHARDED:
            self.held_by.clear()
            self.expected_by.clear()

    @property
    def trainable(self) -> bool:
        """True if any parameter takes gradients."""
        return any(group.requires_grad for group in self.groups)

    @property
    def reducing_frees_memory(self) -> bool:
        """False if gradients stay full and in place, as with ``no_shard``: waiting for a reduction frees nothing."""
        return any(
            group.sharding.inner.shards_optimizer or group.dtypes.grad_comm != group.dtypes.main_grads
            for group in self.groups
        )

    @profiled("unshard")
    def unshard(self, planes: PlaneSet = PlaneSet.ALL) -> None:
        """Start to unshard compute weights that have no memory or are out of date.

        A unit that is not sharded keeps its state, and gets the planes that it lacks.
        """
        if self.state is WeightState.SHARDED:
            self.to(WeightState.UNSHARDING)
        try:
            if self.slot is not None:
                if (rival := self._other_holder()) is not None:
                    rival.yield_slot(self)
                self.slot.holder = weakref.ref(self)
            handles = {group: handle for group in self.groups if (handle := group.weights.unshard(planes)) is not None}
        except BaseException:
            self.abandon()  # the weights may be incomplete
            raise
        # After a write of experts alone, ranks with other experts unshard nothing.
        if handles and (len(handles) == len(self.groups) or not all(g.params[0].key.expert for g in handles)):
            self.channel.note(self._unshard_names[planes], list(handles.values()))

    def lacks(self, direction: Direction) -> bool:
        """Whether the compute has not waited for some of the planes that a pass reads."""
        planes = [plane for group in self.groups for plane in group.weights.planes if direction in plane.directions]
        return not all(plane.is_current for plane in planes)

    def follow_writes(self) -> None:
        """Unshard again if the forward of another unit has written main weights since the unshard was started."""
        if outdated([group.weights for group in self.groups]):
            self.unshard()

    @property
    def slot_is_taken(self) -> bool:
        """True if another unit is unsharded in the slot that this unit needs."""
        rival = self._other_holder()
        return rival is not None and rival.state is not WeightState.SHARDED

    def _other_holder(self) -> "Unit | None":
        """The other unit that used this one's slot last; None if there is none."""
        holder: Unit | None = None if self.slot is None else self.slot.holder()
        return None if holder is self else holder

    def keep_weights(self, keeps: bool) -> None:
        """Set whether the unit keeps its weights after forward. All ranks call it. Backward gathers over all."""
        self.keeps_weights = keeps
        for group in self.groups:
            group.weights.gather_all()

    def yield_slot(self, other: "Unit") -> None:
        """Reshard, because ``other`` needs the slot.

        The unshard of ``other`` runs after this unit's tasks in the same stream, and waits for the compute issued so
        far. It therefore cannot overwrite weights that are still being read.

        Raises:
            RuntimeError: The weights are in use.
        """
        # Nothing tells when the backward of a call ends whose inputs need no gradients, as that of an embedding that is
        # used again. Autograd runs the nodes of later calls first: once another unit's backward begins, it has ended.
        has_ended = self.state is WeightState.BACKWARD and self.unwatched and not (self.calls or self.aside)
        if has_ended or self.state in (WeightState.UNSHARDING, WeightState.UNSHARDED):
            self.reshard()
        elif self.state is not WeightState.SHARDED:
            raise RuntimeError(
                f"FSDP units {self.label} and {other.label} share a buffer (double buffer) and are needed at the same "
                "time. Leave fsdp_double_buffer off for this model."
            )

    @profiled("wait for unshard")
    def use(self, state: WeightState, direction: Direction = Direction.FORWARD) -> None:
        """Make compute wait for the unshard, and make compute weights the module's parameters."""
        self.prepare(direction)
        self.to(state)
        self._set_versions(readable=True)
        self.show(compute=True)

    def hold(self, direction: Direction) -> None:
        """As :meth:`use`, for a pass whose caller unshards and reshards the unit."""
        self.use(WeightState.HELD, direction)
        self.expected_by.discard(direction)
        self.held_by.add(direction)

    def let_go(self, direction: Direction, keep: bool = False) -> None:
        """Reshard as :meth:`reshard`, unless the pass of the other direction holds or expects the unit."""
        self.held_by.discard(direction)
        self.expected_by.discard(direction)
        if self.held_by or self.expected_by:
            return
        if self.state in (WeightState.UNSHARDING, WeightState.HELD):
            self.reshard(keep)

    def prepare(self, direction: Direction) -> None:
        """Make compute wait for the unshards that were started, and quantized weights ready for a pass."""
        try:
            with report_on_failure():
                for group in self.groups:
                    group.weights.wait()
                for storage, params in self.quantized:
                    storage.before_use(params, direction)
        except BaseException:
            self.abandon()
            raise

    @profiled("reshard")
    def reshard(self, keep: bool = False) -> None:
        """Free the compute weights, in any state, once the compute issued so far has read them.

        Args:
            keep: A backward will follow: if only some of the ranks gather the weights for it, keep a shard.
        """
        if self.state is WeightState.SHARDED:
            return
        for storage, params in self.quantized:
            storage.after_use(params)
        for group in self.groups:
            group.weights.reshard(keep)
        self.to(WeightState.SHARDED)
        self._set_versions(readable=False)
        self.show(compute=False)

    def _set_versions(self, readable: bool) -> None:
        """Set the version counters of the compute weights.

        [Note: versions of compute weights] Autograd remembers the version of every weight that it saves, and raises if
        it has changed when backward reads the weight. Unsharded weights get twice the version of their main weights:
        a graph can read them after they were resharded and unsharded again, unless the weight was changed meanwhile,
        as in an unsharded model. Resharded weights have another version, so that backward cannot read freed memory, or
        that of another unit, through a part of the graph that no hook guards. A weight whose memory contains the main
        weight has a counter of its own: a write through one of the two is added to that of the other.
        """
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [2 * param.main._version + (not readable) for param in self._versioned]
            weights = [param.compute for param in self._versioned]
            torch._C._autograd._unsafe_set_version_counter(tuple(weights), tuple(self._versions))
            shared = [(param.main._version, param.compute._version) for param in self._sharing]
            if shared != self._versions_of_shared:
                pairs = zip(self._sharing, shared, self._versions_of_shared or shared, strict=True)
                for param, (main, compute), (main_before, compute_before) in pairs:
                    torch._C._increment_version([param.compute] * (main != main_before))
                    torch._C._increment_version([param.main] * (compute != compute_before))
                self._versions_of_shared = [(param.main._version, param.compute._version) for param in self._sharing]

    def check_not_written(self) -> None:
        """Raise if the forward has written a compute weight: the next unshard would undo that."""
        if not self._shows_compute or [param.compute._version for param in self._versioned] == self._versions:
            return
        written = zip(self._versioned, self._versions, strict=True)
        name = next(param.name for param, version in written if param.compute._version != version)
        raise RuntimeError(
            f"The forward of FSDP unit {self.label} has changed its parameter {name} in place. Expected weights that "
            "only change between forwards: this change would be lost. Change the parameter before or after the model's "
            "forward, where it is the main weight."
        )

    def show(self, compute: bool) -> None:
        """Make compute weights, or main weights, the module's parameters."""
        if self._shows_compute != compute:
            self._shows_compute = compute
            for group in self.groups:
                group.show(compute)

    def has_gradients(self) -> bool:
        """True if parameters have gradients of this micro-batch that are not in the gradient buffer yet."""
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
        """Start to reduce gradients that earlier micro-batches have only accumulated."""
        for group in self.groups:
            group.gradients.reduce_waiting()

    @profiled("wait for reduction")
    def wait_for_gradients(self, outer: bool = True) -> None:
        """Make compute wait for the reductions in flight; see :meth:`GradientBuffer.wait`."""
        with report_on_failure():
            for group in self.groups:
                group.gradients.wait(outer)

    def new_pass(self) -> None:
        """Reset the counters at the start of the model's forward."""
        self.calls = self.calls_done = self.recomputed = 0
        self.unwatched = False

    def new_backward(self) -> None:
        """Reset the counters at the start of a backward."""
        self.calls -= self.recomputed
        self.calls_done = self.recomputed = 0
        self.took_part = self.reduced = self.complete = self.aside = False

    # Hooks -----------------------------------------------------------------------------------------------------

    def install_hooks(self, modules: list[nn.Module], schedule: "Schedule") -> None:
        """Register hooks on the unit's module.

        Args:
            modules: The module, or several. Of the root, also those inside with all parameters, which users may call.
            schedule: Called by the hooks. It is referred to weakly, because the modules hold the hooks.
        """
        self.schedule, self._modules = weakref.ref(schedule), weakref.WeakSet(modules)
        self.together = frozenset(map(id, modules if len(modules) > 1 and not self.is_root else ()))
        self._before, self._after = not_compiled(self._before), not_compiled(self._after)
        for module in modules:
            if module._compiled_call_impl is not None:
                # torch.compile would trace registered hooks into its graph. Call the compiled function between them.
                module._compiled_call_impl = as_forward(self, module, module._compiled_call_impl)
                continue
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            # always_call: activation checkpointing ends a recomputed forward by raising an exception.
            module.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        if self.is_directional:
            for module in [layer for layer in self.layers(quantized=True) if layer not in modules]:
                module.register_forward_pre_hook(not_compiled(weak_method(self.pre_inner_forward)), prepend=True)

    def layers(self, quantized: bool = False) -> list[nn.Module]:
        """The modules that own the unit's parameters, or only those that own quantized ones."""
        groups = [group for group in self.groups if group.storage or not quantized]
        sites = [site for group in groups for param in group.params for site in param.sites]
        return list({id(owner): owner for owner, _ in sites}.values())

    def pre_inner_forward(self, module: nn.Module, args: tuple) -> None:
        """Forward pre-hook of modules inside with quantized weights that forward and backward read from other planes.

        Backward may recompute such a module without the unit, and then needs the planes of forward.
        """
        if (schedule := self.schedule()) is not None:
            schedule.before_inner_forward(self)

    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Forward pre-hook. Calls inside a call of the same unit are ignored."""
        if (schedule := self.schedule()) is None:
            return None
        refuse_transforms(f"FSDP unit {self.label}")
        if self._depth and not self.runs_forward():
            schedule.reset()
        self._depth += 1
        if self._depth > 1:
            return None
        watches = outside_transforms(schedule.before_forward, self)
        self._depth = 1  # also if weights were written and everything was reset
        if not watches:
            return None
        watched, self._end = watch_inputs(self, args, kwargs)
        if self.is_root:
            return watched
        if watched is not None:
            self.calls += 1
            self.recomputed += schedule.passes.in_backward
        else:
            self.unwatched = True
        return watched

    def runs_forward(self) -> bool:
        """Whether a forward of the unit is on the stack. torch calls no hook if KeyboardInterrupt has ended one."""
        if self._depth == 0 or in_backward():
            return self._depth > 0
        frame = sys._getframe().f_back
        while frame is not None:
            of = frame.f_locals["self"] if frame.f_code in _CALLS else None
            if of is self or of in self._modules:
                return True
            frame = frame.f_back
        return False

    def post_forward(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Forward hook. ``output`` is None if the module has raised an exception."""
        self._depth = max(self._depth - 1, 0)
        if (schedule := self.schedule()) is None or self._depth:
            return None
        self.to_run.discard(id(module))
        give_back_inputs(self, failed=output is None)
        if output is not None:
            self.check_not_written()
            if dist.get_debug_level() != dist.DebugLevel.OFF:  # TORCH_DISTRIBUTED_DEBUG, since this is slow
                self._check_not_kept(module)
        copied = self._copy_own_weights(output)
        output = output if copied is None else copied
        end, self._end = self._end, None
        if outside_transforms(schedule.after_forward, self):
            watch_outputs(self, output, end)
        return copied

    def _check_not_kept(self, module: nn.Module) -> None:
        """Raise if a module has kept a weight, whose memory is freed."""
        memory = self._temporary_memory()
        for name, part in module.named_modules():
            for key, value in vars(part).items():
                # Parameters from before sharding stand for the present ones.
                found = [each for each in tensors_in(value) if "_fsdp_stands_for" not in vars(each)]
                # Recurrent layers list their weights again in every forward.
                if key not in ("_parameters", "_modules", "_flat_weights") and any(
                    _is_in(memory, each) for each in found
                ):
                    raise RuntimeError(
                        f"FSDP unit {self.label}: {type(part).__name__}.{key} ({name or 'the module of the unit'}) "
                        "keeps a weight of the unit, or a view of one. Its memory is freed after the unit's forward: "
                        "keep a copy, .clone(), instead."
                    )

    def _temporary_memory(self) -> set[int]:
        """The storages of the unit's weights whose memory is freed, or that have quantized values."""
        groups = [group for group in self.groups if group.weights.temporary or group.storage is not None]
        return {storage_id(plane.buffer.flat) for group in groups for plane in group.weights.planes}

    def _copy_own_weights(self, output: Any) -> Any:
        """Return the output with copies in place of the unit's weights; None if it contains no weights.

        Some modules return parameters, such as Megatron-Core's linear layers, whose bias the caller adds later. By then
        the memory of the weights has been freed.
        """
        memory = self._temporary_memory()
        if not memory or not any(_is_in(memory, tensor) for tensor in tensors_in(output)):
            return None
        output = tree_map(lambda value: value.clone() if _is_in(memory, value) else value, output)
        if any(_is_in(memory, tensor) for tensor in tensors_in(output)):
            raise NotImplementedError(
                f"FSDP unit {self.label} returns one of its own parameters, in a {type(output).__name__}. The memory "
                "of parameters is freed after the unit's forward: return a copy (.clone())."
            )
        return output

    def call(self, module: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run another function of the module between the hooks of its forward."""
        try:
            args, kwargs = self._before(module, args, kwargs) or (args, kwargs)
            output = function(*args, **kwargs)
        except BaseException:
            self._after(module, args, kwargs, None)
            schedule = self.schedule()
            if schedule is not None and self.is_root and not self._depth:
                schedule.forward_failed()
            raise
        copied = self._after(module, args, kwargs, output)
        return output if copied is None else copied

    def pre_backward(self, grad: torch.Tensor) -> None:
        """Tensor hook of an output."""
        if (schedule := self.schedule()) is not None:
            schedule.before_backward(self)

    def post_backward(self) -> None:
        """Called when the gradients of one call's inputs are complete."""
        if (schedule := self.schedule()) is not None and not self.is_root:
            schedule.after_backward(self)

    def abandon(self) -> None:
        """Reshard in any state, and reset the counters of a pass that did not end."""
        self.to_run.clear()
        # Not ``unwatched``: a second backward of the latest forward depends on it.
        self._depth = self.calls = self.calls_done = self.recomputed = 0
        self.reshard()
        for group in self.groups:
            group.weights.drop_kept()


_CALLS = (nn.Module._call_impl.__code__, Unit.call.__code__)


def as_forward(unit: Unit, module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of a module inside the unit, so that it runs like a forward of the unit.

    The wrapper is stored on the module, so it refers to the module and the unit weakly.
    """
    unit_of, module_of = weakref.ref(unit), weakref.ref(module)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        unit, module = unit_of(), module_of()
        if unit is None or module is None:
            return function(*args, **kwargs)
        return unit.call(module, function, args, kwargs)

    return call


def _is_in(memory: set[int], value: Any) -> bool:
    """Whether a value is a tensor in one of these storages."""
    return isinstance(value, torch.Tensor) and not memory.isdisjoint(map(storage_id, _stored_in(value)))


def _stored_in(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that have a tensor's memory: itself, or the parts of a quantized one."""
    storage = storage_of(tensor)
    return iter([tensor]) if storage is None else tensors_in([getattr(tensor, field, None) for field in storage.fields])
