"""A small model with parts that have been trouble: odd shapes, tied weights, checkpoints, buffers, auxiliary losses."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Features(NamedTuple):
    """Features of the model. The first choice of each is the plainest."""

    tied: str = "no"  # "root": input and head, "blocks": the first layers of both blocks
    odd: str = "no"  # "root" or "block": shapes that ranks cannot divide evenly
    checkpoint: str = "no"  # "around" a block, or "inside" of it
    reentrant: bool = False
    dropout: bool = False
    batchnorm: bool = False
    returns: str = (
        "tensor"  # "object", "iterator": what holds a block's output; "inner": its last layer's output itself
    )
    forces: str = "no"  # the forward adds gradients of its results, which are a part of the "graph" or not
    saved: str = "no"  # tensors that autograd saves are copied, by torch's save_on_cpu or by hooks
    embedded: bool = False  # a unit sees the batch before each block, as the embedding of later tokens does
    extra: str = "no"  # another kind of layer in each block; see EXTRA


CHOICES: dict[str, tuple[Any, ...]] = {
    "tied": ("no", "no", "root", "blocks"),
    "odd": ("no", "root", "block"),
    "checkpoint": ("no", "no", "around", "inside"),
    "reentrant": (False, True),
    "dropout": (False, False, True),
    "batchnorm": (False, False, True),
    "returns": ("tensor", "tensor", "tensor", "object", "iterator", "inner"),
    "saved": ("no", "no", "no", "cpu", "clone"),
    "embedded": (False, False, True),
    "forces": ("no", "no", "detached", "graph"),
    "extra": ("no", "conv", "attention", "recurrent", "weight_norm", "spectral_norm", "list", "codes"),
}


class Result:
    """Results that a block may return."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


Output = torch.Tensor | Result | Iterator[torch.Tensor]


def value_of(output: Output) -> torch.Tensor:
    """The results of a block."""
    if isinstance(output, torch.Tensor):
        return output
    return output.value if isinstance(output, Result) else next(output)


class Linear(nn.Linear):
    """Computes in its input's dtype, so that weights of a different dtype give the reference of mixed precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Norm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Odd(nn.Module):
    """No dimension, no element, fewer rows than ranks, a transposed matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.transposed = nn.Parameter(torch.randn(WIDTH, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row, transposed, empty = (p.to(x.dtype) for p in (self.row, self.transposed, self.empty))
        return x * self.scale.to(x.dtype) + row[0] + transposed.mean(0) + empty.sum()


class Attention(nn.MultiheadAttention):
    """Over the batch."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2, batch_first=True)
        # torch starts at 0. The keys' part has no gradient but rounding errors: a penalty would see signs of these.
        nn.init.normal_(self.in_proj_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x[None], x[None], x[None], need_weights=False)[0][0]


class Recurrent(nn.LSTM):
    """Over the batch. It reads its weights from a list of its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x[None])[0][0]


class List(nn.Module):
    """Its weights are in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.randn(WIDTH) for _ in range(2))
        self.named = nn.ParameterDict({"matrix": torch.randn(WIDTH, WIDTH) / WIDTH})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((x * row for row in self.rows), x @ self.named["matrix"])


class Codes(nn.Module):
    """Frozen codes of a quantized matrix, of 8, 16 and 64 bits, that only the forward turns into values."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-100, 100, (WIDTH, WIDTH))
        self.short = nn.Parameter(codes.to(torch.int16), requires_grad=False)
        self.long = nn.Parameter(codes[0], requires_grad=False)
        self.eighths = nn.Parameter(codes[:3].to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        short, long, eighths = (p.to(x.dtype) / 100 for p in (self.short, self.long, self.eighths))
        return x @ short + long + eighths.sum(0)


class Convolution(nn.Conv1d):
    def __init__(self) -> None:
        super().__init__(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, None])[:, 0]


EXTRA: dict[str, Callable[[], nn.Module]] = {
    "no": nn.Identity,
    "conv": Convolution,
    "attention": Attention,
    "recurrent": Recurrent,
    "weight_norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),  # training writes its buffers in the forward
    "list": List,
    "codes": Codes,
}


SAVED: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no": contextlib.nullcontext,
    "cpu": torch.autograd.graph.save_on_cpu,
    "clone": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor),
}


class Block(nn.Module):
    def __init__(self, features: Features) -> None:
        super().__init__()
        self.features = features
        odd = Odd() if features.odd == "block" else nn.Identity()
        if features.returns == "inner":
            self.odd = odd  # layers are registered in the order in which they run
        self.norm = Norm(WIDTH)
        self.up = Linear(WIDTH, 2 * WIDTH)
        self.down = Linear(2 * WIDTH, WIDTH)
        self.odd = odd
        self.extra = EXTRA[features.extra]()
        self.dropout = nn.Dropout(0.2 if features.dropout else 0.0)
        self.aux: torch.Tensor | None = None

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.extra(self.norm(x)))))

    def forward(self, x: torch.Tensor) -> Output:
        inner = self.features.returns == "inner"
        x = self.odd(x) if inner else x
        if self.features.checkpoint == "inside":
            y = checkpoint(self.inner, x, use_reentrant=self.features.reentrant)
        else:
            y = self.inner(x)
        self.aux = y.float().pow(2).mean()
        result = y if inner else self.odd(x + self.dropout(y))
        outputs: dict[str, Output] = {"object": Result(result), "iterator": iter([result])}
        return outputs.get(self.features.returns, result)


class Embedding(Linear):
    """A unit whose inputs need no gradients."""


class Net(nn.Module):
    """``order`` says which blocks run, and how many times."""

    def __init__(self, features: Features) -> None:
        super().__init__()
        self.features = features
        self.inp = Linear(WIDTH, WIDTH)
        self.odd = Odd() if features.odd == "root" else nn.Identity()
        self.batchnorm = nn.BatchNorm1d(WIDTH) if features.batchnorm else nn.Identity()
        self.embedding = Embedding(WIDTH, WIDTH) if features.embedded else None
        self.blocks = nn.ModuleList(Block(features) for _ in range(2))
        self.head = Linear(WIDTH, WIDTH)
        if features.tied == "root":
            self.head.weight = self.inp.weight
        if features.tied == "blocks":
            self.blocks[1].up.weight = self.blocks[0].up.weight

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        with SAVED[self.features.saved]():
            return self.results(x, order)

    def results(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        forces = self.features.forces != "no" and torch.is_grad_enabled()
        x = x.detach().requires_grad_() if forces else x
        batch, x = x, self.batchnorm(self.odd(self.inp(x)))
        for index in order:
            block = self.blocks[index]
            x = x if self.embedding is None else x + self.embedding(batch)
            if self.features.checkpoint == "around":
                x = value_of(checkpoint(block, x, use_reentrant=self.features.reentrant))
            else:
                x = value_of(block(x))
        result = self.head(x)
        if forces:
            (force,) = torch.autograd.grad(result.pow(2).mean(), batch, create_graph=self.features.forces == "graph")
            result = result + self.inp(force)
        return result
