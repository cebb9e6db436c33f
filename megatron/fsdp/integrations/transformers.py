"""Trainers of Hugging Face's transformers, and those that inherit from them, such as TRL's, with a sharded model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn.utils.stateless import _reparametrize_module
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME

from megatron.fsdp.checkpoint.backend import save
from megatron.fsdp.checkpoint.coordination import agreed
from megatron.fsdp.checkpoint.loading import load_with_optimizers
from megatron.fsdp.integrations.accelerate import FSDPAccelerator

# In a checkpoint. A plain Trainer, which cannot read it, takes the name for an optimizer's and raises an error.
FOLDER = "optimizer_megatron_fsdp"
_UNSUPPORTED = {
    "auto_find_batch_size": "one rank that runs out of memory would leave the others behind",
    "fp16_full_eval": "a sharded model cannot be converted",
    "bf16_full_eval": "a sharded model cannot be converted",
    "save_on_each_node": "only rank 0 has full weights",
}


TrainerClass = TypeVar("TrainerClass", bound=Trainer)


def sharded(trainer_class: type[TrainerClass], **sharding: Any) -> type[TrainerClass]:  # noqa: UP047 - Python 3.10
    """Return a subclass of a Trainer's class that shards the model and optimizer with Megatron-FSDP.

    In a process that no launcher has started, the subclass behaves like the class and shards nothing.

    Example::

        trainer = sharded(Trainer, zero_dp_strategy=3)(model=model, args=args, train_dataset=dataset)

    Args:
        trainer_class: ``transformers.Trainer`` or a class that inherits from it.
        **sharding: Arguments of :func:`megatron_fsdp.fully_shard_model`. ``fsdp_unit_modules`` defaults to the model's
            transformer blocks.
    """
    return type(f"Sharded{trainer_class.__name__}", (_ShardedTrainer, trainer_class), {"_sharding": sharding})


class _ShardedTrainer(Trainer):
    """Overrides what a Trainer does differently when its model is sharded."""

    _sharding: dict[str, Any] = {}

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.n_gpu > 1:
            raise ValueError("Expected one process per GPU: start the script with torchrun or `accelerate launch`.")
        FSDPAccelerator.adopt(self.accelerator, self._sharding)
        if not self.accelerator.shards:
            return
        for name, reason in _UNSUPPORTED.items():
            if getattr(self.args, name):
                raise ValueError(f"{name}: expected False with Megatron-FSDP: {reason}.")

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        # Sharding moves the model to the device, unit by unit: all of it may not fit.
        if not self.accelerator.shards:
            super()._move_model_to_device(model, device)

    # A checkpoint has the files of ``save_pretrained``, with main weights, and the shards of the optimizer's state.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.accelerator.shards:
            return super().save_model(output_dir, _internal_call)
        state = self.accelerator.get_state_dict(self.model)
        failed = f"{output_dir or self.args.output_dir}: the model could not be saved: "
        agreed(lambda: self._save_full(output_dir, state), failed)  # rank 0 saves, and the others would wait for it
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_full(self, output_dir: str | None, state: dict[str, Any]) -> None:
        # Of a prompt, PEFT saves what its encoder computes, which rank 0 alone cannot do with shards.
        adapted = hasattr(self.model, "peft_config")
        prompts = {name: value for name, value in state.items() if adapted and name.startswith("prompt_encoder.")}
        with _reparametrize_module(self.model, prompts):
            self._save(output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.accelerator.shards:
            return super()._save_optimizer_and_scheduler(output_dir)
        save({"optimizer": self.optimizer.state_dict()}, Path(output_dir) / FOLDER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # Rank 0 writes the trainer's state next. Then the files of all ranks are there.
        self.accelerator.wait_for_everyone()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True and self.accelerator.shards:
            resume_from_checkpoint = _newest_complete(self.args.output_dir)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # train() calls this before the model is sharded, which would round main weights to the model's dtype.
        if not self.accelerator.shards or model is not None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.accelerator.shards:
            self._load_from_checkpoint(checkpoint, self.model)
        if checkpoint is None or not (folder := Path(checkpoint) / FOLDER).exists():
            return super()._load_optimizer_and_scheduler(checkpoint)
        if not self.accelerator.shards:
            raise ValueError(f"{folder} has shards. To resume in one process: torchrun --nproc-per-node 1 SCRIPT.")
        state = {"optimizer": self.optimizer.state_dict()}
        load_with_optimizers(state, folder)
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME)))


def _newest_complete(folder: str) -> str:
    """The latest checkpoint whose last file was written: a run may have been killed while it saved a later one."""
    found = {
        int(match[1]): path
        for path in Path(folder).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and (path / TRAINER_STATE_NAME).exists()
    }
    if not found:
        raise ValueError(f"resume_from_checkpoint=True: expected a complete checkpoint in {folder}; found none.")
    return str(found[max(found)])
