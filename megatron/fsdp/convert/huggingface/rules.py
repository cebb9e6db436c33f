"""Rules that convert the tensors of a name table's entry between Hugging Face's and Megatron's layouts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megatron.fsdp.checkpoint.lazy import LazyTensor, Region, cat
from megatron.fsdp.convert.huggingface.model import Model


class Context(NamedTuple):
    """The model that a rule is applied to.

    Attributes:
        model: Its description.
        padded_vocabulary: Rows of Megatron's embedding.
    """

    model: Model
    padded_vocabulary: int


class Rule(NamedTuple):
    """A conversion and its inverse. Both raise ValueError for tensors whose shape contradicts the model.

    Attributes:
        to_megatron: Converts the tensors of an entry's Hugging Face names to its one Megatron tensor.
        to_huggingface: The inverse.
    """

    to_megatron: Callable[[Sequence[LazyTensor], Context], LazyTensor]
    to_huggingface: Callable[[LazyTensor, Context], list[LazyTensor]]


def _fuse_qkv(parts: Sequence[LazyTensor], context: Context) -> LazyTensor:
    """Interleave query, key and value rows by group: the group's query heads, its key head, its value head."""
    attention = context.model.attention
    per_group = attention.heads // attention.groups * attention.head_size
    rows = (attention.heads * attention.head_size, *(attention.groups * attention.head_size,) * 2)
    for part, expected in zip(parts, rows, strict=True):
        _expect_rows(part, expected)
    query, key, value = parts
    rows_by_group: list[LazyTensor] = []
    for group in range(attention.groups):
        rows_by_group.append(query.narrow(0, group * per_group, per_group))
        rows_by_group += [part.narrow(0, group * attention.head_size, attention.head_size) for part in (key, value)]
    return cat(rows_by_group)


def _split_qkv(fused: LazyTensor, context: Context) -> list[LazyTensor]:
    attention = context.model.attention
    size = attention.head_size
    per_group = attention.heads // attention.groups * size
    stride = per_group + 2 * size
    _expect_rows(fused, attention.groups * stride)
    return [
        cat([fused.narrow(0, group * stride + start, length) for group in range(attention.groups)])
        for start, length in ((0, per_group), (per_group, size), (per_group + size, size))
    ]


def _pad_vocabulary(parts: Sequence[LazyTensor], context: Context) -> LazyTensor:
    """Append zero rows up to the padded vocabulary."""
    (tensor,), vocabulary = parts, context.model.sizes.vocabulary
    _expect_rows(tensor, vocabulary)
    return tensor.with_rows(context.padded_vocabulary)


def _cut_vocabulary(tensor: LazyTensor, context: Context) -> list[LazyTensor]:
    vocabulary = context.model.sizes.vocabulary
    if tensor.shape[0] < vocabulary:
        raise ValueError(f"expected at least {vocabulary} rows, one for each token; got {tensor.shape[0]}")
    return [tensor.narrow(0, 0, vocabulary)]


def _expect_rows(tensor: LazyTensor, rows: int) -> None:
    if not tensor.shape or tensor.shape[0] != rows:
        raise ValueError(f"expected {rows} rows; got shape {tensor.shape}")


RULES = {
    "same": Rule(lambda parts, context: parts[0], lambda tensor, context: [tensor]),
    "qkv": Rule(_fuse_qkv, _split_qkv),
    "vocabulary": Rule(_pad_vocabulary, _cut_vocabulary),
}


def dequantized(tensor: LazyTensor, scales: LazyTensor, block: tuple[int, int]) -> LazyTensor:
    """Dequantize a matrix of 8-bit floats with one scale per block, as DeepSeek publishes its weights, to float32.

    Args:
        tensor: [rows, columns].
        scales: [row blocks, column blocks] of float32.
        block: Rows and columns of a block. The last blocks may be incomplete.

    Raises:
        ValueError: The shapes contradict each other.
    """
    expected = tuple(-(-size // length) for size, length in zip(tensor.shape, block, strict=False))
    if len(tensor.shape) != 2 or scales.shape != expected:
        raise ValueError(f"expected scales of shape {expected} for blocks of {block}; got {scales.shape}")

    def read(region: Region) -> torch.Tensor:
        # Read the scales of the blocks that the region overlaps with, repeat them, and crop the result to the region.
        first = tuple(o // b for o, b in zip(region.offsets, block, strict=True))
        sizes = tuple(
            -(-(o + n) // b) - f for o, n, b, f in zip(region.offsets, region.sizes, block, first, strict=True)
        )
        part = scales.read(Region(first, sizes)).to(torch.float32)
        for dim, length in enumerate(block):
            start = region.offsets[dim] - first[dim] * length
            part = part.repeat_interleave(length, dim).narrow(dim, start, region.sizes[dim])
        return tensor.read(region).to(torch.float32) * part

    return LazyTensor(tensor.shape, torch.float32, read)
