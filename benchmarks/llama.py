"""Llama blocks for the GPU benchmark: RMS norms, rotary positions, grouped queries, gated MLP, no biases."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.model import Block

ROTARY_BASE = 500_000.0


class LlamaBlock(Block):
    """A Llama block. It is a subclass of ``Block``, so that all peers make it a unit.

    Args:
        width: Hidden size.
        heads: Number of query heads. Keys and values have a quarter as many.
        hidden: Hidden size of the MLP.
    """

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        nn.Module.__init__(self)
        self.heads, self.groups, self.size = heads, max(1, heads // 4), width // heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * self.groups * self.size, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute from and to [sequences, tokens, width]."""
        sequences, tokens, width = x.shape
        normed = self.attention_norm(x)
        q = self.q(normed).view(sequences, tokens, self.heads, self.size).transpose(1, 2)
        kv = self.kv(normed).view(sequences, tokens, 2, self.groups, self.size)
        k, v = (part.transpose(1, 2) for part in kv.unbind(2))
        q, k = _rotated(q), _rotated(k)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(sequences, tokens, width))
        normed = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to [sequences, heads, tokens, size]."""
    tokens, half = x.shape[-2], x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = torch.arange(tokens, device=x.device)[:, None] * ROTARY_BASE**-exponents
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
