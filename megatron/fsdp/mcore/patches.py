"""Makes an unmodified Megatron-Core and its training loop use this FSDP.

:func:`install` replaces the names in :data:`MEGATRON`, and :func:`uninstall` puts the originals back.
"""

from collections.abc import Callable
from typing import Any

from megatron.fsdp.helpers.patches import MEGATRON_CORE, Kind, Patch, Patches, Versions

# Checked on the CPU, where stand-ins replace Transformer Engine, which Megatron-Bridge imports.
MEGATRON_BRIDGE = Versions("megatron-bridge", ("0.6.2",))

_CHECKPOINTING = "megatron.training.checkpointing"
_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_OPTIMIZERS = "megatron.core.optimizer.optimizer"
_BRIDGE = "megatron.bridge.training"
_PEFT_BRIDGE = "megatron.bridge.models.conversion.peft_bridge:MegatronPeftBridge"
_WRAPPER = "megatron.fsdp.mcore.adapter:FullyShardedDataParallel"


def _patch(target: str, reason: str, replacement: str, kind: Kind = Kind.AROUND) -> Patch:
    return Patch(target, reason, f"megatron.fsdp.mcore.{replacement}", MEGATRON_CORE, kind)


def _wrapper(target: str, reason: str, versions: Versions = MEGATRON_CORE) -> Patch:
    return Patch(target, reason, _WRAPPER, versions, Kind.VALUE, optional=versions is MEGATRON_BRIDGE)


def _in_bridge(name: str, reason: str, replacement: str, kind: Kind = Kind.AROUND) -> Patch:
    target = f"{_BRIDGE}.checkpointing:{name}"
    return Patch(target, reason, f"megatron.fsdp.mcore.{replacement}", MEGATRON_BRIDGE, kind, optional=True)


MEGATRON = Patches(
    "Megatron-Core and its training loop",
    [
        # The wrapper.
        _wrapper(
            "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel",
            "is imported by unwrap_model() at every call, to find out which wrappers to remove",
        ),
        _wrapper("megatron.core.distributed:FullyShardedDataParallel", "is what scripts import to wrap a model"),
        _wrapper(
            "megatron.training.training:megatron_FSDP",
            "is what get_model() wraps with, and how train() recognizes a model chunk that has no_sync()",
        ),
        _wrapper(
            "megatron.training.models.dist_utils:FullyShardedDataParallel", "is what model builders wrap a model with"
        ),
        # The command line, and building the model.
        _patch(
            "megatron.training.arguments:validate_args",
            "does not check that settings work with this FSDP before memory is allocated",
            "limits:validate_args",
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
        # Statistics of gradients.
        _patch(
            "megatron.training.training:get_megatron_optimizer",
            "reduces statistics over one optimizer instance, or over tensor- and pipeline-parallel ranks only",
            "statistics:get_megatron_optimizer",
        ),
        _patch(
            f"{_OPTIMIZERS}:MegatronOptimizer._filter_grads_for_norm",
            "selects a gradient on every rank that has a copy of it",
            "statistics:filter_grads_for_norm",
        ),
        _patch(
            f"{_OPTIMIZERS}:MegatronOptimizer.count_zeros",
            "counts zeros once for every rank that has a copy of the gradient",
            "statistics:count_zeros",
        ),
        _patch(
            f"{_OPTIMIZERS}:ChainedOptimizer.count_zeros",
            "counts zeros once for every rank that has a copy of the gradient",
            "statistics:count_zeros",
        ),
        _patch(
            "megatron.training.training:check_param_hashes_across_dp_replicas",
            "compares the parameters of data-parallel ranks, which are different shards",
            "replicas:check_param_hashes",
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
        Patch(
            f"{_CHECKPOINTING}:FileSystemReader",
            "unpickles a checkpoint's metadata without restrictions",
            "megatron.fsdp.checkpoint.backend:Reader",
            MEGATRON_CORE,
            Kind.VALUE,
        ),
        _patch(
            f"{_CHECKPOINTING}:get_async_strategy",
            "chooses a background writer that makes no checksums and leaves files behind if it fails",
            "background:get_async_strategy",
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
            f"{_DISTRIBUTED_OPTIMIZER}._copy_model_params_to_main_params",
            "raises an error with FSDP after loading without optimizer state, although main weights were loaded",
            "optimizer_state:copy_model_params_to_main_params",
        ),
        Patch(
            "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor:uneven_dtensor_to_full_tensor",
            "gathers shards of different lengths, which gloo cannot do",
            "megatron.fsdp.dtensor.uneven:uneven_dtensor_to_full_tensor",
            MEGATRON_CORE,
            Kind.VALUE,
        ),
        # Megatron-Bridge has copies of these. It builds and wraps models with the functions above.
        _wrapper(
            f"{_BRIDGE}.setup:megatron_FSDP", "is how it recognizes a model chunk that has no_sync()", MEGATRON_BRIDGE
        ),
        _in_bridge("generate_state_dict", "is a copy of Megatron's function", "save:generate_state_dict"),
        _in_bridge("preprocess_fsdp_dtensor_state_dict", "is a copy of Megatron's function", "save:preprocess"),
        _in_bridge("torch", "saves and loads as Megatron does", "storage:torch_view", Kind.FACTORY),
        _in_bridge(
            "apply_peft_adapter_filter_to_state_dict",
            "removes base weights from a checkpoint's state, and loses the model chunks that it belongs to",
            "bridge:filter_adapters",
        ),
        Patch(
            f"{_PEFT_BRIDGE}.materialize_adapter_weights",
            "computes with shards of adapters as with whole ones",
            "megatron.fsdp.mcore.bridge:materialize_adapters",
            MEGATRON_BRIDGE,
            optional=True,
        ),
    ],
)


def is_installed() -> bool:
    """Whether Megatron uses this FSDP: True between :func:`install` and :func:`uninstall`."""
    return MEGATRON.is_installed


def install(stand_in: Callable[..., Any] | None = None) -> None:
    """Make Megatron use this FSDP. Further calls change nothing.

    Call it before the model is built. If it is called before the command line is parsed, the command line is checked
    too. Megatron-Bridge may be imported before or after.

    Args:
        stand_in: Called in place of the wrapper, with the wrapper's arguments.

    Raises:
        ImportError: Megatron-Core is not installed or lacks a name that has to be replaced. The message names it and
            the supported versions.
    """
    try:
        MEGATRON.install(instead=None if stand_in is None else {_WRAPPER: stand_in})
    except ImportError as error:
        raise ImportError(f"megatron.fsdp.mcore.install() needs megatron-core[training]. {error}") from error


def uninstall() -> None:
    """Put back everything that :func:`install` replaced."""
    MEGATRON.uninstall()
