"""The model that all peers train, a pre-norm transformer in plain torch, and its data."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

SEED = 1234
ROTARY_BASE = 500_000.0


@dataclass(frozen=True)
class Shape:
    """Sizes of the model.

    Attributes:
        width: Hidden size.
        depth: Number of blocks.
        heads: Number of attention heads.
        vocabulary: Size of the vocabulary.
        llama_hidden: Hidden size of the MLP of Llama blocks; 0 for plain blocks.
    """

    width: int = 512
    depth: int = 8
    heads: int = 8
    vocabulary: int = 512
    llama_hidden: int = 0


class Block(nn.Module):
    """Causal attention and an MLP, each with a pre-norm and a residual connection. Each block is an FSDP unit."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm: nn.Module = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm: nn.Module = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute from and to [sequences, tokens, width]."""
        sequences, tokens, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(sequences, tokens, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(sequences, tokens, width))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class LlamaBlock(Block):
    """A Llama block: RMS norms, rotary positions, grouped queries, gated MLP, no biases.

    It is a subclass of ``Block``, so that all peers make it a unit.

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


def _block(shape: Shape) -> Block:
    if not shape.llama_hidden:
        return Block(shape.width, shape.heads)
    return LlamaBlock(shape.width, shape.heads, shape.llama_hidden)


class Transformer(nn.Module):
    """Embedding, blocks, norm and head. Embedding and head are not tied."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [sequences, tokens, vocabulary] of the next token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ComputeIn(nn.Module):
    """A module that computes in a different dtype than its weights have, for peers without mixed precision per unit."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the module with cast weights."""
        weights = {name: p.to(self.dtype) for name, p in self.module.named_parameters()}
        return functional_call(self.module, weights, inputs)


def build_model(shape: Shape, low_precision: bool, device: str = "cpu") -> Transformer:
    """Build the model in fp32 with the same weights for all peers; ``low_precision`` rounds them to bf16 values."""
    torch.manual_seed(SEED)
    with torch.device(device):
        model = Transformer(shape)
    return model.bfloat16().float() if low_precision else model


def compute_in_bf16(model: Transformer) -> None:
    """Make a model with fp32 weights compute in bf16, unit by unit."""
    for parent, name in ((model, "embedding"), (model, "norm"), (model, "head")):
        setattr(parent, name, ComputeIn(getattr(parent, name), torch.bfloat16))
    model.blocks = nn.ModuleList(ComputeIn(block, torch.bfloat16) for block in model.blocks)


def batch(vocabulary: int, tokens: int, step: int, rank: int) -> torch.Tensor:
    """One random sequence with its last target, [1, tokens + 1]. It is the same for every peer."""
    generator = torch.Generator().manual_seed(SEED + 100_003 * step + rank)
    return torch.randint(0, vocabulary, (1, tokens + 1), generator=generator)


def loss_of(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token, in fp32."""
    logits = model(data[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), data[:, 1:].flatten())
