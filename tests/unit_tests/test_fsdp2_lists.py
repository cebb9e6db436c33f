"""A list given to fully_shard is one unit: unsharded before the first module of it runs, resharded after the last."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp import fsdp2
from megatron.fsdp.fsdp2.marked import model_of
from megatron.fsdp.runtime.unit import WeightState
from tests.exchanges import seen
from tests.models import TinyModel, batches, device, loss_of
from tests.ranks import RankPool, on_ranks
from tests.training_models import Recomputing
from tests.unit_tests.test_fsdp2 import BF16, FSDP2, assert_same, train, train_unsharded

Lists = Callable[[Any], list[list[nn.Module]]]
LISTS: dict[str, Lists] = {
    "pairs": lambda model: [[model.blocks[0], model.blocks[1]], [model.norm, model.head]],
    "around": lambda model: [[model.head, model.embedding], [model.blocks[0]], [model.blocks[2], model.blocks[1]]],
    "inside": lambda model: [[block.down, block.up] for block in model.blocks],
}


def _build(library: Any, start: nn.Module, lists: Lists, policy: dict | None = None, **arguments: Any) -> Any:
    model = copy.deepcopy(start)
    for part in lists(model):
        library.fully_shard(part, mp_policy=library.MixedPrecisionPolicy(**policy or {}), **arguments)
    return library.fully_shard(model, mp_policy=library.MixedPrecisionPolicy(**policy or {}))


class Skipping(TinyModel):
    """Every rank leaves out another block."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number != dist.get_rank():
                x = block(x)
        return self.head(self.norm(x))


def _parity(kind: Callable[..., TinyModel], lists: str, reshard: bool, tied: bool) -> None:
    start, data = kind(tied=tied).to(device()), batches(3, 4)
    policy = BF16 if kind is TinyModel else {}  # the reference cannot recompute in a different dtype
    ours = train(_build(fsdp2, start, LISTS[lists], policy, reshard_after_forward=reshard), data)
    if kind is not Skipping:
        assert_same(ours, train_unsharded(start, data, policy.get("param_dtype", torch.float32)), tolerance=1e-4)
    if kind is TinyModel and not (tied and lists != "around"):  # which torch refuses
        assert_same(ours, train(_build(FSDP2, start, LISTS[lists], policy, reshard_after_forward=reshard), data))


@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("tied", [False, True])
def test_trains_as_torch_and_as_unsharded(ranks: RankPool, lists: str, reshard: bool, tied: bool) -> None:
    ranks.run(2, _parity, TinyModel, lists, reshard, tied)


@pytest.mark.parametrize(
    "kind", [Recomputing, partial(Recomputing, True), Skipping], ids=["plain", "reentrant", "skips"]
)
@pytest.mark.parametrize("lists", ["pairs", "around"])
@pytest.mark.parametrize("reshard", [True, False])
def test_recomputed_and_skipped(ranks: RankPool, kind: Callable[..., TinyModel], lists: str, reshard: bool) -> None:
    ranks.run(2, _parity, kind, lists, reshard, False)


@on_ranks(2)
def test_a_list_is_gathered_and_reduced_once() -> None:
    model = _build(fsdp2, TinyModel().to(device()), LISTS["pairs"])
    unit, states = model_of(model).engine.units[1], list[WeightState]()
    for module in model.blocks:
        module.register_forward_hook(lambda *_: states.append(unit.state))
    with seen("all_gather") as gathers, seen("reduce_scatter") as reductions:
        for tokens in batches(1, 3)[0]:
            del gathers[:], reductions[:], states[:]
            loss_of(model, tokens).backward()
    # The root; each list in forward, and the first again in backward.
    assert len(gathers) == 4 and len(reductions) == 3
    assert states == [WeightState.UNSHARDED, WeightState.SHARDED, WeightState.SHARDED]
    assert fsdp2.fully_shard.state(model.norm) is fsdp2.fully_shard.state(model.head)
    model.blocks[1].unshard()
    assert not hasattr(model.blocks[0].up.weight, "full_tensor")
    model.blocks[0].reshard()
    with torch.no_grad():  # called by itself, each is resharded
        model.blocks[0](torch.ones(1, 13, device=device()))
    assert unit.state is WeightState.SHARDED


@on_ranks(1)
def test_lists_without_a_module_around_them() -> None:
    model: Any = TinyModel().to(device())
    fsdp2.fully_shard([model.norm, model.head])
    with pytest.raises(RuntimeError, match="requires a single root module but got a list with a"):
        model.head(torch.ones(1, 13))
    fsdp2.fully_shard(model)(batches(1, 1)[0, 0])
    other: Any = TinyModel()
    fsdp2.fully_shard([other.blocks[0].up, other.head])
    fsdp2.fully_shard([other.blocks[0]])
    with pytest.raises(
        NotImplementedError, match=r"blocks\.0\.up and head cannot be one unit: they are in other units"
    ):
        fsdp2.fully_shard(other).state_dict()
