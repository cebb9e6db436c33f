"""The peers: the interface that each of them implements, and the table of all peers.

Only rank processes import the modules of peers, because NVIDIA's package and this project have the same import name.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.job import LEARNING_RATE, WEIGHT_DECAY, Job


class Trainable(Protocol):
    """A model and its optimizer, built by a peer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients, and reduce them if the peer does so in backward."""

    def step(self) -> None:
        """Update the weights and drop the gradients."""


class Built:
    """A :class:`Trainable` for peers whose model and optimizer have torch's interfaces.

    Args:
        model: The model.
        optimizer: Its optimizer.
        loss_divisor: Divisor of losses, for peers that sum gradients over ranks without averaging.
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
        title: Name in tables.
        module: Module in this package whose ``build(job, **options)`` returns a :class:`Trainable`.
        options: Arguments of ``build``.
        trains_together: Whether ranks synchronize gradients. If not, losses differ from those of other peers.
        fake: Whether it supports the fake process group.
        cpu_only: Whether it is meaningful on a CPU only.
    """

    title: str
    module: str
    options: dict[str, Any]
    trains_together: bool = True
    fake: bool = True
    cpu_only: bool = False

    def build(self, job: Job) -> Trainable:
        """Build model and optimizer. The process group must exist."""
        trainable: Trainable = importlib.import_module(f"{__name__}.{self.module}").build(job, **self.options)
        return trainable

    @property
    def needs_original(self) -> bool:
        """Whether its rank processes import NVIDIA's package."""
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
    **{f"original-{zero}": Peer(f"NVIDIA's, ZeRO-{zero}", "original", {"zero": zero}) for zero in range(4)},
    "original-3-limited": Peer("NVIDIA's, ZeRO-3, limited prefetch", "original", {"zero": 3, "limited": True}),
    "original-3-double": Peer("NVIDIA's, ZeRO-3, double buffer", "original", {"zero": 3, "double": True}),
    "original-3-streams": Peer(
        "NVIDIA's, ZeRO-3, asynchronous reductions", "original", {"zero": 3, "streams": True}, cpu_only=True
    ),
    "deepspeed-3": Peer("DeepSpeed, ZeRO-3", "deepspeed", {}),
    "deepspeed-3-limited": Peer("DeepSpeed, ZeRO-3, limited buckets", "deepspeed", {"limited": True}),
    **{f"ours-{zero}": Peer(f"this engine, ZeRO-{zero}", "ours", {"zero": zero}) for zero in range(4)},
    "ours-hsdp": Peer("this engine, HSDP over two", "ours", {"zero": 3, "outer": 2}),
    "ours-3-double": Peer("this engine, ZeRO-3, double buffer", "ours", {"zero": 3, "double": True}),
    "ours-3-fused": Peer("this engine, ZeRO-3, mock of fused kernels", "ours", {"zero": 3, "fused": True}),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all peers."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, foreach=True)
