"""The trace tool: the timeline is complete, times add up, and a recording has no side effects."""

import json
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

from megatron.fsdp.tools.trace import Kind, RankTrace, Row, Span, Timeline, trace_step
from megatron.fsdp.tools.trace.__main__ import write
from megatron.fsdp.tools.trace.spans import mark_late_ranks
from megatron.fsdp.tools.trace.watch import StepWatcher
from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from scripts import draw_trace
from tests.exchanges import wrapped
from tests.launch import ROOT
from tests.models import Block, TinyModel, adamw, batches, device, loss_of, shard_in_place, without_collector
from tests.ranks import DEVICE, RankPool, on_ranks

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
UNITS = ["<root>", *BLOCKS]
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="what sleeps is the CPU's stream")


class _Run:
    """A model with an optimizer, and its steps."""

    def __init__(self, model: torch.nn.Module | None = None, **arguments: Any) -> None:
        arguments.setdefault("fsdp_unit_modules", [Block])
        model = (TinyModel() if model is None else model).to(device())
        self.model, self.optimizer = fully_shard(model, adamw(model.parameters()), **arguments)
        self.tokens = batches(1, 2)[0][dist.get_rank() % 2]

    def step(self) -> float:
        loss = loss_of(self.model, self.tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def _traced(steps_before: int = 2, model: torch.nn.Module | None = None, **arguments: Any) -> Timeline:
    run = _Run(model, **arguments)
    for _ in range(steps_before):
        run.step()
    with trace_step(run.model) as timeline:
        run.step()
    return timeline


def _recorded(ranks: RankPool, function: Any = _traced, *args: Any) -> Timeline:
    """The timeline of the first of two ranks; that of the other is empty."""
    first, other = ranks.run(2, function, *args)
    assert [trace.rank for trace in first.ranks] == [0, 1]
    assert other.ranks == []
    return first


def _units(trace: RankTrace, row: Row, kind: Kind, backward: bool | None = None) -> list[str]:
    return [s.unit for s in trace.spans if (s.row, s.kind) == (row, kind) and backward in (None, s.backward)]


# Contents of a trace -------------------------------------------------------------------------------------------


def test_every_unit_computes_and_communicates(ranks: RankPool) -> None:
    for trace in _recorded(ranks).ranks:
        assert list(trace.units) == UNITS
        # The root computes before, between and after the blocks.
        assert [u for u in _units(trace, Row.COMPUTE, Kind.FORWARD) if u != "<root>"] == BLOCKS
        assert [u for u in _units(trace, Row.COMPUTE, Kind.BACKWARD) if u != "<root>"] == BLOCKS[::-1]
        assert _units(trace, Row.GATHERS, Kind.GATHER, backward=False) == UNITS
        # The root and the last block are still there when backward begins.
        assert _units(trace, Row.GATHERS, Kind.GATHER, backward=True) == ["blocks.1", "blocks.0"]
        assert _units(trace, Row.REDUCTIONS, Kind.REDUCTION) == [*BLOCKS[::-1], "<root>"]
        assert set(_units(trace, Row.WAITS, Kind.GATHER)) == set(_units(trace, Row.WAITS, Kind.REDUCTION)) == set(UNITS)
        assert len(_units(trace, Row.COMPUTE, Kind.OPTIMIZER)) > 0


def _recomputed_around() -> Timeline:
    """Activations of whole units are recomputed: their forward runs again, in backward."""

    class Model(TinyModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(self.norm(x))

    return _traced(model=Model())


def test_recomputation_is_distinguished_from_forward(ranks: RankPool) -> None:
    for trace in _recorded(ranks, _recomputed_around).ranks:
        assert set(_units(trace, Row.COMPUTE, Kind.RECOMPUTATION)) == set(BLOCKS)
        assert [u for u in _units(trace, Row.COMPUTE, Kind.FORWARD) if u != "<root>"] == BLOCKS


def _ends_with_a_unit() -> dict[str, float]:
    """Milliseconds of backward per unit. The last unit returns the model's output."""

    class Slow(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.down.register_full_backward_hook(lambda *_: time.sleep(0.05))

    run = fully_shard_model(torch.nn.Sequential(Slow(13), Slow(13)).to(device()), fsdp_unit_modules=[Slow])
    data = torch.randn(4, 13, device=device(), requires_grad=True)
    run(data).sum().backward()
    with trace_step(run, all_ranks=False) as timeline:
        run(data).sum().backward()
    return {unit: times.backward for unit, times in timeline.ranks[0].per_unit().items()}


@on_cpu
def test_backward_of_a_shared_output_belongs_to_the_inner_unit(ranks: RankPool) -> None:
    for backward in ranks.run(2, _ends_with_a_unit):
        assert backward["0"] >= 50 <= backward["1"] > backward["<root>"]


def _gathered_before() -> tuple[int, int]:
    """Numbers of all-gathers, and of waits for all-gathers, some of which began before the recording."""
    run = _Run()
    run.step()
    run.model.start_param_sync()
    with trace_step(run.model, all_ranks=False) as timeline:
        run.step()
    trace = timeline.ranks[0]
    in_forward = [_units(trace, row, Kind.GATHER, backward=False) for row in (Row.GATHERS, Row.WAITS)]
    return len(in_forward[0]), len(in_forward[1])


def test_waits_for_earlier_communication_are_recorded(ranks: RankPool) -> None:
    for gathers, waits in ranks.run(2, _gathered_before):
        assert gathers < len(UNITS) == waits


def _traced_fsdp2() -> Timeline:
    """A model that is sharded by the FSDP2 interface."""
    model = shard_in_place(TinyModel().to(device()))
    optimizer = adamw(model.parameters())
    for _ in range(2):
        with trace_step(model) as timeline:
            loss_of(model, batches(1, 1)[0, 0]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return timeline


def test_models_sharded_as_with_fsdp2(ranks: RankPool) -> None:
    for trace in _recorded(ranks, _traced_fsdp2).ranks:
        assert _units(trace, Row.GATHERS, Kind.GATHER, backward=False) == UNITS
        assert sorted(_units(trace, Row.REDUCTIONS, Kind.REDUCTION)) == UNITS


# Times ---------------------------------------------------------------------------------------------------------


def _check_order(trace: RankTrace) -> None:
    assert all(span.end >= span.start for span in trace.spans)
    for row in (Row.GATHERS, Row.REDUCTIONS):
        spans = [span for span in trace.spans if span.row is row]
        assert all(a.end <= b.start for a, b in zip(spans, spans[1:], strict=False)), row
    for unit in trace.units:
        for backward in (False, True):
            kinds = (Kind.FORWARD, Kind.BACKWARD)
            computes = [s for s in trace.spans if s.kind in kinds and (s.unit, s.backward) == (unit, backward)]
            gathers = [s for s in trace.spans if s.row is Row.GATHERS and (s.unit, s.backward) == (unit, backward)]
            assert all(g.end <= computes[0].start for g in gathers)
        reductions = [s for s in trace.spans if s.row is Row.REDUCTIONS and s.unit == unit]
        assert all(r.start >= computes[-1].end for r in reductions)


def test_compute_spans_do_not_overlap(ranks: RankPool) -> None:
    for trace in _recorded(ranks).ranks:
        lane = sorted((s for s in trace.spans if s.row in (Row.COMPUTE, Row.WAITS)), key=lambda s: (s.start, s.end))
        assert (lane[0].start, lane[-1].end) == (trace.start, trace.end)
        assert all(a.end == b.start for a, b in zip(lane, lane[1:], strict=False))
        assert sum(trace.of_computation().values()) == pytest.approx((trace.end - trace.start) / 1e6)


def test_exposed_time_is_the_sum_of_waits(ranks: RankPool) -> None:
    timeline = _recorded(ranks)
    for trace in timeline.ranks:
        for unit, exposed in timeline.exposed()[trace.rank].items():
            waits = [s.milliseconds for s in trace.spans if s.row is Row.WAITS and s.unit == unit]
            assert waits and exposed == pytest.approx(sum(waits))
    mean = timeline.mean()["blocks.1"].exposed
    assert mean == pytest.approx(sum(of_rank["blocks.1"] for of_rank in timeline.exposed().values()) / 2)


def _slow_gather(seconds: float) -> Timeline:
    """All-gathers of one block are slow."""
    run = _Run()
    run.step()
    block = run.model.engine.units[2].groups[0].weights.compute.flat

    def slow(original: Callable[..., Any]) -> Callable[..., Any]:
        def all_gather(output: torch.Tensor, *rest: Any) -> None:
            if output is block:
                time.sleep(seconds)
            original(output, *rest)

        return all_gather

    with wrapped(all_gather=slow), trace_step(run.model) as timeline:
        run.step()
    return timeline


@on_cpu
def test_a_slow_all_gather_is_exposed_at_its_unit(ranks: RankPool) -> None:
    timeline = _recorded(ranks, _slow_gather, 0.1)
    for trace in timeline.ranks:
        times = trace.per_unit()
        # Once in forward and once in backward; in between there is little to hide it behind.
        assert times["blocks.1"].gather > 200
        assert times["blocks.1"].exposed_gather > 100
        assert max(times.values(), key=lambda t: t.exposed_gather) is times["blocks.1"]


def _late_rank(seconds: float) -> Timeline:
    run = _Run()
    run.step()
    if dist.get_rank() == 1:
        run.model.module.blocks[1].up.register_forward_hook(lambda *_: time.sleep(seconds))
    with trace_step(run.model) as timeline:
        run.step()
    return timeline


@on_cpu
def test_waiting_for_a_rank_is_distinguished_from_communicating(ranks: RankPool) -> None:
    punctual, late = _recorded(ranks, _late_rank, 0.1).ranks
    waited, others = punctual.per_unit(), late.per_unit()
    assert 50 < sum(times.late for times in waited.values()) > sum(times.late for times in others.values())
    assert all(times.late <= times.exposed for times in waited.values())
    assert others["blocks.1"].forward > 100


def _rank(rank: int, *starts: int, all_meet: bool = True) -> RankTrace:
    """A rank whose all-gathers of one unit take 10 each, and whose computation waits for the last 5 of each."""
    spans = []
    for work, start in enumerate(starts, 1):
        spans.append(Span(Row.GATHERS, Kind.GATHER, "a", False, start, start + 10, 8, work))
        spans.append(Span(Row.WAITS, Kind.GATHER, "a", False, start + 5, start + 10, 0, work))
    return RankTrace(rank, "cpu", ("a",), 0, 100, tuple(spans), 0, all_meet)


def test_late_ranks() -> None:
    early, late = mark_late_ranks([_rank(0, 0, 20), _rank(1, 8, 20)])
    assert [span.late for span in early.spans] == [8, 3, 0, 0]
    assert [span.late for span in late.spans] == [0, 0, 0, 0]
    assert early.per_unit()["a"].late == 3e-6


@pytest.mark.parametrize("all_meet", [True, False])
def test_communication_without_other_ranks_is_never_late(all_meet: bool) -> None:
    """An all-gather of only one rank, or process groups with fewer ranks than are recorded."""
    traces = mark_late_ranks([_rank(0, 0, all_meet=all_meet), _rank(1, *(() if all_meet else (8,)), all_meet=True)])
    assert all(span.late == 0 for trace in traces for span in trace.spans)


# Side effects --------------------------------------------------------------------------------------------------


def _attributes(model: MegatronFSDP) -> list[set[str]]:
    streams = [model.engine.context.stream, *(group.weights.stream for group in model.engine.groups)]
    buffers = [buffer for group in model.engine.groups for buffer in (group.weights, group.gradients)]
    return [set(vars(thing)) for thing in (model, model.engine.schedule, *model.engine.units, *streams, *buffers)]


def _losses(traced: bool) -> list[float]:
    torch.manual_seed(0)
    run = _Run()
    losses = [run.step()]
    before = _attributes(run.model)
    hooks = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    for _ in range(3):
        if traced:
            with trace_step(run.model):
                assert _attributes(run.model) != before
                losses.append(run.step())
        else:
            losses.append(run.step())
    losses.append(run.step())
    assert _attributes(run.model) == before
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == hooks
    return losses


def test_tracing_is_bit_identical_and_leaves_no_hooks(ranks: RankPool) -> None:
    assert ranks.run(2, _losses, True) == ranks.run(2, _losses, False)


def _interrupted() -> list[float]:
    run = _Run()
    run.step()
    before = _attributes(run.model)
    with pytest.raises(KeyError), trace_step(run.model, all_ranks=False) as timeline:
        run.step()
        raise KeyError
    assert timeline.ranks == []
    assert _attributes(run.model) == before
    return [run.step(), run.step()]


def test_an_exception_ends_the_recording(ranks: RankPool) -> None:
    first, second = ranks.run(1, _interrupted)[0]
    assert second < first


@on_ranks(1)
def test_a_recording_does_not_keep_the_model() -> None:
    run = _Run()
    run.step()
    with without_collector():
        with trace_step(run.model, all_ranks=False) as timeline:
            run.step()
        model = weakref.ref(run.model)
        del run
        assert model() is None
        assert timeline.ranks


@on_ranks(1)
def test_one_sharded_model_is_expected() -> None:
    with pytest.raises(ValueError, match="expected one sharded model; got 0 in TinyModel"), trace_step(TinyModel()):
        pass
    both = torch.nn.ModuleList([fully_shard_model(TinyModel()), fully_shard_model(TinyModel())])
    with pytest.raises(ValueError, match="got 2 in ModuleList"), trace_step(both):
        pass


# Files ---------------------------------------------------------------------------------------------------------


def test_chrome_trace(ranks: RankPool, tmp_path: Path) -> None:
    timeline = _recorded(ranks)
    timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {(pid, tid): row for pid in (0, 1) for tid, row in enumerate(Row)}
    assert {e["pid"]: e["args"]["name"][:6] for e in events if e["name"] == "process_name"} == {
        0: "rank 0",
        1: "rank 1",
    }
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(len(trace.spans) for trace in timeline.ranks)
    assert all(e["dur"] >= 0 and (e["pid"], e["tid"]) in rows and e["name"] for e in spans)
    assert min(event["ts"] for event in spans) == 0
    assert {"forward blocks.0", "gather blocks.0", "reduction <root>", "wait: gather blocks.2"} <= {
        event["name"] for event in spans
    }
    begun, awaited = ({e["id"]: e["ts"] for e in events if e["ph"] == ph} for ph in "sf")
    assert awaited.keys() <= begun.keys()
    assert all(begun[name] <= ts for name, ts in awaited.items())


def test_picture(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline = _recorded(ranks)
    timeline.save(tmp_path / "trace.json")
    for drawn, recorded in zip(draw_trace.read(tmp_path / "trace.json"), timeline.ranks, strict=True):
        assert drawn.of_computation() == pytest.approx(recorded.of_computation(), abs=1e-3)
        assert drawn.per_unit().keys() == recorded.per_unit().keys()
    draw_trace.main([str(tmp_path / "trace.json"), str(tmp_path / "trace.png")])
    content = (tmp_path / "trace.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) < 300_000
    for picture in (content, (ROOT / "docs" / "trace.png").read_bytes()):
        assert draw_trace.WORDS.encode() in picture, (
            "the picture has other words than scripts/draw_trace.py: draw it again"
        )


def test_table(ranks: RankPool) -> None:
    lines = _recorded(ranks).table().splitlines()
    assert [line.split()[0] for line in lines[1:6]] == [*UNITS, "sum"]
    assert lines[6].startswith("rank 0 (") and "waiting" in lines[7]


def test_ranks_without_a_recording_write_nothing(tmp_path: Path) -> None:
    empty = Timeline()
    empty.save(tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == [] and empty.table() == "" and empty.exposed() == {}


def test_the_first_rank_of_every_data_parallel_group_writes_a_file(tmp_path: Path) -> None:
    for rank in (0, 3):
        recording = RankTrace(rank, "a device", ("<root>",), start=0, end=1, spans=(), clock_error=0, all_meet=True)
        write(Timeline([recording]), str(tmp_path / "trace"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace-3.json", "trace.json"]
    assert '"pid": 0' in (tmp_path / "trace.json").read_text()


def test_shortened_names_stay_distinct() -> None:
    units = ["<root>", "encoder.0", "decoder.0", "decoder.1"]
    assert list(draw_trace.short_names(units).values()) == ["root", "encoder.0", "decoder.0", "1"]


# Scripts -------------------------------------------------------------------------------------------------------


def _watched() -> tuple[list[Timeline], list[bool]]:
    """Trace an unmodified loop with learning rate schedulers created before and after the watcher."""
    found: list[Timeline] = []
    done = []
    watcher = StepWatcher(trace_step, 2, found.append)
    run = _Run()
    scheduler = torch.optim.lr_scheduler.ConstantLR(run.optimizer)
    own = vars(run.optimizer)["step"]
    for _ in range(4):
        run.step()
        scheduler.step()
        done.append(watcher.done)
    torch.optim.lr_scheduler.ConstantLR(run.optimizer)
    assert vars(run.optimizer)["step"] is own
    return found, done


def test_a_step_of_a_script_is_traced(ranks: RankPool) -> None:
    (found, done), _ = ranks.run(2, _watched)
    assert done == [False, False, True, True]
    assert len(found) == 1
    for trace in found[0].ranks:
        assert _units(trace, Row.GATHERS, Kind.GATHER, backward=False) == UNITS
        _check_order(trace)


def test_the_first_steps_cannot_be_traced() -> None:
    with pytest.raises(ValueError, match="at least 2 steps before the traced one; got 1"):
        StepWatcher(trace_step, 1, lambda _: None)
