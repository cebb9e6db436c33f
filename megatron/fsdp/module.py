"""ShardedModel: the wrapper module of a sharded model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.comm.collectives import AllGather, AllReduce, ReduceScatter
from megatron.fsdp.comm.process_groups import require_process_group
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.dtensor.unsupported import NO_COPY, refuse_join
from megatron.fsdp.helpers.arguments import check_type
from megatron.fsdp.helpers.notes import add_note
from megatron.fsdp.quantized.storage import KEEP_TRANSPOSE, storage_of
from megatron.fsdp.runtime.builder import build_engine, make_blueprint
from megatron.fsdp.runtime.partition import UnitClasses, root_modules
from megatron.fsdp.runtime.structure import reject_conversion
from megatron.fsdp.sharding.mesh import MeshIndex
from megatron.fsdp.state.export import adapt_pretrained
from megatron.fsdp.state.full_weights import BUCKET, Convert, Options, full_weights
from megatron.fsdp.state.loading import (
    NO_PICKLE,
    compare_expert_names,
    hook_state_dict,
    ignored_parameters,
    load,
    with_prefix,
)

_OUTSIDE_OF_FORWARD = (
    "FSDP: parameters are DTensors except while the forward of their unit runs. To call another method that reads "
    "them, register it: megatron_fsdp.register_forward_method(module, 'name')."
)


class ShardedModel(nn.Module):
    """A model whose parameters, gradients and optimizer state are sharded over the data-parallel ranks.

    Users get one from :func:`megatron_fsdp.fully_shard_model`, as a :class:`megatron_fsdp.MegatronFSDP`, which adds the
    names of Megatron-FSDP's API.

    Outside of forward and backward the model's parameters are main weights: DTensors of which each rank holds its
    shard, in the dtype that the optimizer updates. During a unit's forward and backward its parameters are compute
    weights: plain, full tensors in the model's own dtype.

    The idea is that of ZeRO (arXiv:1910.02054) and PyTorch FSDP (arXiv:2304.11277). Gradients are reduced from the
    buffers they are accumulated in, without copies, as in Megatron-FSDP.

    Args:
        module: The model. All ranks must build the same one.
        config: Settings.
        index: Mesh and axes to shard over. None: one axis of all ranks.
        unit_modules: Module classes, class names, import paths or modules; see ``fully_shard_model``.
        device: Device to compute on. None: that of the parameters, or the current CUDA device if there is one.

    Attributes:
        module: The model.
        engine: The :class:`megatron.fsdp.runtime.engine.Engine` that shards it.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: The model or a setting cannot be used as given.
        NotImplementedError: A setting requests a feature that is not supported.
    """

    @torch.inference_mode(False)  # weights made in inference mode could not be written by a later all-gather
    def __init__(
        self,
        module: nn.Module,
        config: FSDPConfig,
        index: MeshIndex | None = None,
        unit_modules: UnitClasses | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_type("module", module, nn.Module)
        super().__init__()
        blueprint = make_blueprint(module, config, index, unit_modules, device)
        for param in (param for part in blueprint.root.walk() for param in part.params):
            if storage_of(param.compute) is not None:
                setattr(param.compute, KEEP_TRANSPOSE, config.keep_fp8_transpose_cache)
        # All ranks raise here if one of them has another model, before anything is allocated or communicated.
        blueprint.agreement.wait(blueprint.channel)
        self.module = module
        self.engine = build_engine(blueprint)
        hook_state_dict(self.engine, (self, *root_modules(module)))
        adapt_pretrained(self)
        self.engine.broadcast_weights()
        compare_expert_names(self.engine)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped model."""
        require_process_group()
        self.engine.schedule.end_failed_callers_pass()
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, RuntimeError) and "DTensor" in str(error):
                add_note(error, _OUTSIDE_OF_FORWARD)
            self.engine.schedule.forward_failed()
            raise

    # Settings --------------------------------------------------------------------------------------------------

    @property
    def fsdp_config(self) -> FSDPConfig:
        """The settings."""
        return self.engine.config

    @property
    def index(self) -> MeshIndex:
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

    join_hook = refuse_join

    def no_sync(self) -> AbstractContextManager[None]:
        """Context for all micro-batches but the last: gradients are accumulated and not synchronized.

        Gradients that the strategy shards are reduced nevertheless, since no rank keeps full ones.
        """
        return self.engine.synchronizing(auto_sync=False, last=False)

    # Weights ---------------------------------------------------------------------------------------------------

    def mark_weights_changed(self) -> None:
        """Tell the model that main weights were written in a way that PyTorch does not count.

        Writes through parameters, their ``.data``, ``detach()``, ``state_dict()`` and ``to_local()`` are noticed. Those
        of a collective, of NumPy or of ``to_local().data`` are not: call this before the next forward, on all ranks.
        """
        self.engine.invalidate_weights()

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Context without gradients in which every rank holds all compute weights, for ``generate()`` and the like.

        Forwards inside it communicate nothing, so ranks may run different numbers of them, or none. All ranks enter and
        leave it together. Weights that are changed inside it are lost, and it needs memory for the whole model.

        Raises:
            RuntimeError: ``fsdp_double_buffer`` is on: units then share buffers.
        """
        with torch.no_grad(), self.engine.unsharded():
            yield

    def full_weights(
        self,
        bucket_bytes: int = BUCKET,
        dtype: torch.dtype | None = None,
        to_rank: int | None = None,
        convert: Convert | None = None,
        names: Callable[[str], str] | None = None,
        expert_group: dist.ProcessGroup | None = None,
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield all full weights, and then persistent buffers, in buckets: for inference while training.

        The next bucket is gathered while the caller uses one, so memory grows by two buckets. A tied parameter comes
        once, under its first name. All ranks iterate to the end, between steps.

        Args:
            bucket_bytes: Bytes of a bucket. A larger tensor has a bucket alone.
            dtype: Dtype of the weights, to which they are cast before they are sent. None: that of compute weights.
            to_rank: The only rank that gets them; others get empty buckets. None: all ranks.
            convert: ``convert(name, tensor)`` returns pairs of names and tensors to yield instead, such as those of
                Hugging Face.
            names: Returns the name to yield for a parameter's name in this model. None: the same name.
            expert_group: The expert-parallel ranks, if each has other experts. Then ``names`` has to return other names
                on each of them.

        Yields:
            Tensors on the model's device, by name. They are valid until the next bucket is asked for: its memory is
            that of the bucket before. To keep one, ``clone()`` it.

        Raises:
            ValueError: Ranks give other arguments, ``to_rank`` does not hold the model, or two tensors have one name.
            NotImplementedError: Experts need ``expert_group``.
            RuntimeError: Weights changed meanwhile, or tensors of an earlier bucket are still in use.
        """
        options = Options(bucket_bytes, dtype, to_rank, convert, names or str, expert_group)
        return full_weights(self.engine, self.module, options)

    def register_buffers(self) -> None:
        """Register all communication buffers that exist now with NCCL. A collective, to be called between steps.

        Only ``fsdp_manual_registration`` makes it necessary. The first step should have run, because it makes most
        buffers.

        Raises:
            RuntimeError: ``nccl_ub`` is off, or a rank has too little memory.
        """
        self.engine.register_buffers()

    # Gradients -------------------------------------------------------------------------------------------------

    def finish_grad_sync(self) -> None:
        """Finish all reductions, and put gradients into ``.grad`` of the main weights."""
        self.engine.finish_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or fill those in ``.grad`` with zeros."""
        self.engine.clear_gradients(set_to_none)
        for parameter in ignored_parameters(self.module).values():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    # State -----------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load main weights and buffers, and mark compute weights as out of date.

        Args:
            state_dict: Full tensors or DTensors, by the names that ``state_dict()`` uses or by those of the model
                itself, which lack ``module.``. A tied parameter needs one of its names.
            strict: Every parameter and buffer must be present, and nothing else.
            assign: Must be False: values are copied into the memory of the main weights.

        Raises:
            RuntimeError: ``strict``, and keys are missing or unexpected.
            ValueError: A shape differs, or ``assign`` is set.
        """
        check_type("state_dict", state_dict, Mapping)
        if assign:
            raise ValueError("load_state_dict: assign=True would replace the main weights; expected assign=False.")
        # A model with a submodule called "module" has such names without the wrapper.
        if not any(name.startswith("module.") for param in self.engine.params() for name in param.names):
            state_dict = with_prefix(state_dict, "module.", self.engine.params())
        return load(self.engine, self, "module.", state_dict, strict)

    def use_collectives(
        self,
        *,
        all_gather: AllGather | None = None,
        reduce_scatter: ReduceScatter | None = None,
        all_reduce: AllReduce | None = None,
        module: nn.Module | None = None,
    ) -> None:
        """Communicate weights and gradients by other operations from now on, such as a compressed reduction.

        :class:`megatron.fsdp.comm.collectives.Collectives` says what each operation has to do. All ranks must call this
        at the same point, outside of forward and backward.

        Args:
            all_gather: Gathers weights. None: as before.
            reduce_scatter: Reduces gradients to shards. It gets them in the dtype of communication.
            all_reduce: Reduces gradients of which every rank needs the sum, as with ``no_shard`` or HSDP.
            module: Only those of the unit that contains this module. None: those of all units.

        Raises:
            ValueError: ``module`` is no part of the model.
        """
        unit = None if module is None else self.engine.unit_around(module)
        if module is not None and unit is None:
            raise ValueError(f"module: expected a module of the sharded model; got a {type(module).__name__}.")
        given = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}
        names = [f"{name}={getattr(f, '__qualname__', type(f).__name__)}" for name, f in given.items() if f is not None]
        # Recorded, so that ranks that use different ones are reported.
        self.engine.context.channel.note(f"use collectives {', '.join(names)}", [])
        self.engine.use_collectives(unit, **given)

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Replace floating-point buffers by their mean over the data-parallel ranks. A collective.

        Ranks update buffers such as BatchNorm's running statistics from their own data, and a checkpoint contains
        those of one rank. Call this before saving to save the mean of all.
        """
        self.engine.average_buffers(self.module)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the module's attribute if it has one, and this object has none: reading finds the module's, too."""
        inner = vars(self).get("_modules", {}).get("module")
        own = name in vars(self) or hasattr(type(self), name) or name in vars(self).get("_modules", {})
        if inner is None or own or name.startswith("_") or not hasattr(inner, name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("_"):
                raise
        return getattr(module, name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "ShardedModel":
        reject_conversion((param.main for param in self.engine.params()), fn)
        return self

    def __deepcopy__(self, memo: dict) -> "ShardedModel":
        raise NotImplementedError(NO_COPY)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise NotImplementedError(NO_PICKLE)
