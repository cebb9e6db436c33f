"""What the examples in docs/guide start from. docs/guide/index.md shows it to readers."""

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Block", "build_model", "dist", "nn", "start", "torch", "train_step"]


def start() -> None:
    """Make the process group, and seed all ranks equally."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build_model() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor | None = None) -> float:
    batch = torch.ones(8, 64) if batch is None else batch
    loss = model(batch).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
