"""A small LightningModule, its data and its Trainer. Only ranks import this: it takes seconds."""

import functools
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from megatron.fsdp.integrations.lightning import MegatronFSDPStrategy

warnings.filterwarnings("ignore", module="lightning")
GLOBAL_BATCH = 8
# Not a power of two: shards of ranks begin and end inside of rows.
WIDTH = 20


class Block(nn.Module):
    """The unit of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of [batch, WIDTH]."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(L.LightningModule):
    """A regression that records its losses."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.inputs = nn.Linear(5, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(WIDTH, 1)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of [batch, 5]."""
        return self.head(self.blocks(self.inputs(x)))

    def _loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch[0]).float(), batch[1].float())

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Record the loss of this rank's batch."""
        loss = self._loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        """Log the loss of all ranks."""
        self.log("val", self._loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        """The outputs of a batch."""
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        """AdamW, whose learning rate is halved every three steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, eps=1e-5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(ranks: int, samples: int = 48) -> DataLoader:
    """Batches of which the ranks together get ``GLOBAL_BATCH`` samples."""
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=GLOBAL_BATCH // ranks)


def trainer(strategy: Any, ranks: int, folder: Path, **settings: Any) -> L.Trainer:
    """A Trainer on the CPU that prints nothing and saves after every epoch."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1), *settings.pop("callbacks", [])]
    settings = {"max_epochs": 2, "default_root_dir": folder, "callbacks": callbacks} | quiet | settings
    return L.Trainer(accelerator="cpu", devices=ranks, strategy=strategy, use_distributed_sampler=True, **settings)


sharded = functools.partial(MegatronFSDPStrategy, [Block])


def full(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict whose DTensors are gathered. A collective."""
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}


def fit(strategy: Any, ranks: int, folder: Path, ckpt_path: Any = None, **settings: Any) -> tuple[L.Trainer, Net]:
    """Train a new model."""
    net, run = Net(), trainer(strategy, ranks, folder, **settings)
    run.fit(net, loader(ranks), loader(ranks, 16), ckpt_path=ckpt_path)
    return run, net
