"""Learning-rate schedulers, created before or after sharding, affect the step as without sharding."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from megatron_fsdp import fully_shard
from tests.models import Block, Pair, TinyModel, batches, device, train_step
from tests.ranks import on_ranks

Optimizer = torch.optim.Optimizer
SGD: Callable[..., Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
ADAMW: Callable[..., Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2)  # noqa: E731

SCHEDULERS: dict[str, tuple[Callable[..., Optimizer], Callable[[Optimizer], Any]]] = {
    "lambda": (ADAMW, lambda o: LambdaLR(o, lambda step: 0.7**step)),
    "cosine": (ADAMW, lambda o: CosineAnnealingLR(o, T_max=4, eta_min=1e-4)),
    "warm_restarts": (SGD, lambda o: CosineAnnealingWarmRestarts(o, T_0=2)),
    "one_cycle_momentum": (SGD, lambda o: OneCycleLR(o, max_lr=0.3, total_steps=8, cycle_momentum=True)),
    "one_cycle_betas": (ADAMW, lambda o: OneCycleLR(o, max_lr=0.03, total_steps=8, cycle_momentum=True)),
    "sequential": (SGD, lambda o: SequentialLR(o, [ConstantLR(o, 0.1), CosineAnnealingLR(o, 4)], milestones=[2])),
    "plateau": (SGD, lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5)),
}


def _options(optimizer: Optimizer) -> list[tuple]:
    names = ("lr", "momentum", "betas", "weight_decay", "initial_lr", "max_momentum")
    return [tuple(group.get(name) for name in names) for group in optimizer.param_groups]


@on_ranks(2)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler(name: str, before: bool) -> None:
    make_optimizer, make_scheduler = SCHEDULERS[name]
    schedulers: list[LRScheduler] = []

    def make(parameters: Any) -> Optimizer:
        optimizer = make_optimizer(parameters)
        if before:
            schedulers.append(make_scheduler(optimizer))
        return optimizer

    pair, changed = Pair(TinyModel(), make), False
    optimizers = [optimizer for _, optimizer in pair.sides]
    if not before:
        schedulers += map(make_scheduler, optimizers)
    for step in batches(5, dist.get_world_size()):
        pair.backward(step)
        options = _options(optimizers[0])
        pair.update()
        for scheduler in schedulers:
            scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
        assert _options(optimizers[0]) == _options(optimizers[1])
        changed |= _options(optimizers[0]) != options
    assert changed
    pair.assert_same_weights()


@on_ranks(2)
def test_scheduler_and_optimizer_resume_together() -> None:
    """A scheduler's state dict does not depend on sharding, and a loaded scheduler continues."""
    model = TinyModel().to(device())
    sharded, optimizer = fully_shard(model, SGD(model.parameters()), fsdp_unit_modules=[Block])
    scheduler = SCHEDULERS["one_cycle_momentum"][1](optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that the optimizer's step was not seen, among others
        for tokens in batches(3, 1)[:, 0]:
            train_step(sharded, optimizer, tokens)
            scheduler.step()
    other = TinyModel().to(device())
    _, other_optimizer = fully_shard(other, SGD(other.parameters()), fsdp_unit_modules=[Block])
    other_scheduler = SCHEDULERS["one_cycle_momentum"][1](other_optimizer)
    other_optimizer.load_state_dict(optimizer.state_dict())
    other_scheduler.load_state_dict(scheduler.state_dict())
    assert other_scheduler.get_last_lr() == scheduler.get_last_lr()
    assert _options(other_optimizer) == _options(optimizer)
