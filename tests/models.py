"""Tiny models with shapes that divide nothing evenly, and the unsharded reference that sharded runs are compared to."""

import copy
import gc
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron.fsdp import fsdp2
from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from tests.ranks import DEVICE

FP32_GRADS = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")


@contextmanager
def logged(level: int = logging.WARNING, by: str = "megatron.fsdp") -> Iterator[list[str]]:
    """Collect what the engine, or another module, logs at this level or above."""
    logger, texts = logging.getLogger(by), list[str]()
    handler, before = logging.Handler(level), logger.level
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield texts
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


@contextmanager
def without_collector() -> Iterator[None]:
    """Context in which nobody collects cycles, so that they keep objects as references do."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Block(nn.Module):
    """A residual MLP with a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class TinyModel(nn.Module):
    """Embedding, blocks, norm and head; the head's weight is the embedding's if ``tied``."""

    def __init__(self, width: int = 13, depth: int = 3, vocabulary: int = 31, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the model's guesses of its own input, in float32."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def batches(steps: int, per_step: int, seed: int = 1, vocabulary: int = 31) -> torch.Tensor:
    """Random tokens, [steps, per_step, 2, 5]: ``per_step`` micro-batches for every step."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (steps, per_step, 2, 5), generator=generator).to(device())


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain gradient descent: an update shows its gradient and nothing else."""
    return torch.optim.SGD(parameters, lr=0.3)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with weight decay, which also shows parameters that should have no gradient."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def shard(model: nn.Module, strategy: str, **settings: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard a model whose blocks are units, and make an :func:`adamw` of it."""
    optimizer = adamw(model.parameters())
    return fully_shard(model, optimizer, fsdp_unit_modules=[Block], zero_dp_strategy=strategy, **settings)


def shard_in_place(model: Any, library: types.ModuleType = fsdp2) -> Any:
    """Shard a model by the interface of FSDP2, or by FSDP2: its blocks, and the rest."""
    for block in model.blocks:
        library.fully_shard(block)
    return library.fully_shard(model)


def whole(entry: ShardedParameter, tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a main weight, or of one like it, gathered by what each rank says it holds, on every rank."""
    local = local_shard(tensor).detach().cpu().flatten()
    parts: list[tuple[int, torch.Tensor]] = [(0, local)] * dist.get_world_size()
    dist.all_gather_object(parts, (entry.shard_slice.start, local))
    result = torch.full((tensor.numel(),), torch.nan, dtype=local.dtype)
    for start, part in parts:
        known = result[start : start + part.numel()]
        # Replicas have to agree bit by bit.
        assert known.isnan().all() or torch.equal(known, part)
        known.copy_(part)
    return result.view(tensor.shape)


def main_weights(model: MegatronFSDP) -> dict[str, torch.Tensor]:
    """The main weights, gathered, by name."""
    return {entry.name: whole(entry, entry.main) for entry in model.engine.params()}


def train_step(model: Any, optimizer: torch.optim.Optimizer, *micro_batches: torch.Tensor) -> None:
    """Take a step, before which gradients of micro-batches are accumulated."""
    *others, last = micro_batches
    for tokens in others:
        with model.no_sync():
            loss_of(model, tokens).backward()
    loss_of(model, last).backward()
    optimizer.step()
    optimizer.zero_grad()


def train_reference(
    model: nn.Module,
    data: torch.Tensor,
    make_optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    step_loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
) -> list[float]:
    """Train an unsharded model on all ranks' micro-batches; return the loss of every step."""
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in data:
        total = 0.0
        for tokens in step:
            loss = step_loss(model, tokens) / len(step)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train_sharded(
    model: nn.Module,
    data: torch.Tensor,
    make_optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    step_loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
    use_no_sync: bool = False,
    **fsdp_arguments: Any,
) -> tuple[MegatronFSDP, list[float]]:
    """Train a sharded model: of every step's micro-batches, rank r takes r, r + ranks, r + 2 ranks, ..."""
    fsdp_arguments.setdefault("fsdp_unit_modules", [Block])
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    sharded, optimizer = fully_shard(model, optimizer, **fsdp_arguments)
    losses = []
    for step in data:
        mine = step[dist.get_rank() :: dist.get_world_size()]
        total = torch.zeros((), device=device())
        for number, tokens in enumerate(mine):
            last = number == len(mine) - 1
            if use_no_sync and not last:
                with sharded.no_sync():
                    loss = step_loss(sharded, tokens) / len(mine)
                    loss.backward()
            else:
                loss = step_loss(sharded, tokens) / len(mine)
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return sharded, losses


def assert_same_training(
    model: nn.Module,
    data: torch.Tensor,
    make_optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    step_loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
    tolerance: float = 2e-5,
    **sharded_arguments: Any,
) -> MegatronFSDP:
    """Train ``model`` sharded and a copy of it unsharded; losses and weights must agree."""
    model = model.to(device())
    reference = copy.deepcopy(model)
    expected = train_reference(reference, data, make_optimizer, step_loss)
    sharded, losses = train_sharded(model, data, make_optimizer, step_loss, **sharded_arguments)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance)
    assert_same_weights(sharded, reference, tolerance)
    return sharded


class Pair:
    """A sharded model and an unsharded copy of it, which train on the same micro-batches, each with its optimizer."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[..., torch.optim.Optimizer] = adamw,
        step_loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
        prepare: Callable[[Any], object] = lambda model: None,
        **settings: Any,
    ) -> None:
        model = model.to(device())
        self.reference = copy.deepcopy(model)
        prepare(model)  # what the reference does not get
        optimizers = [
            make_optimizer([p for p in each.parameters() if p.requires_grad]) for each in (model, self.reference)
        ]
        settings = {"fsdp_unit_modules": [Block], **settings}
        self.sharded, self.optimizer = fully_shard(model, optimizers[0], **settings)
        self.sides = ((self.sharded, self.optimizer), (self.reference, optimizers[1]))
        self.step_loss = step_loss

    def backward(self, step: torch.Tensor, called: nn.Module | None = None) -> None:
        """Compute gradients. Of the micro-batches, rank r takes r, r + ranks, ..., and the reference takes all.

        Args:
            step: The micro-batches.
            called: What is called in place of the sharded model, such as the model that it wraps.
        """
        called = self.sharded if called is None else called
        for tokens in step:
            (self.step_loss(self.reference, tokens) / len(step)).backward()
        *others, last = step[dist.get_rank() :: dist.get_world_size()]
        for tokens in others:
            with self.sharded.no_sync():
                (self.step_loss(called, tokens) / (len(others) + 1)).backward()
        (self.step_loss(called, last) / (len(others) + 1)).backward()

    def update(self) -> None:
        """Let both optimizers take a step."""
        for _, optimizer in self.sides:
            optimizer.step()
            optimizer.zero_grad()

    def assert_same_weights(self, tolerance: float = 2e-5) -> None:
        """The main weights are the weights of the reference."""
        assert_same_weights(self.sharded, self.reference, tolerance)

    def assert_same_gradients(self) -> None:
        """The gradients are those of the reference, and the same parameters have none."""
        assert_same_gradients(self.sharded, self.reference)


def assert_same_gradients(sharded: MegatronFSDP, reference: nn.Module, rtol: float = 2e-5, atol: float = 1e-6) -> None:
    """The gradients are those of an unsharded model, and the same parameters have none."""
    for entry in sharded.engine.params():
        expected = reference.get_parameter(entry.name.replace("_orig_mod.", "")).grad
        assert (entry.main.grad is None) == (expected is None), entry.name
        if expected is not None:
            found = whole(entry, entry.main.grad)
            torch.testing.assert_close(
                found, expected.cpu(), rtol=rtol, atol=atol, msg=lambda m, n=entry.name: f"{n}: {m}"
            )


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The content of a checkpoint."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save_to(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint, as users do."""
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)


def load_from(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint into a model and its optimizer, as users do."""
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


# All of torch.optim that works element by element.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


def assert_same_weights(sharded: MegatronFSDP, reference: nn.Module, tolerance: float = 2e-5) -> None:
    """The main weights are the weights of the unsharded model."""
    # torch.compile(module) puts a part of its own into names.
    weights = {name.replace("_orig_mod.", ""): weight for name, weight in main_weights(sharded).items()}
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(
            weights[name], parameter.detach().cpu(), rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
