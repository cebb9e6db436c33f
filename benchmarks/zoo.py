"""Small models of ten kinds, on which the planner's memory is checked."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.model import SEED, Block, Shape, Transformer, loss_of

WIDTH, DEPTH, TOKENS, VOCABULARY = 192, 4, 128, 512


@dataclass(frozen=True)
class Model:
    """One kind of model, and how it is trained.

    Attributes:
        title: For tables.
        build: Returns the model on the CPU.
        batch: Returns the batch of a rank.
        loss: The loss of model and batch, a scalar.
        units: Classes whose modules become FSDP units.
        settings: Settings of the engine in addition to the strategy.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    units: tuple[type[nn.Module], ...]
    settings: dict[str, Any] = field(default_factory=dict)


class Recomputed(Block):
    """A block whose activations are computed again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute from and to [sequences, tokens, width]."""
        result: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class Experts(Block):
    """A block whose MLP is one of four experts, chosen for each token by a router."""

    def __init__(self, width: int, heads: int, number: int = 4) -> None:
        super().__init__(width, heads)
        self.number = number
        self.router = nn.Linear(width, number, bias=False)
        del self.up, self.down
        self.ups = nn.Parameter(torch.randn(number, width, 2 * width) / width**0.5)
        self.downs = nn.Parameter(torch.randn(number, 2 * width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute from and to [sequences, tokens, width]. Every expert chooses the same number of tokens."""
        sequences, tokens, width = x.shape
        x = x + self.projection(self.qkv(self.attention_norm(x))[..., :width])
        flat = self.mlp_norm(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).t().topk(sequences * tokens // self.number)
        hidden = functional.silu(torch.bmm(flat[chosen], self.ups))
        result = torch.bmm(hidden, self.downs) * weights.unsqueeze(-1)
        return x + torch.zeros_like(flat).index_add(0, chosen.flatten(), result.flatten(0, 1)).view_as(x)


class Adapted(Block):
    """A block with frozen weights and a small trainable adapter."""

    def __init__(self, width: int, heads: int, rank: int = 16) -> None:
        super().__init__(width, heads)
        self.requires_grad_(False)
        self.inwards = nn.Linear(width, rank, bias=False)
        self.outwards = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute from and to [sequences, tokens, width]."""
        return super().forward(x) + self.outwards(self.inwards(x))


class Convolution(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(8, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute from and to [images, channels, height, width]."""
        return x + self.second(self.norm(self.first(x)).relu())


class Recurrent(nn.LSTM):
    """An LSTM that returns only its outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Compute from and to [sequences, tokens, width]."""
        result: torch.Tensor = super().forward(x)[0]
        return result


class Patches(nn.Module):
    """A vision transformer's patches: images [n, 3, 64, 64] to [n, 64, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, width, 8, 8)
        self.positions = nn.Parameter(torch.randn(64, width))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the embedding of every patch."""
        return self.projection(images).flatten(2).transpose(1, 2) + self.positions


class Mean(nn.Module):
    """The mean over all dimensions between the first and the last one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute from [n, tokens, width] to [n, width]."""
        return x.mean(1)


def _blocks(kind: type[Block]) -> nn.Module:
    """The transformer with blocks of another kind."""
    model = Transformer(Shape(WIDTH, DEPTH, 4, VOCABULARY))
    model.blocks = nn.ModuleList(kind(WIDTH, 4) for _ in range(DEPTH))
    if kind is Adapted:
        for module in (model.embedding, model.norm, model.head):
            module.requires_grad_(False)
    return model


def _tied() -> nn.Module:
    model = _blocks(Block)
    assert isinstance(model, Transformer)
    model.head.weight = model.embedding.weight
    return model


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 4, 4), *(Convolution(64) for _ in range(6)), nn.Flatten(2), Mean(), nn.Linear(256, 10)
    )


def _recurrent() -> nn.Module:
    layers = (Recurrent(WIDTH, WIDTH, batch_first=True) for _ in range(DEPTH))
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))


def _vision() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(DEPTH))
    return nn.Sequential(Patches(WIDTH), *layers, Mean(), nn.Linear(WIDTH, 10))


def _seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        torch.manual_seed(SEED)
        return build()

    return seeded


def _tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, TOKENS + 1), generator=torch.Generator().manual_seed(SEED))


def _images() -> torch.Tensor:
    return torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(SEED))


def _square(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(images)
    return result.square().mean()


def _text(title: str, build: Callable[[], nn.Module], units: tuple[type[nn.Module], ...], **settings: Any) -> Model:
    return Model(title, _seeded(build), _tokens, loss_of, units, settings)


def _llama() -> nn.Module:
    return Transformer(Shape(WIDTH, DEPTH, 8, VOCABULARY, llama_hidden=3 * WIDTH))


MODELS: dict[str, Model] = {
    "gpt": _text("GPT", lambda: _blocks(Block), (Block,)),
    "llama": _text("Llama, grouped queries", _llama, (Block,)),
    "tied": _text("tied embeddings", _tied, (Block,)),
    "experts": _text("mixture of experts", lambda: _blocks(Experts), (Block,)),
    "convolutions": Model("convolutions", _seeded(_convolutions), _images, _square, (Convolution,)),
    "lstm": _text("LSTM", _recurrent, (Recurrent,)),
    "vision": Model("vision transformer", _seeded(_vision), _images, _square, (nn.TransformerEncoderLayer,)),
    "recomputed": _text("GPT, recomputation", lambda: _blocks(Recomputed), (Block,)),
    "adapters": _text("frozen GPT, adapters", lambda: _blocks(Adapted), (Block,)),
    "bf16": _text("GPT in bf16", lambda: _blocks(Block).bfloat16(), (Block,)),
}
