"""Results do not depend on timing: with random delays in each rank's collectives and compute they are bit-identical."""

import contextlib
import copy
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import fully_shard
from tests.exchanges import both_exchanges, delayed, seen
from tests.fuzz.network import WIDTH, Block, Embedding, Features, Net
from tests.models import FP32_GRADS, STRATEGIES, TinyModel, assert_same_weights, batches, device, loss_of, shard
from tests.ranks import DEVICE, RankPool, on_ranks


def _train(strategy: str, dtype: torch.dtype, seed: int | None) -> list[bytes]:
    """The bits of every rank's main weights after some steps, with delays unless ``seed`` is None."""
    generator = random.Random(f"{seed} {dist.get_rank()}")
    torch.manual_seed(3)
    model = TinyModel().to(device(), dtype)
    if seed is not None:
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: time.sleep(generator.random() * 0.001))
            module.register_full_backward_hook(lambda *_: time.sleep(generator.random() * 0.002))
    with contextlib.nullcontext() if seed is None else delayed(lambda: generator.random() * 0.004):
        sharded, optimizer = shard(model, strategy, mixed_precision_policy=FP32_GRADS)
        for step in batches(steps=3, per_step=2 * dist.get_world_size()):
            mine = step[dist.get_rank() :: dist.get_world_size()]
            with sharded.no_sync():
                loss_of(sharded, mine[0]).backward()
            loss_of(sharded, mine[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [local_shard(e.main).detach().cpu().numpy().tobytes() for e in sharded.engine.params()]


@pytest.mark.skipif(DEVICE == "cuda", reason="these delays are those of the CPU's stream")
@both_exchanges("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delays_change_no_bit(ranks: RankPool, strategy: str, dtype: torch.dtype) -> None:
    expected = ranks.run(3, _train, strategy, dtype, None)
    for seed in range(2):
        assert ranks.run(3, _train, strategy, dtype, seed) == expected


@on_ranks(2)
@both_exchanges("strategy", ["optim", "optim_grads"])
def test_full_weights_are_gathered_once_per_step(strategy: str) -> None:
    model, optimizer = shard(TinyModel().to(device()), strategy)
    tokens = batches(steps=1, per_step=1)[0, 0]
    loss_of(model, tokens).backward()
    optimizer.step()
    loss_of(model, tokens).backward()
    with seen("all_gather") as calls:
        loss_of(model, tokens).backward()
        loss_of(model, tokens)
    assert not calls


class Recurrent(nn.Module):
    """Calls a unit as often as its input is long, first with inputs that need no gradients."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, outputs = x.new_zeros(3, 8), []
        for each in x:
            hidden = self.cell(each, hidden)
            outputs.append(self.head(hidden))
        return torch.stack(outputs) * self.scale


@on_ranks(2)
@pytest.mark.parametrize("lengths", [[(3, 3), (3, 4), (5, 3)], [(4, 4), (3, 4), (4, 2)]])
@pytest.mark.parametrize("strategy", [0, 1, 2])
def test_ranks_may_call_a_unit_more_often_than_others(lengths: list[tuple[int, int]], strategy: int) -> None:
    torch.manual_seed(0)
    plain = Recurrent().to(device())
    model = copy.deepcopy(plain)
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    sharded, optimizer = fully_shard(
        model, torch.optim.SGD(model.parameters(), 0.1), fsdp_unit_modules=[nn.GRUCell], zero_dp_strategy=strategy
    )
    sharded.scale = plain.scale = 2.0  # that of the module inside
    for each in lengths:
        x = torch.full((each[dist.get_rank()], 3, 4), dist.get_rank() + 1.0, device=device())
        for side, updater in ((plain, reference), (sharded, optimizer)):
            (side(x) - 1).pow(2).mean().backward()
            for parameter in plain.parameters() if side is plain else ():
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2  # type: ignore[operator]
            updater.step()
            updater.zero_grad()
    assert_same_weights(sharded, plain)


@on_ranks(2)
@pytest.mark.parametrize("order", [(), (0,), (1,)])
def test_a_unit_that_some_ranks_still_hold_is_gathered_again(order: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = Net(Features(embedded=True)).to(device())
    net = copy.deepcopy(plain)
    model, _ = fully_shard(net, torch.optim.SGD(net.parameters(), lr=0.1), fsdp_unit_modules=[Block, Embedding])
    batch = torch.randn(4, WIDTH, device=device())
    # The gradients of the inputs tell when each call ends: the plan gathers the embedding twice.
    model(batch.clone().requires_grad_(), (0, 1)).sum().backward()
    plain(batch, (0, 1)).sum().backward()
    mine = order if dist.get_rank() else (0, 1)
    # Without them, a rank still holds it where ranks that run fewer blocks gather it again.
    model(batch, mine).sum().backward()
    plain(batch, mine).sum().backward()
    for name, parameter in net.named_parameters():
        wanted = plain.get_parameter(name)
        grad = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad
        dist.all_reduce(grad)
        torch.testing.assert_close(parameter.grad.full_tensor(), grad / dist.get_world_size())
