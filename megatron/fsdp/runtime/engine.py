"""Engine: one sharded model between the start of a forward and the optimizer's step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.buffers.pool import FixedPool
from megatron.fsdp.buffers.weights import WeightBuffer
from megatron.fsdp.comm.backends import runs_ahead
from megatron.fsdp.comm.collectives import all_reduce, broadcast
from megatron.fsdp.comm.context import CommContext
from megatron.fsdp.comm.journal import JOURNAL, report_on_failure
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.helpers.patches import TORCH, Patches, rows_of
from megatron.fsdp.quantized.storage import Direction
from megatron.fsdp.runtime.agreement import Agreement, buffers_of
from megatron.fsdp.runtime.partition import owner_of
from megatron.fsdp.runtime.passes import PassState
from megatron.fsdp.runtime.registration import BufferRegistration
from megatron.fsdp.runtime.schedule import Schedule
from megatron.fsdp.runtime.unit import Unit, in_forward
from megatron.fsdp.sharding.mesh import DataParallelAxes, MeshIndex


class Engine:
    """Shards one model: owns its units and their buffers, and decides when they communicate.

    The outermost module owns the engine: it is a :class:`megatron.fsdp.MegatronFSDP` wrapper or a module that
    :mod:`megatron.fsdp.fsdp2` shards in place. The engine must not hold that module. Otherwise the two would form a
    cycle, and a deleted model would keep its memory until the garbage collector ran.
    :func:`megatron.fsdp.runtime.builder.build_engine` creates engines.

    Args:
        units: All units of the model; the root first, then in the order of registration.
        config: Settings.
        index: Mesh and process groups.
        context: Devices, streams and process groups.
        pool: Fixed buffers; None if temporary buffers come from torch's allocator.
        registration: Registers the buffers of ``pool`` with NCCL; None if they are not registered.
        agreement: Comparison of the model between ranks.
        unit_of: The innermost unit around each module of the model.

    Attributes:
        is_last_microbatch: Whether the next backward is the last one before the optimizer's step.
        model_auto_sync: Whether every backward ends with reduced gradients in ``.grad``.
        microbatch_count: Number of backward passes since gradients were last synchronized.
        has_pending_gradients: A backward has ended since gradients were last put into ``.grad``.
        reads_synchronize: Whether reading ``.grad`` synchronizes gradients that wait. Megatron-Core scales gradients
            when it synchronizes them, so that reading them earlier would be a mistake.
        attach_optimizer: Called with each optimizer that has parameters of the model, before its first step. None:
            nothing is called.
    """

    reads_synchronize = True
    attach_optimizer: Callable[[torch.optim.Optimizer], None] | None = None

    def __init__(
        self,
        units: list[Unit],
        config: FSDPConfig,
        index: MeshIndex,
        context: CommContext,
        pool: FixedPool | None,
        registration: BufferRegistration | None,
        agreement: Agreement,
        unit_of: weakref.WeakKeyDictionary[nn.Module, Unit],
    ) -> None:
        self.units = units
        self.config = config
        self.index = index
        self.context = context
        self.pool = pool
        self._registration = registration
        self._agreement = agreement
        self._unit_of = unit_of
        self._unit_with = {id(e.compute): unit for unit in units for group in unit.groups for e in group.params}
        self._units_in: weakref.WeakKeyDictionary[nn.Module, list[Unit]] = weakref.WeakKeyDictionary()
        self.model_auto_sync = config.sync_model_each_microbatch
        self.is_last_microbatch = True
        self.microbatch_count = 0
        self.has_pending_gradients = False
        self.schedule = Schedule(units, config, context, self._reduces_now, self._backward_ended)
        # Which parameters take gradients, as of the last synchronization.
        self._trained = [param.trained for group in self.groups if group.requires_grad for param in group.params]
        if runs_ahead(self.device):
            # When the engine is deleted, tasks may still use memory that compute has allocated. Compute would reuse it.
            weakref.finalize(self, context.join).atexit = False

    # Structure -------------------------------------------------------------------------------------------------

    @property
    def groups(self) -> list[ParameterGroup]:
        """All parameter groups, unit by unit."""
        return self.schedule.groups

    @property
    def unit_names(self) -> list[str]:
        """Names of the units' modules; the root's is empty."""
        return [unit.name for unit in self.units]

    @property
    def device(self) -> torch.device:
        """The device of the computation."""
        return self.context.device

    def params(self) -> Iterator[ShardedParameter]:
        """All parameters, each once."""
        for group in self.groups:
            yield from group.params

    def unit_around(self, module: nn.Module) -> Unit | None:
        """The innermost unit that contains ``module``; None if it is no part of the model."""
        return self._unit_of.get(module)

    def unit_with(self, weight: torch.Tensor) -> Unit | None:
        """The unit that a compute weight belongs to; None if it is no compute weight of the model."""
        return self._unit_with.get(id(weight))

    def units_in(self, module: nn.Module, direction: Direction) -> list[Unit]:
        """The units, except the root, that parameters in ``module`` may belong to, in the order of a pass."""
        if module not in self._units_in:
            found = {id(self._unit_of.get(each)) for each in module.modules()}
            self._units_in[module] = [unit for unit in self.units if id(unit) in found and not unit.is_root]
        return self._units_in[module][:: 1 if direction is Direction.FORWARD else -1]

    # Ranks -----------------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Wait until all ranks have compared their models; raise if they differ. Does nothing afterwards.

        Raises:
            ValueError: Ranks have different models or settings. All of them raise.
            RuntimeError: A rank did not arrive in time.
        """
        self._agreement.wait(self.context.channel)

    def use_collectives(self, unit: Unit | None = None, **operations: Any) -> None:
        """Communicate weights and gradients by other operations from now on. All ranks call it at the same point.

        Args:
            unit: Only those of this unit. None: all.
            operations: See :meth:`megatron.fsdp.comm.collectives.Collectives.replaced`.
        """
        self.context.join()  # what was issued before ends with the operations that it began with, on every rank
        for group in self.groups if unit is None else unit.groups:
            group.use_collectives(**operations)

    def average_buffers(self, module: nn.Module) -> None:
        """Replace floating-point buffers of ``module`` by their mean over the data-parallel ranks. A collective."""
        for expert, _, buffer in buffers_of(module, self.index):
            axes = self.index.experts if expert else self.index.dense
            for group in self._groups_of(axes) if buffer.is_floating_point() else ():
                self.context.stream.run(functools.partial(all_reduce, buffer, dist.ReduceOp.SUM, group)).wait()
                buffer.div_(group.size())

    def _groups_of(self, axes: DataParallelAxes) -> list[dist.ProcessGroup]:
        """The process groups of some axes for tasks of the context's stream."""
        return [self.context.dp_group] if axes is self.index.dense else [*map(self.context.stream.group, axes.groups)]

    # Which backward synchronizes ---------------------------------------------------------------------------------

    def _reduces_now(self) -> bool:
        """Whether gradients that are not sharded are reduced in this backward, or wait for a later one."""
        return self.model_auto_sync or (self.is_last_microbatch and self.config.overlap_grad_reduce)

    @contextmanager
    def synchronizing(self, auto_sync: bool, last: bool | None = None) -> Iterator[None]:
        """Context with other settings of :attr:`model_auto_sync` and, unless None, :attr:`is_last_microbatch`."""
        was_auto, was_last = self.model_auto_sync, self.is_last_microbatch
        self.model_auto_sync = auto_sync
        self.is_last_microbatch = was_last if last is None else last
        try:
            yield
        finally:
            self.model_auto_sync, self.is_last_microbatch = was_auto, was_last

    def _backward_ended(self) -> None:
        JOURNAL.settle()
        self.microbatch_count += 1
        # This reshards all units, so it waits for a later backward if the next micro-batch's forward runs.
        if self.model_auto_sync and not self.schedule.in_callers_forward:
            self.finish_gradients()
        else:
            self.has_pending_gradients = True
            if self.reads_synchronize:
                if not _waiting:
                    GRADIENTS.install()
                _waiting.add(self)

    def _nothing_waits(self, pending: bool = False) -> None:
        """From here on, reading ``.grad`` does not synchronize gradients."""
        self.has_pending_gradients = pending
        _waiting.discard(self)
        if not _waiting:
            GRADIENTS.uninstall()

    def finish_before_read(self) -> None:
        """Put waiting gradients into ``.grad``, which is about to be read or set, unless a forward or backward runs."""
        if self not in _waiting or self.schedule.in_callers_forward:
            return
        if not in_forward(self.units) and self.schedule.passes.state is PassState.NO_BACKWARD:
            self.finish_gradients()

    # Weights ---------------------------------------------------------------------------------------------------

    def invalidate_weights(self) -> None:
        """Mark compute weights as out of date: main weights have changed, by a step or a load.

        The next unshard of a unit copies from the new main weights.
        """
        self.context.follow()  # a step has read gradients
        self.schedule.reset()
        self.schedule.invalidate()

    def hold(self, module: nn.Module, direction: Direction) -> None:
        """Unshard the units in ``module`` for a pass whose caller has begun it; see :class:`Schedule`."""
        for unit in self.units_in(module, direction):
            self.schedule.hold(unit, direction)

    def let_go(self, module: nn.Module, direction: Direction) -> None:
        """Reshard the units in ``module`` that no other pass needs. After a backward, reduce their gradients."""
        for unit in self.units_in(module, direction):
            self.schedule.let_go(unit, direction)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Context in which all units stay unsharded, so that forwards communicate nothing. A collective."""
        self.schedule.begin_callers_forward()
        try:
            for unit in self.units[1:]:
                self.schedule.hold(unit, Direction.FORWARD)
            # Otherwise the model's forward would take this for a pass that has failed, and reshard all units.
            self.schedule.in_callers_forward = False
            yield
        finally:
            self.schedule.end_callers_forward()

    def reshard(self) -> None:
        """Reshard all units and wait for all-gathers in flight; main weights are then the model's parameters."""
        self.schedule.reset()
        self.wait_before_write()

    def unshard_persistent(self) -> None:
        """Unshard, and wait for, all weights that every rank keeps in full."""
        persistent = [group.weights for group in self.groups if not group.weights.temporary]
        for weights in persistent:
            weights.unshard()
        for weights in persistent:
            weights.wait()

    def wait_for_prefetched(self) -> None:
        """Wait for the all-gathers that :meth:`Schedule.prefetch_first` has started. Called after a step."""
        self.context.follow()  # it has read gradients
        for group in self.groups:
            for handle in group.weights.unsharding:
                handle.wait()

    def wait_before_write(self) -> None:
        """Make what writes main weights next, compute or with offload the host, wait for unshards that read them.

        Compute has not waited for unshards of weights that it did not use.
        """
        self.context.join_unshards()
        self.context.finish_offload()

    def broadcast_weights(self) -> None:
        """Make replicas of main weights equal. A collective.

        A shard has one owner and needs no broadcast. Weights that are replicated over an axis become those of the
        axis's first rank.
        """
        self.wait_before_write()
        for group in self.groups:
            for axis, placements in zip(group.axes.groups, group.sharding.axes, strict=False):
                if not placements.shards_optimizer:
                    self.context.stream.run(functools.partial(self._broadcast, group.weights, axis)).wait()
        self.invalidate_weights()

    def _broadcast(self, weights: WeightBuffer, axis: dist.ProcessGroup) -> None:
        # Main weights may be in host memory, and the backend of the axis sends from the device of the computation only.
        sent = weights.main.to(self.device)
        broadcast(sent, 0, self.context.stream.group(axis))
        weights.main.copy_(sent)

    def register_buffers(self) -> None:
        """Register all buffers that exist now with NCCL. A collective, to be called between steps.

        Raises:
            RuntimeError: ``nccl_ub`` is off, and not because of ``synchronous``, or a rank has too little memory.
        """
        if self.config.synchronous:
            return
        if self._registration is None:
            raise RuntimeError("register_buffers: expected nccl_ub=True; the buffers of this model are not for NCCL.")
        self.reshard()
        self._registration.register()

    # Gradients -------------------------------------------------------------------------------------------------

    def wait_for_reductions(self) -> None:
        """Make the computation wait for all reductions in flight."""
        for group in self.groups:
            group.gradients.wait()

    def finish_gradients(self) -> None:
        """Reduce what is left to reduce, wait for it, and put gradients into ``.grad`` of the main weights."""
        self._nothing_waits()
        try:
            self._check_hooks()
            self.schedule.reduce_waiting()
            with report_on_failure():
                self.schedule.reset()
                self.wait_for_reductions()
                # Not every optimizer calls wait_before_write: Megatron-Core's updates main weights after this.
                self.context.join_unshards()
            if self._registration is not None:
                self._registration.end_step()
            arrived = self._attach_gradients()
            if self.config.cuda_graph_mode:
                # A capture ends with an error if a stream that it has forked is not joined.
                self.context.join()
        except BaseException:
            self.schedule.abandon_gradients()
            raise
        self.microbatch_count = 0
        self.schedule.refresh_weights = self.config.cuda_graph_mode
        # Last, because a user's gradient hook may run the optimizer's step, which needs the final state.
        for param in arrived:
            param.run_gradient_hooks()

    def _check_hooks(self) -> None:
        """Raise if gradient hooks, which are called once, would have been called more often in an unsharded model."""
        nested, self.schedule.passes.was_nested = self.schedule.passes.was_nested, False
        for param in self.params() if nested else ():
            if param.has_hooks:
                unit = self.unit_with(param.compute)
                assert unit is not None
                if unit.calls > 1 or len(param.sites) > 1:
                    raise NotImplementedError(
                        f"{param.name} has gradient hooks and is used more than once under reentrant activation "
                        "checkpointing, which accumulates its gradient in parts: without sharding, the hooks would be "
                        "called with each part. Use checkpoint(..., use_reentrant=False), or change .grad before the "
                        "optimizer's step in place of the hooks."
                    )

    def finish_pending_gradients(self) -> None:
        """Call :meth:`finish_gradients` if a backward has ended since the last call."""
        if self.has_pending_gradients:
            self.finish_gradients()

    def leave_gradients_waiting(self) -> None:
        """Let the optimizer's step use what is in ``.grad``, without gradients that are not synchronized yet."""
        self._nothing_waits(self.has_pending_gradients)

    def _attach_gradients(self) -> list[ShardedParameter]:
        groups = [group for group in self.groups if group.requires_grad or group.pending]
        groups.sort(key=lambda group: group.axes is not self.index.dense)  # experts differ: ranks compare them apart
        used = iter(self._used_anywhere(groups))
        taken = [group.take_gradients() for group in groups]
        # With offload the host reads the gradients from here on. All copies were started before it waits for them.
        if self.config.offloads_gradients:
            self.context.finish_offload()
        arrived = []
        for group, reduced in zip(groups, taken, strict=True):
            flags = [next(used) for _ in group.params]
            arrived += group.attach_gradients(reduced, flags)
        self.context.follow()  # what was added to earlier gradients is dropped now
        return arrived

    def _used_anywhere(self, groups: list[ParameterGroup]) -> list[bool]:
        """For each parameter of ``groups``, whether any rank had a gradient for it."""
        used_here = [flag for group in groups for flag in group.used]
        trained = [param.trained for group in groups for param in group.params]
        if self.config.zero_unused_gradients or not used_here:
            return used_here
        dense = sum(len(group.used) for group in groups if group.axes is self.index.dense)
        parts = [(self.index.dense, used_here[:dense]), (self.index.experts, used_here[dense:])]
        used_anywhere = [self.context.any_rank(flags, *self._groups_of(axes)) for axes, flags in parts if flags]
        # Reading the flags makes the host wait for the device. If this rank has used every parameter, the result is
        # clear without reading it, unless parameters were frozen, which must be the same ones on all ranks.
        frozen, self._trained = trained != self._trained, trained
        if not frozen and all(used for used, needed in zip(used_here, trained, strict=True) if needed):
            return used_here
        result = [flag for part in used_anywhere for flag in part.read()]
        params = [param for group in groups for param in group.params]
        for param, here, anywhere in zip(params, used_here, result, strict=True):
            if anywhere and not here and not param.trained:
                raise RuntimeError(
                    f"requires_grad of {param.name} is False on this rank, but another rank has a gradient for it. "
                    "Freeze the same parameters on all ranks."
                )
        return result

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply the gradients in ``.grad`` in place by a number, or by a tensor with one element."""
        grads = [getattr(param.main, self.config.grad_attribute, None) for param in self.params()]
        shards = [local_shard(grad) for grad in grads if grad is not None]
        shards += [parameter.grad for parameter in self.config.ignored_params if parameter.grad is not None]
        for device in {shard.device for shard in shards}:
            factor = scaling_factor
            if isinstance(factor, torch.Tensor):
                factor = factor.reshape(()).to(device)
            torch._foreach_mul_([shard for shard in shards if shard.device == device], factor)

    def clear_gradients(self, set_to_none: bool = True) -> None:
        """Drop all gradients: accumulated, reduced, and in ``.grad``, or fill the latter with zeros."""
        if not set_to_none and not self.config.cuda_graph_mode:
            self.finish_pending_gradients()  # parameters that have gradients keep some
        self._nothing_waits()
        self.context.follow()
        for group in self.groups:
            group.clear_gradients(set_to_none)

    def abandon_pass(self) -> None:
        """Reshard all units, and drop gradients that are not in ``.grad`` yet."""
        self._nothing_waits()
        self.schedule.reset()
        self.schedule.abandon_gradients()


# Engines with gradients that are not synchronized yet: reading or setting ``.grad`` of their main weights synchronizes.
_waiting: weakref.WeakSet[Engine] = weakref.WeakSet()


def _finish_of(tensor: Any) -> None:
    if (engine := owner_of(tensor)) is not None:
        engine.finish_before_read()


def synchronizing(original: Any) -> property:
    """The attribute ``grad``, whose value is synchronized before it is read or set."""

    def read(tensor: nn.Parameter) -> torch.Tensor | None:
        _finish_of(tensor)
        grad: torch.Tensor | None = original.__get__(tensor)
        return grad

    def write(tensor: nn.Parameter, grad: torch.Tensor | None) -> None:
        _finish_of(tensor)  # otherwise the gradients that wait would be added to the new one
        original.__set__(tensor, grad)

    def delete(tensor: nn.Parameter) -> None:
        write(tensor, None)

    return property(read, write, delete)


def register_after_synchronizing(original: Callable[..., Any], tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
    """Register a gradient hook that earlier gradients, which are synchronized before, do not pass through."""
    _finish_of(tensor)
    return original(tensor, hook)


# Reading an attribute of a tensor calls no hook. The property is installed only while gradients wait to be
# synchronized, so a step whose backward synchronizes pays nothing for it. A placeholder in ``.grad`` that is computed
# at its first use would need no patch, but only that computation shows which parameters no rank has used.
_ROWS = """
    torch.distributed.tensor:DTensor.grad -> engine:synchronizing FACTORY
        would be None, or lack micro-batches: clipping and scaling by hand would change nothing
    torch.distributed.tensor:DTensor.register_hook -> engine:register_after_synchronizing
        would be called with gradients of micro-batches before it was registered
"""
GRADIENTS = Patches("Gradients that wait to be synchronized", rows_of(_ROWS, "megatron.fsdp.runtime", TORCH))


def engines_of(parameters: Iterable[nn.Parameter]) -> list[Engine]:
    """The engines that the parameters belong to, each once."""
    found: list[Engine] = []
    for parameter in parameters:
        engine = owner_of(parameter)
        if engine is not None and engine not in found:
            found.append(engine)
    return found
