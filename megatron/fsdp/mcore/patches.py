"""Makes an unmodified Megatron-Core and its training loop use this FSDP.

:func:`install` replaces the names in :data:`MEGATRON`, and :func:`uninstall` puts the originals back.
"""

from collections.abc import Callable, Iterator
from typing import Any

from megatron.fsdp.helpers.import_name import warn_of_conflict
from megatron.fsdp.helpers.patches import MEGATRON_CORE, Kind, Patch, Patches, Versions, rows_of, warn_if_untried

# Checked on the CPU, where mocks replace Transformer Engine, which Megatron-Bridge imports.
MEGATRON_BRIDGE = Versions("megatron-bridge", ("0.6.2",))

_CHECKPOINTING = "megatron.training.checkpointing"
_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_OPTIMIZERS = "megatron.core.optimizer.optimizer"
_PIPELINE = "megatron.core.pipeline_parallel"
_BRIDGE = "megatron.bridge"
_SAVING = f"{_BRIDGE}.training.checkpointing"
_ADAPTERS = f"{_BRIDGE}.models.conversion.peft_bridge:MegatronPeftBridge"
_HERE = "megatron.fsdp.mcore"
_WRAPPER = "adapter:FullyShardedDataParallel"
_FSDP = "megatron.core.distributed.fsdp"
_ORIGINAL = f"{_FSDP}.src.megatron_fsdp"
_ADAPTER = f"{_FSDP}.mcore_fsdp_adapter"

_API = "MegatronFSDP MixedPrecisionPolicy FSDPDistributedIndex fully_shard fully_shard_model fully_shard_optimizer"
# What scripts import from Megatron-Core's FSDP: the module there, the module here, and the names.
_PUBLIC = (
    ("", "", _API),
    (".fully_shard", "", _API),
    (".megatron_fsdp", "", "MegatronFSDP MixedPrecisionPolicy FSDPDistributedIndex"),
    (".mixed_precision", "", "MixedPrecisionPolicy"),
    (".utils", "", "FSDPDistributedIndex"),
    (
        ".uneven_dtensor",
        ".api.uneven_dtensor",
        "filter_unflattened_state_dict gather_and_compute_chunk_metadata gather_uneven_dtensor_to_full_tensor "
        "get_unflattened_state_dict preprocess_state_dict_for_uneven_dtensor redistribute_uneven_dtensor_to_replicated "
        "split_dtensor uneven_dtensor_to_full_tensor update_uneven_dtensor_chunk_metadata validate_uneven_dtensor",
    ),
)


def _public() -> Iterator[Patch]:
    for theirs, ours, names in _PUBLIC:
        for name in names.split():
            reason = "is what scripts import, without Megatron's wrapper"
            if name == "uneven_dtensor_to_full_tensor":
                reason = "gathers shards of different lengths, which gloo cannot do"
            target, replacement = f"{_ORIGINAL}{theirs}:{name}", f"megatron.fsdp{ours}:{name}"
            yield Patch(target, reason, replacement, MEGATRON_CORE, Kind.VALUE)


def refuse_original(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raise an error: a name of Megatron-Core's FSDP was imported before it was replaced."""
    raise RuntimeError(
        "Megatron-Core's FSDP was called although megatron.fsdp.mcore.install() has replaced it: a name such as "
        "FullyShardedDataParallel was imported before. Call install() before these imports, or start the script with "
        "python -m megatron.fsdp.launch. Call megatron.fsdp.mcore.uninstall() to use Megatron-Core's FSDP."
    )


# Megatron-Core and its training loop.
_OF_MEGATRON = f"""
    # The wrapper. The class is looked up by its name, so this row precedes the one that replaces the name.
    {_ORIGINAL}.megatron_fsdp:MegatronFSDP.__init__ -> patches:refuse_original
        would run in place of this FSDP where its name was imported before it was replaced
    {_ADAPTER}:FullyShardedDataParallel -> {_WRAPPER} VALUE
        is imported by unwrap_model() at every call, to find out which wrappers to remove
    {_ADAPTER}:FullyShardedDataParallelV1 -> {_WRAPPER} VALUE since=0.20
        is what unwrap_model() imports since FullyShardedDataParallel is a function that calls it
    {_FSDP}:FullyShardedDataParallel -> {_WRAPPER} VALUE
        is what scripts import to wrap a model
    megatron.core.distributed:FullyShardedDataParallel -> {_WRAPPER} VALUE
        is what scripts import to wrap a model
    megatron.training.training:megatron_FSDP -> {_WRAPPER} VALUE before=0.20
        is what get_model() wraps with, and how train() recognizes a model chunk that has no_sync()
    megatron.training.training:FullyShardedDataParallel -> {_WRAPPER} VALUE since=0.20
        is what get_model() wraps with
    megatron.training.training:FullyShardedDataParallelV1 -> {_WRAPPER} VALUE since=0.20
        is how train() recognizes a model chunk that has no_sync()
    megatron.training.models.dist_utils:FullyShardedDataParallel -> {_WRAPPER} VALUE
        is what model builders wrap a model with
    # The command line, and building the model.
    megatron.training.arguments:add_megatron_arguments -> options:add_megatron_arguments
        lacks options for experts in the versions before they were added
    megatron.training.arguments:validate_args -> limits:validate_args
        does not check that settings work with this FSDP before memory is allocated
    # The beginning and the end of a run.
    megatron.training.training:train -> limits:train
        evaluates for process_non_loss_data_func on the last rank, which lacks the others' shards
    megatron.training.training:initialize_megatron -> ending:initialize
        leaves the file in which an earlier run has said how it ended
    megatron.core.datasets.utils:compile_helpers -> ending:compile_if_missing
        ends the run because the wheel has no Makefile, although it has the compiled helpers
    megatron.training.global_vars:DistributedSignalHandler -> ending:SignalHandler VALUE
        does not save at Ctrl-C
    megatron.training.datasets.data_samplers:DistributedSignalHandler -> ending:SignalHandler VALUE
        does not save at Ctrl-C
    megatron.training.training:get_model -> initialization:build_recorded
        loses how Megatron's layers are initialized if it builds them on the meta device
    megatron.training.models.dist_utils:build_virtual_pipeline_stages -> initialization:build_recorded
        builds models from a configuration, and loses how they are initialized in the same way
    # The optimizer.
    megatron.core.optimizer:_get_megatron_emerging_optimizer -> muon:get_emerging_optimizer
        orthogonalizes a rank's part of a matrix as if it were the matrix
    # Statistics of gradients.
    megatron.training.training:get_megatron_optimizer -> statistics:get_megatron_optimizer
        reduces statistics over one optimizer instance, or over tensor- and pipeline-parallel ranks only
    megatron.core.optimizer:get_megatron_optimizer -> statistics:get_megatron_optimizer
        reduces statistics over one optimizer instance, or over tensor- and pipeline-parallel ranks only
    {_OPTIMIZERS}:MegatronOptimizer._filter_grads_for_norm -> statistics:filter_grads_for_norm since=0.19
        selects a gradient on every rank that has a copy of it
    {_OPTIMIZERS}:MegatronOptimizer.get_main_grads_for_grad_norm -> statistics:main_grads_for_norm before=0.19
        selects a gradient on every rank that has a copy of it
    {_OPTIMIZERS}:MegatronOptimizer.count_zeros -> statistics:count_zeros
        counts zeros once for every rank that has a copy of the gradient
    {_OPTIMIZERS}:ChainedOptimizer.count_zeros -> statistics:count_zeros
        counts zeros once for every rank that has a copy of the gradient
    megatron.training.training:calc_params_l2_norm -> statistics:params_l2_norm
        raises an error for shards of different lengths, and cannot compute on weights in host memory
    megatron.training.training:check_param_hashes_across_dp_replicas -> replicas:check_param_hashes
        compares the parameters of data-parallel ranks, which are different shards
    # Overlap of the forward of one micro-batch with the backward of another.
    {_PIPELINE}.schedules:combined_1f1b_schedule_for_interleaved_pipelining -> overlap:interleaved_step
        rejects FSDP
    {_PIPELINE}.combined_1f1b:combined_forward_backward_step -> overlap:combined_step
        does not call the model, whose hooks begin and end passes
    megatron.core.models.common.model_chunk_schedule_plan:TransformerLayerSchedulePlan.run -> overlap:run_layers
        does not call layers, whose hooks unshard and reshard them
    # The optimizer in host memory.
    megatron.training.training:get_megatron_ddp_config -> options:get_megatron_ddp_config
        does not tell the wrapper that the optimizer is offloaded to the CPU, and how experts are sharded
    megatron.core.optimizer:HybridDeviceOptimizer -> offload:build_optimizer
        makes further copies of main weights on the host, and its state cannot be saved with FSDP
    # Saving and loading.
    {_CHECKPOINTING}:generate_state_dict -> save:generate_state_dict
        collects a checkpoint's state and does not keep the model chunks that it belongs to
    {_CHECKPOINTING}:preprocess_fsdp_dtensor_state_dict -> save:preprocess
        communicates to find out which slices the ranks have, which the layout says
    {_CHECKPOINTING}:torch -> storage:torch_view FACTORY
        saves and loads with torch.distributed.checkpoint, which overwrites checkpoints and unpickles anything
    {_CHECKPOINTING}:maybe_msc -> storage:FileView FACTORY
        has no files on object storage, except through NVIDIA's client
    {_CHECKPOINTING}:shutil -> storage:shutil_view FACTORY
        removes checkpoints of file systems only
    {_CHECKPOINTING}:FileSystemReader -> torch_dist:Reader VALUE
        unpickles a checkpoint's metadata without restrictions
    {_CHECKPOINTING}:get_async_strategy -> background:get_async_strategy
        chooses a background writer that makes no checksums and leaves files behind if it fails
    megatron.training.async_utils:get_async_strategy -> background:get_async_strategy
        ends a background save, and leaves its files behind if it failed
    megatron.core.dist_checkpointing.strategies.async_utils:mp -> background:multiprocessing_view FACTORY
        starts processes that outlive a killed rank
    megatron.core.dist_checkpointing.strategies.filesystem_async:mp -> background:multiprocessing_view FACTORY
        starts processes that outlive a killed rank
    {_CHECKPOINTING}:_get_checkpoint_format -> torch_dist:checkpoint_format
        does not load a torch_dist checkpoint into a run that saves fsdp_dtensor
    {_CHECKPOINTING}:get_load_checkpoint_path_by_args -> resuming:load_path
        raises a TypeError with fsdp_dtensor if --pretrained-checkpoint is given without --load
    {_CHECKPOINTING}:get_checkpoint_name -> resuming:checkpoint_name
        finds a checkpoint only in folders iter_* and release of the folder that --load names
    {_CHECKPOINTING}:read_metadata -> resuming:read_metadata
        ends the run if the tracker file cannot be read, and trusts the checkpoint that it names
    {_CHECKPOINTING}:_load_base_checkpoint -> resuming:load_base_checkpoint
        starts from random weights if the tracker file is missing, and later overwrites the checkpoints
    {_CHECKPOINTING}:checkpoint_exists -> resuming:checkpoint_exists
        finds no checkpoint if the tracker file is missing, so that --pretrained-checkpoint is loaded instead
    # The optimizer's state.
    {_DISTRIBUTED_OPTIMIZER}._param_name -> optimizer_state:param_name
        gives parameters of different pipeline stages and expert-parallel ranks the same name
    {_DISTRIBUTED_OPTIMIZER}._init_optimizer_states_with_dummy_values -> optimizer_state:initialize
        takes a step to create state to load into; if nothing is loaded, training begins with the second step
    {_DISTRIBUTED_OPTIMIZER}.sharded_param_state_fsdp_dtensor -> optimizer_state:state_to_save
        saves moments in fp16 and FP8 without their scales
    {_DISTRIBUTED_OPTIMIZER}._param2group_meta_to_param_groups -> optimizer_state:groups_to_load
        takes the learning rates of the checkpoint with every option, and empties groups without parameters
    {_DISTRIBUTED_OPTIMIZER}._copy_model_params_to_main_params -> optimizer_state:copy_model_params_to_main_params
        raises an error with FSDP after loading without optimizer state, although main weights were loaded
    {_DISTRIBUTED_OPTIMIZER}._collect_main_grad_data_for_unscaling -> optimizer_state:gradients_to_unscale
        unscales gradients of empty shards, which a fused optimizer must not see
"""

# Megatron-Bridge has copies of these. It builds and wraps models with the functions above.
_OF_BRIDGE = f"""
    {_BRIDGE}.training.setup:megatron_FSDP -> {_WRAPPER} VALUE
        is how it recognizes a model chunk that has no_sync()
    {_SAVING}:generate_state_dict -> save:generate_state_dict
        is a copy of Megatron's function
    {_SAVING}:preprocess_fsdp_dtensor_state_dict -> save:preprocess
        is a copy of Megatron's function
    {_SAVING}:torch -> storage:torch_view FACTORY
        saves and loads as Megatron does
    {_SAVING}:apply_peft_adapter_filter_to_state_dict -> bridge:filter_adapters
        removes base weights from a checkpoint's state, and loses the model chunks that it belongs to
    {_ADAPTERS}.materialize_adapter_weights -> bridge:materialize_adapters
        computes with shards of adapters as with full ones
"""

MEGATRON = Patches(
    "Megatron-Core and its training loop",
    [
        *rows_of(_OF_MEGATRON, _HERE, MEGATRON_CORE),
        *_public(),
        *rows_of(_OF_BRIDGE, _HERE, MEGATRON_BRIDGE, optional=True),
    ],
)


def is_installed() -> bool:
    """Whether Megatron uses this FSDP: True between :func:`install` and :func:`uninstall`."""
    return MEGATRON.is_installed


def install(replacement: Callable[..., Any] | None = None) -> None:
    """Make Megatron use this FSDP. Further calls change nothing.

    Call it before the model is built. If it is called before the command line is parsed, the command line is checked
    too. Megatron-Bridge may be imported before or after. A version of Megatron-Core that was not tested is a warning.

    Args:
        replacement: Called in place of the wrapper, with the wrapper's arguments.

    Raises:
        ImportError: Megatron-Core is not installed or lacks a name that has to be replaced. The message names it and
            the supported versions.
    """
    try:
        MEGATRON.install(instead=None if replacement is None else {f"{_HERE}.{_WRAPPER}": replacement})
    except ImportError as error:
        raise ImportError(f"megatron.fsdp.mcore.install() needs megatron-core[training]. {error}") from error
    warn_of_conflict()
    warn_if_untried(MEGATRON_CORE, MEGATRON_CORE.installed or "of an unknown version")


def uninstall() -> None:
    """Put back everything that :func:`install` replaced."""
    MEGATRON.uninstall()
