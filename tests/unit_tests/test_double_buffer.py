"""Fixed buffers: equal results, no allocation after the first iteration, and no conflicts between units."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.buffers.pool import Buffer, FixedPool
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from tests.models import FP32_GRADS, STRATEGIES, Block, TinyModel, adamw, assert_same_training, batches, device, loss_of
from tests.ranks import RankPool


class Unequal(nn.Module):
    """Units of sizes that differ, in no order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 13)
        self.blocks = nn.ModuleList(Block(13) for _ in range(5))
        for number, hidden in enumerate((7, 40, 3, 90, 20)):
            self.blocks[number].up = nn.Linear(13, hidden)
            self.blocks[number].down = nn.Linear(hidden, 13, bias=False)
        self.head = nn.Linear(13, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _train(strategy: str, micro_batches: int) -> None:
    data = batches(steps=4, per_step=micro_batches * dist.get_world_size())
    assert_same_training(Unequal(), data, adamw, zero_dp_strategy=strategy, fsdp_double_buffer=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_trains_as_unsharded(ranks: RankPool, strategy: str, micro_batches: int) -> None:
    ranks.run(3, _train, strategy, micro_batches)


def _step(model: MegatronFSDP, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    with model.no_sync():
        loss_of(model, tokens).backward()
    loss_of(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def _allocations(strategy: str, bf16: bool) -> tuple[list[list[Buffer]], bool]:
    """The buffers at the end of each step, and whether unsharded weights have kept their addresses."""
    model = Unequal().to(device(), torch.bfloat16 if bf16 else torch.float32)
    sharded, optimizer = fully_shard(
        model,
        adamw(model.parameters()),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        mixed_precision_policy=FP32_GRADS if bf16 else MixedPrecisionPolicy(),
        fsdp_double_buffer=True,
    )
    assert sharded.engine.pool is not None
    made, places = [], []
    for step in batches(steps=6, per_step=1):
        _step(sharded, optimizer, step[0])
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


class Outer(nn.Module):
    """A unit with units inside."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(13, 13)
        self.inner = nn.ModuleList(Block(13) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for block in self.inner:
            x = block(x)
        return x


class Nested(TinyModel):
    """Blocks inside of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Outer() for _ in range(3))


def _nested(own: bool) -> None:
    assert_same_training(
        Nested(),
        batches(3, dist.get_world_size()),
        adamw,
        fsdp_unit_modules=[Block, Outer],
        fsdp_double_buffer=True,
        fsdp_db_use_persist_buf_on_alloc_fail=own,
    )


@pytest.mark.parametrize("own", [False, True])
def test_units_inside_each_other_have_different_buffers(ranks: RankPool, own: bool) -> None:
    ranks.run(2, _nested, own)


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
