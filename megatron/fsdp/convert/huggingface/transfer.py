"""Whole models from Megatron checkpoints to Hugging Face folders and back: what is to be done, then doing it."""

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.fsdp.checkpoint.checksums import write_file
from megatron.fsdp.checkpoint.reader import RELEASE
from megatron.fsdp.convert.canonical import Tensors, TrainingState
from megatron.fsdp.convert.huggingface.arguments import from_args, notes, script, to_args
from megatron.fsdp.convert.huggingface.config import from_config, to_config
from megatron.fsdp.convert.huggingface.conversion import readable, to_huggingface, to_megatron
from megatron.fsdp.convert.huggingface.folder import FolderWriter, companions, identity, read_config, read_weights
from megatron.fsdp.convert.huggingface.model import Model, differences
from megatron.fsdp.convert.options import WriteOptions
from megatron.fsdp.convert.run import write_state

ARGUMENTS = "args.sh"
_CHECKPOINT_VERSION = 3.0


@dataclass(frozen=True)
class Export:
    """A Hugging Face folder that can be written. Nothing but headers has been read for it.

    Attributes:
        tensors: By Hugging Face name, in order.
        config: For config.json.
        files: To copy beside.
        model: What it is.
        notes: What the user should know.
        source: What it is made of.
    """

    tensors: Tensors
    config: dict[str, Any]
    files: list[Path]
    model: Model
    notes: list[str]
    source: str

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def prepare_export(
    state: TrainingState, dtype: torch.dtype | None, original: Path | None = None, vocabulary: int | None = None
) -> Export:
    """Find out whether a checkpoint can become a Hugging Face folder, and how.

    Args:
        state: The checkpoint.
        dtype: Of the weights; None: as they are.
        original: A folder of a Hugging Face model with the same architecture and sizes, whose config.json, tokenizer
            and so on go with the weights. None: config.json is made from the checkpoint's arguments.
        vocabulary: Number of tokens without padding, if neither the folder nor the arguments know it.

    Raises:
        NotImplementedError: No architecture computes what the arguments ask for.
        ValueError: Names or shapes do not fit, or the original is another model.
    """
    config = read_config(original) if original is not None else {}
    wanted = from_config(config) if config else None
    model = from_args(state.args, wanted.sizes.vocabulary if wanted else vocabulary)
    if wanted is not None:
        _require_same(wanted, model)
        model = wanted
    exported = to_huggingface(state.weights | state.buffers, model, dtype)
    found = exported.tensors["model.embed_tokens.weight"].dtype
    if wanted is None:
        config = to_config(exported.model, found)
    else:
        # The weights are neither quantized nor of the original's dtype any more.
        config = {k: v for k, v in config.items() if k not in ("quantization_config", "dtype")}
        config["torch_dtype"] = str(found).removeprefix("torch.")
        if exported.model.mtp_layers != model.mtp_layers:
            config["num_nextn_predict_layers"] = exported.model.mtp_layers
    files = companions(original) if original is not None else []
    return Export(exported.tensors, config, files, exported.model, exported.notes + notes(model), state.source)


def _require_same(wanted: Model, model: Model) -> None:
    # How long sequences may be is no property of the weights, and layers that are missing are noted elsewhere.
    alike = dataclasses.replace(
        model, sizes=dataclasses.replace(model.sizes, positions=wanted.sizes.positions), mtp_layers=wanted.mtp_layers
    )
    if found := differences(wanted, alike):
        lines = "\n  ".join(found)
        raise ValueError(f"The original's config.json and the checkpoint's args differ (config.json, args):\n  {lines}")


def export(
    plan: Export,
    path: Path,
    largest_file: int,
    options: WriteOptions,
    progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Write the folder, or this process's part of it.

    Args:
        plan: From :func:`prepare_export`.
        path: The folder to be.
        largest_file: Bytes of tensors in one file.
        options: Processes that share the work, and bytes that are held at a time.
        progress: Called with numbers of bytes that are written.

    Raises:
        FileExistsError: It is there already.
    """
    writer = FolderWriter(path, plan.source, largest_file, options.process, options.processes, options.block)
    writer.write(plan.tensors, plan.config, plan.files, progress)


@dataclass(frozen=True)
class ImportOptions:
    """How a Hugging Face model becomes a checkpoint.

    Attributes:
        format: ``fsdp_dtensor`` or ``torch_dist``.
        layer_spec: ``local`` or ``transformer_engine``: whose layers are to load it.
        vocabulary_multiple: The embedding gets so many rows, or a multiple.
        dtype: Of the weights; None: as they are.
        write: Processes that share the work, and bytes that are held at a time.

    Raises:
        ValueError: ``vocabulary_multiple`` is below 1.
    """

    format: str = "fsdp_dtensor"
    layer_spec: str = "transformer_engine"
    vocabulary_multiple: int = 128
    dtype: torch.dtype | None = torch.float32
    write: WriteOptions = field(default_factory=WriteOptions)

    def __post_init__(self) -> None:
        if self.vocabulary_multiple < 1:
            raise ValueError(f"ImportOptions: expected vocabulary_multiple >= 1; got {self.vocabulary_multiple}.")


@dataclass(frozen=True)
class Import:
    """A checkpoint that can be written. Nothing but headers has been read for it.

    Attributes:
        state: What it holds.
        model: What it is.
        notes: What the user should know.
    """

    state: TrainingState
    model: Model
    notes: list[str]

    @property
    def args(self) -> argparse.Namespace:
        """Megatron's arguments that build the model."""
        return self.state.args

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (self.state.weights | self.state.buffers).values())


def prepare_import(folder: Path, options: ImportOptions) -> Import:
    """Find out whether a Hugging Face folder can become a checkpoint, and how.

    Args:
        folder: With config.json and safetensors files.
        options: How.

    Raises:
        FileNotFoundError: The folder is no such one.
        NotImplementedError: Megatron-Core's GPT, or its training script, does not know what config.json asks for.
        ValueError: Names or shapes do not fit, or a file is damaged.
    """
    config = read_config(folder)
    model = from_config(config)
    tensors = readable(read_weights(folder), config)
    multiple = options.vocabulary_multiple
    padded = -(-model.sizes.vocabulary // multiple) * multiple
    imported = to_megatron(tensors, model, options.layer_spec, padded, options.dtype)
    low = (torch.bfloat16, torch.float16)
    found = tensors["model.embed_tokens.weight"].dtype
    compute = next((dtype for dtype in (options.dtype, found) if dtype in low), torch.float32)
    args = to_args(imported.model, options.layer_spec, padded, compute)
    args.ckpt_format = options.format
    args.make_vocab_size_divisible_by = multiple
    state = TrainingState(
        weights=imported.weights,
        buffers=imported.buffers,
        common={"args": args, "iteration": 0, "checkpoint_version": _CHECKPOINT_VERSION},
        source=f"{identity(folder)} {options.layer_spec} {multiple} {options.dtype}",
    )
    return Import(state, imported.model, imported.notes + notes(imported.model))


def import_(plan: Import, path: Path, options: ImportOptions, progress: Callable[[int], None]) -> None:
    """Write the checkpoint, or this process's part of it, for ``--load path``, and the arguments beside it.

    Args:
        plan: From :func:`prepare_import`.
        path: The folder to be given to ``--load``. The checkpoint becomes ``release`` in it.
        options: The same as for the plan.
        progress: Called with numbers of bytes that are written.

    Raises:
        FileExistsError: It is there already.
    """
    write_state(plan.state, path / RELEASE, options.format, options.write, progress)
    if options.write.process == 0:
        write_file(path / ARGUMENTS, script(plan.args).encode())
