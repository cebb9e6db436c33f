"""How the tensors of one entry of a table become those of the other side. Each rule has its inverse beside it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megatron.fsdp.checkpoint.lazy import Box, LazyTensor, cat
from megatron.fsdp.convert.huggingface.model import Model

Parts = Sequence[LazyTensor]


class Context(NamedTuple):
    """What rules need to know.

    Attributes:
        model: The model.
        padded_vocabulary: Rows of Megatron's embedding.
    """

    model: Model
    padded_vocabulary: int


class Rule(NamedTuple):
    """A way and its way back. Both raise ValueError for tensors whose shape is not the model's.

    Attributes:
        to_megatron: From the tensors of an entry's Hugging Face names to those of its Megatron names.
        to_huggingface: The other way.
    """

    to_megatron: Callable[[Parts, Context], list[LazyTensor]]
    to_huggingface: Callable[[Parts, Context], list[LazyTensor]]


def _same(parts: Parts, context: Context) -> list[LazyTensor]:
    return list(parts)


def _fuse_qkv(parts: Parts, context: Context) -> list[LazyTensor]:
    """Query, key and value rows, each by head, to rows by group: its query heads, its key head, its value head."""
    attention = context.model.attention
    per_group = attention.heads // attention.groups * attention.head_size
    rows = (attention.heads * attention.head_size, *(attention.groups * attention.head_size,) * 2)
    for part, expected in zip(parts, rows, strict=True):
        _expect_rows(part, expected)
    query, key, value = parts
    pieces: list[LazyTensor] = []
    for group in range(attention.groups):
        pieces.append(query.narrow(0, group * per_group, per_group))
        pieces += [part.narrow(0, group * attention.head_size, attention.head_size) for part in (key, value)]
    return [cat(pieces)]


def _split_qkv(parts: Parts, context: Context) -> list[LazyTensor]:
    attention = context.model.attention
    size = attention.head_size
    per_group = attention.heads // attention.groups * size
    stride = per_group + 2 * size
    _expect_rows(parts[0], attention.groups * stride)
    found = []
    for start, length in ((0, per_group), (per_group, size), (per_group + size, size)):
        found.append(cat([parts[0].narrow(0, group * stride + start, length) for group in range(attention.groups)]))
    return found


def _pad_vocabulary(parts: Parts, context: Context) -> list[LazyTensor]:
    """Zero rows at the end, for tokens that do not exist."""
    tensor, vocabulary = parts[0], context.model.sizes.vocabulary
    _expect_rows(tensor, vocabulary)
    missing = context.padded_vocabulary - vocabulary
    return [cat([tensor, zeros((missing, *tensor.shape[1:]), tensor.dtype)]) if missing else tensor]


def _cut_vocabulary(parts: Parts, context: Context) -> list[LazyTensor]:
    tensor, vocabulary = parts[0], context.model.sizes.vocabulary
    if tensor.shape[0] < vocabulary:
        raise ValueError(f"expected at least {vocabulary} rows, one for each token; got {tensor.shape[0]}")
    return [tensor.narrow(0, 0, vocabulary)]


def _expect_rows(tensor: LazyTensor, rows: int) -> None:
    if not tensor.shape or tensor.shape[0] != rows:
        raise ValueError(f"expected {rows} rows; got shape {tensor.shape}")


RULES = {
    "same": Rule(_same, _same),
    "qkv": Rule(_fuse_qkv, _split_qkv),
    "vocabulary": Rule(_pad_vocabulary, _cut_vocabulary),
}


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> LazyTensor:
    """Zeros that take no memory before they are read."""
    return LazyTensor(shape, dtype, lambda box: torch.zeros(box.sizes, dtype=dtype))


def dequantized(tensor: LazyTensor, scales: LazyTensor, block: tuple[int, int]) -> LazyTensor:
    """A matrix of 8-bit floats with one scale for each block, as DeepSeek publishes its weights, in float32.

    Args:
        tensor: [rows, columns].
        scales: [row blocks, column blocks] of float32.
        block: Rows and columns of a block; the last ones may be incomplete.

    Raises:
        ValueError: The shapes do not go together.
    """
    expected = tuple(-(-size // length) for size, length in zip(tensor.shape, block, strict=False))
    if len(tensor.shape) != 2 or scales.shape != expected:
        raise ValueError(f"expected scales of shape {expected} for blocks of {block}; got {scales.shape}")

    def read(box: Box) -> torch.Tensor:
        first = tuple(o // b for o, b in zip(box.offsets, block, strict=True))
        sizes = tuple(-(-(o + n) // b) - f for o, n, b, f in zip(box.offsets, box.sizes, block, first, strict=True))
        part = scales.read(Box(first, sizes)).to(torch.float32)
        for dim, length in enumerate(block):
            start = box.offsets[dim] - first[dim] * length
            part = part.repeat_interleave(length, dim).narrow(dim, start, box.sizes[dim])
        return tensor.read(box).to(torch.float32) * part

    return LazyTensor(tensor.shape, torch.float32, read)
