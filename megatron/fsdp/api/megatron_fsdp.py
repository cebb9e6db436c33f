"""MegatronFSDP: a sharded model with the constructor and the method names that Megatron-FSDP gave it."""

import dataclasses
import inspect
import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.api.ddp_config import NOTHING_SHARDED, DistributedDataParallelConfig, from_megatron, to_megatron
from megatron.fsdp.api.index import FSDPDistributedIndex
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.helpers.arguments import described
from megatron.fsdp.module import ShardedModel
from megatron.fsdp.quantized.storage import Direction
from megatron.fsdp.runtime.partition import UnitClasses
from megatron.fsdp.runtime.unit import WeightState
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy

logger = logging.getLogger(__name__)


class MegatronFSDP(ShardedModel):
    """A model whose parameters, gradients and optimizer state are sharded over the data-parallel ranks.

    :func:`megatron_fsdp.fully_shard_model` creates one from plain arguments; this constructor is for code that already
    has a :class:`DistributedDataParallelConfig`. Unlike there, backward does not synchronize gradients by default: call
    ``finish_grad_sync`` before the optimizer's step, or give the optimizer to ``fully_shard_optimizer``, whose step
    does that.

    Outside of forward and backward the model's parameters are main weights: DTensors of which each rank holds its
    shard, in the dtype that the optimizer updates. During a unit's forward and backward its parameters are compute
    weights: plain, full tensors in the model's own dtype.

    Args:
        module: The model. All ranks must build the same one.
        dist_index: Mesh and axes to shard over. None: one axis of all ranks.
        ddp_config: Settings of data parallelism, Megatron-Core's or this project's. None: everything is sharded, and
            communication overlaps with computation.
        mixed_precision_policy: Dtypes of main weights, gradients and communication. None: the defaults of
            :class:`MixedPrecisionPolicy`. Dtypes in ``ddp_config`` have no effect here.
        fsdp_unit_modules: Module classes, class names, import paths or modules; see ``fully_shard_model``.
        disable_bucketing: No effect: a unit is one bucket per dtype.
        device: Device to compute on. None: that of the parameters, or the current CUDA device if there is one.
        calculate_per_token_loss: Sum gradients over ranks without dividing; the caller scales them.
        init_model_with_meta_device: Accept parameters on the meta device and initialize them unit by unit.
        sync_model_each_microbatch: End every backward with reduced gradients in ``.grad``.
        keep_fp8_transpose_cache: As in ``ddp_config``; either of them suffices. Likewise the following four.
        nccl_ub: See ``keep_fp8_transpose_cache``.
        fsdp_double_buffer: See ``keep_fp8_transpose_cache``.
        fsdp_db_use_persist_buf_on_alloc_fail: See ``keep_fp8_transpose_cache``.
        disable_symmetric_registration: See ``keep_fp8_transpose_cache``.
        enable_fine_grained_param_gather_hook: Make every module that directly owns parameters a unit.
        enable_fine_grained_param_gather_backward_hook: The same: such units are unsharded in backward as well.
        fine_grained_recurse_module_types: Not supported; a class in it raises an error.
        report_nan_in_param_grad: Raise at the first gradient that is not finite, and name its parameter.
        config: All settings of the engine, instead of ``ddp_config`` and the arguments that repeat its fields.

    Attributes:
        module: The model.
        engine: The :class:`megatron.fsdp.runtime.engine.Engine` that shards it.
        dist_index: Mesh and process groups of the model.
        ddp_config: The settings as Megatron names them: the object given, or one with the same values.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError: ``dist_index`` has another class.
        ValueError: The model or a setting cannot be used as given, or ``config`` comes with other settings.
        NotImplementedError: A setting requests a feature that is not supported.
    """

    _mp_policy: MixedPrecisionPolicy | None = None  # since reset_mixed_precision_policy()

    def __init__(
        self,
        module: nn.Module,
        dist_index: FSDPDistributedIndex | None = None,
        ddp_config: Any = None,
        mixed_precision_policy: MixedPrecisionPolicy | None = None,
        fsdp_unit_modules: UnitClasses | None = None,
        disable_bucketing: bool = False,
        device: torch.device | str | None = None,
        calculate_per_token_loss: bool = False,
        init_model_with_meta_device: bool = False,
        sync_model_each_microbatch: bool = False,
        keep_fp8_transpose_cache: bool = False,
        nccl_ub: bool = False,
        fsdp_double_buffer: bool = False,
        fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
        disable_symmetric_registration: bool = False,
        enable_fine_grained_param_gather_hook: bool = False,
        enable_fine_grained_param_gather_backward_hook: bool = False,
        fine_grained_recurse_module_types: tuple[type[nn.Module], ...] | None = None,
        report_nan_in_param_grad: bool = False,
        *,
        config: FSDPConfig | None = None,
    ) -> None:
        arguments = dict(locals())
        if dist_index is not None and not isinstance(dist_index, FSDPDistributedIndex):
            raise TypeError(
                f"dist_index: expected megatron_fsdp.FSDPDistributedIndex; got {described(dist_index)}. Make one: "
                "FSDPDistributedIndex(device_mesh, ...)."
            )
        if config is None:
            config = _config_from(arguments)
        elif given := sorted(name for name in _SETTINGS if arguments[name] != _DEFAULTS[name]):
            raise ValueError(f"config has all settings; got {', '.join(given)} besides it.")
        super().__init__(module, config, dist_index, fsdp_unit_modules, device)
        if ddp_config is not None and not config.sharding.inner.shards_optimizer and dist.get_rank() == 0:
            logger.warning("FSDP: %s", NOTHING_SHARDED)
        self.dist_index = dist_index or FSDPDistributedIndex(self.engine.index.device_mesh)
        self.ddp_config = to_megatron(config) if ddp_config is None else ddp_config
        # Weak: the model owns its parameters, and must be freed as soon as its last user drops it.
        model = weakref.proxy(self)
        for param in self.engine.params():
            for parameter in (param.compute, param.main):
                parameter._megatron_fsdp_model = model  # type: ignore[attr-defined]

    # Settings --------------------------------------------------------------------------------------------------

    @property
    def index(self) -> FSDPDistributedIndex:
        """The mesh and its process groups: ``dist_index``."""
        return self.dist_index

    def get_distributed_index(self) -> FSDPDistributedIndex:
        """Return ``dist_index``."""
        return self.dist_index

    @property
    def data_parallel_sharding_strategy(self) -> str:
        """Name of the strategy of the inner axis."""
        return str(self.fsdp_config.zero_dp_strategy)

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """Dtypes of main weights, gradients and communication."""
        return self._mp_policy or self.fsdp_config.mixed_precision_policy

    @contextmanager
    def mixed_precision_context(self, mixed_precision_policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Context in which gradients are reduced in a different dtype; see :meth:`reset_mixed_precision_policy`."""
        before = self.mp_policy
        self.reset_mixed_precision_policy(mixed_precision_policy)
        try:
            yield
        finally:
            self.reset_mixed_precision_policy(before)

    def reset_mixed_precision_policy(self, mixed_precision_policy: MixedPrecisionPolicy) -> None:
        """Change the dtype that gradients are reduced in. Dtypes of main weights and gradients stay as they are.

        Raises:
            NotImplementedError: Communication buffers have fixed addresses, and are laid out for a different dtype.
            RuntimeError: A backward has accumulated gradients that are not reduced yet.
            ValueError: float16 and bfloat16 would be mixed.
        """
        policy = dataclasses.replace(self.mp_policy, grad_comm_dtype=mixed_precision_policy.grad_comm_dtype)
        changes = {group: policy.grad_comm_dtype or group.dtypes.main_grads for group in self.engine.groups}
        changes = {group: dtype for group, dtype in changes.items() if dtype != group.dtypes.grad_comm}
        for group, dtype in changes.items():
            if group.gradients.reduction.pool.is_fixed:
                raise NotImplementedError(
                    f"The communication buffers were laid out for {self.mp_policy}; got grad_comm_dtype={dtype}. "
                    "Shard the model with the dtype that it needs: fully_shard_model(mixed_precision_policy=...)."
                )
            if group.gradients.owed:
                raise RuntimeError(
                    f"grad_comm_dtype={dtype}: gradients of {group.params[0].name} are still to be reduced in "
                    f"{group.dtypes.grad_comm}. Change it after finish_grad_sync() or the optimizer's step."
                )
        for group, dtype in changes.items():
            group.gradients.wait()
            group.dtypes = dataclasses.replace(group.dtypes, grad_comm=dtype)
            group.gradients.reduction.use(group.dtypes)
        self._mp_policy = policy

    # Micro-batches ---------------------------------------------------------------------------------------------

    def sync(self) -> AbstractContextManager[None]:
        """Context in which every backward ends with reduced gradients in ``.grad``."""
        return self.engine.synchronizing(auto_sync=True)

    @property
    def model_auto_sync(self) -> bool:
        """Whether every backward ends with reduced gradients in ``.grad``. Settable."""
        return self.engine.model_auto_sync

    @model_auto_sync.setter
    def model_auto_sync(self, value: bool) -> None:
        self.engine.model_auto_sync = value

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Choose whether every backward ends with reduced gradients in ``.grad``."""
        self.engine.model_auto_sync = sync_model

    # Weights ---------------------------------------------------------------------------------------------------

    def install_optimized_model_weights(self) -> None:
        """Mark compute weights as out of date after a step or a load has changed main weights."""
        self.engine.invalidate_weights()

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Start to unshard the units that the next forward needs first.

        Args:
            unused: Accepted as Megatron-Core's wrappers do.
            force_sync: Unshard all weights that every rank keeps in full, and wait.
            force_dispatch: Accepted as Megatron-Core's wrappers do; all-gathers are always issued at once.
        """
        if force_sync or not self.fsdp_config.overlap_param_gather:
            self.engine.unshard_persistent()
        else:
            self.engine.schedule.prefetch_first()

    def synchronize_param_gather(self) -> None:
        """Reshard all units: main weights are then the model's parameters."""
        self.engine.reshard()

    def broadcast_params(self) -> None:
        """Make replicas of main weights equal: those of the first rank along each axis that does not shard them.

        A shard has one owner and stays as it is, so this does not give all ranks the model of the first rank: sharding
        does that (``sync_module_states``). Call it after a write that differed between replicas. A collective.
        """
        self.engine.broadcast_weights()

    def all_gather_and_wait_parameters_ready(
        self,
        params: Iterable[nn.Parameter],
        prefetch: bool = True,
        prefetch_order: object = None,
        wait_bucket_ready: bool = True,
        bwd: bool = False,
    ) -> None:
        """Unshard the units that hold certain parameters.

        Afterwards the modules of these units have compute weights as parameters, until their next forward ends or
        ``synchronize_param_gather`` is called.

        Args:
            params: Parameters of the model, sharded or not.
            prefetch: No effect: forward and backward prefetch, this method does not.
            prefetch_order: No effect.
            wait_bucket_ready: Wait for the all-gathers. If False, they are only started.
            bwd: No effect: forward and backward use the same weights.
        """
        wanted = {id(parameter) for parameter in params}
        for unit in self.engine.units:
            held = {id(p) for group in unit.groups for e in group.params for p in (e.original, e.compute, e.main)}
            if wanted.isdisjoint(held):
                continue
            if unit.state is WeightState.SHARDED:
                unit.unshard()
            if wait_bucket_ready and unit.state in (WeightState.UNSHARDING, WeightState.UNSHARDED):
                unit.use(WeightState.UNSHARDED)

    def _replace_param_with_distributed_if_needed(self) -> None:
        # Part of the documented use of NVIDIA's: scripts call it before they create an optimizer.
        self.synchronize_param_gather()

    # Schedules that call modules inside units ------------------------------------------------------------------

    # Where a schedule does not call the model and its units but modules inside them, no hooks run, and it calls these
    # methods in the same order on all ranks. The forward of one micro-batch and the backward of another may overlap.

    def pre_forward(self) -> None:
        """Begin the forward of one micro-batch, and unshard the parameters outside of units."""
        self.engine.schedule.begin_callers_forward()

    def post_forward(self) -> None:
        """End the forward that :meth:`pre_forward` has begun, and reshard units that it has left unsharded."""
        self.engine.schedule.end_callers_forward()

    def pre_forward_unshard_module(self, module: nn.Module) -> None:
        """Unshard the units in ``module``, or the unit around it, for forward."""
        self.engine.hold(module, Direction.FORWARD)

    def post_forward_release_module(self, module: nn.Module) -> None:
        """Reshard these units after their forward. A unit that the backward in progress needs stays unsharded."""
        self.engine.let_go(module, Direction.FORWARD)

    def pre_backward(self) -> None:
        """Begin the backward of one micro-batch, and unshard the parameters outside of units."""
        self.engine.schedule.begin_callers_backward()

    def post_backward(self) -> None:
        """End the backward that :meth:`pre_backward` has begun: reduce the gradients that are left."""
        if self.engine.schedule.passes.by_caller:
            self.engine.schedule.finish_backward()

    def pre_backward_unshard_module(self, module: nn.Module) -> None:
        """Unshard the units in ``module``, or the unit around it, for backward."""
        self.engine.hold(module, Direction.BACKWARD)

    def post_backward_release_module(self, module: nn.Module) -> None:
        """Reshard these units when all their gradients of this micro-batch are computed, and reduce the gradients."""
        self.engine.let_go(module, Direction.BACKWARD)

    def _replace_param_with_raw_if_needed(self) -> None:
        # Megatron-Core's schedule calls this once per step. Here each unshard makes compute weights the parameters.
        pass

    # Gradients -------------------------------------------------------------------------------------------------

    def start_grad_sync(self, *unused: Any) -> None:
        """Start to reduce gradients that earlier micro-batches have only accumulated."""
        self.engine.schedule.reduce_waiting()

    def synchronize_gradient_reduce(self) -> None:
        """Make the computation wait for all reductions in flight."""
        self.engine.wait_for_reductions()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Finish all reductions, and put gradients into ``.grad`` of the main weights.

        Args:
            force_all_reduce: Accepted as Megatron-Core's wrappers do.
        """
        self.engine.finish_gradients()

    def attach_grad_to_optimizer_state(self) -> None:
        """Put the gradients into ``.grad`` of the main weights, after reducing those that still have to be."""
        self.engine.finish_pending_gradients()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply the gradients in ``.grad`` in place by a number, or by a tensor with one element."""
        self.engine.scale_gradients(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Drop all gradients: accumulated, reduced, and in ``.grad``."""
        self.engine.clear_gradients()


_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(MegatronFSDP.__init__).parameters.items()}
_SETTINGS = _DEFAULTS.keys() - {"self", "module", "dist_index", "fsdp_unit_modules", "device", "config"}


def _config_from(arguments: dict[str, Any]) -> FSDPConfig:
    """Translate the constructor's arguments to the engine's settings."""
    ddp_config = arguments["ddp_config"]
    if ddp_config is None:
        ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    if arguments["fine_grained_recurse_module_types"]:
        raise NotImplementedError(
            "fine_grained_recurse_module_types: schedules that call modules inside a unit directly are not supported "
            "in this way. Register the methods that they call: megatron_fsdp.register_forward_method(module, name)."
        )
    # Arguments that are named like a setting; either they or the same ones of ``ddp_config`` switch it on.
    names = arguments.keys() & {field.name for field in dataclasses.fields(FSDPConfig)} - {"mixed_precision_policy"}
    merged = {name: bool(arguments[name] or getattr(ddp_config, name, False)) for name in names}
    merged["report_nan_in_param_grad"] |= ddp_config.check_for_nan_in_grad
    merged["enable_fine_grained_param_gather"] = bool(
        arguments["enable_fine_grained_param_gather_hook"]
        or arguments["enable_fine_grained_param_gather_backward_hook"]
        or ddp_config.megatron_fsdp_enable_fine_grained_param_gather
    )
    policy = arguments["mixed_precision_policy"] or MixedPrecisionPolicy()
    return from_megatron(ddp_config, mixed_precision_policy=policy, **merged)
