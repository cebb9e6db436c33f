"""Models that sharding could get wrong: tied, unused and odd parameters, units inside units, recomputed activations."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models import Block, TinyModel


class TiedAcrossUnits(TinyModel):
    """The first and the last block share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class SharedBlock(nn.Module):
    """One block at two places, called at both; its activations may be recomputed: ``None``, or ``use_reentrant``."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 13)
        self.first = Block(13)
        self.second = self.first
        self.head = nn.Linear(13, 31)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in (self.first, self.second):
            x = torch.tanh(block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute))
        return self.head(x)


class WithUnused(TinyModel):
    """Has a parameter inside a unit, one in the root, and a whole unit that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].spare = nn.Linear(5, 3)
        self.spare = nn.Parameter(torch.ones(7))
        self.spare_block = Block(13)


class Skipping(nn.Module):
    """Skips the block whose number is the first token modulo 5, if there is such a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 13)
        self.blocks = nn.ModuleList(Block(13) for _ in range(4))
        self.head = nn.Linear(13, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if int(tokens[0, 0]) % 5 != number:
                x = block(x)
        return self.head(x)


class TwoHeads(TinyModel):
    """A unit runs, but where the first token is 0, nothing of it reaches the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = Block(13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        other = self.extra(x)
        return self.head(self.norm(x if int(tokens[0, 0]) == 0 else x + other))


SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "one": (1,),
    "one_of_many_dimensions": (1, 1, 1),
    "two_rows": (2, 7),
    "one_row": (1, 13),
    "empty": (0,),
    "empty_rows": (0, 5),
    "rows_of_nothing": (3, 0),
}


class Odd(nn.Module):
    """Adds a function of every parameter, whatever its shape, to its input."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(SHAPES[name])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            x = x + torch.sin(parameter.sum() + 0.1 * (parameter * parameter).sum()) * torch.tanh(x)
        return x


class WithOdd(nn.Module):
    """A unit for each group of shapes, one that holds all of them, and all of them in the root."""

    def __init__(self) -> None:
        super().__init__()
        names = list(SHAPES)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.zeros(0))
        self.embedding = nn.Embedding(31, 5)
        self.blocks = nn.ModuleList([Odd([name]) for name in names] + [Odd(names)])
        self.head = nn.Linear(5, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) / self.temperature + self.nothing.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Unequal(TinyModel):
    """Units of sizes that differ, in no order."""

    def __init__(self) -> None:
        super().__init__(depth=5)
        for block, hidden in zip(self.blocks, (7, 40, 3, 90, 20), strict=True):
            block.up, block.down = nn.Linear(13, hidden), nn.Linear(hidden, 13, bias=False)


class Gate(nn.Module):
    """The innermost unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.weight)


class Middle(Block):
    """A unit that uses direct parameters before and after it calls the unit inside."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate = Gate(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate(super().forward(x)) @ self.down.weight @ self.up.weight


class Outer(nn.Module):
    """A unit around two units, with direct parameters. Its inner units may be recomputed."""

    def __init__(self, width: int, recompute: bool | None) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.inner = nn.ModuleList(Middle(width) for _ in range(2))
        self.after = nn.Linear(width, width)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for module in self.inner:
            x = module(x) if self.recompute is None else checkpoint(module, x, use_reentrant=self.recompute)
        return torch.tanh(self.after(x))


class Levels(nn.Module):
    """Outer units, which may be recomputed: ``None``, or ``use_reentrant``."""

    def __init__(self, outer: bool | None = None, inner: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 7)
        self.outer = nn.ModuleList(Outer(7, inner) for _ in range(2))
        self.head = nn.Linear(7, 31)
        self.recompute = outer

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for module in self.outer:
            x = module(x) if self.recompute is None else checkpoint(module, x, use_reentrant=self.recompute)
        return self.head(x)


class Inside(Block):
    """Recomputes the modules inside it."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(lambda y: nn.functional.gelu(self.up(self.norm(y))), x, use_reentrant=self.reentrant)
        return x + self.down(inner)


class Recomputing(TinyModel):
    """Recomputes its blocks one by one, two by two, or the modules inside them."""

    def __init__(self, reentrant: bool = False, what: str = "units", tied: bool = False) -> None:
        super().__init__(depth=4, tied=tied)
        self.reentrant, self.what = reentrant, what
        if what == "inside":
            self.blocks = nn.ModuleList(Inside(13) for _ in range(4))
            for block in self.blocks:
                block.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        size = 2 if self.what == "pairs" else 1
        for first in range(0, len(self.blocks), size):
            part = nn.Sequential(*self.blocks[first : first + size])
            x = part(x) if self.what == "inside" else checkpoint(part, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class SkipsBias(nn.Linear):
    """Leaves adding the bias to the caller, as Megatron-Core's linear layers do."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Returns the product, the bias, and a view of the weight."""
        return {"product": nn.functional.linear(x, self.weight), "bias": self.bias, "gain": self.weight[0]}


class UsesReturned(nn.Module):
    """Uses the parameters that its layers have returned, also in a multiplication."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(SkipsBias(16, 16) for _ in range(3))
        self.recompute = recompute

    def _layer(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = layer(x)
        return x + torch.tanh(out["product"] * out["gain"] + out["bias"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(self._layer, layer, x, use_reentrant=False) if self.recompute else self._layer(layer, x)
        return x @ self.embedding.weight.t()


class Wrapped(nn.Module):
    """Wrappers around a model, with keyword and container arguments and outputs."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyModel()

        def forward(self, *, batch: dict[str, Any]) -> dict[str, Any]:
            return {"logits": (self.inner(batch["tokens"][0]),)}

    def __init__(self) -> None:
        super().__init__()
        self.outer = Wrapped.Inner()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.outer(batch={"tokens": [tokens]})["logits"][0]


def frozen(what: str) -> TinyModel:
    """A model whose parameters with this beginning of the name are frozen."""
    model = TinyModel()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(what))
    return model
