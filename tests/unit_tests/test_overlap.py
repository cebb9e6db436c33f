"""Communication overlaps with compute: unshards are prefetched, and reductions run while backward continues."""

import dataclasses
import os
import threading
import time
from unittest.mock import patch

import pytest
import torch

from megatron.fsdp.buffers.reduction import Reduction
from megatron.fsdp.comm.streams import CpuStream
from megatron.fsdp.config import SYNCHRONOUS
from megatron.fsdp.runtime.schedule import Schedule
from megatron.fsdp.runtime.unit import Unit
from megatron_fsdp import FSDPConfig, fully_shard_model
from tests.exchanges import seen
from tests.models import Block, TinyModel, batches, loss_of
from tests.ranks import DEVICE, RankPool, on_ranks

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="these times are those of the CPU's stream")


class _Slow(TinyModel):
    """Each block computes for a while in forward and in backward."""

    seconds = 0.05

    def __init__(self) -> None:
        super().__init__(depth=4)
        for block in self.blocks:
            block.register_forward_pre_hook(lambda *_: time.sleep(self.seconds))
            block.register_full_backward_pre_hook(lambda *_: time.sleep(self.seconds))


def _step_time(overlap: bool) -> float:
    """Seconds of a step in which a collective takes as long as a block computes."""
    run = CpuStream.run

    def slow(self: CpuStream, task):  # noqa: ANN001, ANN202
        return run(self, lambda: (time.sleep(_Slow.seconds), task()))

    model = fully_shard_model(
        _Slow(), fsdp_unit_modules=[Block], overlap_grad_reduce=overlap, overlap_param_gather=overlap
    )
    tokens = batches(1, 1)[0, 0]
    loss_of(model, tokens).backward()
    with patch.object(CpuStream, "run", slow):
        start = time.perf_counter()
        loss_of(model, tokens).backward()
        return time.perf_counter() - start


def test_communication_hides_behind_compute(ranks: RankPool) -> None:
    # Compute alone: 8 times. In order: 10 gathers and 5 reductions and the flags of unused parameters on top, 24.
    # Overlapped, forward waits for the root and the first block; in backward a gather and a reduction of each block
    # share the stream, which is then what takes longest: 7 more; the root's reduction and the flags come last.
    overlapped = max(ranks.run(2, _step_time, True)) / _Slow.seconds
    in_order = max(ranks.run(2, _step_time, False)) / _Slow.seconds
    assert overlapped < 0.8 * in_order, f"overlapped {overlapped:.1f}, in order {in_order:.1f} block times"


def _what_runs_beside_block(index: int, **settings: bool) -> tuple[set[str], set[str]]:
    """Units on their way while block ``index`` computes, in forward and in backward, of the second step."""
    model = fully_shard_model(TinyModel(depth=5), fsdp_unit_modules=[Block], **settings)
    tokens = batches(1, 1)[0, 0]
    loss_of(model, tokens).backward()
    seen: dict[str, set[str]] = {"forward": set(), "backward": set()}

    def on_their_way() -> set[str]:
        return {unit.name for unit in model.engine.units if unit.state.value == "unsharding"}

    block = model.module.blocks[index]
    block.up.register_forward_pre_hook(lambda *_: seen["forward"].update(on_their_way()))
    block.up.register_full_backward_hook(lambda *_: seen["backward"].update(on_their_way()))
    loss_of(model, tokens).backward()
    return seen["forward"], seen["backward"]


def test_the_next_unit_is_gathered_while_this_one_computes(ranks: RankPool) -> None:
    assert ranks.run(2, _what_runs_beside_block, 2) == [({"blocks.3"}, {"blocks.1"})] * 2


def test_the_variable_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SYNCHRONOUS, "")
    assert not FSDPConfig().synchronous
    with pytest.raises(TypeError, match="^synchronous: expected bool; got 'yes'"):
        FSDPConfig(synchronous="yes")  # type: ignore[arg-type]
    monkeypatch.setenv(SYNCHRONOUS, "false")
    with pytest.raises(ValueError, match=f"{SYNCHRONOUS}: expected 0 or 1; got 'false'"):
        FSDPConfig()


def _waits_of_a_step(settings: dict[str, bool]) -> list[bool]:
    """For each reduction that was started, whether compute has waited for it before it goes on."""
    model = fully_shard_model(TinyModel(depth=3), fsdp_unit_modules=[Block], **settings)
    assert model.engine.pool is None
    model.register_buffers()  # a loop with fsdp_manual_registration does this, and there is nothing to register
    found: list[bool] = []
    issue = Schedule._issue_reduction

    def issued(self: Schedule, unit: Unit) -> None:
        issue(self, unit)
        found.append(not any(group.gradients.handles for group in unit.groups))

    with patch.object(Schedule, "_issue_reduction", issued):
        loss_of(model, batches(1, 1)[0, 0]).backward()
    return found


OFF = ("overlap_param_gather", "overlap_grad_reduce", "fsdp_double_buffer", "nccl_ub", "cuda_graph_mode")


@on_ranks(2)
@pytest.mark.parametrize("by_variable", [False, True], ids=["argument", "variable"])
def test_one_switch_turns_everything_asynchronous_off(by_variable: bool) -> None:
    settings = {} if by_variable else {"synchronous": True}
    with patch.dict(os.environ, {SYNCHRONOUS: "1" if by_variable else "0"}):
        with patch.object(torch.cuda, "is_available", lambda: True):  # registration and graphs need it
            config = FSDPConfig(nccl_ub=True, cuda_graph_mode=True, fsdp_manual_registration=True, **settings)
        assert config.synchronous and dataclasses.replace(config, nccl_ub=True) == config
        assert not any(getattr(config, name) for name in vars(config) if name in OFF)
        assert _what_runs_beside_block(2, **settings) == (set(), set())
        waits = _waits_of_a_step(settings)
    assert waits and all(waits)


def _backward_does_not_wait_for_reductions() -> bool:
    """Whether backward of the first blocks is over before the last block's reduction is."""
    gate = threading.Event()
    passed: list[bool] = []
    model = fully_shard_model(TinyModel(), fsdp_unit_modules=[Block], zero_dp_strategy="optim_grads")
    tokens = batches(1, 1)[0, 0]
    loss_of(model, tokens).backward()
    original = Reduction.over_inner

    def held(self, *args):  # noqa: ANN001, ANN002, ANN202
        if self is model.engine.groups[-1].gradients.reduction:
            passed.append(gate.wait(10))
        return original(self, *args)

    model.module.blocks[1].norm.register_full_backward_hook(lambda *_: gate.set())
    with patch.object(Reduction, "over_inner", held):
        loss_of(model, tokens).backward()
    return passed == [True]


def test_backward_goes_on_while_a_unit_is_reduced(ranks: RankPool) -> None:
    assert ranks.run(2, _backward_does_not_wait_for_reductions) == [True, True]


def _order_of_reductions() -> list[int]:
    with seen("reduce_scatter") as calls:
        model = TinyModel()
        for number, block in enumerate(model.blocks):  # blocks that can be distinguished by their sizes
            block.up, block.down = torch.nn.Linear(13, 40 + 9 * number), torch.nn.Linear(40 + 9 * number, 13)
        sharded = fully_shard_model(model, fsdp_unit_modules=[Block])
        loss_of(sharded, batches(1, 1)[0, 0]).backward()
        calls.clear()
        loss_of(sharded, batches(1, 1)[0, 0]).backward()
    by_size = {unit.groups[0].layout.numel: number for number, unit in enumerate(sharded.engine.units)}
    return [by_size[flat.numel()] for _, flat, *_ in calls]


def test_units_are_reduced_last_first_in_one_order_on_all_ranks(ranks: RankPool) -> None:
    assert ranks.run(3, _order_of_reductions) == [[3, 2, 1, 0]] * 3
