"""MegatronFSDP: the module that wraps a sharded model, under the names that users of Megatron-FSDP know."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from megatron.fsdp.comm.process_groups import require_process_group
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.runtime.builder import build_engine, examine
from megatron.fsdp.runtime.other_engines import refuse_others
from megatron.fsdp.runtime.partition import UnitClasses, is_wrapped, root_modules
from megatron.fsdp.sharding.mesh import FSDPDistributedIndex
from megatron.fsdp.state.export import save_safetensors
from megatron.fsdp.state.loading import (
    NO_COPY,
    NO_PICKLE,
    hook_state_dict,
    load,
    refuse_conversion,
    with_prefix,
)

_OUTSIDE_OF_FORWARD = (
    "FSDP: parameters are DTensors except while the forward of their unit runs. To call another method that reads "
    "them, register it: megatron_fsdp.register_forward_method(module, 'name')."
)


class MegatronFSDP(nn.Module):
    """Fully sharded data parallelism for any ``torch.nn.Module``.

    Between passes the model's parameters are main weights: DTensors of which each rank holds a shard, in the dtype
    that the optimizer updates. During a unit's forward and backward its parameters are compute weights: plain, whole
    tensors in the model's own dtype.

    The idea is that of ZeRO (arXiv:1910.02054) and PyTorch FSDP (arXiv:2304.11277). Flat buffers that collectives
    read and write without copies, and gradients that are reduced from the buffer in which they accumulate, are ideas
    of Megatron-FSDP.

    Args:
        module: The model. All ranks must build it alike. It stays reachable as ``.module``.
        config: Settings; the defaults are those of :class:`FSDPConfig`.
        index: Mesh and axes to shard over. None: one axis over all ranks.
        fsdp_unit_modules: Module classes, or import paths of such: each module of one of them is a unit, unsharded
            and resharded as a whole. The root is the unit of all other parameters. None: weights are never resharded,
            every rank keeps whole compute weights as with DDP; gradients and optimizer state are sharded as the
            strategy says.
        device: Device of the computation. None: that of the parameters, or the current CUDA device if there is one.

    Attributes:
        module: The model.
        engine: The :class:`megatron.fsdp.runtime.engine.Engine` that shards it.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: The model or a setting is invalid. This is checked before anything is allocated.
    """

    @torch.inference_mode(False)  # weights made in inference mode could not be written by a later all-gather
    def __init__(
        self,
        module: nn.Module,
        config: FSDPConfig | None = None,
        index: FSDPDistributedIndex | None = None,
        fsdp_unit_modules: UnitClasses | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        blueprint = examine(module, config or FSDPConfig(), index, fsdp_unit_modules, device)
        # All ranks raise here if one of them has another model, before anything is allocated or communicated.
        blueprint.agreement.wait(blueprint.channel)
        self.module = module
        self.engine = build_engine(blueprint)
        refuse_others(self, is_wrapped)
        hook_state_dict(self.engine, (self, *root_modules(module)))
        self.engine.broadcast_weights()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped model."""
        require_process_group()
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, RuntimeError) and "DTensor" in str(error):
                error.add_note(_OUTSIDE_OF_FORWARD)
            self.engine.schedule.forward_failed()
            raise

    # Settings --------------------------------------------------------------------------------------------------

    @property
    def fsdp_config(self) -> FSDPConfig:
        """The settings."""
        return self.engine.config

    @property
    def index(self) -> FSDPDistributedIndex:
        """The mesh and its process groups."""
        return self.engine.index

    @property
    def device(self) -> torch.device:
        """The device of the computation."""
        return self.engine.device

    # Micro-batches ---------------------------------------------------------------------------------------------

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the next backward is the last one before the optimizer's step. Settable."""
        return self.engine.is_last_microbatch

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self.engine.is_last_microbatch = value

    @property
    def microbatch_count(self) -> int:
        """Number of backward passes since gradients were last synchronized."""
        return self.engine.microbatch_count

    def no_sync(self) -> AbstractContextManager[None]:
        """Context for all micro-batches but the last: gradients are accumulated and not synchronized.

        Gradients that the strategy shards are reduced nevertheless, since no rank keeps whole ones.
        """
        return self.engine.synchronizing(auto_sync=False, last=False)

    def sync(self) -> AbstractContextManager[None]:
        """Context in which every backward ends with reduced gradients in ``.grad``."""
        return self.engine.synchronizing(auto_sync=True)

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Choose whether every backward ends with reduced gradients in ``.grad``."""
        self.engine.model_auto_sync = sync_model

    # Weights ---------------------------------------------------------------------------------------------------

    def install_optimized_model_weights(self) -> None:
        """Make compute weights follow main weights that were changed by a step or a load, before their next use."""
        self.engine.invalidate_weights()

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Start to unshard the units that the next forward needs first.

        Args:
            unused: Accepted as Megatron-Core's wrappers do.
            force_sync: Unshard all weights that every rank keeps whole, and wait.
            force_dispatch: Accepted as Megatron-Core's wrappers do; all-gathers are always issued at once.
        """
        if force_sync or not self.fsdp_config.overlap_param_gather:
            self.engine.unshard_persistent()
        else:
            self.engine.prefetch_first()

    def synchronize_param_gather(self) -> None:
        """Reshard all units: main weights are then the model's parameters."""
        self.engine.reshard()

    def broadcast_params(self) -> None:
        """Make ranks agree on weights that they may have initialized differently. A collective."""
        self.engine.broadcast_weights()

    # Gradients -------------------------------------------------------------------------------------------------

    def start_grad_sync(self, *unused: Any) -> None:
        """Start to reduce gradients that earlier micro-batches have only accumulated."""
        self.engine.start_reductions()

    def synchronize_gradient_reduce(self) -> None:
        """Make the computation wait for all reductions in flight."""
        self.engine.wait_for_reductions()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Finish all reductions, and put gradients into ``.grad`` of the main weights.

        Args:
            force_all_reduce: Accepted as Megatron-Core's wrappers do.
        """
        self.engine.finish_gradients()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply the gradients in ``.grad`` in place by a number, or by a tensor with one element."""
        self.engine.scale_gradients(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Drop all gradients: accumulated, reduced, and in ``.grad``."""
        self.engine.clear_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self.engine.clear_gradients()

    # State -----------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load main weights and buffers; compute weights follow.

        Args:
            state_dict: Whole tensors or DTensors, by the names that ``state_dict()`` uses or by those of the model
                itself, which lack ``module.``. A tied parameter needs one of its names.
            strict: Every parameter and buffer must be present, and nothing else.
            assign: Must be False: values are copied into the memory of the main weights.

        Raises:
            RuntimeError: ``strict``, and keys are missing or unexpected.
            ValueError: A shape differs, or ``assign`` is set.
        """
        if assign:
            raise ValueError("load_state_dict: assign=True would replace the main weights; expected assign=False.")
        # A model with a submodule called "module" may have such names itself.
        if not any(name.startswith("module.") for param in self.engine.params() for name in param.names):
            state_dict = with_prefix(state_dict, "module.", self.engine.params())
        return load(self.engine, self, "module.", state_dict, strict)

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Replace floating-point buffers by their mean over the data-parallel ranks. A collective.

        Ranks update buffers such as BatchNorm's running statistics from their own data, and a checkpoint contains
        those of one rank. Call this before saving to save the mean of all.
        """
        self.engine.average_buffers(self.module)

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
        refuse_conversion(self.engine.params(), fn)
        return self

    def __deepcopy__(self, memo: dict) -> "MegatronFSDP":
        raise NotImplementedError(NO_COPY)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise NotImplementedError(NO_PICKLE)
