"""Loss scaling with torch's scalers: an infinite gradient that one rank holds makes every rank skip the step."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad_norm_

from megatron.fsdp import fsdp2
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import fully_shard
from tests.models import (
    DEVICE,
    FP32_GRADS,
    STRATEGIES,
    Block,
    Pair,
    TinyModel,
    assert_same_weights,
    batches,
    device,
    loss_of,
    main_weights,
)
from tests.ranks import RankPool, on_ranks

SCALERS = {"GradScaler": GradScaler, "ShardedGradScaler": ShardedGradScaler}


class Probed(TinyModel):
    """One element of one parameter gets a given gradient; a scalar parameter may come first."""

    def __init__(self, scalar_first: bool) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.zeros(40))
        self.coefficient = 0.0
        if scalar_first:
            self._parameters = {"scalar": nn.Parameter(torch.tensor(0.9)), **self._parameters}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scalar = self._parameters.get("scalar")
        logits = super().forward(tokens)
        if scalar is not None:
            logits = logits * scalar
        return logits + _GradientOf.apply(self.probe, self.coefficient)


class _GradientOf(torch.autograd.Function):
    """Zero, whose gradient for the last element of the parameter is the coefficient."""

    @staticmethod
    def forward(ctx, parameter: torch.Tensor, coefficient: float) -> torch.Tensor:  # noqa: ANN001
        ctx.coefficient, ctx.shape = coefficient, parameter.shape
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN001
        result = grad.new_zeros(ctx.shape)
        result[-1] = ctx.coefficient
        return result, None


def _optimizer(parameters: object, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=fused)


def _train(strategy: str, kind: str, scalar_first: bool, fused: bool) -> None:
    model = Probed(scalar_first)
    pair = Pair(model, lambda parameters: _optimizer(parameters, fused), zero_dp_strategy=strategy)
    sharded, reference = pair.sharded, pair.reference
    options = {"init_scale": 2.0**10, "growth_interval": 2}
    scalers = SCALERS[kind](DEVICE, **options), GradScaler(DEVICE, **options)
    skipped = []
    for coefficient, step in zip((0.0, math.inf, 1.0, math.nan, 0.0), batches(5, dist.get_world_size()), strict=True):
        # In one rank's micro-batch only, and only in the last rank's shard of the gradient.
        for number, tokens in enumerate(step):
            reference.coefficient = coefficient if number == 0 else 0.0
            scalers[1].scale(loss_of(reference, tokens) / len(step)).backward()
        model.coefficient = coefficient if dist.get_rank() == 0 else 0.0
        scalers[0].scale(loss_of(sharded, step[dist.get_rank()])).backward()
        before = [local_shard(entry.main).clone() for entry in sharded.engine.params()]
        for scaler, (each, each_optimizer) in zip(scalers, pair.sides, strict=True):
            if not fused:
                scaler.unscale_(each_optimizer)
                clip_grad_norm_(each.parameters(), 0.5)
            scaler.step(each_optimizer)
            scaler.update()
            each_optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        after = [local_shard(entry.main) for entry in sharded.engine.params()]
        skipped.append(all(torch.equal(a, b) for a, b in zip(after, before, strict=True)))
    assert skipped == [False, True, False, True, False]
    assert_same_weights(sharded, reference)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", SCALERS)
def test_all_ranks_skip_the_same_steps(ranks: RankPool, strategy: str, kind: str, fused: bool) -> None:
    ranks.run(2, _train, strategy, kind, False, fused)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", SCALERS)
def test_scalar_that_comes_first(ranks: RankPool, strategy: str, kind: str) -> None:
    """A scalar that every rank has in full, before parameters of which ranks have shards."""
    ranks.run(2, _train, strategy, kind, True, False)


class OfOneRow(TinyModel):
    """Begins with a parameter of which most ranks own nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters = {"row": nn.Parameter(torch.ones(1, 13)), **self._parameters}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.row.sum() / 13


@on_ranks(4)
@pytest.mark.parametrize("interface", ["row", "parameter", "compat"])
@pytest.mark.parametrize("first", [Probed, OfOneRow])
@pytest.mark.parametrize("holder", range(4))
def test_infinity_on_one_rank_is_found_on_all_ranks(interface: str, first: type[nn.Module], holder: int) -> None:
    """One rank's shard of a gradient is infinite: every rank skips the step and halves the scale."""
    torch.manual_seed(3)
    model = first(True) if first is Probed else first()
    if interface == "compat":
        fsdp2.fully_shard(model, shard_granularity="parameter")
        optimizer = _optimizer(model.parameters(), False)
    else:
        model, optimizer = fully_shard(
            model, _optimizer(model.parameters(), False), fsdp_unit_modules=[Block], shard_granularity=interface
        )
    scaler = GradScaler(DEVICE, init_scale=2.0**10)
    scaler.scale(loss_of(model, batches(1, 1)[0, 0])).backward()
    parts = [local_shard(p.grad) for p in model.parameters() if p.dim()]
    if dist.get_rank() == holder:
        next(part for part in parts if part.numel()).view(-1)[-1] = math.inf
    before = [local_shard(p).clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(local_shard(p), b) for p, b in zip(model.parameters(), before, strict=True))


def _half(strategy: str) -> tuple[list[float], list[float]]:
    """Scales and losses of a model in fp16, whose gradients do not fit into it at first."""
    torch.manual_seed(3)
    model = TinyModel().to(device(), torch.float16)
    sharded, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        mixed_precision_policy=FP32_GRADS,
    )
    scaler = GradScaler(DEVICE, init_scale=2.0**20)
    scales, losses = [], []
    tokens = batches(1, dist.get_world_size())[0, dist.get_rank()]
    for _ in range(12):
        loss = loss_of(sharded, tokens)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    assert all(weight.isfinite().all() for weight in main_weights(sharded).values())
    return scales, losses


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp16_finds_its_scale(ranks: RankPool, strategy: str) -> None:
    (scales, losses), (other_scales, other_losses) = ranks.run(2, _half, strategy)
    assert scales == other_scales
    assert 2.0**20 > scales[-1] == scales[-2] >= 2.0**8
    assert losses[-1] < losses[0] - 0.3 and other_losses[-1] < other_losses[0] - 0.3
