"""Context parallelism, and values of a different size than keys, for Megatron-Core's own attention.

Megatron-Core leaves both to Transformer Engine. The results here are exact, but every rank gathers all keys and values.

A sequence is split into 2n chunks for n ranks. Megatron-Core gives rank r the chunks r and 2n - 1 - r, so that with a
causal mask all ranks have equally much to compute.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch


def initialize(
    original: Callable[..., None],
    self: Any,
    config: Any,
    *args: Any,
    k_channels: int | None = None,
    v_channels: int | None = None,
    **kwargs: Any,
) -> None:
    """Initialize attention for any context-parallel size, and for values of a different size than keys."""
    accepted = copy.copy(config)
    accepted.context_parallel_size = 1
    original(self, accepted, *args, **kwargs)
    self.config = config
    if v_channels is not None:
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def attend_to_all(
    original: Callable[..., Any],
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Attend to the keys and values of all context-parallel ranks."""
    from megatron.core import parallel_state

    if self.config.context_parallel_size == 1:
        return original(self, query, key.contiguous(), value.contiguous(), mask, *args, **kwargs)
    group = parallel_state.get_context_parallel_group()
    if mask is None:
        mask = causal_mask(query.shape[0], group.rank(), group.size())
    return original(self, query, whole(key, group), whole(value, group), mask, *args, **kwargs)


def whole(local: torch.Tensor, group: Any) -> torch.Tensor:
    """Gather a sequence [tokens / ranks, ...] in its natural order. Gradients are summed over the ranks."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    gathered = gather_from_sequence_parallel_region(local.contiguous(), True, group=group)
    chunks = gathered.chunk(2 * group.size())
    held = [chunk for rank in range(group.size()) for chunk in chunks_of(rank, group.size())]
    return torch.cat([chunks[held.index(chunk)] for chunk in range(len(held))])


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The chunks of a sequence that a rank has."""
    return rank, 2 * ranks - 1 - rank


def causal_mask(tokens: int, rank: int, ranks: int) -> torch.Tensor:
    """A mask of shape [1, 1, tokens, tokens * ranks], True where a token of this rank must not attend."""
    length = tokens // 2
    mine = torch.cat([torch.arange(chunk * length, (chunk + 1) * length) for chunk in chunks_of(rank, ranks)])
    return (torch.arange(tokens * ranks) > mine.unsqueeze(1)).view(1, 1, tokens, tokens * ranks)
