"""Fixed buffers: equal results, no allocation after the first iteration, and no conflicts between units."""

import pytest
import torch
from torch import nn

from megatron.fsdp.buffers.pool import Buffer, FixedPool
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy
from tests.models import FP32_GRADS, STRATEGIES, Block, batches, device, shard, train_step
from tests.ranks import RankPool, on_ranks
from tests.training_models import Unequal


def _allocations(strategy: str, bf16: bool) -> tuple[list[list[Buffer]], bool]:
    """The buffers at the end of each step, and whether unsharded weights have kept their addresses."""
    model = Unequal().to(device(), torch.bfloat16 if bf16 else torch.float32)
    sharded, optimizer = shard(
        model, strategy, mixed_precision_policy=FP32_GRADS if bf16 else MixedPrecisionPolicy(), fsdp_double_buffer=True
    )
    assert sharded.engine.pool is not None
    made, places = [], []
    for step in batches(steps=6, per_step=1):
        train_step(sharded, optimizer, step[0], step[0])
        sharded.synchronize_gradient_reduce()
        made.append(sharded.engine.pool.buffers())
        places.append([group.weights.compute.flat.data_ptr() for group in sharded.engine.groups])
    return made, all(place == places[0] for place in places)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_nothing_is_allocated_in_the_steady_state(ranks: RankPool, strategy: str, bf16: bool) -> None:
    for made, stayed in ranks.run(2, _allocations, strategy, bf16):
        assert made[0]
        assert made[1:] == [made[0]] * 5
        assert stayed


def _slots() -> list[tuple[int, int]]:
    model = MegatronFSDP(Unequal(), config=_double(), fsdp_unit_modules=[Block])
    return [
        (group.weights.compute.flat.untyped_storage().data_ptr(), group.weights.compute.flat.untyped_storage().nbytes())
        for unit in model.engine.units[1:]
        for group in unit.groups
    ]


def _double(**settings: object):  # noqa: ANN202
    from megatron_fsdp import FSDPConfig

    return FSDPConfig(fsdp_double_buffer=True, **settings)  # type: ignore[arg-type]


def test_units_take_two_buffers_in_turn(ranks: RankPool) -> None:
    (slots,) = ranks.run(1, _slots)
    places = [place for place, _ in slots]
    assert places == [places[0], places[1], places[0], places[1], places[0]]
    assert places[0] != places[1]
    assert len({size for _, size in slots}) == 2


def test_scratch_is_reused_and_the_two_sides_have_their_own() -> None:
    pool = FixedPool(2, torch.device("cpu"))
    cpu, fp32 = torch.device("cpu"), torch.float32
    first = pool.scratch(100, fp32, cpu, False)
    pool.give_back(first)
    small = pool.scratch(60, fp32, cpu, False)
    assert small.data_ptr() == first.data_ptr() and small.numel() == 60
    other = pool.scratch(60, fp32, cpu, True)
    assert other.data_ptr() != small.data_ptr()
    pool.give_back(small[:10])
    pool.give_back(torch.zeros(3))  # not the pool's
    assert pool.scratch(100, fp32, cpu, False).data_ptr() == first.data_ptr()
    assert len(pool.buffers()) == 2


class _Layer(nn.Linear):
    pass


class _Embedding(nn.Module):
    """A unit whose inputs need no gradients; it keeps an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.layers(x))
        return self.seen[-1] * 2


@on_ranks(1)
def test_a_unit_that_backward_enters_inside_keeps_its_buffer() -> None:
    embedding, first, last = _Embedding(), _Layer(4, 4), _Layer(4, 4)
    model = nn.ModuleDict({"embedding": embedding, "first": first, "last": last}).to(device())
    x = torch.ones(2, 4, device=device())
    model.forward = lambda: last(first(embedding(x).detach())).sum()  # type: ignore[method-assign]
    sharded = MegatronFSDP(model, config=_double(), fsdp_unit_modules=[_Embedding, _Layer])
    sharded().backward()
    with pytest.raises(RuntimeError, match="embedding and .* share a buffer"):
        (sharded() + embedding.seen[-1].sum()).backward()
