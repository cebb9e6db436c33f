"""MegatronFSDP: wraps a model so that data-parallel ranks share its parameters, gradients and optimizer state."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from megatron.fsdp.buffers.flat_buffer import all_reduce, exchange_numbers
from megatron.fsdp.buffers.gradients import GradientScaling
from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.buffers.parameter_group import Environment, ParameterGroup
from megatron.fsdp.buffers.pool import AllocatorPool, FixedPool
from megatron.fsdp.buffers.weights import WeightBuffer
from megatron.fsdp.comm import gloo
from megatron.fsdp.comm.journal import report_on_failure, watch
from megatron.fsdp.comm.process_groups import require_process_group
from megatron.fsdp.comm.registered_memory import NcclMemory
from megatron.fsdp.comm.streams import Handle, Stream, communication_stream, default_device
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.dtensor import torch_patches
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.helpers.weak import weak_method
from megatron.fsdp.init.deferred import forget
from megatron.fsdp.init.materialize import check_can_materialize, comes_last, initialize, materialize_buffers
from megatron.fsdp.runtime.agreement import Agreement, fingerprint, propagate_errors
from megatron.fsdp.runtime.other_engines import refuse_others
from megatron.fsdp.runtime.partition import (
    UnitClasses,
    UnitPart,
    check_devices,
    check_dtypes,
    check_not_wrapped,
    is_wrapped,
    mark_owner,
    partition,
    resolve_unit_classes,
    root_modules,
    tensor_parallel_mesh,
)
from megatron.fsdp.runtime.schedule import Limits, Schedule
from megatron.fsdp.runtime.structure import keep_structure
from megatron.fsdp.runtime.unit import Unit
from megatron.fsdp.sharding.layout import parse_granularity
from megatron.fsdp.sharding.mesh import FSDPDistributedIndex, default_index
from megatron.fsdp.sharding.strategy import Sharding
from megatron.fsdp.state.export import save_safetensors
from megatron.fsdp.state.loading import (
    NO_COPY,
    NO_PICKLE,
    check_shape,
    copy_shard,
    match_keys,
    own_shard,
    refuse_conversion,
    unsharded_state,
    with_prefix,
)

logger = logging.getLogger(__name__)

_READ_AT_REST = (
    "FSDP: parameters are DTensors except while the forward of their unit runs. To call another method that reads "
    "them, register it: megatron_fsdp.register_forward_method(module, 'name')."
)


class MegatronFSDP(nn.Module):
    """Fully sharded data parallelism for any ``torch.nn.Module``.

    At rest the model's parameters are main weights: DTensors of which each rank holds its part, in the dtype that
    the optimizer updates. Around a unit's forward and backward its parameters are compute weights: plain, whole
    tensors in the model's own dtype.

    The idea is that of ZeRO (arXiv:1910.02054) and PyTorch FSDP (arXiv:2304.11277); buffers without copies around
    communication, of units whose gradients are reduced from where they are collected, are that of Megatron-FSDP.

    Args:
        module: The model. Its parameters are taken over; all ranks must build it alike.
        config: Settings; the defaults are those of :class:`FSDPConfig`.
        index: Mesh and axes to shard over. None: one axis over all ranks.
        fsdp_unit_modules: Module classes, or import paths of such: each module of one of them is a unit, gathered
            and released together. The root is the unit of all other parameters. None: nothing is released, every rank
            keeps whole compute weights, as with DDP; gradients and optimizer state are sharded as the strategy says.
        device: Where to compute. None: where the parameters are, or the current CUDA device if there is one.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: The model or a setting is not fit; checked before anything is allocated.
    """

    @torch.inference_mode(False)  # who only evaluates may build it in inference mode, but must be able to gather
    def __init__(
        self,
        module: nn.Module,
        config: FSDPConfig | None = None,
        index: FSDPDistributedIndex | None = None,
        fsdp_unit_modules: UnitClasses | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        require_process_group()
        torch_patches.apply()
        self.fsdp_config = config or FSDPConfig()
        self.device = torch.device(device) if device is not None else default_device(module)
        check_not_wrapped(module)
        self.index = index or default_index(self.device)
        everyone = self.index.dense.dp_group
        self._channel = watch(everyone, self.device)
        with propagate_errors(self.index):
            part = self._examine(module, fsdp_unit_modules)
        self._agreement = Agreement(self.index, *fingerprint(part, self.fsdp_config, self.index, self._settings_of))
        self.agree()

        self.module = module
        self._stream = communication_stream(self.device, everyone)
        self._dp_group = self._stream.group(everyone)
        self._is_last_microbatch = True
        self._model_auto_sync = self.fsdp_config.sync_model_each_microbatch
        self._unsynchronized = False
        self.microbatch_count = 0
        self._without_parameters = materialize_buffers(module, self.device)
        self._move_buffers()
        self._build(
            part, self.fsdp_config.sharding if self._releases else self.fsdp_config.sharding.with_whole_parameters
        )
        if self.fsdp_config.init_model_with_meta_device:
            forget(module)
        self._update_reduce_now()
        self._hook_state_dict()
        keep_structure(module, self)
        self.broadcast_params()

    # Construction ----------------------------------------------------------------------------------------------

    def _examine(self, module: nn.Module, unit_modules: UnitClasses | None) -> UnitPart:
        """Raise if this rank's model or settings are not fit; else divide the model into units."""
        config = self.fsdp_config
        check_devices(module, self.device, config.init_model_with_meta_device)
        if config.init_model_with_meta_device:
            check_can_materialize(module)
        check_dtypes(module, config.mixed_precision_policy)
        classes = resolve_unit_classes(module, unit_modules)
        self._tp_mesh = tensor_parallel_mesh(module, self.index)
        if config.average_in_collective and dist.get_backend(self.index.dense.inner) == "gloo":
            raise ValueError("average_in_collective: gloo can sum only. Leave it off; the result is the same.")
        part = partition(module, classes, config.enable_fine_grained_param_gather)
        self._releases = unit_modules is not None or bool(part.children)
        return part

    def _settings_of(self, part: UnitPart) -> str:
        """What was said about one unit, and must be the same on all ranks."""
        return f"weights are released: {self._releases}" if not part.name else ""

    def agree(self) -> None:
        """Wait until the other ranks have the same model, or raise."""
        self._agreement.wait(self._channel)

    def _move_buffers(self) -> None:
        for buffer in self.module.buffers():
            if buffer.device != self.device:
                buffer.data = buffer.data.to(self.device)

    def _build(self, part: UnitPart, sharding: Sharding) -> None:
        config, everyone = self.fsdp_config, self.index.dense.dp_group
        environment = Environment(
            index=self.index,
            tp_mesh=self._tp_mesh,
            granularity=parse_granularity(config.shard_granularity),
            sharding=sharding,
            policy=config.mixed_precision_policy,
            scaling=GradientScaling(
                factor=1.0 if config.calculate_per_token_loss else 1.0 / self.index.size,
                average=config.average_in_collective,
                # Over gloo parts are sent one by one in any case. Fused kernels give gradients in main_grads_dtype.
                exchange=(config.exchange_gradients or gloo.is_for(everyone, self.device))
                and not config.fused_weight_gradients,
            ),
            device=self.device,
            main_device=torch.device("cpu") if config.offload_optimizer else self.device,
            stream=self._stream,
            unshard_stream=communication_stream(self.device, everyone, second=self.index.has_gather_group),
            pool=AllocatorPool(),
            report_nan=config.report_nan_in_param_grad,
            grad_attribute=config.grad_attribute,
        )
        modules: dict[int, nn.Module] = {}
        self._units: list[Unit] = []
        self._unit_numbers = itertools.count()
        self._nccl_memory: NcclMemory | None = None
        self.pool: FixedPool | None = None
        if config.nccl_ub:
            groups = list(dict.fromkeys([*self.index.dense.groups, self.index.dense.gather]))
            self._nccl_memory = NcclMemory(groups, self.device, config.symmetric_registration)
            self.pool = FixedPool(config.max_unsharded_units, self._nccl_memory.allocation)
        elif config.fsdp_double_buffer:
            self.pool = FixedPool(config.max_unsharded_units)
        self._build_unit(part, environment, modules)
        self._schedule = Schedule(
            self._units,
            Limits(
                gathered=config.max_unsharded_units,
                reducing=config.max_reducing_units,
                prefetch=config.overlap_param_gather and config.max_unsharded_units > 1,
                wait_for_reduction=not config.overlap_grad_reduce,
            ),
            exchange=functools.partial(exchange_numbers, self._stream, self._dp_group, self.device),
            on_backward_end=self._backward_ended,
        )
        for unit in self._units:
            module = modules[id(unit)]
            unit.channel = self._channel
            unit.install_hooks(root_modules(module) if unit.is_root else [module], self._schedule)
            for group in unit.groups:
                group.show(compute=False)
                if config.fused_weight_gradients and group.requires_grad:
                    group.let_kernels_write()
        refuse_others(self, is_wrapped)
        for param in self.params():
            for parameter in (param.original, param.compute, param.main):
                mark_owner(parameter, self)

    def _build_unit(
        self, part: UnitPart, environment: Environment, modules: dict[int, nn.Module], depth: int = 0
    ) -> Unit:
        place, number, own, slot = len(self._units), next(self._unit_numbers), environment, None
        if self.pool is not None:
            inside_another = depth > 1 and self.fsdp_config.fsdp_db_use_persist_buf_on_alloc_fail
            unit_pool = self.pool.for_unit(number, depth, shared=depth > 0 and not inside_another)
            own, slot = dataclasses.replace(environment, pool=unit_pool), unit_pool.slot

        def build_children() -> list[Unit]:
            return [self._build_unit(child, environment, modules, depth + 1) for child in part.children]

        # Numbers are drawn as they were when the model was built; a unit's place is before those in it all the same.
        children = (
            build_children()
            if self.fsdp_config.init_model_with_meta_device and comes_last(part.params, part.params_inside)
            else []
        )
        unit = Unit(part.name, [ParameterGroup(params, own) for params in part.groups], [], slot)
        empty = [group for group in unit.groups if not group.initialized]
        if empty or (unit.is_root and self._without_parameters):
            params = [param for group in empty for param in group.params]
            initialize(params, self.device, self._without_parameters)
            self._without_parameters = []
        for group in empty:
            group.initialize_main()
        self._units.insert(place, unit)
        modules[id(unit)] = part.module
        unit.children += children or build_children()
        return unit

    def _hook_state_dict(self) -> None:
        for module in (self, *root_modules(self.module)):
            module.register_state_dict_pre_hook(weak_method(self._before_state_dict))
            module.register_load_state_dict_post_hook(weak_method(self._after_load_state_dict))

    # Parts -----------------------------------------------------------------------------------------------------

    @property
    def groups(self) -> list[ParameterGroup]:
        """All parameter groups, unit by unit."""
        return [group for unit in self._units for group in unit.groups]

    @property
    def unit_names(self) -> list[str]:
        """Names of the units; the root's is empty."""
        return [unit.name for unit in self._units]

    def params(self) -> Iterator[ShardedParameter]:
        """All parameters, each once."""
        for group in self.groups:
            yield from group.params

    def unit_around(self, module: nn.Module) -> Unit | None:
        """The innermost unit that a part of the wrapped model is in; None if it is no part of it."""
        path = next((name for name, part in self.module.named_modules() if part is module), None)
        if path is None:
            return None
        # Outer units come before those inside them.
        around = [unit for unit in self._units if unit.is_root or f"{path}.".startswith(f"{unit.name}.")]
        return around[-1]

    # Running ---------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped model."""
        require_process_group()
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, RuntimeError) and "DTensor" in str(error):
                error.add_note(_READ_AT_REST)
            self._schedule.forward_failed()
            raise

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the next backward is the last before the optimizer's step. Settable."""
        return self._is_last_microbatch

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self._is_last_microbatch = value
        self._update_reduce_now()

    def _update_reduce_now(self) -> None:
        overlapped = self._is_last_microbatch and self.fsdp_config.overlap_grad_reduce
        self._schedule.reduce_now = self._model_auto_sync or overlapped

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context for micro-batches before the last: gradients are accumulated and not yet synchronized.

        Gradients that the strategy shards are reduced all the same, since no rank keeps whole ones.
        """
        was_last, was_auto = self._is_last_microbatch, self._model_auto_sync
        self._model_auto_sync = False
        self.is_last_microbatch = False
        try:
            yield
        finally:
            self._model_auto_sync = was_auto
            self.is_last_microbatch = was_last

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Context in which every backward ends with reduced gradients in ``.grad``."""
        was_auto = self._model_auto_sync
        self.set_model_auto_sync(True)
        try:
            yield
        finally:
            self.set_model_auto_sync(was_auto)

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Choose whether every backward ends with reduced gradients in ``.grad``."""
        self._model_auto_sync = sync_model
        self._update_reduce_now()

    def _backward_ended(self) -> None:
        self.microbatch_count += 1
        self._unsynchronized = True
        if self._model_auto_sync:
            self.finish_grad_sync()

    # Parameters ------------------------------------------------------------------------------------------------

    def install_optimized_model_weights(self) -> None:
        """The main weights have changed, by a step or a load: compute weights follow before their next use."""
        self._schedule.reset()
        for unit in self._units:
            unit.invalidate()

    @property
    def units_to_prefetch_first(self) -> list[Unit]:
        """What :meth:`prefetch_first` gathers, in that order, as far as main weights may be changed meanwhile."""
        return self._schedule.units_to_prefetch_first()

    def prefetch_first(self, until: Unit | None = None) -> None:
        """Start gathering what the next forward needs first, up to a unit; None: as much as may be in flight."""
        self._schedule.prefetch_first(until)

    def wait_for_prefetched(self) -> None:
        """Wait for the gathers that :meth:`prefetch_first` has started."""
        for group in self.groups:
            group.weights.finish_unshard()

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Start gathering what the next forward needs first.

        Args:
            unused: Accepted as Megatron-Core's wrappers do.
            force_sync: Gather all weights that every rank keeps whole, and wait.
            force_dispatch: Accepted as Megatron-Core's wrappers do; gathers are always dispatched at once.
        """
        if force_sync or not self.fsdp_config.overlap_param_gather:
            persistent = [group.weights for group in self.groups if not group.weights.temporary]
            for weights in persistent:
                weights.unshard()
            for weights in persistent:
                weights.wait()
        else:
            self.prefetch_first()

    def synchronize_param_gather(self) -> None:
        """Bring all units to rest: nothing gathered, main weights visible as the model's parameters."""
        self._schedule.reset()

    def broadcast_params(self) -> None:
        """Make ranks agree on weights that they may have initialized differently.

        Weights that are sharded agree as they are: each part has one owner. Others, and parts that an outer axis
        repeats, become those of the first rank of the axis.
        """
        for group in self.groups:
            for axis, placements in zip(group.axes.groups, group.sharding.axes, strict=False):
                if not placements.shards_optimizer:
                    self._stream.run(functools.partial(self._broadcast, group.weights, axis)).wait()
        self.install_optimized_model_weights()

    def _broadcast(self, weights: WeightBuffer, axis: dist.ProcessGroup) -> None:
        # Only what is on the computing device can be sent: main weights may be on the host.
        sent = weights.main.to(self.device)
        group = self._stream.group(axis)
        with gloo.wait_for_gloo_references(group, sent):
            dist.broadcast(sent, dist.get_global_rank(axis, 0), group=group)
        weights.main.copy_(sent)

    # Gradients -------------------------------------------------------------------------------------------------

    def start_grad_sync(self, *unused: Any) -> None:
        """Start reducing gradients that wait for a reduction."""
        self._schedule.reduce_waiting()

    def synchronize_gradient_reduce(self) -> None:
        """Make the compute wait for all reductions that were started."""
        for group in self.groups:
            group.gradients.wait()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Reduce what waits, wait for it, and put the gradients into ``.grad`` of the main weights.

        Args:
            force_all_reduce: Accepted as Megatron-Core's wrappers do.
        """
        try:
            self._schedule.reduce_waiting()
            with report_on_failure():
                self._schedule.reset()
                self.synchronize_gradient_reduce()
            if self._nccl_memory is not None and self.pool is not None:
                self._nccl_memory.register(self.pool.allocations)
            arrived = self._attach_gradients()
        except BaseException:
            for group in self.groups:
                group.abandon_gradients()
            raise
        self.microbatch_count = 0
        self._unsynchronized = False
        # Hooks may take an optimizer's step.
        for param in arrived:
            param.tell_gradient()

    def _attach_gradients(self) -> list[ShardedParameter]:
        groups = [group for group in self.groups if group.requires_grad or group.pending]
        used = iter(self._used_anywhere(groups))
        arrived = []
        for group in groups:
            flags = [next(used) for _ in group.params]
            arrived += group.attach_gradients(flags, self.fsdp_config.zero_unused_gradients)
        return arrived

    def finish_waiting_gradients(self) -> None:
        """:meth:`finish_grad_sync`, unless it has been called since the last backward."""
        if self._unsynchronized:
            self.finish_grad_sync()

    def _used_anywhere(self, groups: list[ParameterGroup]) -> list[bool]:
        """For each parameter of ``groups``, whether any rank had a gradient for it."""
        used_here = [flag for group in groups for flag in group.used]
        trained = [param.trained for group in groups for param in group.params]
        if self.fsdp_config.zero_unused_gradients or not used_here:
            return used_here
        flags, handle = self._start_any(used_here)
        # What is used here is used: reading the flags, which stops the host, is for ranks that miss a gradient.
        if all(used for used, needed in zip(used_here, trained, strict=True) if needed):
            return used_here
        with report_on_failure():
            handle.wait()
        return [bool(flag) for flag in flags.tolist()]

    def on_any_rank(self, flags: list[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank. All ranks must call this, with as many flags."""
        everyone, handle = self._start_any(flags)
        with report_on_failure():
            handle.wait()
        return [bool(flag) for flag in everyone.tolist()]

    def _start_any(self, flags: list[bool]) -> tuple[torch.Tensor, Handle]:
        """Start finding out which flags are set on any rank: the result, and what to wait for before it is read."""
        everyone = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        handle = self._stream.run(functools.partial(_all_reduce_max, self._stream, everyone, self._dp_group))
        self._channel.note(f"compare {len(flags)} flags", [handle])
        return everyone, handle

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply the gradients in ``.grad`` in place.

        Args:
            scaling_factor: A number or a tensor with one element.
        """
        grads = [getattr(param.main, self.fsdp_config.grad_attribute, None) for param in self.params()]
        locals_ = [local_shard(grad) for grad in grads if grad is not None]
        if isinstance(scaling_factor, torch.Tensor):
            scaling_factor = scaling_factor.reshape(())
        torch._foreach_mul_(locals_, scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Drop all gradients, collected, reduced or in ``.grad``."""
        for group in self.groups:
            group.clear_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self.zero_grad_buffer()

    # State -----------------------------------------------------------------------------------------------------

    def _before_state_dict(self, *unused: Any) -> None:
        self._schedule.show_main()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load main weights and buffers; compute weights follow.

        Args:
            state_dict: By the names that ``state_dict()`` uses, or by those of the model itself, which lack
                ``module.``: whole tensors, or DTensors. A tied parameter needs one of its names.
            strict: Every parameter and buffer must be there, and nothing else.
            assign: Must be False: the values are copied into the memory of the main weights.

        Raises:
            RuntimeError: ``strict``, and keys are missing or unexpected.
            ValueError: A shape differs, or ``assign`` is set.
        """
        if assign:
            raise ValueError("load_state_dict: assign=True would replace the main weights; expected assign=False.")
        # A model with a part called "module" may have such names itself.
        if not any(name.startswith("module.") for param in self.params() for name in param.names):
            state_dict = with_prefix(state_dict, "module.", self.params())
        return self._load(self, "module.", state_dict, strict)

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Replace buffers of floating point by their mean over the data-parallel ranks. A collective.

        Ranks update buffers such as BatchNorm's running statistics from their own data, and a checkpoint has those of
        one rank. Call this before saving to save the mean of all.
        """
        size = self.index.dense.dp_group.size()
        for buffer in self.module.buffers():
            if buffer.is_floating_point():
                self._stream.run(functools.partial(all_reduce, buffer, dist.ReduceOp.SUM, self._dp_group)).wait()
                buffer.div_(size)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("_"):
                raise
        if name == "save_pretrained" and hasattr(module, name):
            return functools.partial(save_safetensors, self)
        return getattr(module, name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "MegatronFSDP":
        refuse_conversion(self.params(), fn)
        return self

    def __deepcopy__(self, memo: dict) -> "MegatronFSDP":
        raise NotImplementedError(NO_COPY)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise NotImplementedError(NO_PICKLE)

    @torch.no_grad()
    def _load(self, module: nn.Module, prefix: str, state_dict: Mapping[str, Any], strict: bool) -> Any:
        """:meth:`load_state_dict` by the names in ``module``'s state dict: ``prefix`` stands before parameters'."""
        names = {id(param): [prefix + name for name in param.names] for param in self.params()}
        wanted: dict[str, Any] = {name: param for param in self.params() for name in names[id(param)]}
        wanted |= unsharded_state(module)
        tied = {name for of_entry in names.values() if any(n in state_dict for n in of_entry) for name in of_entry}
        keys = match_keys({k: v for k, v in wanted.items() if k in state_dict or k not in tied}, state_dict, strict)
        # Nothing is changed before everything is known to fit.
        for key in keys:
            if isinstance(wanted[key], ShardedParameter):
                check_shape(wanted[key], state_dict[key], key)
        for key in keys:
            target = wanted[key]
            if isinstance(target, ShardedParameter):
                copy_shard(target, own_shard(target, state_dict[key]))
            elif isinstance(target, nn.Module):
                target.set_extra_state(state_dict[key])
            else:
                target.copy_(state_dict[key])
        self.install_optimized_model_weights()
        return _IncompatibleKeys([k for k in wanted if k not in keys], [k for k in state_dict if k not in keys])

    def _after_load_state_dict(self, *unused: Any) -> None:
        self.install_optimized_model_weights()


def _all_reduce_max(stream: Stream, flags: torch.Tensor, group: dist.ProcessGroup) -> None:
    stream.keep([flags])
    all_reduce(flags, dist.ReduceOp.MAX, group)
