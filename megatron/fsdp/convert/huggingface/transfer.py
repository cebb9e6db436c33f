"""Converts whole models between Megatron checkpoints and Hugging Face folders: first a plan, then its execution."""

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron.fsdp.checkpoint.checksums import fingerprint, write_file
from megatron.fsdp.checkpoint.reader import RELEASE
from megatron.fsdp.convert.canonical import TrainingState
from megatron.fsdp.convert.fsdp_dtensor import CHECKPOINT_VERSION
from megatron.fsdp.convert.huggingface.arguments import from_args, notes, script, to_args
from megatron.fsdp.convert.huggingface.config import from_config, to_config
from megatron.fsdp.convert.huggingface.conversion import readable, to_huggingface, to_megatron
from megatron.fsdp.convert.huggingface.folder import Export, companions, read_config, read_weights
from megatron.fsdp.convert.huggingface.model import Model, differences
from megatron.fsdp.convert.options import WriteOptions
from megatron.fsdp.convert.run import write_state

ARGUMENTS = "args.sh"


def prepare_export(
    state: TrainingState, dtype: torch.dtype | None, original: Path | None = None, vocabulary: int | None = None
) -> Export:
    """Plan the conversion of a checkpoint to a Hugging Face folder.

    Args:
        state: The checkpoint.
        dtype: Of the weights; None keeps their dtypes.
        original: Folder of a Hugging Face model with the same architecture and sizes, whose config.json and tokenizer
            files are copied. None: config.json is made from the checkpoint's arguments, which those of Megatron-Bridge
            lack.
        vocabulary: Number of tokens without padding, if neither ``original`` nor the arguments contain it.

    Raises:
        NotImplementedError: No architecture supports what the arguments require.
        ValueError: Names or shapes do not match, or ``original`` is another model.
    """
    config = read_config(original) if original is not None else {}
    shapes = [tensor.shape for tensor in (state.weights | state.buffers).values()]
    wanted = from_config(config, shapes) if config else None
    if wanted is not None and not vars(state.args):
        model = wanted  # a checkpoint of Megatron-Bridge; names and shapes are compared below
    else:
        model = from_args(state.args, wanted.sizes.vocabulary if wanted else vocabulary)
    if wanted is not None:
        _require_same(wanted, model)
        model = wanted
    exported = to_huggingface(state.weights | state.buffers, model, dtype)
    found = exported.tensors["model.embed_tokens.weight"].dtype
    if wanted is None:
        config = to_config(exported.model, found)
    else:
        # The original may be quantized or of a different dtype; the exported weights are not.
        config = {k: v for k, v in config.items() if k not in ("quantization_config", "dtype")}
        config["torch_dtype"] = str(found).removeprefix("torch.")
        if exported.model.mtp_layers != model.mtp_layers:
            config["num_nextn_predict_layers"] = exported.model.mtp_layers
    files = companions(original) if original is not None else []
    return Export(exported.tensors, config, files, exported.model, exported.notes + notes(model), state.source)


def _require_same(wanted: Model, model: Model) -> None:
    # The sequence length does not affect the weights, and missing prediction layers have a note of their own.
    alike = dataclasses.replace(
        model, sizes=dataclasses.replace(model.sizes, positions=wanted.sizes.positions), mtp_layers=wanted.mtp_layers
    )
    if found := differences(wanted, alike):
        lines = "\n  ".join(found)
        raise ValueError(f"config.json of the original and args of the checkpoint differ (config, args):\n  {lines}")


@dataclass(frozen=True)
class ImportOptions:
    """Options for converting a Hugging Face model to a checkpoint.

    Attributes:
        format: ``fsdp_dtensor`` or ``torch_dist``.
        layer_spec: ``local`` or ``transformer_engine``: the layers that will load the checkpoint.
        vocabulary_multiple: The embedding's rows are padded to a multiple of this.
        dtype: Of the weights; None keeps their dtypes.
        write: How processes share the work, and how many bytes each holds in memory.

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
    """A checkpoint to write. Only metadata has been read for it.

    Attributes:
        state: Contents of the checkpoint.
        model: Description of the model.
        notes: Remarks for the user.
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
    """Plan the conversion of a Hugging Face folder to a checkpoint.

    Args:
        folder: Holds config.json and safetensors files.
        options: Of the conversion.

    Raises:
        FileNotFoundError: The folder lacks config.json or the weights.
        NotImplementedError: Megatron-Core's GPT or its training script does not support what config.json requires.
        ValueError: Names or shapes do not match, or a file is damaged.
    """
    config = read_config(folder)
    weights = read_weights(folder)
    model = from_config(config, [tensor.shape for tensor in weights.values()])
    tensors = readable(weights, config)
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
        common={"args": args, "iteration": 0, "checkpoint_version": CHECKPOINT_VERSION},
        source=f"{fingerprint(folder)} {options.layer_spec} {multiple} {options.dtype}",
    )
    return Import(state, imported.model, imported.notes + notes(imported.model))


def import_(plan: Import, path: Path, options: ImportOptions, progress: Callable[[int], None]) -> None:
    """Write the checkpoint, or this process's share of it, and a script with its arguments.

    Args:
        plan: From :func:`prepare_import`.
        path: The folder for ``--load``, which will hold the checkpoint as ``release``.
        options: The same as for the plan.
        progress: Called with the number of bytes after each write.

    Raises:
        FileExistsError: The checkpoint already exists.
    """
    write_state(plan.state, path / RELEASE, options.format, options.write, progress)
    if options.write.process == 0:
        write_file(path / ARGUMENTS, script(plan.args).encode())
