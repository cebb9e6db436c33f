"""Trains a program of plain PyTorch without sharding or sharded over ranks, and records it for a comparison.

The run without sharding is one process that knows of no other rank. In every step it computes the gradients of the
ranks' batches one after the other, and averages them by hand in fp64.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.api.fully_shard import fully_shard
from megatron.fsdp.comm.backends import local_device
from megatron.fsdp.runtime.engine import engines_of
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.tools.compare_runs import RECORD, Step
from megatron.fsdp.tools.program import DTYPES, load, unit_classes

SEED = 1234
# In the environment of ranks: the file that names the precision of the sharded run.
PRECISION = "precision"


class _Settings:
    """A program on a device in a dtype, the same in every process."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(SEED)
        self.program = load(options.model)
        self.model = self.program.model
        if any(parameter.is_meta for parameter in self.model.parameters()):
            raise ValueError("expected a model with weights; got parameters on the meta device")
        self._batches = self.program.first_batches(options.steps * options.ranks)
        self.dtype = DTYPES.get(options.dtype)
        self.device = _device(options)
        self.model.to(self.device, self.dtype)
        self.dtypes = [parameter.dtype for parameter in self.model.parameters()]
        self.optimizer = self.program.optimizer or torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._ranks = options.ranks

    def loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        """The loss of a rank's batch. Random numbers, as of dropout, depend on step and rank only."""
        number = step * self._ranks + rank
        torch.manual_seed(SEED + 1 + number)
        return self.program.loss(model, _placed(self._batches[number], self.device, self.dtype))


def _device(options: argparse.Namespace) -> torch.device:
    suffice = torch.cuda.device_count() >= options.ranks
    return local_device(options.device or ("cuda" if suffice else "cpu"))


def _placed(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """A batch on a device, with numbers of fractions in ``dtype``."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else None)
    if isinstance(batch, dict):
        return {name: _placed(value, device, dtype) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [_placed(value, device, dtype) for value in batch]
    return batch


# Without sharding --------------------------------------------------------------------------------------------------


def record_trusted(options: argparse.Namespace, folder: Path) -> None:
    """Train in this process, and record every step.

    Raises:
        ValueError: ``--model`` names no usable program.
    """
    folder.mkdir()
    with _alone():
        settings = _Settings(options)
        if settings.program.shard is None:
            unit_classes(settings.model, options.units)
        buffers = [_copies(settings.model) for _ in range(options.ranks)]
        for step in range(options.steps):
            losses = _average_gradients(settings, step, buffers)
            gradients = _named(settings.model, lambda parameter: parameter.grad)
            settings.optimizer.step()
            settings.optimizer.zero_grad()
            weights = _named(settings.model, lambda parameter: parameter)
            Step(losses, gradients, weights=weights).save(folder, step + 1, 0)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A process group of this process, for models that ask for their rank."""
    with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _average_gradients(settings: _Settings, step: int, buffers: list[list[torch.Tensor]]) -> dict[str, float]:
    """Run every rank's forward and backward, each with its own buffers. Returns their losses.

    Main weights of parameters with 16 bits are in fp32, as in the sharded run.
    """
    parameters = list(settings.model.parameters())
    main_weights = [parameter.data for parameter in parameters]
    for parameter, dtype in zip(parameters, settings.dtypes, strict=True):
        parameter.data = parameter.data.to(dtype)
    totals: dict[int, torch.Tensor] = {}
    losses = {}
    for rank, kept in enumerate(buffers):
        with torch.no_grad():
            for buffer, value in zip(settings.model.buffers(), kept, strict=True):
                buffer.copy_(value)
        loss = settings.loss(settings.model, step, rank)
        loss.backward()
        losses[_loss_of(rank)] = loss.item()
        buffers[rank] = _copies(settings.model)
        for place, parameter in enumerate(parameters):
            if parameter.grad is not None:
                totals[place] = totals.get(place, 0) + parameter.grad.double()
                parameter.grad = None
    for place, (parameter, weight) in enumerate(zip(parameters, main_weights, strict=True)):
        parameter.data = weight.float() if weight.dtype.itemsize < 4 else weight
        if place in totals:
            parameter.grad = (totals[place] / len(buffers)).to(parameter.dtype)
    return losses


def _copies(model: nn.Module) -> list[torch.Tensor]:
    return [buffer.detach().clone() for buffer in model.buffers()]


def _loss_of(rank: int) -> str:
    return f"loss of rank {rank}"


# Sharded -----------------------------------------------------------------------------------------------------------


def record_sharded(options: argparse.Namespace) -> None:
    """Train as one of several ranks. The first one records every step."""
    wait = timedelta(seconds=options.timeout)
    dist.init_process_group("nccl" if _device(options).type == "cuda" else "gloo", timeout=wait)
    try:
        train_sharded(options, Path(os.environ[RECORD]))
    finally:
        dist.destroy_process_group()


def train_sharded(options: argparse.Namespace, folder: Path) -> None:
    """Train as one rank of the process group."""
    settings, rank = _Settings(options), dist.get_rank()
    model, optimizer = (settings.program.shard or _shard_by(options))(settings.model, settings.optimizer)
    if rank == 0:
        (folder / PRECISION).write_text(_precision(settings.model))
    for step in range(options.steps):
        loss = settings.loss(model, step, rank)
        loss.backward()
        # The original module has the same names as without sharding.
        gradients = _named(settings.model, lambda parameter: parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        weights = _named(settings.model, lambda parameter: parameter)
        losses: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(losses, loss.item())
        if rank == 0:
            named = {_loss_of(number): value for number, value in enumerate(losses)}
            Step(named, gradients, weights=weights).save(folder, step + 1, 0)


def _shard_by(options: argparse.Namespace) -> Any:
    def shard(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        units = list(unit_classes(model, options.units))
        wide = all(parameter.dtype == torch.float64 for parameter in model.parameters())
        policy = MixedPrecisionPolicy(main_params_dtype=torch.float64 if wide else torch.float32)
        return fully_shard(
            model,
            optimizer,
            fsdp_unit_modules=units,
            zero_dp_strategy=options.strategy,
            mixed_precision_policy=policy,
        )

    return shard


def _named(model: nn.Module, choose: Any) -> dict[str, torch.Tensor]:
    """A full tensor for each parameter, in the order of registration. With sharded ones, all ranks must call it."""
    chosen = {name: choose(parameter) for name, parameter in model.named_parameters()}
    full = {
        name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)()
        for name, tensor in chosen.items()
        if tensor is not None
    }
    return {name: tensor.detach().cpu().clone() for name, tensor in full.items()}


def _precision(model: nn.Module) -> str:
    """The narrowest precision in which a sharded model computes, as a key of the tolerances."""
    computed = [param.compute.dtype for engine in engines_of(model.parameters()) for param in engine.params()]
    narrowest = min(dtype.itemsize for dtype in [*computed, *(parameter.dtype for parameter in model.parameters())])
    return {8: "fp64", 4: "fp32"}.get(narrowest, "bf16")
