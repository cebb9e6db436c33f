"""Trains with PyTorch Lightning on sharded weights. Started again, it resumes from the last checkpoint.

torchrun --nproc-per-node 2 lightning_fit.py runs --epochs 2
"""

import argparse
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from megatron.fsdp.integrations.lightning import MegatronFSDPStrategy

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--ddp", action="store_true", help="Lightning's own DDP instead, for comparison")


class Block(nn.Module):
    """One layer, which is unsharded and resharded as a unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 60), nn.GELU(), nn.Linear(60, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of [batch, width]."""
        return x + self.mlp(x)


class Regression(L.LightningModule):
    """A LightningModule as for DDP."""

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(5, width), Block(width), Block(width), nn.Linear(width, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of this rank's samples."""
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Print the mean loss of the epoch."""
        loss = self.trainer.callback_metrics["loss"].item()
        self.print(f"step {self.current_epoch}: loss {loss:.5f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5)


if __name__ == "__main__":
    args, ranks = parser.parse_args(), int(os.environ.get("WORLD_SIZE", 1))
    L.seed_everything(0, verbose=False)
    x = torch.randn(64, 5)
    trainer = L.Trainer(
        strategy="ddp" if args.ddp else MegatronFSDPStrategy(fsdp_unit_modules=[Block]),
        devices=ranks,
        max_epochs=args.epochs,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(args.folder, save_last=True)],
        default_root_dir=args.folder,
        logger=False,
        enable_progress_bar=False,
    )
    last = args.folder / "last.ckpt"
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16 // ranks)
    trainer.fit(Regression(), data, ckpt_path=last if last.exists() else None)
