"""Sizes of devices, and the verdict whether a model fits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.tools.devices import GIB, gpu_memory, parse_memory
from megatron.fsdp.tools.estimate import AxisSizes, outline
from megatron.fsdp.tools.fit import CONTEXT, NCCL, Situation, comparison, verdict
from tests.models import FP32_GRADS, Block, TinyModel

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80", 80 * 10**9), ("80GB", 80 * 10**9), ("79.5 GiB", 79.5 * GIB), ("81559mib", 81559 * MIB), ("1tb", 10**12)],
)
def test_sizes(text: str, expected: float) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "80XB", "-1", "0", "1e3"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="80GB.*got"):
        parse_memory(text)


def test_gpus_by_name() -> None:
    assert gpu_memory("H100") == 81559 * MIB and gpu_memory("A100 80") == gpu_memory("a100_80") == 80 * GIB
    with pytest.raises(ValueError, match=r"got 'h10'. Did you mean 'h100'\?"):
        gpu_memory("h10")


# The verdict ------------------------------------------------------------------------------------------------------


def situation(strategy: str, ranks: int, **changes: Any) -> Situation:
    with torch.device("meta"):
        model = TinyModel(width=1024, depth=8, vocabulary=128).bfloat16()
    config = FSDPConfig(zero_dp_strategy=strategy, mixed_precision_policy=FP32_GRADS)
    found = Situation([outline(model, (Block,), config)], config, AxisSizes(ranks), AxisSizes(ranks))
    return replace(found, **changes)


def test_what_fits_is_not_changed() -> None:
    needs = situation("optim_grads_params", 8).total
    found = verdict(situation("optim_grads_params", 8), needs, 8)
    assert found.fits and found.text.startswith("without activations, fits, with less than 10 % left: 0.00 GiB free")
    assert found.fewest_ranks == 8 and not found.suggestions
    less = verdict(situation("optim_grads_params", 8, rest=0), needs - 1, 8)
    assert not less.fits and less.text.startswith("does not fit by ") and less.fewest_ranks == 16
    assert comparison(9 * GIB, 10 * GIB) == "fits: 1.00 GiB free"


def test_numbers_of_ranks_are_those_that_would_start() -> None:
    """Context-parallel ranks are among the data-parallel ones, and each of the others has a micro-batch."""
    present = situation("optim_grads_params", 8, context=4, micro_batches=12)
    assert verdict(present, 1 << 60, 8).fewest_ranks == 4
    assert [present.on(factor) is not None for factor in (0.25, 0.5, 2, 4)] == [False, True, True, False]
    few = verdict(situation("optim_grads_params", 8), situation("optim_grads_params", 16).total, 8)
    assert [s.change for s in few.suggestions if "ranks" in s.change] == ["16 ranks"]


def test_suggestions_are_those_that_fit() -> None:
    present = situation("no_shard", 8)
    strategies = ("optim", "optim_grads", "optim_grads_params")
    totals = {name: situation(name, 8).total for name in strategies}
    assert totals["optim"] > totals["optim_grads"] > totals["optim_grads_params"]
    found = verdict(present, totals["optim_grads"], 8)
    assert {s.change: s.total for s in found.suggestions if "strategy" in s.change} == {
        f"--data-parallel-sharding-strategy {name}": totals[name] for name in strategies[1:]
    }
    assert all(s.total <= found.capacity for s in found.suggestions)


def test_changes_are_combined_if_none_suffices() -> None:
    present = situation("optim_grads_params", 8, rest=400 * MIB)
    fewer = [("--micro-batch-size 1", 300 * MIB), ("--recompute", 200 * MIB), ("--micro-batch-size 1 --recompute", 0)]

    def changes(capacity: int) -> dict[str, int]:
        return {s.change: s.total for s in verdict(present, capacity, 8, lambda: iter(fewer)).suggestions}

    single = changes(present.total - 1)
    assert {flags for flags, _ in fewer} < single.keys()
    totals = {flags: replace(present, rest=rest).total for flags, rest in fewer}
    assert {flags: single[flags] for flags in totals} == totals
    (every,) = changes(min(single.values()) - 1).items()
    assert every[0].startswith("--micro-batch-size 1 --recompute --optimizer-cpu-offload") and "ranks" not in every[0]
    (wider,) = changes(every[1] - 15 * MIB).items()
    assert wider[0] == f"{every[0]} on 32 ranks" and wider[1] <= every[1] - 15 * MIB
    assert changes(CONTEXT + NCCL) == {}
    assert not any("micro-batch" in s.change for s in verdict(present, present.total - 1, 8).suggestions)


def test_more_ranks_need_less_and_are_suggested() -> None:
    present = situation("optim_grads_params", 2)
    wide = situation("optim_grads_params", 8).total
    found = verdict(present, wide, 2)
    assert "8 ranks" in {s.change for s in found.suggestions} and found.fewest_ranks == 8
    assert "4 ranks" not in {s.change for s in found.suggestions}
    # Expert parallelism leaves 3 ranks that share experts: they cannot be halved.
    assert situation("optim", 6, experts=AxisSizes(3)).on(0.5) is None
