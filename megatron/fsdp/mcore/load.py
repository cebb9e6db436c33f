"""Loads ``fsdp_dtensor`` checkpoints, and those of Megatron's DDP, for Megatron's training loop."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from megatron.core import parallel_state
from megatron.fsdp.checkpoint import loading
from megatron.fsdp.checkpoint.matching import Reaction, Strictness
from megatron.fsdp.checkpoint.reader import RELEASE
from megatron.fsdp.checkpoint.storage import as_path
from megatron.fsdp.convert.canonical import SCALER
from megatron.fsdp.convert.fsdp_dtensor import KEPT
from megatron.fsdp.helpers.notes import add_note
from megatron.fsdp.mcore.checkpoint_state import LAYOUTS_KEY, CheckpointState, Names
from megatron.fsdp.mcore.replicas import check_replicas
from megatron.fsdp.mcore.resuming import megatron_arguments, needs_checksums
from megatron.fsdp.mcore.torch_dist import is_torch_dist, load_common, view
from megatron.fsdp.mcore.vocabulary import padding_of
from megatron.fsdp.naming.keys import other_names
from megatron.fsdp.naming.names import FUSED_DOWN
from megatron.fsdp.state.consistency import inconsistent_weights

# Settings of an optimizer's kernels. They do not depend on training, so a checkpoint may lack them.
_KERNEL_SETTINGS = re.compile(
    r"optimizer\.param_to_group_meta\..*\.(amsgrad|foreach|maximize|capturable|differentiable|fused"
    r"|decoupled_weight_decay|bias_correction)"
)
# Settings of an optimizer's groups that depend on this run's parallel sizes and not on those of the saved run.
_TOPOLOGY = ("is_expert_parallel",)
# A conversion stores Adam's step in both places where an optimizer may expect it. Each run loads one of them.
_STEP = re.compile(r"optimizer\.(?:state|param_to_group_meta)\..*\.step")
_OPERATIONS = "num_floating_point_operations_so_far"
# Arguments that decide which tensors a checkpoint has, and their shapes.
_ARGUMENTS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_experts", "optimizer")

# What to do about keys that only the run has, and about those that only the checkpoint has.
_REACTIONS = {
    "log_unexpected": (Reaction.RAISE, Reaction.LOG),
    "log_all": (Reaction.LOG, Reaction.LOG),
    "raise_unexpected": (Reaction.RAISE, Reaction.RAISE),
    "raise_all": (Reaction.RAISE, Reaction.RAISE),
    "return_unexpected": (Reaction.RAISE, Reaction.LOG),
    "return_all": (Reaction.LOG, Reaction.LOG),
    "ignore_all": (Reaction.IGNORE, Reaction.IGNORE),
}


def strictness_of(args: Any, saved: Callable[[], Mapping[str, Any]] = dict) -> Strictness:
    """How keys that only one side has are treated, and a vocabulary with a different padding.

    Args:
        args: Megatron's arguments, such as ``--dist-ckpt-strictness`` and ``--no-strict-fsdp-dtensor-load``, or None.
        saved: Returns those of the run that wrote the checkpoint, as far as they are known.
    """
    chosen = getattr(args, "dist_ckpt_strictness", "assume_ok_unexpected")
    missing, unexpected = _REACTIONS.get(chosen, (Reaction.RAISE, Reaction.IGNORE))
    lenient = not getattr(args, "strict_fsdp_dtensor_load", True)

    def optional(key: str) -> bool:
        scaler = key.startswith(f"{SCALER}.")  # other runs have no fp16, and other FSDPs do not store it
        return scaler or bool(_KERNEL_SETTINGS.fullmatch(key)) or (lenient and not key.startswith("model."))

    def extra(key: str) -> bool:
        return key == KEPT or key.startswith((f"{LAYOUTS_KEY}.", f"{SCALER}.")) or bool(_STEP.fullmatch(key))

    return Strictness(missing, unexpected, optional, extra, padding_of(vars(args) if args else {}, saved))


def load_objects(state_dict: dict[str, Any], *, checkpoint_id: Any = None, **options: Any) -> None:
    """Load what is not a tensor, such as the saved run's arguments, before process groups exist."""
    if options:
        dcp.load(state_dict, checkpoint_id=checkpoint_id, **options)
        return
    folder = as_path(checkpoint_id)
    if is_torch_dist(folder):
        found = load_common(folder, list(state_dict))
        state_dict.clear()  # Megatron takes its own arguments if there is no key of them
        state_dict.update(found)
        return
    state_dict.update(loading.load_objects(folder, list(state_dict)))


def load_state_dict(state_dict: dict[str, Any], storage_reader: Any, planner: Any = None) -> None:
    """Load a checkpoint in place, and check that weights are consistent afterwards. A collective.

    Raises:
        RuntimeError: Keys are missing or unexpected, the order of a parameter's rows is unknown, or weights are
            inconsistent after loading.
    """
    folder = as_path(storage_reader.path)
    if not isinstance(state_dict, CheckpointState):
        loading.load(state_dict, folder)
        return
    _use_own_random_state(state_dict)
    own: dict[str, Any] = {}
    if is_torch_dist(folder):
        own = _take_out_missing(state_dict, folder)
    else:
        saved = storage_reader.read_metadata().state_dict_metadata
        if _OPERATIONS in saved:
            state_dict[_OPERATIONS] = 0
        check_sections(state_dict, saved.keys(), folder)
        _check_scales(state_dict, saved, folder)
    with _own_topology(state_dict), _naming_arguments(folder):
        loading.load(
            state_dict,
            folder,
            other_names,
            strictness_of(megatron_arguments(), partial(_saved_arguments, folder)),
            check=needs_checksums(folder),
            view=partial(view, "optimizer" in state_dict),
        )
    state_dict.update(own)
    state_dict.restore()
    for chunk in state_dict.chunks:
        chunk.install_optimized_model_weights()
        if stale := inconsistent_weights(chunk.engine):
            raise RuntimeError(
                f"{folder}: after loading, compute weights differ from main weights: {', '.join(stale)}."
            )
    check_replicas(state_dict.chunks, f"after loading {folder}")


@contextmanager
def _naming_arguments(folder: Path) -> Iterator[None]:
    """Context that adds to an error the arguments of the saved run that differ from this run's: they explain it."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        saved, run = _saved_arguments(folder), megatron_arguments()
        own = vars(run) if run else {}
        differing = [
            f"--{name.replace('_', '-')} {saved[name]} (here {own[name]})"
            for name in _ARGUMENTS
            if name in saved and name in own and saved[name] != own[name]
        ]
        if differing:
            add_note(
                error,
                f"{folder} was saved with {', '.join(differing)}. Use the same arguments to continue that run; with "
                "another optimizer, --no-load-optim loads weights only.",
            )
        raise


def _saved_arguments(folder: Path) -> dict[str, Any]:
    """The arguments of the run that wrote a checkpoint; empty if it does not say, as other projects' may not."""
    found: dict[str, Any] = {"args": None}
    with suppress(RuntimeError):
        load_objects(found, checkpoint_id=folder)
    args = found.get("args")
    return vars(args) if args else {}


def _take_out_missing(state_dict: CheckpointState, folder: Path) -> dict[str, Any]:
    """Remove what Megatron does not load from such a ``torch_dist`` checkpoint either.

    Returns:
        This run's own values, to put back after loading, because Megatron expects them.
    """
    common = load_common(folder, ["args", _OPERATIONS])
    if _OPERATIONS in common:
        state_dict[_OPERATIONS] = 0
    unused = [] if "args" in common else ["args"]
    if folder.name == RELEASE:
        unused += ["optimizer", "opt_param_scheduler", "rng_state"]
    elif getattr(common.get("args"), "no_save_rng", False):
        unused.append("rng_state")
    return {key: state_dict.pop(key) for key in unused if key in state_dict}


def _use_own_random_state(state_dict: CheckpointState) -> None:
    """Ask for the random state of this rank's stage and tensor rank: Megatron may ask for that of (0, 0) instead."""
    if state_dict.get("rng_state", {}) is None:
        # Megatron-Bridge: not to be loaded, since the parallel sizes differ from those of the checkpoint.
        del state_dict["rng_state"]
    if "rng_state" in state_dict:
        pp = parallel_state.get_pipeline_model_parallel_rank()
        tp = parallel_state.get_tensor_model_parallel_rank()
        state_dict["rng_state"] = {f"({pp}, {tp})": next(iter(state_dict["rng_state"].values()))}


@contextmanager
def _own_topology(state_dict: CheckpointState) -> Iterator[None]:
    """Keep this run's values of settings that depend on its parallel sizes."""
    groups = state_dict.get("optimizer", {}).get("param_to_group_meta", {})
    own = {key: {name: settings[name] for name in _TOPOLOGY if name in settings} for key, settings in groups.items()}
    yield
    for key, settings in own.items():
        groups[key].update(settings)


def check_sections(state_dict: CheckpointState, keys: Collection[str], folder: Path) -> None:
    """Check that the order of the rows of fused parameters is known.

    With tensor parallelism, other FSDPs store the ranks' shards of a fused parameter one after the other, so that its
    sections alternate. A checkpoint that was written here says in which order rows are.

    Args:
        state_dict: The state dict to load into.
        keys: The checkpoint's keys.
        folder: The checkpoint's folder.

    Raises:
        RuntimeError: The checkpoint does not say it, and was written with tensor parallelism.
    """
    fused = next((key for key in keys if key.startswith("model.") and key.endswith(f".{FUSED_DOWN}.weight")), None)
    if fused is not None and _tensor_parallel_size(folder) > 1:
        raise RuntimeError(
            f"{folder}: expected linear_q_down_proj and linear_kv_down_proj; got {fused}, written with tensor "
            "parallelism. The checkpoint does not say in which order its rows are. Convert a torch_dist checkpoint of "
            "the run instead."
        )
    spread = [name for chunk in state_dict.chunks for name in Names(chunk).spread]
    # A conversion from torch_dist puts sections in order, and keeps what only the way back needs.
    if not spread or any(key.startswith(f"{LAYOUTS_KEY}.") or key == KEPT for key in keys):
        return
    ranks = _tensor_parallel_size(folder)
    if ranks > 1:
        raise RuntimeError(
            f"{folder}: the checkpoint does not say in which order the rows of {spread[0]} are. It was written with "
            f"tensor_model_parallel_size {ranks} by another FSDP, which stores the ranks' shards one after the other. "
            "Convert a torch_dist checkpoint of the run instead."
        )


def _check_scales(state_dict: CheckpointState, saved: Mapping[str, Any], folder: Path) -> None:
    """Raise if moments were saved in fp16 without their scales, as other FSDPs do. This one saves them in float32."""
    for name, state in state_dict.get("optimizer", {}).get("state", {}).items():
        for kind, value in state.items():
            stored = getattr(saved.get(f"optimizer.state.{name}.{kind}"), "properties", None)
            if stored is not None and stored.dtype == torch.float16 and value.dtype != torch.float16:
                raise RuntimeError(
                    f"{folder}: {kind} of {name} is in float16; its scale is not in the checkpoint. Load without "
                    "optimizer state (--no-load-optim)."
                )


def _tensor_parallel_size(folder: Path) -> int:
    """The number of tensor-parallel ranks of the run that wrote a checkpoint; 1 if the checkpoint does not say."""
    return _saved_arguments(folder).get("tensor_model_parallel_size") or 1
