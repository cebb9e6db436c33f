"""FullyShardedDataParallel: this engine behind the interface of Megatron-Core's data-parallel wrappers."""

import dataclasses
import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.ssm.mamba_context_parallel import MambaContextParallel
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import log_single_rank
from megatron.fsdp.api.ddp_config import FLAGS, from_megatron
from megatron.fsdp.api.index import FSDPDistributedIndex
from megatron.fsdp.api.megatron_fsdp import MegatronFSDP
from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.comm.backends import compute_device
from megatron.fsdp.config import SYNCHRONOUS, FSDPConfig
from megatron.fsdp.convert.huggingface.arguments import from_args
from megatron.fsdp.convert.huggingface.live import to_huggingface_names
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.helpers.spelling import bare_name
from megatron.fsdp.mcore.limits import Settings, adjust, check
from megatron.fsdp.mcore.options import EXPERT_INSTANCES, ROOT_EMBEDDINGS
from megatron.fsdp.mcore.parameter_names import global_name
from megatron.fsdp.mcore.resuming import megatron_arguments
from megatron.fsdp.mcore.topology import make_index, mark_tensor_parallel
from megatron.fsdp.optim.classes import looks_at
from megatron.fsdp.optim.hooks import attach_at_first_use
from megatron.fsdp.optim.local_step import LocalStep
from megatron.fsdp.quantized.storage import drop_copies_after_forward
from megatron.fsdp.runtime.engine import Engine, engines_of
from megatron.fsdp.runtime.partition import UnitClasses, resolve_unit_classes
from megatron.fsdp.runtime.unit import Unit
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.state.full_weights import BUCKET, Convert
from megatron.fsdp.state.loading import unsharded_state

logger = logging.getLogger(__name__)

# Modules of these classes and their subclasses, such as MoETransformerLayer, are units by default.
DEFAULT_UNITS: tuple[type[nn.Module], ...] = (TransformerLayer, MambaLayer)

# Layers in which this is true write weight gradients into ``main_grad``: Megatron-Core's layers, Transformer Engine's
# modules, and its operations.
_FUSES = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation", "_accumulate_into_main_grad")


class ShardedModule(MegatronFSDP):
    """The ``module`` of a :class:`FullyShardedDataParallel`.

    Megatron's checkpointing removes only the outer wrapper, so this class needs the method that checkpointing calls.
    """

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return main weights and buffers."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)


class _Step(LocalStep):
    """Checks before an optimizer's step that Megatron-Core's training loop has synchronized gradients.

    Element-wise optimizers then update local shards: fused ones of other libraries take their memory's addresses.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        optimizer.register_step_pre_hook(self.check)
        if looks_at(optimizer) == "element":
            optimizer.register_step_pre_hook(self.before_step)
            optimizer.register_step_post_hook(self.after_step)

    def add_engines(self, engines: list[Engine]) -> None:
        """Check these engines, too."""
        self._engines.update(engines)
        self.add(group for engine in engines for group in engine.groups)

    def check(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Step pre-hook: raise if a backward has ended since gradients were last synchronized."""
        if any(engine.has_pending_gradients for engine in self._engines):
            raise RuntimeError(
                "The optimizer's step would ignore the gradients of the latest backward, which are not synchronized "
                "yet. Call finish_grad_sync() of the wrapped model, or Megatron's finalize_model_grads(), before the "
                "step."
            )


def _mark(group: ParameterGroup, sharded: ShardedModule) -> None:
    """Set the attributes that Megatron-Core and Megatron-Bridge read from the parameters of NVIDIA's FSDP."""
    shards = sharded.engine.config.sharding_of(group.params[0].key.expert).inner.shards_optimizer
    # Megatron's norm of gradients, a sum over ranks, leaves out what is marked as shared.
    repeated = shards and not group.sharding.inner.shards_optimizer and dist.get_rank(group.axes.inner) > 0
    for param in group.params:
        main: Any = param.main
        main.orig_param = param.compute
        main.__fsdp_param__ = True
        main.megatron_fsdp_slice = slice(param.shard_slice.start, param.shard_slice.stop)
        main.megatron_fsdp_dist_index = sharded.index
        if repeated:
            main.shared = True


def _attach(optimizer: torch.optim.Optimizer) -> None:
    step: _Step | None = vars(optimizer).get("_fsdp_step")
    if step is None:
        step = vars(optimizer)["_fsdp_step"] = _Step(optimizer)
    step.add_engines(engines_of(p for group in optimizer.param_groups for p in group["params"]))


class WeightInstaller:
    """The part of NVIDIA's ``param_and_grad_buffer`` that Megatron-Core's optimizer and training loop use.

    Args:
        module: The sharded module.
    """

    def __init__(self, module: ShardedModule) -> None:
        self._module = module

    def copy_main_weights_to_model_weights(self) -> None:
        """Mark compute weights as out of date. Megatron-Core's optimizer calls this after its step."""
        self._module.install_optimized_model_weights()

    def manual_buffer_registration(self) -> None:
        """Register the buffers with NCCL. With ``fsdp_manual_registration`` the loop calls this after one iteration."""
        self._module.register_buffers()


class FullyShardedDataParallel(_BaseDataParallel):
    """Wraps a Megatron model for training with ``use_megatron_fsdp``.

    Args:
        config: The TransformerConfig of the model.
        ddp_config: Settings of data parallelism. They are changed in place according to ``limits.ADJUSTMENTS``.
        module: The model, or a Float16Module around it.
        fsdp_unit_modules: What becomes a unit. None: see :func:`units_of`.
        disable_bucketing: No effect: a unit is one bucket per dtype.
        device: Device of the computation. None: the current CUDA device, or the CPU if there is none.
        pg_collection: Process groups. None: those of ``megatron.core.parallel_state``.
        engine_settings: Fields of :class:`FSDPConfig` that Megatron has no setting for, such as
            ``reshard_after_forward``, ``ignored_params`` and ``replicated_params``.

    Raises:
        ValueError: Settings contradict each other.
        NotImplementedError: A setting is not supported.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        fsdp_unit_modules: UnitClasses | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **engine_settings: Any,
    ) -> None:
        settings = Settings(ddp_config, config)
        check(settings)
        adjust(settings)
        _follow_settings(module, config)
        device = compute_device(module, device)
        has_experts = config.expert_model_parallel_size > 1
        instances = getattr(ddp_config, EXPERT_INSTANCES, None) if has_experts else None
        index = make_index(pg_collection, device, instances)
        if ddp_config.num_distributed_optimizer_instances > 1 and not index.use_hybrid_fsdp:
            raise ValueError(
                f"num_distributed_optimizer_instances is {ddp_config.num_distributed_optimizer_instances}: expected a "
                "group inter_dist_opt of that many ranks in pg_collection or in parallel_state; got none."
            )
        mark_tensor_parallel(module, index)
        units = units_of(module, ddp_config) if fsdp_unit_modules is None else fsdp_unit_modules
        sharded = ShardedModule(
            module,
            index,
            fsdp_unit_modules=units,
            device=device,
            config=fsdp_config(config, ddp_config, largest_unit(module, units), **engine_settings),
        )
        super().__init__(config=config, module=sharded)
        if config.init_model_with_meta_device:
            _update_helpers(sharded)
            self._share_embedding(pg_collection)
        attach_at_first_use(sharded.engine, _attach)
        sharded.engine.reads_synchronize = False
        self.ddp_config = sharded.ddp_config = ddp_config
        self.fsdp_unit_modules = units
        self.param_and_grad_buffer = WeightInstaller(sharded)
        # The training loop sets this to request full gradients, which are not supported; see limits.LIMITS.
        self.force_all_reduce = False
        for group in sharded.engine.groups:
            _mark(group, sharded)
        _log_plan(sharded)
        _warn_of_copies(sharded.engine.units, config)

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """Dtypes of main weights, gradients and communication."""
        return self.module.mp_policy

    @property
    def megatron_fsdp_dist_index(self) -> FSDPDistributedIndex:
        """Mesh and process groups of the model."""
        return self.module.index

    @torch.no_grad()
    def _share_embedding(self, groups: ProcessGroupCollection | None) -> None:
        """Copy the first pipeline stage's embedding to the last stage, whose tied copy is initialized with zeros.

        Megatron does this when it builds the model, except for models on the meta device.
        """
        shared = [param.main for param in self.module.engine.params() if getattr(param.main, "shared_embedding", False)]
        for main in shared:
            # A shared embedding has a parameter group for itself, so both stages divide it in the same way, and the
            # sum over the two stages' shards, one of which is zero, is a copy.
            embd = (groups or ProcessGroupCollection.use_mpu_process_groups(["embd"])).embd
            dist.all_reduce(local_shard(main), group=embd)
        if shared:
            self.module.install_optimized_model_weights()

    # Gradients -------------------------------------------------------------------------------------------------

    def no_sync(self) -> Any:
        """Context for the micro-batches before the last."""
        return self.module.no_sync()

    def start_grad_sync(self, *unused: Any) -> None:
        """Start to reduce gradients that earlier micro-batches have only accumulated."""
        self.module.start_grad_sync()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Finish all reductions, and put gradients into ``.grad`` of the main weights.

        Args:
            force_all_reduce: Must be False: gradients are sharded, and no rank has memory for full ones.
        """
        if force_all_reduce:
            raise NotImplementedError("finish_grad_sync(force_all_reduce=True): gradients stay sharded.")
        self.module.finish_grad_sync()
        if self.ddp_config.check_for_nan_in_grad or self.ddp_config.check_for_large_grads:
            self._check_gradients()
        gradient = self.module.fsdp_config.grad_attribute
        for param in self.module.engine.params():
            # Megatron-Core sums the gradients of tied embeddings on two pipeline stages and assigns this rank's shard
            # of the sum, a plain tensor. A DTensor's .grad must be a DTensor; main_grad, which Megatron-Core prefers,
            # may be anything. It reduces main_grad or grad over tensor-parallel ranks, and never decoupled_grad.
            if getattr(param.main, "shared_embedding", False) or gradient != "grad":
                param.main.main_grad = getattr(param.main, gradient)
        if not USING_PYTORCH_OPTIMIZER and not self.module.fsdp_config.offload_optimizer:
            # Fused optimizers of Apex and Transformer Engine skip the tensors that follow an empty one.
            for param in self.module.engine.params():
                if local_shard(param.main).numel() == 0:
                    setattr(param.main, gradient, None)

    def _check_gradients(self) -> None:
        gradient = self.module.fsdp_config.grad_attribute
        grads = [(param.name, getattr(param.main, gradient, None)) for param in self.module.engine.params()]
        named = [(name, local_shard(grad)) for name, grad in grads if grad is not None]
        shards = [grad for _, grad in named if grad.numel()]
        if not shards:
            return
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(shards)).float())
        machine = get_rerun_state_machine()
        message = "gradient norm of this rank's shards, after reduction: any data-parallel rank may be at fault"
        if not torch.isfinite(total):
            bad = [name for name, grad in named if not torch.isfinite(grad).all()]
            names = f"not finite in {', '.join(bad[:8])}{' and others' if len(bad) > 8 else ''}"
            logger.error("Megatron-FSDP: gradients are %s", names)
            # A rerun of the step finds the check by its message, which must not depend on what was found.
            message += f"; {names}" * (machine.get_mode() is RerunMode.DISABLED)
        large = functools.partial(machine.is_unexpectedly_large, threshold=10, context="grads")
        # For each check: whether it is on, the name of the finding, the test, and whether a finding ends the run.
        checks: tuple[tuple[bool, str, Callable[..., Any], bool], ...] = (
            (self.ddp_config.check_for_nan_in_grad, "NaN", torch.isnan, True),
            (self.ddp_config.check_for_nan_in_grad, "Inf", torch.isinf, True),
            (self.ddp_config.check_for_large_grads, "an unexpectedly large value", large, False),
        )
        for is_on, finding, rejects, fatal in checks:
            if is_on:
                text = f"found {finding} in {message}"
                machine.validate_result(total, rejects, message=text, tolerance=0.001, fatal=fatal)

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply all gradients in place."""
        self.module.scale_gradients(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Drop all gradients."""
        self.module.zero_grad_buffer()
        for param in self.module.engine.params():
            if hasattr(param.main, "main_grad") and not self.module.fsdp_config.cuda_graph_mode:
                param.main.main_grad = None

    # Parameters ------------------------------------------------------------------------------------------------

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Start to unshard the units that the next forward needs first."""
        if self.ddp_config.fsdp_all_gather_in_start_param_sync or force_sync:
            self.module.start_param_sync(force_sync=force_sync)

    def synchronize_param_gather(self) -> None:
        """Reshard all units: main weights are then the model's parameters."""
        self.module.synchronize_param_gather()

    def stop_communication(self) -> None:
        """Wait for all communication in flight, and reshard all units."""
        self.module.synchronize_gradient_reduce()
        self.module.synchronize_param_gather()

    def free_overlap_buffers(self) -> None:
        """Free the weights that were prefetched for the next forward. Megatron calls this before it saves."""
        self.module.synchronize_param_gather()

    def broadcast_params(self) -> None:
        """Make replicas of main weights equal; see :meth:`MegatronFSDP.broadcast_params`. A collective."""
        self.module.broadcast_params()

    def full_weights(
        self,
        bucket_bytes: int = BUCKET,
        dtype: torch.dtype | None = None,
        to_rank: int | None = None,
        convert: Convert | None = None,
        huggingface: bool = False,
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the full weights of this rank's pipeline stage in buckets; see :meth:`ShardedModel.full_weights`.

        Names count the layers and experts of the whole model. The tensors of tensor- and expert-parallel ranks are
        gathered as well.

        Args:
            bucket_bytes: Bytes of a bucket.
            dtype: Dtype of the weights. None: that of compute weights.
            to_rank: The only rank that gets them, one of this stage. None: all ranks.
            convert: Converts each tensor.
            huggingface: Give the tensors Hugging Face's names and layouts, by Megatron's arguments.

        Raises:
            NotImplementedError: ``huggingface``, and no architecture of its fits the arguments.
            ValueError: ``huggingface``, and a parameter has no name there.
        """
        model: Any = self.module.module
        model = model.module if isinstance(model, Float16Module) else model
        if huggingface:
            convert = to_huggingface_names(from_args(megatron_arguments()))
        experts = parallel_state.get_expert_model_parallel_group(check_initialized=False)
        several = experts if experts is not None and experts.size() > 1 else None
        return self.module.full_weights(
            bucket_bytes, dtype, to_rank, convert, lambda name: global_name(model, bare_name(name)), several
        )

    # State -----------------------------------------------------------------------------------------------------

    def sharded_state_dict(self, *unused: Any, **also_unused: Any) -> dict[str, Any]:
        """Raise NotImplementedError: Megatron's ShardedTensors describe parameters that every rank has in full."""
        raise NotImplementedError(
            "sharded_state_dict() would describe every rank's shard as a full parameter. Save with "
            "torch.distributed.checkpoint and state_dict(), or with Megatron's save_checkpoint() and ckpt_format "
            "fsdp_dtensor."
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load main weights and buffers.

        Args:
            state_dict: Full or sharded tensors. Names may have any number of leading ``module.``: every wrapper adds
                one, but not all wrappers keep it in their state dicts.
            strict: Every parameter and buffer must be present, and nothing else.
        """
        names = {bare_name(name): f"module.{name}" for param in self.module.engine.params() for name in param.names}
        names |= {bare_name(name): name for name in unsharded_state(self.module)}
        renamed = {names.get(bare_name(key), key): value for key, value in state_dict.items()}
        return self.module.load_state_dict(renamed, strict=strict)


def _log_plan(sharded: ShardedModule) -> None:
    units, config = sharded.engine.units, sharded.fsdp_config
    log_single_rank(
        logger, logging.INFO, f"Megatron-FSDP: {len(units)} units over {sharded.index.size} ranks, {config}"
    )
    if config.offload_optimizer:
        sizes = [(sum(group.layout.numel for group in unit.groups), unit.is_offloaded) for unit in units]
        share = sum(size for size, offloaded in sizes if offloaded) / max(sum(size for size, _ in sizes), 1)
        log_single_rank(
            logger,
            logging.WARNING,
            f"Megatron-FSDP: the optimizer of {sum(offloaded for _, offloaded in sizes)} of {len(units)} units is in "
            f"host memory, {share:.1%} of the parameters ({config.offload_fraction:.1%} requested)",
        )


def _warn_of_copies(units: Sequence[Unit], config: TransformerConfig) -> None:
    """Warn if layers keep 8-bit copies of plain weights from forward to backward."""
    layers = [layer for unit in units if unit.gathers_twice for layer in unit.layers()] if config.fp8 else []
    if not (kept := drop_copies_after_forward(layers)):
        return
    numel = sum(p.numel() for layer in kept for p in layer.parameters(recurse=False) if p.dim() > 1)
    text = (
        f"Megatron-FSDP: with FP8, {', '.join(sorted({type(layer).__name__ for layer in kept}))} may keep copies of "
        f"their weights from forward to backward, up to {2 * numel:,} bytes per rank. Use --fp8-param-gather, or "
        "recompute the layers (--recompute-granularity full). Transformer Engine 2.15 and later keep fewer."
    )
    log_single_rank(logger, logging.WARNING, text)


def largest_unit(module: nn.Module, units: UnitClasses) -> int:
    """The number of parameters of the largest unit of a class; 0 if there is none.

    An embedding is left out: if it is much larger than the layers, no layer would be unsharded ahead.
    """
    classes = tuple(cls for cls in resolve_unit_classes(module, units) if isinstance(cls, type))
    sizes = (sum(p.numel() for p in each.parameters()) for each in module.modules() if isinstance(each, classes))
    return max(sizes, default=0)


def fsdp_config(
    config: TransformerConfig, ddp_config: DistributedDataParallelConfig, unit_size: int = 0, **given: Any
) -> FSDPConfig:
    """Translate Megatron's settings to the engine's.

    Args:
        config: The model's settings.
        ddp_config: Settings of data parallelism.
        unit_size: The number of parameters of the largest unit; 0 if there is none.
        given: Fields of :class:`FSDPConfig` that have these values.
    """
    # Megatron's training loop finishes gradients once per step, not after each backward, and its optimizer reads the
    # gradient of every trainable parameter. MXFP8 weights (fp8_param_gather) need no
    # enable_fine_grained_param_gather, which Megatron-Core's FSDP sets for them: a unit's pass gathers only the bytes
    # that it reads, by rows in forward and by columns in backward.
    settings = {**given, "sync_model_each_microbatch": False, "zero_unused_gradients": True}
    if getattr(ddp_config, FLAGS["offload_optimizer"], False):
        settings["use_decoupled_grad"] = True  # see megatron.fsdp.mcore.offload
    found = from_megatron(ddp_config, config, **settings)
    if found.synchronous and config.cuda_graph_impl == "full_iteration":
        # Megatron captures an iteration whatever the engine's settings are.
        raise ValueError(f"{SYNCHRONOUS}=1 turns CUDA graphs off: expected --cuda-graph-impl none; got full_iteration.")
    in_flight = ddp_config.suggested_communication_unit_size
    if in_flight is None or not unit_size or found.fsdp_double_buffer:
        return found
    # Megatron-Core prefetches units until half as many parameters are in flight, and lets the reductions of at most so
    # many go on.
    prefetched, reducing = math.ceil(in_flight // 2 / unit_size), max(in_flight // unit_size, 1)
    return dataclasses.replace(found, max_unsharded_units=1 + prefetched, max_reducing_units=reducing)


def units_of(
    module: nn.Module, ddp_config: DistributedDataParallelConfig | None = None
) -> list[type[nn.Module] | nn.Module]:
    """Return what becomes a unit by default: layers, and a language model's embedding and output layer.

    The last two stay in the root unit where Megatron-Core reads their weights outside of them, as tied weights are, or
    where ``fsdp_embeddings_in_root`` is set: the root stays unsharded during a step, and larger units take its place.
    """
    found: list[type[nn.Module] | nn.Module] = [
        unit for unit in DEFAULT_UNITS if any(isinstance(m, unit) for m in module.modules())
    ]
    if not found or getattr(ddp_config, ROOT_EMBEDDINGS, None):
        return found
    models = [m for m in module.modules() if isinstance(m, LanguageModule)]
    for model in [m for m in models if not getattr(m, "share_embeddings_and_output_weights", True)]:
        found += [m for m in model.children() if isinstance(m, LanguageModelEmbedding)]
        output = getattr(model, "output_layer", None)
        if isinstance(output, nn.Module) and not getattr(model.config, "mtp_detach_heads", False):
            found.append(output)
    return found


def _update_helpers(module: ShardedModule) -> None:
    """Replace the meta device's parameters in Mamba's helper for context parallelism, which is no module."""
    compute = {id(param.original): param.compute for param in module.engine.params()}
    helpers = (value for layer in module.modules() for value in vars(layer).values())
    for helper in [value for value in helpers if isinstance(value, MambaContextParallel)]:
        for name, value in vars(helper).items():
            setattr(helper, name, compute.get(id(value), value))


def _follow_settings(module: nn.Module, config: TransformerConfig) -> None:
    """Give layers the settings that were adjusted after they had copied them."""
    changes: dict[str, bool] = {}
    if not config.gradient_accumulation_fusion:
        changes = dict.fromkeys(_FUSES, False)
    if config.disable_parameter_transpose_cache:
        changes["disable_parameter_transpose_cache"] = True
    for layer in module.modules():
        for name, value in changes.items():
            if hasattr(layer, name):
                setattr(layer, name, value)
