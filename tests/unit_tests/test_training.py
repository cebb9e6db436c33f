"""Sharded training equals unsharded training. A row is a model, how it is sharded, and what else must be true."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.sharding.strategy import OUTER
from megatron_fsdp import MegatronFSDP, fully_shard_model
from tests.exchanges import COLLECTIVES, SENDS
from tests.models import DEVICE, OPTIMIZERS, STRATEGIES, Block, TinyModel, adamw, assert_same_training, batches, loss_of
from tests.ranks import RankPool
from tests.training_models import (
    SHAPES,
    Gate,
    Levels,
    Middle,
    Odd,
    Outer,
    Recomputing,
    SharedBlock,
    Skipping,
    SkipsBias,
    TiedAcrossUnits,
    TwoHeads,
    Unequal,
    UsesReturned,
    WithOdd,
    WithUnused,
    Wrapped,
    frozen,
)

ZERO_3 = STRATEGIES[-1:]


class Case(NamedTuple):
    """One row.

    Attributes:
        model: Makes the model.
        settings: How it is sharded, and ``use_no_sync``.
        ranks: The number of ranks.
        micro_batches: Of each rank in a step.
        mesh: Sizes of the outer and the inner axis, if there are two.
        strategies: Those that it is trained with.
        exchanges: Those that it is trained with, if anything is sharded.
        first: The first token of each rank's micro-batch, by step.
        loss: Of the model and a micro-batch.
        make: Makes the optimizer.
        tolerance: Of losses and weights.
        check: What else must be true after training.
    """

    model: Callable[[], nn.Module] = TinyModel
    settings: dict[str, Any] = {}
    ranks: int = 2
    micro_batches: int = 1
    mesh: tuple[int, int] | None = None
    strategies: tuple[str, ...] = STRATEGIES
    exchanges: tuple[str, ...] = (SENDS,)
    first: list[list[int]] | None = None
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of
    make: Callable[..., torch.optim.Optimizer] = adamw
    tolerance: float = 2e-5
    check: Callable[[MegatronFSDP], None] | None = None


# Checks ---------------------------------------------------------------------------------------------------------------


def _all_sharded(sharded: MegatronFSDP) -> None:
    assert all(unit.state.value == "sharded" and not unit.has_gradients() for unit in sharded.engine.units)


def _tied(sharded: MegatronFSDP) -> None:
    assert sharded.module.head.weight is sharded.module.embedding.weight
    assert len(list(sharded.parameters())) == len(list(TinyModel(tied=True).parameters()))
    assert list(sharded.module.state_dict()) == list(TinyModel(tied=True).state_dict())


def _of_the_root(sharded: MegatronFSDP) -> None:
    assert "blocks.0.up.weight" in [entry.name for group in sharded.engine.units[0].groups for entry in group.params]


def _without_gradients(sharded: MegatronFSDP) -> None:
    assert all(entry.main.grad is None for entry in sharded.engine.params() if "spare" in entry.name)


def _still_frozen(what: str, sharded: MegatronFSDP) -> None:
    for entry in sharded.engine.params():
        assert entry.main.requires_grad != entry.name.startswith(what)


def _every_element_has_a_place(sharded: MegatronFSDP) -> None:
    """Ranks hold each element once, or each of them holds all; a state dict is loaded into another model."""
    for entry in sharded.engine.params():
        assert isinstance(entry.main, DTensor) and entry.main.grad is None
        assert tuple(entry.main.shape) == SHAPES.get(entry.name.rsplit(".", 1)[-1], tuple(entry.main.shape))
        held = torch.tensor(local_shard(entry.main).numel())
        assert held == entry.shard_slice.stop - entry.shard_slice.start
        dist.all_reduce(held)
        everywhere = sharded.fsdp_config.zero_dp_strategy == "no_shard" or not entry.main.dim()
        assert held == entry.main.numel() * (dist.get_world_size() if everywhere else 1)
    strategy = sharded.fsdp_config.zero_dp_strategy
    other = fully_shard_model(WithOdd().to(DEVICE), fsdp_unit_modules=[Odd], zero_dp_strategy=strategy)
    other.load_state_dict(sharded.state_dict())
    for mine, theirs in zip(sharded.engine.params(), other.engine.params(), strict=True):
        assert torch.equal(local_shard(mine.main), local_shard(theirs.main))


def _three_buffers(sharded: MegatronFSDP) -> None:
    slots = {id(unit.slot) for unit in sharded.engine.units[1:] if unit.temporary}
    assert len(slots) == (3 if sharded.fsdp_config.zero_dp_strategy == STRATEGIES[-1] else 0)


def _replicated(sharded: MegatronFSDP) -> None:
    assert sharded.engine.unit_names == [""]
    for group in sharded.engine.groups:
        assert not group.weights.temporary and group.weights.compute.flat.untyped_storage().nbytes()


# Losses ---------------------------------------------------------------------------------------------------------------


def _evaluated(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """With evaluations before the forward, and between it and the backward."""
    with torch.no_grad():
        before = loss_of(model, tokens)
    loss = loss_of(model, tokens)
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(loss_of(model, tokens), before)
    model.train()
    torch.testing.assert_close(loss.detach(), before)
    return loss


def _after_another_forward(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss_of(model, tokens)  # with gradients, and no backward
    return loss_of(model, tokens)


# Rows -----------------------------------------------------------------------------------------------------------------

BOTH = (SENDS, COLLECTIVES)
LEVELS = {"fsdp_unit_modules": [Outer, Middle, Gate]}
TWO_AXES = {outer: STRATEGIES if outer == "no_shard" else STRATEGIES[1:] for outer in OUTER}
# After each micro-batch or the last one; no_sync; overlap.
SYNCHRONIZED = [
    (True, False, True),
    (True, True, True),
    (False, True, True),
    (False, False, False),
    (False, True, False),
]
SKIPPED = {
    "one rank, from the first step on": [[1, 4, 4]] * 3,
    "later": [[4, 4, 4], [0, 1, 2], [3, 3, 3], [3, 4, 0]],
    "the last on some ranks": [[3, 0, 3], [0, 0, 0]],
}

CASES: dict[str, dict[str, Case]] = {
    "ranks": {str(size): Case(ranks=size, exchanges=BOTH) for size in (1, 2, 3, 4)},
    "one unit for everything": {"": Case(settings={"fsdp_unit_modules": []}, exchanges=BOTH)},
    "no units": {
        outer: Case(
            settings={"fsdp_unit_modules": None, "outer_dp_sharding_strategy": outer},
            ranks=4,
            mesh=(2, 2),
            strategies=ZERO_3 if outer == "optim" else ("no_shard", *ZERO_3),
            check=_replicated,
        )
        for outer in OUTER
    },
    "accumulation": {
        f"{each} {no_sync} {overlap}": Case(
            settings={
                "use_no_sync": no_sync,
                "sync_model_each_microbatch": each,
                "overlap_grad_reduce": overlap,
                "overlap_param_gather": overlap,
            },
            micro_batches=3,
            exchanges=BOTH,
        )
        for each, no_sync, overlap in SYNCHRONIZED
    }
    | {"three ranks": Case(settings={"use_no_sync": True}, ranks=3, micro_batches=2, exchanges=BOTH)},
    "two axes": {
        f"{outer}, {count} micro-batches {'in no_sync' * no_sync}": Case(
            settings={"outer_dp_sharding_strategy": outer, "use_no_sync": no_sync},
            ranks=4,
            micro_batches=count,
            mesh=(2, 2),
            strategies=strategies,
            exchanges=BOTH,
        )
        for outer, strategies in TWO_AXES.items()
        for count, no_sync in ((1, False), (3, False), (3, True))
    },
    "axes of one rank": {
        f"{outer} {mesh}": Case(
            settings={"outer_dp_sharding_strategy": outer, "use_no_sync": True},
            ranks=mesh[0] * mesh[1],
            micro_batches=2,
            mesh=mesh,
            strategies=ZERO_3,
        )
        for outer in OUTER
        for mesh in ((1, 3), (3, 1), (1, 1))
    },
    "tied": {
        "embedding and head": Case(partial(TinyModel, tied=True), check=_tied),
        "across units": Case(TiedAcrossUnits, ranks=3, check=_of_the_root),
        "a block called twice": Case(SharedBlock, micro_batches=2),
    },
    "unused": {
        "on all ranks": Case(WithUnused, micro_batches=2, check=_without_gradients),
        "output of a unit": Case(TwoHeads, first=[[0, 1]] * 3, strategies=ZERO_3),
        **{name: Case(Skipping, ranks=3, first=first) for name, first in SKIPPED.items()},
    },
    # The embedding: then no input of the first block needs gradients. A whole block, part of one, all of them.
    "frozen": {
        what: Case(partial(frozen, what), micro_batches=2, check=partial(_still_frozen, what))
        for what in ("embedding", "blocks.1", "blocks.0.up.weight", "blocks")
    },
    "small parameters": {
        str(size): Case(WithOdd, {"fsdp_unit_modules": [Odd]}, size, check=_every_element_has_a_place)
        for size in (1, 2, 3, 4)
    },
    "double buffer": {
        "one": Case(Unequal, {"fsdp_double_buffer": True}, 3),
        "accumulation": Case(Unequal, {"fsdp_double_buffer": True}, 3, 3),
        "three buffers": Case(
            Unequal, {"fsdp_double_buffer": True, "max_unsharded_units": 3}, 3, 2, check=_three_buffers
        ),
        **{
            f"units inside each other, {own}": Case(
                Levels,
                {"fsdp_double_buffer": True, "fsdp_db_use_persist_buf_on_alloc_fail": own, **LEVELS},
                strategies=ZERO_3,
            )
            for own in (False, True)
        },
    },
    "recomputation": {
        **{
            f"{what} {reentrant}": Case(partial(Recomputing, reentrant, what), micro_batches=2)
            for what in ("units", "pairs", "inside")
            for reentrant in (False, True)
        },
        **{
            f"called twice {reentrant}": Case(partial(SharedBlock, reentrant), micro_batches=2, strategies=ZERO_3)
            for reentrant in (False, True)
        },
    },
    "units inside units": {
        str(outer): Case(partial(Levels, outer), LEVELS, micro_batches=2, check=_all_sharded)
        for outer in (None, False, True)
    },
    "recomputed at two levels": {
        f"{outer} {inner} {len(units)}": Case(
            partial(Levels, outer, inner),
            {"fsdp_unit_modules": units},
            micro_batches=2,
            strategies=ZERO_3,
            check=_all_sharded,
        )
        for outer, inner in ((None, False), (None, True), (False, False), (True, True), (True, False))
        for units in ([Outer, Middle, Gate], [Outer, Gate])
    },
    "containers": {
        str(len(units)): Case(Wrapped, {"fsdp_unit_modules": units}, strategies=ZERO_3)
        for units in ([Block], [Wrapped.Inner, Block], [TinyModel, Block, "torch.nn.LayerNorm"])
    },
    "returned parameters": {
        str(recompute): Case(partial(UsesReturned, recompute), {"fsdp_unit_modules": [SkipsBias]}, micro_batches=2)
        for recompute in (False, True)
    },
    "forwards": {
        "evaluation": Case(loss=_evaluated, micro_batches=2, check=_all_sharded),
        "without backward": Case(loss=_after_another_forward),
    },
    "offload": {"": Case(settings={"offload_optimizer": True}, micro_batches=2)},
    "granularities": {
        name: Case(settings={"shard_granularity": name}, ranks=4, strategies=STRATEGIES[1:])
        for name in ("row", "tensor", "parameter", "block(4)", "element")
    },
    # Elements whose gradient is almost zero: optimizers that divide by it turn a rounding error into a step.
    "optimizers": {
        name: Case(make=make, ranks=3, strategies=ZERO_3, tolerance=2e-4) for name, make in OPTIMIZERS.items()
    },
}


def _train(group: str, name: str, strategy: str) -> None:
    case = CASES[group][name]
    data = batches(4 if case.first is None else len(case.first), case.micro_batches * case.ranks)
    if case.first is not None:
        data[:, :, 0, 0] = torch.tensor(case.first)
    settings = {**case.settings, "zero_dp_strategy": strategy}
    if case.mesh is not None:
        mesh = init_device_mesh(DEVICE, case.mesh, mesh_dim_names=("outer", "inner"))
        settings |= {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
    sharded = assert_same_training(case.model(), data, case.make, case.loss, case.tolerance, **settings)
    if case.check is not None:
        case.check(sharded)


def _test(group: str) -> Callable[[RankPool, str, str], None]:
    """A test of every row of a group."""
    rows = [
        (name, strategy, exchange)
        for name, case in CASES[group].items()
        for strategy in case.strategies
        for exchange in case.exchanges
        if exchange == SENDS or strategy != "no_shard" or case.settings.get("outer_dp_sharding_strategy") == "optim"
    ]

    @pytest.mark.parametrize(("name", "strategy", "exchange"), rows, indirect=["exchange"])
    @pytest.mark.usefixtures("exchange")
    def test(ranks: RankPool, name: str, strategy: str) -> None:
        ranks.run(CASES[group][name].ranks, _train, group, name, strategy)

    return test


test_ranks = pytest.mark.every_strategy(_test("ranks"))
test_one_unit_for_everything = pytest.mark.every_strategy(_test("one unit for everything"))
test_without_units_weights_are_replicated = pytest.mark.every_strategy(_test("no units"))
test_accumulation = pytest.mark.every_strategy(_test("accumulation"))
test_two_axes = _test("two axes")
test_axes_of_one_rank = _test("axes of one rank")
test_tied = _test("tied")
test_unused = _test("unused")
test_frozen = _test("frozen")
test_small_parameters = _test("small parameters")
test_double_buffer = _test("double buffer")
test_recomputation = _test("recomputation")
test_units_inside_units = _test("units inside units")
test_recomputed_at_two_levels = _test("recomputed at two levels")
test_containers = _test("containers")
test_returned_parameters = _test("returned parameters")
test_forwards = _test("forwards")
test_offload = _test("offload")
test_granularities = _test("granularities")
test_optimizers = _test("optimizers")
