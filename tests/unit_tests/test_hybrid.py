"""HSDP and hybrid FSDP: two data-parallel axes train like one, and each is sharded according to its strategy."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp.sharding.strategy import INNER, OUTER
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from tests.exchanges import seen
from tests.models import DEVICE, STRATEGIES, Block, TinyModel, batches, loss_of
from tests.ranks import RankPool, on_ranks

DEFINED = [(i, o) for i in STRATEGIES for o in OUTER if not (i == "no_shard" and o == "optim")]


def _mesh(outer: int, inner: int) -> dict:
    mesh = init_device_mesh(DEVICE, (outer, inner), mesh_dim_names=("dp_outer", "dp_shard"))
    return {"device_mesh": mesh, "dp_shard_dim": "dp_shard", "dp_outer_dim": "dp_outer"}


def _kept(strategy: str, outer_strategy: str) -> dict[str, int]:
    """Elements of the largest unit that a rank holds while sharded: main weights, and memory of compute weights."""
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    model = fully_shard_model(
        TinyModel().bfloat16(),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        outer_dp_sharding_strategy=outer_strategy,
        mixed_precision_policy=policy,
        **_mesh(2, 2),
    )
    group = max(model.engine.groups, key=lambda g: g.layout.numel)
    weights = group.weights
    home = weights.planes[0].shard.untyped_storage().nbytes() // 2
    gathered = weights.compute.flat.untyped_storage().nbytes() // 2
    return {
        "whole": group.layout.numel,
        "main": weights.main.numel(),
        "compute": max(home, gathered),
    }


@pytest.mark.parametrize("strategy, outer", DEFINED)
def test_each_axis_divides_what_its_strategy_says(ranks: RankPool, strategy: str, outer: str) -> None:
    main = (2 if INNER[strategy].shards_optimizer else 1) * (2 if OUTER[outer].shards_optimizer else 1)
    # Where a rank's main weights are all of its shard, no other copy of the shard is kept.
    compute = 1 if not INNER[strategy].shards_parameters else 2 if OUTER[outer].shards_optimizer else None
    for kept in ranks.run(4, _kept, strategy, outer):
        assert kept["main"] * main == kept["whole"]
        assert kept["compute"] * (compute or 0) == (kept["whole"] if compute else 0)


def _count_outer(strategy: str, outer_strategy: str) -> list[int]:
    """Elements reduced over the outer axis in each of three micro-batches, the last of which synchronizes."""
    found: list[int] = []
    model = fully_shard_model(
        TinyModel(),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        outer_dp_sharding_strategy=outer_strategy,
        **_mesh(2, 2),
    )
    axis = model.engine.groups[0].gradients.reduction.outer
    outer = None if axis is None else axis.group
    with seen("all_reduce") as all_reduces, seen("reduce_scatter") as reduce_scatters:
        for number, tokens in enumerate(batches(1, 3)[0]):
            all_reduces.clear()
            reduce_scatters.clear()
            if number < 2:
                with model.no_sync():
                    loss_of(model, tokens).backward()
            else:
                loss_of(model, tokens).backward()
            model.synchronize_gradient_reduce()
            flats = [(call[0], call[-1]) for call in all_reduces] + [(call[1], call[-1]) for call in reduce_scatters]
            found.append(sum(flat.numel() for flat, group in flats if group is outer))
    return found


@pytest.mark.parametrize("strategy, outer", DEFINED)
def test_reduces_over_the_outer_axis_after_the_last_micro_batch_only(
    ranks: RankPool, strategy: str, outer: str
) -> None:
    for first, second, last in ranks.run(4, _count_outer, strategy, outer):
        assert first == second == 0
        assert last > 0


def _undefined() -> str:
    with pytest.raises(ValueError, match="'no_shard' does not shard it") as error:
        fully_shard_model(TinyModel(), zero_dp_strategy="no_shard", outer_dp_sharding_strategy="optim", **_mesh(1, 2))
    return str(error.value)


def test_sharding_over_the_outer_axis_alone_is_refused(ranks: RankPool) -> None:
    ranks.run(2, _undefined)


@on_ranks(4)
def test_axis_may_be_a_flattened_one() -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "cp"))
    mesh["dp", "cp"]._flatten("dp_shard_cp")
    model = fully_shard_model(TinyModel(), mesh, "dp_shard_cp", fsdp_unit_modules=[Block])
    assert model.index.size == 4
    assert model.index.get_fsdp_group().size() == 4


@on_ranks(2)
def test_group_must_have_the_ranks_of_its_axes() -> None:
    mesh = _mesh(1, 2)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.raises(ValueError, match=r"hybrid_fsdp_group: expected a group of ranks \[0, 1\]"):
        fully_shard_model(TinyModel(), hybrid_fsdp_group=alone, **mesh)
    with pytest.raises(ValueError, match="so it needs dp_outer_dim"):
        fully_shard_model(TinyModel(), mesh["device_mesh"], "dp_shard", hybrid_fsdp_group=dist.group.WORLD)
