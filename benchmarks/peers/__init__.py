"""Who is measured: one small interface, and the table of those who have it.

Modules of peers are imported by rank processes only, since the original and this project share an import name.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.job import LEARNING_RATE, WEIGHT_DECAY, Job


class Trainable(Protocol):
    """A model with its optimizer, as a peer built them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients, reduced over ranks where the peer does that."""

    def step(self) -> None:
        """Update the weights and drop the gradients."""


class Built:
    """A :class:`Trainable` for peers with a model and an optimizer as torch has them.

    Args:
        model: What is called with tokens.
        optimizer: What updates its weights.
        loss_divisor: Losses are divided by it, for peers that add gradients over ranks and divide by nothing.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_divisor: int = 1) -> None:
        self.model = model
        self.optimizer = optimizer
        self._divisor = loss_divisor

    def backward(self, loss: torch.Tensor) -> None:
        """See :meth:`Trainable.backward`."""
        (loss / self._divisor if self._divisor != 1 else loss).backward()

    def step(self) -> None:
        """See :meth:`Trainable.step`."""
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Peer:
    """One way to train the model.

    Attributes:
        title: Its name in tables.
        module: The module in this package whose ``build(job, options)`` makes a :class:`Trainable`.
        options: What distinguishes it from others of that module.
        trains_together: Whether ranks share gradients: only then must its losses be those of the others.
        fake: Whether it runs on the fake process group.
        cpu_only: Whether it means something on a CPU only.
    """

    title: str
    module: str
    options: dict[str, Any]
    trains_together: bool = True
    fake: bool = True
    cpu_only: bool = False

    def build(self, job: Job) -> Trainable:
        """Build model and optimizer; the process group exists."""
        trainable: Trainable = importlib.import_module(f"{__name__}.{self.module}").build(job, **self.options)
        return trainable

    @property
    def needs_original(self) -> bool:
        """Whether its processes import the original package."""
        return self.module == "original"


PEERS: dict[str, Peer] = {
    "alone": Peer("compute alone", "replicated", {"together": False}, trains_together=False),
    "ddp": Peer("torch DDP", "replicated", {"together": True}, fake=False),
    "megatron-ddp": Peer("Megatron DDP + distributed optimizer", "megatron_ddp", {}, fake=False),
    "fsdp2": Peer("FSDP2", "fsdp2", {"reshard": True}),
    "fsdp2-keep": Peer("FSDP2, no reshard after forward", "fsdp2", {"reshard": False}),
    "fsdp2-streams": Peer(
        "FSDP2, emulated streams, forward prefetch", "fsdp2", {"reshard": True, "streams": True}, cpu_only=True
    ),
    **{f"original-{zero}": Peer(f"the original, ZeRO-{zero}", "original", {"zero": zero}) for zero in range(4)},
    "original-3-limited": Peer("the original, ZeRO-3, limited prefetch", "original", {"zero": 3, "limited": True}),
    "original-3-double": Peer("the original, ZeRO-3, double buffer", "original", {"zero": 3, "double": True}),
    "original-3-streams": Peer(
        "the original, ZeRO-3, asynchronous reductions", "original", {"zero": 3, "streams": True}, cpu_only=True
    ),
    **{f"ours-{zero}": Peer(f"ours, ZeRO-{zero}", "ours", {"zero": zero}) for zero in range(4)},
    "ours-3-double": Peer("ours, ZeRO-3, double buffer", "ours", {"zero": 3, "double": True}),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all peers."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, foreach=True)
