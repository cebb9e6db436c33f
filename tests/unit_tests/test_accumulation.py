"""Gradient accumulation over micro-batches, synchronized after each or after the last only."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from tests.exchanges import seen
from tests.models import FP32_GRADS, STRATEGIES, Block, Pair, TinyModel, assert_same_gradients, batches, loss_of
from tests.ranks import RankPool, on_ranks
from tests.training_models import Recomputing

pytestmark = pytest.mark.every_strategy


def _count_reductions(strategy: str) -> int:
    with seen("all_reduce") as all_reduces, seen("reduce_scatter") as reduce_scatters:
        model = fully_shard_model(TinyModel(), zero_dp_strategy=strategy, mixed_precision_policy=FP32_GRADS)
        data = batches(steps=1, per_step=3)[0]
        with model.no_sync():
            loss_of(model, data[0]).backward()
            loss_of(model, data[1]).backward()
        model.synchronize_gradient_reduce()
        before_last = len(all_reduces) + len(reduce_scatters)
        loss_of(model, data[2]).backward()
        assert all(p.grad is not None for p in model.parameters())
        assert len(all_reduces) + len(reduce_scatters) == before_last + 1
        return before_last


@on_ranks(2)
def test_recomputed_units_are_resharded_one_by_one_if_forwards_come_first() -> None:
    sharded, states = fully_shard_model(Recomputing(True, "units"), fsdp_unit_modules=[Block]), list[str]()

    def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: states.extend(unit.state.name for unit in sharded.engine.units[1:]))

    sharded.module.embedding.register_forward_hook(watch)
    losses = [loss_of(sharded, tokens) for tokens in batches(1, 2)[0]]
    with sharded.no_sync():
        for loss in losses:
            loss.backward()
    assert states == ["SHARDED"] * 4 * 2


@pytest.mark.parametrize(("strategy", "expected"), [("no_shard", 0), ("optim", 0), ("optim_grads", 2)])
def test_no_sync_keeps_back_what_is_not_sharded(ranks: RankPool, strategy: str, expected: int) -> None:
    assert ranks.run(2, _count_reductions, strategy) == [expected, expected]


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_as_in_torch(set_to_none: bool) -> None:
    model = fully_shard_model(TinyModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = batches(steps=1, per_step=1)[0, 0]
    loss_of(model, tokens).backward()
    once = [local_shard(p.grad).clone() for p in model.parameters()]
    loss_of(model, tokens).backward()
    twice = [local_shard(p.grad).clone() for p in model.parameters()]
    torch.testing.assert_close(twice, [2 * grad for grad in once])
    optimizer.zero_grad(set_to_none=set_to_none)
    loss_of(model, tokens).backward()
    torch.testing.assert_close([local_shard(p.grad) for p in model.parameters()], once)


def clip(sharded: MegatronFSDP, kept: list[nn.Parameter], read: str) -> torch.Tensor:
    if read == "by hand":
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm().full_tensor() for p in sharded.parameters()]))  # type: ignore
        sharded.scale_gradients(min(1.0, 0.5 / (norm.item() + 1e-6)))
        return norm
    return nn.utils.clip_grad_norm_(sharded.parameters() if read == "model" else kept, 0.5)


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("sync_each", "read"), [(True, "model"), (False, "model"), (True, "by hand"), (True, "kept")])
def test_clipping_reads_synchronized_gradients(strategy: str, sync_each: bool, read: str) -> None:
    """Clip after micro-batches none of which has synchronized, in one of several ways."""
    kept: list[nn.Parameter] = []
    settings: dict[str, Any] = {"zero_dp_strategy": strategy, "sync_model_each_microbatch": sync_each}
    pair = Pair(TinyModel(), prepare=lambda model: kept.extend(model.parameters()), **settings)
    sharded, reference = pair.sharded, pair.reference
    for number, step in enumerate(batches(steps=3, per_step=2 * dist.get_world_size())):
        for tokens in step:
            (loss_of(reference, tokens) * 100 / len(step)).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        with sharded.no_sync() if sync_each else contextlib.nullcontext():
            for tokens in step[dist.get_rank() :: dist.get_world_size()]:
                (loss_of(sharded, tokens) * 100 / 2).backward()
            norm = clip(sharded, kept, read) if number % 2 else None
        norm = clip(sharded, kept, read) if norm is None else norm
        torch.testing.assert_close(float(norm), float(expected), rtol=2e-5, atol=0)
        pair.update()
    pair.assert_same_weights()
    assert "grad" not in vars(DTensor), "nothing waits: reading a gradient is as fast as without sharding"


def _drop() -> int:
    model = fully_shard_model(TinyModel(), zero_dp_strategy=1)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with model.no_sync():
        loss_of(model, batches(1, 1)[0, 0]).backward()
    issued = model.engine.context.channel.log.count
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    return model.engine.context.channel.log.count - issued


def test_dropping_gradients_synchronizes_nothing(ranks: RankPool) -> None:
    assert ranks.run(2, _drop) == [0, 0]


@on_ranks(2)
def test_an_optimizer_of_some_parameters_drops_its_gradients() -> None:
    """An optimizer of some parameters drops their waiting gradients, and the others keep theirs."""
    model = fully_shard_model(TinyModel(), zero_dp_strategy=1)
    first, *others = model.parameters()
    optimizer = fully_shard_optimizer(torch.optim.SGD([first], lr=0.1))
    with model.no_sync():
        loss_of(model, batches(1, 1)[0, 0]).backward()
    optimizer.zero_grad()
    assert first.grad is None and all(p.grad is not None for p in others)


@on_ranks(2)
def test_hooks_do_not_see_earlier_gradients() -> None:
    """A hook changes gradients of backwards after it was registered only."""
    torch.manual_seed(0)
    model = fully_shard_model(TinyModel(), zero_dp_strategy=1)
    weight = next(model.parameters())
    first, second = batches(1, 2)[0]
    grads = []
    for tokens in (first, second):
        loss_of(model, tokens).backward()
        grads.append(weight.grad.full_tensor().clone())
        model.zero_grad()
    with model.no_sync():
        loss_of(model, first).backward()
    weight.register_hook(lambda grad: grad * 0.5)
    loss_of(model, second).backward()
    torch.testing.assert_close(weight.grad.full_tensor(), grads[0] + 0.5 * grads[1])


DROPS: dict[str, Callable[[nn.Parameter], None]] = {
    "None": lambda parameter: setattr(parameter, "grad", None),
    "del": lambda parameter: delattr(parameter, "grad"),
    "another": lambda parameter: setattr(parameter, "grad", parameter.detach() * 2),
}


@on_ranks(2)
@pytest.mark.parametrize("way", DROPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_wait_are_replaced(strategy: str, way: str) -> None:
    torch.manual_seed(0)
    pair = Pair(TinyModel(), zero_dp_strategy=strategy)
    data = batches(1, 2)[0]
    for model in (pair.reference, pair.sharded):
        with model.no_sync() if model is pair.sharded else contextlib.nullcontext():
            loss_of(model, data[0]).backward()
            for parameter in model.parameters():
                DROPS[way](parameter)
        loss_of(model, data[1]).backward()
    assert_same_gradients(pair.sharded, pair.reference)
