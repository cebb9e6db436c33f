"""What Megatron's training loop gets in place of its own steps when it saves and loads ``fsdp_dtensor`` checkpoints."""

import functools
import logging
import os
import queue
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron.core import parallel_state
from megatron.fsdp.checkpoint.backend import Finishing, Planner, Reader, Writer, file_result, remove_save, save_with
from megatron.fsdp.checkpoint.checksums import METADATA
from megatron.fsdp.checkpoint.loading import load, load_objects
from megatron.fsdp.checkpoint.matching import Reaction, Rows, Strictness
from megatron.fsdp.checkpoint.newest import folder_of, iterations_in, newest_whole
from megatron.fsdp.checkpoint.reader import FORMAT_FILE, RELEASE, TRACKER
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.mcore.adapter import FullyShardedDataParallel
from megatron.fsdp.mcore.checkpoint_state import (
    LAYOUTS_KEY,
    Names,
    Prepared,
    optimizer_names,
    preprocess_fsdp_dtensor_state_dict,
)
from megatron.fsdp.mcore.parameter_names import FUSED_DOWN
from megatron.fsdp.mcore.replicas import check_replicas
from megatron.fsdp.state.consistency import inconsistent_weights

logger = logging.getLogger(__name__)

# Set to 0 to load without reading files twice.
VERIFY = "MEGATRON_FSDP_VERIFY_CHECKPOINT"

# What optimizers know about how they compute, not what they have computed: it need not be in a checkpoint.
_KERNEL_SETTINGS = re.compile(
    r"optimizer\.param_to_group_meta\..*\.(amsgrad|foreach|maximize|capturable|differentiable|fused"
    r"|decoupled_weight_decay|bias_correction)"
)
# What says how this run is divided, whatever the run before did.
_TOPOLOGY = ("is_expert_parallel",)
_WRAPPERS = re.compile(r"^(optimizer\.(?:state|param_to_group_meta)\.|model\.)((?:module\.)+)")
_STEP = re.compile(r"optimizer\.(state|param_to_group_meta)\.(.*?)(_[wv])?\.step")
_RENAMED = (
    # A layer's norms, in layers of Megatron's own and in Transformer Engine's fused ones.
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    # The layer that predicts a further token, in megatron-core 0.19 and after it.
    (".mtp_model_layer.", ".transformer_layer."),
    # A layer's norm, where it is part of a fused down projection; groups have the module's own name.
    (".input_layernorm.", f".self_attention.{FUSED_DOWN}.layer_norm_"),
)
# What a fused down projection is apart.
_DOWN = ("linear_q_down_proj", "linear_kv_down_proj")


def other_names(key: str) -> list[str | Rows]:
    """What checkpoints of other runs, or of other layers' implementations, have in place of a value."""
    found = [key]
    for name in found:  # and of what is found: a name may differ in several words
        found += [other for other in _unique(_variants(name)) if other not in found]
    found = _renamed(found)
    return [*found[1:], *(rows for name in found if (rows := _fused(name, key)) is not None)]


def _variants(name: str) -> Iterator[str]:
    """Names that differ from one in a single way."""
    step = _STEP.fullmatch(name)
    if step is not None and step[1] == "state":
        yield f"optimizer.param_to_group_meta.{step[2]}.step"
    elif step is not None:
        yield from (f"optimizer.state.{step[2]}{half}.step" for half in ("", "_w"))
    if name.startswith("rng_state."):
        yield re.sub(r"\(\d+, \d+\)", "(0, 0)", name, count=1)
    for one, other in (*_RENAMED, *(pair[::-1] for pair in _RENAMED)):
        if one in name:
            yield name.replace(one, other)
    if name.startswith("optimizer.param_to_group_meta."):
        yield from (name.replace(f".{down}.", f".{FUSED_DOWN}.") for down in _DOWN)
        yield from (name.replace(f".{FUSED_DOWN}.", f".{down}.") for down in _DOWN)


def _renamed(names: list[str]) -> list[str]:
    """Names, and those that they have in a run of another precision: one in bf16 has one wrapper more."""
    found = list(names)
    for name in names:
        wrappers = _WRAPPERS.match(name)
        if wrappers is not None:
            found += [name.replace(wrappers[2], "module." * n, 1) for n in (2, 3)]
    return _unique(found)


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _fused(name: str, key: str) -> Rows | None:
    """The tensor that has the rows of both down projections, as a run that fuses them once stored it.

    Args:
        name: One that a value may have.
        key: That by which it is wanted.
    """
    down = next((down for down in _DOWN if f".{down}." in name and f".{down}." in key), None)
    if down is None or name.startswith("optimizer.param_to_group_meta."):
        return None
    parts = tuple(key.replace(f".{down}.", f".{part}.") for part in _DOWN)
    return Rows(name.replace(f".{down}.", f".{FUSED_DOWN}."), parts)


def strictness_of(args: Any) -> Strictness:
    """What ``--dist-ckpt-strictness`` and ``--no-strict-fsdp-dtensor-load`` say about keys that only one side has."""
    chosen = getattr(args, "dist_ckpt_strictness", "assume_ok_unexpected")
    missing, unexpected = {
        "log_unexpected": (Reaction.RAISE, Reaction.LOG),
        "log_all": (Reaction.LOG, Reaction.LOG),
        "raise_unexpected": (Reaction.RAISE, Reaction.RAISE),
        "raise_all": (Reaction.RAISE, Reaction.RAISE),
        "return_unexpected": (Reaction.RAISE, Reaction.LOG),
        "return_all": (Reaction.LOG, Reaction.LOG),
        "ignore_all": (Reaction.IGNORE, Reaction.IGNORE),
    }.get(chosen, (Reaction.RAISE, Reaction.IGNORE))
    lenient = not getattr(args, "strict_fsdp_dtensor_load", True)

    def optional(key: str) -> bool:
        return bool(_KERNEL_SETTINGS.fullmatch(key)) or (lenient and not key.startswith("model."))

    return Strictness(missing, unexpected, optional, extra=lambda key: key.startswith(f"{LAYOUTS_KEY}."))


# Saving and loading --------------------------------------------------------------------------------------------------


def keeping_chunks(generate_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``generate_state_dict`` whose result knows the model chunks it was made of."""

    @functools.wraps(generate_state_dict)
    def generate(args: Any, model: list[Any], *rest: Any, **kwargs: Any) -> Any:
        state = generate_state_dict(args, model, *rest, **kwargs)
        if args.ckpt_format != "fsdp_dtensor":
            return state
        kept = Prepared(state)
        kept.chunks, kept.raw = list(model), {}
        kept.loading = bool((kwargs.get("optim_sd_kwargs") or {}).get("is_loading"))
        return kept

    return generate


def preparing(original: Any) -> Callable[..., Prepared]:
    """Return ours for Megatron's ``preprocess_fsdp_dtensor_state_dict``."""
    return _prepare


def reader(original: Any) -> type[Reader]:
    """Return ours for torch's ``FileSystemReader``."""
    return Reader


def _prepare(args: Any, raw_state_dict: dict[str, Any], model: Any) -> Prepared:
    if not isinstance(raw_state_dict, Prepared):
        return preprocess_fsdp_dtensor_state_dict(args, raw_state_dict, model)
    chunks, saving = raw_state_dict.chunks, not raw_state_dict.loading
    if saving:
        check_replicas(chunks, "before a checkpoint is saved")
    return preprocess_fsdp_dtensor_state_dict(args, raw_state_dict, model, chunks, saving)


def _saves_objects() -> bool:
    if not parallel_state.model_parallel_is_initialized():
        return True
    return bool(
        parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        or parallel_state.get_expert_data_parallel_rank() == 0
    )


def _save(state_dict: dict[str, Any], *, storage_writer: Any = None, **options: Any) -> Any:
    planner = Planner(_saves_objects()) if isinstance(state_dict, Prepared) else None
    options = {"planner": planner, **options}
    if isinstance(storage_writer, Writer):
        return save_with(storage_writer, state_dict, **options)
    return dcp.save(state_dict, storage_writer=storage_writer, **options)


def _load_objects(state_dict: dict[str, Any], *, checkpoint_id: Any = None, **options: Any) -> None:
    if options:
        dcp.load(state_dict, checkpoint_id=checkpoint_id, **options)
        return
    state_dict.update(load_objects(Path(checkpoint_id), list(state_dict)))


def _load(state_dict: dict[str, Any], storage_reader: Any, planner: Any = None) -> None:
    if not isinstance(state_dict, Prepared):
        dcp.load_state_dict(state_dict, storage_reader=storage_reader, planner=planner)
        return
    folder = Path(storage_reader.path)
    if "rng_state" in state_dict:
        pp, tp = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        state_dict["rng_state"] = {f"({pp}, {tp})": next(iter(state_dict["rng_state"].values()))}
    keys = storage_reader.read_metadata().state_dict_metadata.keys()
    counted = "num_floating_point_operations_so_far"
    if counted in keys:
        state_dict[counted] = 0
    _check_sections(state_dict, keys, folder)
    groups = state_dict.get("optimizer", {}).get("param_to_group_meta", {})
    own = {key: {name: settings[name] for name in _TOPOLOGY if name in settings} for key, settings in groups.items()}
    load(state_dict, folder, other_names, strictness_of(_arguments()), check=folder not in _checked and _verifies())
    for key, settings in own.items():
        groups[key].update(settings)
    state_dict.restore()
    for chunk in state_dict.chunks:
        chunk.install_optimized_model_weights()
        stale = inconsistent_weights(chunk.engine)
        if stale:
            raise RuntimeError(
                f"{folder}: after loading, compute weights differ from main weights: {', '.join(stale)}."
            )
    check_replicas(state_dict.chunks, f"after loading {folder}")


def _check_sections(state_dict: Prepared, keys: Collection[str], folder: Path) -> None:
    """Raise if the checkpoint has tensor-parallel ranks' parts of sections one after the other, as others write it."""
    spread = [name for chunk in state_dict.chunks for name in Names(chunk).spread]
    fused = next((key for key in keys if key.startswith("model.") and key.endswith(f".{FUSED_DOWN}.weight")), None)
    if fused is not None and _ranks_of(folder, keys) > 1:
        raise RuntimeError(
            f"{folder}: expected {' and '.join(_DOWN)}; got {fused}, written with tensor parallelism: in which order "
            "its rows are, it does not say. Convert a torch_dist checkpoint of the run instead."
        )
    # What a conversion kept for the way back is under the second.
    if not spread or any(key.startswith(f"{LAYOUTS_KEY}.") or key == "torch_dist" for key in keys):
        return
    ranks = _ranks_of(folder, keys)
    if ranks > 1:
        raise RuntimeError(
            f"{folder}: it does not say in which order the rows of {spread[0]} are, and was written with "
            f"tensor_model_parallel_size {ranks}, by another FSDP, which stores the ranks' parts one after the other. "
            "Convert a torch_dist checkpoint of the run instead."
        )


def _ranks_of(folder: Path, keys: Collection[str]) -> int:
    """Tensor-parallel ranks of the run that wrote a checkpoint; 1 if it does not say."""
    args = load_objects(folder, ["args"])["args"] if "args" in keys else None
    return getattr(args, "tensor_model_parallel_size", None) or 1


def _arguments() -> Any:
    """Megatron's arguments; None where they have not been parsed, or there are none, as in Megatron-Bridge."""
    from megatron.training import get_args

    try:
        return get_args()
    except AssertionError:
        return None


# Which checkpoint ----------------------------------------------------------------------------------------------------

_checked: set[Path] = set()
# A number as Megatron writes it, and no longer than Python takes.
_ITERATION = re.compile(r"[0-9]{1,18}")


def _verifies() -> bool:
    return os.environ.get(VERIFY, "1") != "0"


def falling_back(read_metadata: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``read_metadata`` that reads a tracker file, and takes an older checkpoint if that one is not whole."""

    @functools.wraps(read_metadata)
    def read(tracker_filename: str) -> tuple[int, bool]:
        folder = Path(tracker_filename).parent
        text = Path(tracker_filename).read_bytes().decode(errors="replace").strip()
        wanted = int(text) if _ITERATION.fullmatch(text) else None
        args = _arguments()  # None: they are to come from the checkpoint
        if wanted is not None and _is_ours(args):
            _refuse_torch_dist(folder_of(folder, wanted))
        torch_dist = wanted is not None and (folder_of(folder, wanted) / FORMAT_FILE).exists()
        if torch_dist or text == RELEASE or (args is not None and not _is_ours(args)):
            return read_metadata(tracker_filename)
        if getattr(args, "ckpt_step", None):  # who asks for one gets that one, or an error
            return int(args.ckpt_step), False
        found = _newest(folder, wanted)
        if found is None:
            raise RuntimeError(f"{folder}: no whole checkpoint is there; {tracker_filename} says {text[:40]!r}.")
        return found, False

    return read


def going_on_untracked(load_base_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``_load_base_checkpoint`` that finds checkpoints where the tracker file is missing.

    Megatron would start from random weights, and in time write over the checkpoints that are there.
    """

    @functools.wraps(load_base_checkpoint)
    def load_base(load_dir: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        chosen = getattr(args, "ckpt_step", None)
        found = None
        if load_dir is not None and not chosen and _is_ours(args) and not _tracker_is_there(Path(load_dir)):
            found = _untracked(Path(load_dir))
        if found is None:
            return load_base_checkpoint(load_dir, args, *rest, **kwargs)
        args.ckpt_step = found
        try:
            return load_base_checkpoint(load_dir, args, *rest, **kwargs)
        finally:
            args.ckpt_step = chosen

    return load_base


def seeing_untracked(checkpoint_exists: Callable[..., bool]) -> Callable[..., bool]:
    """Return a ``checkpoint_exists`` that also sees checkpoints that no tracker file names."""

    @functools.wraps(checkpoint_exists)
    def exists(checkpoints_path: Any) -> bool:
        if checkpoint_exists(checkpoints_path):
            return True
        return checkpoints_path is not None and _is_ours(_arguments()) and bool(_complete(Path(checkpoints_path)))

    return exists


def _is_ours(args: Any) -> bool:
    """Whether a run of these arguments saves and loads with what is here."""
    return args is not None and bool(args.use_megatron_fsdp) and args.ckpt_format == "fsdp_dtensor"


def _tracker_is_there(folder: Path) -> bool:
    """As the first rank sees it: a file system that machines share may show a new file to some of them only."""
    there = [(folder / TRACKER).is_file()]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(there, src=0)
    return there[0]


def _complete(folder: Path) -> list[Path]:
    """Checkpoints in a folder whose save was completed, whole or damaged by now: the first is the newest."""
    if not folder.is_dir():
        return []
    found = [*(folder_of(folder, iteration) for iteration in iterations_in(folder)), folder / RELEASE]
    return [path for path in found if (path / METADATA).exists()]


def _untracked(folder: Path) -> int | None:
    """The iteration to go on from if there is no tracker file; None if there are no checkpoints either. A collective.

    Raises:
        RuntimeError: There are, but none that can be gone on from without being told.
    """
    complete = [_complete(folder)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(complete, src=0)
    if not complete[0]:
        return None
    _refuse_torch_dist(complete[0][0])
    found = _newest(folder, None)
    if not found:  # neither iteration 0 nor a release can be asked for by number
        raise RuntimeError(
            f"{folder}: expected {TRACKER} beside the checkpoints that are there, or one of an iteration that is "
            f"whole; got neither. Write the iteration to load, or {RELEASE!r}, into that file, or give another --load."
        )
    logger.warning("%s: there is no %s; going on from iteration %d.", folder, TRACKER, found)
    return found


def _newest(folder: Path, wanted: int | None) -> int | None:
    """See :func:`newest_whole`; what is compared with checksums here is not compared again when it is loaded."""
    check = _verifies() and dist.is_initialized()
    found = newest_whole(folder, wanted, check, _checked)
    if found is not None and check:
        _checked.add(folder_of(folder, found))
    return found


def _refuse_torch_dist(folder: Path) -> None:
    if (folder / FORMAT_FILE).exists():
        raise RuntimeError(
            f"{folder}: expected an fsdp_dtensor checkpoint; got torch_dist. Convert it: "
            "tools/checkpoint/checkpoint_inspector.py convert-torch-dist-to-fsdp-dtensor."
        )


# In the background ---------------------------------------------------------------------------------------------------


def finishing_whole(get_async_strategy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``get_async_strategy`` whose writer finishes as ours does."""

    @functools.wraps(get_async_strategy)
    def get_strategy(*args: Any, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        name, modules = get_async_strategy(*args, **kwargs)
        writer = _background_writer(modules["FileSystemWriterAsync"])
        finalize = _leaving_nothing(modules["save_state_dict_async_finalize"])
        return name, {**modules, "FileSystemWriterAsync": writer, "save_state_dict_async_finalize": finalize}

    return get_strategy


@functools.cache
def _background_writer(base: type) -> type:
    """A writer for saves in the background, Megatron-Core's or nvidia-resiliency-ext's, that finishes as ours does."""

    class BackgroundWriter(Finishing, base):
        """Writes in another process; the checksums are made there too."""

        def get_save_function_and_args(self) -> Any:
            """The function that writes, and its arguments."""
            write, preload, arguments = super().get_save_function_and_args()
            return (None if write is None else functools.partial(_write_and_sum, write)), preload, arguments

    return BackgroundWriter


def _leaving_nothing(finalize: Callable[..., None]) -> Callable[..., None]:
    """Return a ``save_state_dict_async_finalize`` that removes what was written if a rank could not write."""

    @functools.wraps(finalize)
    def finalize_or_remove(storage_writer: Any, *args: Any, **kwargs: Any) -> None:
        try:
            finalize(storage_writer, *args, **kwargs)
        except CheckpointException:
            for path, _, _ in storage_writer.write_buckets or ():
                remove_save(Path(path))
            raise

    return finalize_or_remove


def _write_and_sum(write: Callable[..., None], rank: int, buckets: Any, results: Any, *rest: Any) -> None:
    """Write, and add the checksums of what was written to the results."""
    caught: queue.Queue = queue.Queue()
    write(rank, buckets, caught, *rest)
    written = caught.get()
    if not isinstance(written, Exception):
        for (path, name, _), number in zip(buckets, sorted(written), strict=True):
            size, crc32 = _sum_of(Path(path))
            written[number].append(file_result(name, size, crc32))
    results.put(written)


def _sum_of(path: Path) -> tuple[int, int]:
    crc32 = size = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc32, size = zlib.crc32(block, crc32), size + len(block)
    return size, crc32


# What Megatron sees --------------------------------------------------------------------------------------------------


class View:
    """A module with some of its names replaced; all else is looked up in it.

    Args:
        module: The module, or another view.
        names: What is replaced.
    """

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def torch_view(torch: Any) -> View:
    """torch, as the module that saves and loads checkpoints sees it."""
    checkpoint = View(
        torch.distributed.checkpoint,
        save=_save,
        load=_load_objects,
        load_state_dict=_load,
        FileSystemWriter=Writer,
        FileSystemReader=Reader,
        DefaultSavePlanner=lambda: Planner(_saves_objects(), copies=True),
    )
    return View(torch, distributed=View(torch.distributed, checkpoint=checkpoint))


# The optimizer -------------------------------------------------------------------------------------------------------


def _updates_ours(optimizer: Any) -> bool:
    chunks = getattr(optimizer, "model_chunks", [])
    return bool(chunks) and all(isinstance(chunk, FullyShardedDataParallel) for chunk in chunks)


def naming_globally(param_name: Callable[..., str]) -> Callable[..., str]:
    """Return a ``DistributedOptimizer._param_name`` by which pipeline stages and experts do not share names."""

    @functools.wraps(param_name)
    def name_of(self: Any, param: Any) -> str:
        if not _updates_ours(self):
            return param_name(self, param)
        if not hasattr(self, "_global_names"):
            self._global_names = optimizer_names(self.model_chunks)
        return self._global_names[param]

    return name_of


def comparing_compute_weights(check: Callable[..., bool]) -> Callable[..., bool]:
    """Return a ``check_param_hashes_across_dp_replicas`` that looks at what forward reads: parameters are sharded."""

    @functools.wraps(check)
    def check_hashes(model: list[Any], cross_check: bool = False) -> bool:
        ours = [chunk for chunk in model if isinstance(chunk, FullyShardedDataParallel)]
        if not ours:
            return check(model, cross_check)
        stale = [name for chunk in ours for name in inconsistent_weights(chunk.module.engine)]
        if stale:
            logger.error("compute weights differ from main weights, or among ranks: %s", ", ".join(stale))
        return not stale

    return check_hashes


def leaving_main_weights(copy: Callable[..., None]) -> Callable[..., None]:
    """Return a ``_copy_model_params_to_main_params`` that does nothing where main weights are what was loaded."""

    @functools.wraps(copy)
    def copy_unless_ours(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _updates_ours(self):
            copy(self, *args, **kwargs)

    return copy_unless_ours


def taking_no_step(make_state: Callable[..., None]) -> Callable[..., None]:
    """Return an ``_init_optimizer_states_with_dummy_values`` after which training begins as if it had not been called.

    Megatron-Core lets the optimizer take a step without gradients, so that there is state to load into. It decays the
    weights and counts, and where ``--load`` names a folder without a checkpoint, as a run's first start does, nothing
    takes that back: Adam's bias correction is that of the step after.
    """

    @functools.wraps(make_state)
    def make_state_only(self: Any) -> None:
        if not _updates_ours(self):
            make_state(self)
            return
        optimizer = self.optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        counts = [(counted, counted["step"] * 1) for counted in _that_count(optimizer)]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        apart = _parameters(optimizer) if getattr(optimizer, "use_decoupled_grad", False) else []
        for parameter in apart:
            parameter.decoupled_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        make_state(self)
        for parameter in apart:
            parameter.decoupled_grad = None  # type: ignore[attr-defined]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for counted in _that_count(optimizer):
            counted["step"] = counted["step"] * 0
        for counted, count in counts:
            counted["step"] = count

    return make_state_only


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Those of which this rank has a part."""
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in found if local_shard(parameter).numel()]


def _that_count(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Where an optimizer counts its steps: torch's in each parameter's state, fused ones in their groups."""
    return [counted for counted in (*optimizer.param_groups, *optimizer.state.values()) if "step" in counted]
