"""A profiler sees the engine's operations with their units; without a profiler, no label is created."""

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from megatron_fsdp import MegatronFSDP
from tests.models import Block, TinyModel, batches, loss_of
from tests.ranks import RankPool


def _labels(all_threads: bool) -> set[str]:
    model = MegatronFSDP(TinyModel(), fsdp_unit_modules=[Block])
    tokens = batches(1, 1)[0, 0]
    loss_of(model, tokens).backward()
    config = _ExperimentalConfig(profile_all_threads=all_threads)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        loss_of(model, tokens).backward()
    return {event.name for event in profiler.events() if event.name.startswith("FSDP ")}


@pytest.mark.parametrize("all_threads", [False, True])
def test_a_profiler_sees_the_units(ranks: RankPool, all_threads: bool) -> None:
    kinds = ("unshard", "wait for unshard", "reshard", "reduce", "wait for reduction")
    expected = {f"FSDP {kind} {unit}" for kind in kinds for unit in ("blocks.1", "blocks.2")}
    for found in ranks.run(2, _labels, all_threads):
        assert expected <= found, expected - found
        assert "FSDP unshard <root>" in found


def _labels_without_profiler() -> int:
    made = 0

    class Counting(torch.autograd.profiler.record_function):
        def __init__(self, name: str) -> None:
            nonlocal made
            made += name.startswith("FSDP ")
            super().__init__(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.profiler, "record_function", Counting)
        model = MegatronFSDP(TinyModel(), fsdp_unit_modules=[Block])
        loss_of(model, batches(1, 1)[0, 0]).backward()
    return made


def test_nothing_is_labelled_without_a_profiler(ranks: RankPool) -> None:
    assert ranks.run(1, _labels_without_profiler) == [0]
