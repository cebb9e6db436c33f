"""What Megatron-Core's own attention lacks, since it leaves that to Transformer Engine: context parallelism, and values
of another size than keys, as multi-latent attention has them. Exact, and slow: every rank gathers all keys and values.

Megatron-Core gives rank r of n the chunks r and 2n - 1 - r out of 2n chunks of a sequence, so that with a causal mask
all ranks have as much to compute.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch


def accepting_more(init: Callable[..., None]) -> Callable[..., None]:
    """Return a DotProductAttention.__init__() that takes a context-parallel size, and sizes of keys and values."""

    @functools.wraps(init)
    def init_any(
        self: Any,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        accepted = copy.copy(config)
        accepted.context_parallel_size = 1
        init(self, accepted, *args, **kwargs)
        self.config = config
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return init_any


def gathering_keys_and_values(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a DotProductAttention.forward() that attends to the whole sequence."""

    @functools.wraps(forward)
    def forward_over_all(
        self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from megatron.core import parallel_state

        if self.config.context_parallel_size == 1:
            return forward(self, query, key.contiguous(), value.contiguous(), mask, *args, **kwargs)
        group = parallel_state.get_context_parallel_group()
        if mask is None:
            mask = causal_mask(query.shape[0], group.rank(), group.size())
        return forward(self, query, whole(key, group), whole(value, group), mask, *args, **kwargs)

    return forward_over_all


def whole(part: torch.Tensor, group: Any) -> torch.Tensor:
    """Gather a sequence [tokens / ranks, ...] in its natural order; gradients are summed over the ranks."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    gathered = gather_from_sequence_parallel_region(part.contiguous(), True, group=group)
    chunks = gathered.chunk(2 * group.size())
    held = [chunk for rank in range(group.size()) for chunk in chunks_of(rank, group.size())]
    return torch.cat([chunks[held.index(chunk)] for chunk in range(len(held))])


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Return which chunks of a sequence a rank has."""
    return rank, 2 * ranks - 1 - rank


def causal_mask(tokens: int, rank: int, ranks: int) -> torch.Tensor:
    """Return [1, 1, tokens, tokens * ranks]: True where a token of this rank must not look."""
    length = tokens // 2
    mine = torch.cat([torch.arange(chunk * length, (chunk + 1) * length) for chunk in chunks_of(rank, ranks)])
    return (torch.arange(tokens * ranks) > mine.unsqueeze(1)).view(1, 1, tokens, tokens * ranks)
