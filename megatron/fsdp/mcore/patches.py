"""Makes an unmodified Megatron-Core and its training loop use this FSDP.

:func:`install` replaces the names in :data:`MEGATRON`, and :func:`uninstall` puts the originals back.
"""

from collections.abc import Callable, Iterator
from typing import Any

from megatron.fsdp.helpers.import_name import warn_of_conflict
from megatron.fsdp.helpers.patches import MEGATRON_CORE, Kind, Patch, Patches, Versions, warn_if_untried

# Checked on the CPU, where mocks replace Transformer Engine, which Megatron-Bridge imports.
MEGATRON_BRIDGE = Versions("megatron-bridge", ("0.6.2",))

_CHECKPOINTING = "megatron.training.checkpointing"
_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_OPTIMIZERS = "megatron.core.optimizer.optimizer"
_PIPELINE = "megatron.core.pipeline_parallel"
_SAVING = "training.checkpointing"
_WRAPPER = "megatron.fsdp.mcore.adapter:FullyShardedDataParallel"
_ORIGINAL = "megatron.core.distributed.fsdp.src.megatron_fsdp"

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


def _patch(target: str, reason: str, replacement: str, kind: Kind = Kind.AROUND, **versions: Any) -> Patch:
    return Patch(target, reason, f"megatron.fsdp.mcore.{replacement}", MEGATRON_CORE, kind, **versions)


def _wrapper(target: str, reason: str, **versions: Any) -> Patch:
    return Patch(target, reason, _WRAPPER, MEGATRON_CORE, Kind.VALUE, **versions)


def _in_bridge(target: str, reason: str, replacement: str, kind: Kind = Kind.AROUND) -> Patch:
    target = f"megatron.bridge.{target}"
    return Patch(target, reason, f"megatron.fsdp.mcore.{replacement}", MEGATRON_BRIDGE, kind, optional=True)


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


MEGATRON = Patches(
    "Megatron-Core and its training loop",
    [
        # The wrapper. The class is looked up by its name, so this row precedes the one that replaces the name.
        _patch(
            f"{_ORIGINAL}.megatron_fsdp:MegatronFSDP.__init__",
            "would run in place of this FSDP where its name was imported before it was replaced",
            "patches:refuse_original",
        ),
        _wrapper(
            "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel",
            "is imported by unwrap_model() at every call, to find out which wrappers to remove",
        ),
        _wrapper(
            "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallelV1",
            "is what unwrap_model() imports since FullyShardedDataParallel is a function that calls it",
            since="0.20",
        ),
        _wrapper("megatron.core.distributed.fsdp:FullyShardedDataParallel", "is what scripts import to wrap a model"),
        _wrapper("megatron.core.distributed:FullyShardedDataParallel", "is what scripts import to wrap a model"),
        _wrapper(
            "megatron.training.training:megatron_FSDP",
            "is what get_model() wraps with, and how train() recognizes a model chunk that has no_sync()",
            before="0.20",
        ),
        _wrapper("megatron.training.training:FullyShardedDataParallel", "is what get_model() wraps with", since="0.20"),
        _wrapper(
            "megatron.training.training:FullyShardedDataParallelV1",
            "is how train() recognizes a model chunk that has no_sync()",
            since="0.20",
        ),
        _wrapper(
            "megatron.training.models.dist_utils:FullyShardedDataParallel", "is what model builders wrap a model with"
        ),
        # The command line, and building the model.
        _patch(
            "megatron.training.arguments:add_megatron_arguments",
            "lacks options for experts in the versions before they were added",
            "options:add_megatron_arguments",
        ),
        _patch(
            "megatron.training.arguments:validate_args",
            "does not check that settings work with this FSDP before memory is allocated",
            "limits:validate_args",
        ),
        # The beginning and the end of a run.
        _patch(
            "megatron.training.training:train",
            "evaluates for process_non_loss_data_func on the last rank, which lacks the others' shards",
            "limits:train",
        ),
        _patch(
            "megatron.training.training:initialize_megatron",
            "leaves the file in which an earlier run has said how it ended",
            "ending:initialize",
        ),
        _patch(
            "megatron.core.datasets.utils:compile_helpers",
            "ends the run because the wheel has no Makefile, although it has the compiled helpers",
            "ending:compile_if_missing",
        ),
        *(
            _patch(
                f"megatron.training.{module}:DistributedSignalHandler",
                "does not save at Ctrl-C",
                "ending:SignalHandler",
                Kind.VALUE,
            )
            for module in ("global_vars", "datasets.data_samplers")
        ),
        _patch(
            "megatron.training.training:get_model",
            "loses how Megatron's layers are initialized if it builds them on the meta device",
            "initialization:build_recorded",
        ),
        _patch(
            "megatron.training.models.dist_utils:build_virtual_pipeline_stages",
            "builds models from a configuration, and loses how they are initialized in the same way",
            "initialization:build_recorded",
        ),
        # The optimizer.
        _patch(
            "megatron.core.optimizer:_get_megatron_emerging_optimizer",
            "orthogonalizes a rank's part of a matrix as if it were the matrix",
            "muon:get_emerging_optimizer",
        ),
        # Statistics of gradients.
        *(
            _patch(
                f"megatron.{module}:get_megatron_optimizer",
                "reduces statistics over one optimizer instance, or over tensor- and pipeline-parallel ranks only",
                "statistics:get_megatron_optimizer",
            )
            for module in ("training.training", "core.optimizer")
        ),
        _patch(
            f"{_OPTIMIZERS}:MegatronOptimizer._filter_grads_for_norm",
            "selects a gradient on every rank that has a copy of it",
            "statistics:filter_grads_for_norm",
            since="0.19",
        ),
        _patch(
            f"{_OPTIMIZERS}:MegatronOptimizer.get_main_grads_for_grad_norm",
            "selects a gradient on every rank that has a copy of it",
            "statistics:main_grads_for_norm",
            before="0.19",
        ),
        *(
            _patch(
                f"{_OPTIMIZERS}:{owner}.count_zeros",
                "counts zeros once for every rank that has a copy of the gradient",
                "statistics:count_zeros",
            )
            for owner in ("MegatronOptimizer", "ChainedOptimizer")
        ),
        _patch(
            "megatron.training.training:calc_params_l2_norm",
            "raises an error for shards of different lengths, and cannot compute on weights in host memory",
            "statistics:params_l2_norm",
        ),
        _patch(
            "megatron.training.training:check_param_hashes_across_dp_replicas",
            "compares the parameters of data-parallel ranks, which are different shards",
            "replicas:check_param_hashes",
        ),
        # Overlap of the forward of one micro-batch with the backward of another.
        _patch(
            f"{_PIPELINE}.schedules:combined_1f1b_schedule_for_interleaved_pipelining",
            "rejects FSDP",
            "overlap:interleaved_step",
        ),
        _patch(
            f"{_PIPELINE}.combined_1f1b:combined_forward_backward_step",
            "does not call the model, whose hooks begin and end passes",
            "overlap:combined_step",
        ),
        _patch(
            "megatron.core.models.common.model_chunk_schedule_plan:TransformerLayerSchedulePlan.run",
            "does not call layers, whose hooks unshard and reshard them",
            "overlap:run_layers",
        ),
        # The optimizer in host memory.
        _patch(
            "megatron.training.training:get_megatron_ddp_config",
            "does not tell the wrapper that the optimizer is offloaded to the CPU, and how experts are sharded",
            "options:get_megatron_ddp_config",
        ),
        _patch(
            "megatron.core.optimizer:HybridDeviceOptimizer",
            "makes further copies of main weights on the host, and its state cannot be saved with FSDP",
            "offload:build_optimizer",
        ),
        # Saving and loading.
        _patch(
            f"{_CHECKPOINTING}:generate_state_dict",
            "collects a checkpoint's state and does not keep the model chunks that it belongs to",
            "save:generate_state_dict",
        ),
        _patch(
            f"{_CHECKPOINTING}:preprocess_fsdp_dtensor_state_dict",
            "communicates to find out which slices the ranks have, which the layout says",
            "save:preprocess",
        ),
        _patch(
            f"{_CHECKPOINTING}:torch",
            "saves and loads with torch.distributed.checkpoint, which overwrites checkpoints and unpickles anything",
            "storage:torch_view",
            Kind.FACTORY,
        ),
        _patch(
            f"{_CHECKPOINTING}:maybe_msc",
            "has no files on object storage, except through NVIDIA's client",
            "storage:FileView",
            Kind.FACTORY,
        ),
        _patch(
            f"{_CHECKPOINTING}:shutil",
            "removes checkpoints of file systems only",
            "storage:shutil_view",
            Kind.FACTORY,
        ),
        _patch(
            f"{_CHECKPOINTING}:FileSystemReader",
            "unpickles a checkpoint's metadata without restrictions",
            "torch_dist:Reader",
            Kind.VALUE,
        ),
        _patch(
            f"{_CHECKPOINTING}:get_async_strategy",
            "chooses a background writer that makes no checksums and leaves files behind if it fails",
            "background:get_async_strategy",
        ),
        _patch(
            "megatron.training.async_utils:get_async_strategy",
            "ends a background save, and leaves its files behind if it failed",
            "background:get_async_strategy",
        ),
        *(
            _patch(
                f"megatron.core.dist_checkpointing.strategies.{module}:mp",
                "starts processes that outlive a killed rank",
                "background:multiprocessing_view",
                Kind.FACTORY,
            )
            for module in ("async_utils", "filesystem_async")
        ),
        _patch(
            f"{_CHECKPOINTING}:_get_checkpoint_format",
            "does not load a torch_dist checkpoint into a run that saves fsdp_dtensor",
            "torch_dist:checkpoint_format",
        ),
        _patch(
            f"{_CHECKPOINTING}:get_load_checkpoint_path_by_args",
            "raises a TypeError with fsdp_dtensor if --pretrained-checkpoint is given without --load",
            "resuming:load_path",
        ),
        _patch(
            f"{_CHECKPOINTING}:get_checkpoint_name",
            "finds a checkpoint only in folders iter_* and release of the folder that --load names",
            "resuming:checkpoint_name",
        ),
        _patch(
            f"{_CHECKPOINTING}:read_metadata",
            "ends the run if the tracker file cannot be read, and trusts the checkpoint that it names",
            "resuming:read_metadata",
        ),
        _patch(
            f"{_CHECKPOINTING}:_load_base_checkpoint",
            "starts from random weights if the tracker file is missing, and later overwrites the checkpoints",
            "resuming:load_base_checkpoint",
        ),
        _patch(
            f"{_CHECKPOINTING}:checkpoint_exists",
            "finds no checkpoint if the tracker file is missing, so that --pretrained-checkpoint is loaded instead",
            "resuming:checkpoint_exists",
        ),
        # The optimizer's state.
        _patch(
            f"{_DISTRIBUTED_OPTIMIZER}._param_name",
            "gives parameters of different pipeline stages and expert-parallel ranks the same name",
            "optimizer_state:param_name",
        ),
        _patch(
            f"{_DISTRIBUTED_OPTIMIZER}._init_optimizer_states_with_dummy_values",
            "takes a step to create state to load into; if nothing is loaded, training begins with the second step",
            "optimizer_state:initialize",
        ),
        _patch(
            f"{_DISTRIBUTED_OPTIMIZER}.sharded_param_state_fsdp_dtensor",
            "saves moments in fp16 and FP8 without their scales",
            "optimizer_state:state_to_save",
        ),
        _patch(
            f"{_DISTRIBUTED_OPTIMIZER}._param2group_meta_to_param_groups",
            "takes the learning rates of the checkpoint with every option, and empties groups without parameters",
            "optimizer_state:groups_to_load",
        ),
        _patch(
            f"{_DISTRIBUTED_OPTIMIZER}._copy_model_params_to_main_params",
            "raises an error with FSDP after loading without optimizer state, although main weights were loaded",
            "optimizer_state:copy_model_params_to_main_params",
        ),
        _patch(
            f"{_DISTRIBUTED_OPTIMIZER}._collect_main_grad_data_for_unscaling",
            "unscales gradients of empty shards, which a fused optimizer must not see",
            "optimizer_state:gradients_to_unscale",
        ),
        *_public(),
        # Megatron-Bridge has copies of these. It builds and wraps models with the functions above.
        _in_bridge(
            "training.setup:megatron_FSDP",
            "is how it recognizes a model chunk that has no_sync()",
            "adapter:FullyShardedDataParallel",
            Kind.VALUE,
        ),
        _in_bridge(f"{_SAVING}:generate_state_dict", "is a copy of Megatron's function", "save:generate_state_dict"),
        _in_bridge(
            f"{_SAVING}:preprocess_fsdp_dtensor_state_dict", "is a copy of Megatron's function", "save:preprocess"
        ),
        _in_bridge(f"{_SAVING}:torch", "saves and loads as Megatron does", "storage:torch_view", Kind.FACTORY),
        _in_bridge(
            f"{_SAVING}:apply_peft_adapter_filter_to_state_dict",
            "removes base weights from a checkpoint's state, and loses the model chunks that it belongs to",
            "bridge:filter_adapters",
        ),
        _in_bridge(
            "models.conversion.peft_bridge:MegatronPeftBridge.materialize_adapter_weights",
            "computes with shards of adapters as with full ones",
            "bridge:materialize_adapters",
        ),
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
        MEGATRON.install(instead=None if replacement is None else {_WRAPPER: replacement})
    except ImportError as error:
        raise ImportError(f"megatron.fsdp.mcore.install() needs megatron-core[training]. {error}") from error
    warn_of_conflict()
    warn_if_untried(MEGATRON_CORE, MEGATRON_CORE.installed or "of an unknown version")


def uninstall() -> None:
    """Put back everything that :func:`install` replaced."""
    MEGATRON.uninstall()
