"""MegatronFSDP: the sharded model that users hold, with the constructor, attributes and methods of the original."""

import inspect
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.ddp_config import DistributedDataParallelConfig, from_megatron, to_megatron
from megatron.fsdp.module import MegatronFSDP as ShardedModel
from megatron.fsdp.runtime.partition import UnitClasses
from megatron.fsdp.runtime.unit import WeightState
from megatron.fsdp.sharding.mesh import FSDPDistributedIndex
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy


class MegatronFSDP(ShardedModel):
    """A model whose parameters, gradients and optimizer state are sharded over the data-parallel ranks.

    :func:`megatron_fsdp.fully_shard_model` creates one from plain arguments; this constructor is for code that already
    has a :class:`DistributedDataParallelConfig`. Unlike there, backward does not synchronize gradients by default: call
    ``finish_grad_sync`` before the optimizer's step, or give the optimizer to ``fully_shard_optimizer``, whose step
    does that.

    Outside of forward and backward the model's parameters are main weights: DTensors of which each rank holds its
    shard, in the dtype that the optimizer updates. During a unit's forward and backward its parameters are compute
    weights: plain, whole tensors in the model's own dtype.

    The idea is that of ZeRO (arXiv:1910.02054) and PyTorch FSDP (arXiv:2304.11277). Gradients are reduced from the
    buffers they are accumulated in, without copies, as in Megatron-FSDP.

    Args:
        module: The model. All ranks must build the same one.
        dist_index: Mesh and axes to shard over. None: one axis of all ranks.
        ddp_config: Settings of data parallelism, Megatron-Core's or ours. None: everything is sharded, and
            communication overlaps with computation.
        mixed_precision_policy: Dtypes of main weights, gradients and communication. None: the defaults of
            :class:`MixedPrecisionPolicy`. Dtypes in ``ddp_config`` have no effect here.
        fsdp_unit_modules: Module classes, class names or import paths; see ``fully_shard_model``.
        disable_bucketing: No effect: a unit is one bucket per dtype.
        device: Device to compute on. None: that of the parameters, or the current CUDA device if there is one.
        calculate_per_token_loss: Sum gradients over ranks without dividing; the caller scales them.
        init_model_with_meta_device: Accept parameters on the meta device and initialize them unit by unit.
        sync_model_each_microbatch: End every backward with reduced gradients in ``.grad``.
        keep_fp8_transpose_cache: Not supported; True raises an error.
        nccl_ub: As in ``ddp_config``; either of them suffices. Likewise the following three.
        fsdp_double_buffer: See ``nccl_ub``.
        fsdp_db_use_persist_buf_on_alloc_fail: See ``nccl_ub``.
        disable_symmetric_registration: See ``nccl_ub``.
        enable_fine_grained_param_gather_hook: Make every module that directly owns parameters a unit.
        enable_fine_grained_param_gather_backward_hook: The same: such units are unsharded in backward as well.
        fine_grained_recurse_module_types: Not supported; a class in it raises an error.
        report_nan_in_param_grad: Raise at the first gradient that is not finite, and name its parameter.
        config: All settings of the engine, instead of ``ddp_config`` and the arguments that repeat its fields.

    Attributes:
        ddp_config: The settings as Megatron names them: the object given, or one with the same values.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError: ``dist_index`` has another class.
        ValueError: The model or a setting cannot be used as given, or ``config`` comes with other settings.
        NotImplementedError: A setting requests a feature that is not supported.
    """

    def __init__(
        self,
        module: nn.Module,
        dist_index: FSDPDistributedIndex | FSDPConfig | None = None,
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
        if isinstance(dist_index, FSDPConfig):  # earlier versions took (module, config, index)
            config, dist_index, ddp_config = dist_index, ddp_config, None
        arguments = dict(locals())
        if dist_index is not None and not isinstance(dist_index, FSDPDistributedIndex):
            raise TypeError(
                f"dist_index: expected megatron_fsdp.FSDPDistributedIndex; got {type(dist_index).__module__}."
                f"{type(dist_index).__name__}."
            )
        if config is None:
            config = _config_from(arguments)
        elif given := sorted(name for name in _SETTINGS if arguments[name] != _DEFAULTS[name]):
            raise ValueError(f"config has all settings; got {', '.join(given)} besides it.")
        super().__init__(module, config, dist_index, fsdp_unit_modules, device)
        self.ddp_config = to_megatron(config) if ddp_config is None else ddp_config
        # Weak: the model owns its parameters, and must be freed as soon as its last user drops it.
        model = weakref.proxy(self)
        for param in self.params():
            for parameter in (param.compute, param.main):
                parameter._megatron_fsdp_model = model  # type: ignore[attr-defined]

    # Settings --------------------------------------------------------------------------------------------------

    @property
    def dist_index(self) -> FSDPDistributedIndex:
        """Mesh and process groups of the model."""
        return self.index

    def get_distributed_index(self) -> FSDPDistributedIndex:
        """Return ``dist_index``."""
        return self.index

    @property
    def data_parallel_sharding_strategy(self) -> str:
        """Name of the strategy of the inner axis."""
        return str(self.fsdp_config.zero_dp_strategy)

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """Dtypes of main weights, gradients and communication."""
        return self.fsdp_config.mixed_precision_policy

    @contextmanager
    def mixed_precision_context(self, mixed_precision_policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Context with another mixed-precision policy; see :meth:`reset_mixed_precision_policy`."""
        self.reset_mixed_precision_policy(mixed_precision_policy)
        yield

    def reset_mixed_precision_policy(self, mixed_precision_policy: MixedPrecisionPolicy) -> None:
        """Change the dtype that gradients are reduced in. Dtypes of main weights and gradients stay as they are.

        Raises:
            NotImplementedError: ``grad_comm_dtype`` means another dtype than the present one, for which the
                communication buffers are laid out.
        """
        asked = mixed_precision_policy.grad_comm_dtype
        if any((asked or group.dtypes.main_grads) != group.dtypes.grad_comm for group in self.groups):
            raise NotImplementedError(
                f"The communication buffers were laid out for {self.mp_policy}; got grad_comm_dtype={asked}. Shard the "
                "model with the dtype that it needs: fully_shard_model(mixed_precision_policy=...)."
            )

    # Synchronization -------------------------------------------------------------------------------------------

    @property
    def model_auto_sync(self) -> bool:
        """Whether every backward ends with reduced gradients in ``.grad``. Settable."""
        return self._model_auto_sync

    @model_auto_sync.setter
    def model_auto_sync(self, value: bool) -> None:
        self.set_model_auto_sync(value)

    def attach_grad_to_optimizer_state(self) -> None:
        """Put the gradients into ``.grad`` of the main weights, after reducing those that still have to be."""
        self.finish_waiting_gradients()

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
        for unit in self._units:
            held = {id(p) for group in unit.groups for e in group.params for p in (e.original, e.compute, e.main)}
            if wanted.isdisjoint(held):
                continue
            if unit.state is WeightState.SHARDED:
                unit.unshard()
            if wait_bucket_ready and unit.state is WeightState.UNSHARDING:
                unit.use(WeightState.UNSHARDED)

    def _replace_param_with_distributed_if_needed(self) -> None:
        # The original's documentation tells users to call this before they create an optimizer.
        self.synchronize_param_gather()


_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(MegatronFSDP.__init__).parameters.items()}
_IN_BOTH = (
    "nccl_ub",
    "fsdp_double_buffer",
    "fsdp_db_use_persist_buf_on_alloc_fail",
    "disable_symmetric_registration",
)
_SETTINGS = _DEFAULTS.keys() - {"self", "module", "dist_index", "fsdp_unit_modules", "device", "config"}


def _config_from(arguments: dict[str, Any]) -> FSDPConfig:
    """The engine's settings for the constructor's arguments."""
    given = arguments["ddp_config"]
    ddp_config = given or DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    for name in ("keep_fp8_transpose_cache", "fp8_param_gather"):
        if arguments.get(name) or getattr(ddp_config, name, False):
            raise NotImplementedError(f"{name}: weights in FP8 are not supported yet. Leave it off.")
    if arguments["fine_grained_recurse_module_types"]:
        raise NotImplementedError(
            "fine_grained_recurse_module_types: schedules that call modules inside a unit directly are not supported "
            "in this way. Register the methods that they call: megatron_fsdp.register_forward_method(module, name)."
        )
    merged = {name: bool(arguments[name] or getattr(ddp_config, name)) for name in _IN_BOTH}
    return from_megatron(
        ddp_config,
        mixed_precision_policy=arguments["mixed_precision_policy"] or MixedPrecisionPolicy(),
        calculate_per_token_loss=arguments["calculate_per_token_loss"],
        init_model_with_meta_device=arguments["init_model_with_meta_device"],
        sync_model_each_microbatch=arguments["sync_model_each_microbatch"],
        report_nan_in_param_grad=arguments["report_nan_in_param_grad"] or ddp_config.check_for_nan_in_grad,
        enable_fine_grained_param_gather=(
            arguments["enable_fine_grained_param_gather_hook"]
            or arguments["enable_fine_grained_param_gather_backward_hook"]
            or ddp_config.megatron_fsdp_enable_fine_grained_param_gather
        ),
        **merged,
    )
