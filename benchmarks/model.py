"""The model that all peers train, a pre-norm transformer in plain torch, and its data."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

SEED = 1234


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


def _block(shape: Shape) -> Block:
    if not shape.llama_hidden:
        return Block(shape.width, shape.heads)
    from benchmarks.llama import LlamaBlock  # not at the top, because it imports Block from here

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
    """A module that computes in another dtype than that of its weights, for peers without mixed precision per unit."""

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
