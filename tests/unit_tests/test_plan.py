"""The plan command: its choices, their order, and a comparison with a trace."""

import concurrent.futures
import dataclasses
import itertools
import json
import math
import re
import shlex
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.tools.devices import GIB
from megatron.fsdp.tools.predict import Prediction, search
from megatron.fsdp.tools.predict.ghosts import Cost, Ghosts
from megatron.fsdp.tools.predict.plan import (
    Choice,
    Cluster,
    _kept,
    audit,
    candidates,
    cluster_of,
    main,
    ordered,
    per_unit,
    plan,
    table,
)
from megatron.fsdp.tools.predict.space import Place, Space, settings_of, uneven, with_changes
from megatron.fsdp.tools.script import Change, CommandStep
from megatron.fsdp.tools.trace.spans import Row
from megatron.fsdp.tools.trace.timeline import Timeline
from tests.models import FP32_GRADS, Block, TinyModel
from tests.unit_tests import test_predict as small

H100 = cluster_of("h100")


def _cluster(memory: int) -> Cluster:
    return dataclasses.replace(H100, per_host=2, device=dataclasses.replace(H100.device, memory=memory))


def _model() -> nn.Module:
    return TinyModel(width=64, depth=2, vocabulary=32)


def test_choices_their_order_and_an_audit(tmp_path: Path) -> None:
    seen: list[Choice] = []
    found = plan(
        _model,
        lambda: torch.zeros(2, 8, dtype=torch.int64),
        units=[Block],
        ranks=4,
        cluster=_cluster(80 * GIB),
        on_choice=seen.append,
        loss=lambda model, tokens: model(tokens).sum(),
    )
    assert len(seen) == 7 and [c.name for c in seen][-2:] == ["HSDP 2 x 2", "hybrid FSDP 2 x 2"]
    assert [c.prediction.step_seconds for c in found] == sorted(c.prediction.step_seconds for c in seen)
    assert all(name in table(found) for name in ("optim_grads_params", "HSDP 2 x 2", "free"))
    predicted = found[0].prediction
    assert predicted.tokens == 2 * 8 and predicted.mfu == pytest.approx(
        predicted.flops / predicted.step_seconds / H100.device.flops["float32"], rel=0.01
    )
    rows = [line.split() for line in per_unit(found[0]).splitlines()[1:]]
    assert [row[0] for row in rows] == ["<root>", "blocks.0", "blocks.1", "outside", "engine", "optimizer"]
    assert {row[-1] for row in rows[:3]} == {"compute"}
    seconds = [float(cell) for row in rows for cell in row[1:] if cell[0].isdigit()]
    assert sum(seconds) == pytest.approx(predicted.step_seconds, rel=0.05)
    small = ordered([dataclasses.replace(c, capacity=1) for c in seen])
    assert [c.memory for c in small] == sorted(c.memory for c in seen) and "does not fit by" in small[0].verdict
    Timeline([found[0].prediction.trace]).save(tmp_path / "trace.json")
    for line in audit(found[0], tmp_path / "trace.json").splitlines()[1:]:
        cells = line.split("  ")[1:]
        assert all(abs(float(a) - float(b)) <= 0.011 for a, _, b in (cell.split() for cell in cells)), line


def test_waits_are_those_of_the_computation() -> None:
    """Streams wait for each other, too."""
    slow = dataclasses.replace(_cluster(80 * GIB), between=1e7)
    batch = torch.zeros(2, 8, dtype=torch.int64)
    found = plan(_model, lambda: batch, units=["Block"], ranks=4, cluster=slow, loss=lambda m, x: m(x).sum())
    for each in found:
        waits = sum(span.milliseconds for span in each.prediction.trace.spans if span.row is Row.WAITS)
        assert 0 < waits / 1e3 < each.prediction.step_seconds


def test_links_follow_the_hosts() -> None:
    assert (H100.link(8).bandwidth, H100.link(8, 8).bandwidth) == (H100.inside, H100.between)
    crossing = H100.link(64)
    assert crossing.bandwidth == 8 * H100.between and crossing.ranks_per_hop == 8
    assert [axes.inner for *_, axes in candidates(64, 8)] == [64, 64, 64, 64, 64, 8, 8, 16, 16, 32, 32]


def test_an_unknown_gpu_lists_the_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps({}))
    monkeypatch.setattr(sys, "argv", ["plan", "--model", f"{__name__}:_model", "--units", "Block", "--gpu", "h1000"])
    with pytest.raises(SystemExit):
        main()
    assert "h100, h100-nvl" in capsys.readouterr().err


def test_a_network_and_hosts_of_ones_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Cluster] = []

    def evaluated(
        script: Path, world_size: int, cluster: Cluster, each: search.Candidate, slowest: float
    ) -> search.Candidate:
        seen.append(cluster)
        return dataclasses.replace(each, refusal="no")

    _use_threads(monkeypatch, evaluated)
    own = f"--gpu h100 --network 25GB --per-host 4 --device-memory 64GiB {__file__} --micro-batch-size 1"
    monkeypatch.setattr(sys, "argv", ["plan", *own.split()])
    assert main() == 1
    assert capsys.readouterr().out == "ERROR  no\n"  # of the line itself, and not of what was tried with it
    assert (seen[0].between, seen[0].per_host, seen[0].device.memory) == (25e9, 4, 64 * GIB)
    monkeypatch.setattr(
        sys, "argv", ["plan", "--machine", "m.json", "--network", "1GB", "--model", f"{__name__}:_model"]
    )
    with pytest.raises(SystemExit):
        main()
    assert "a --machine has its own" in capsys.readouterr().err
    words = f"--gpu h100 --sites 2 fast 0.02 --model {__name__}:_model --units Block"
    monkeypatch.setattr(sys, "argv", ["plan", *words.split()])
    with pytest.raises(SystemExit):
        main()
    assert "--sites: expected a number, bytes per second and seconds, as in 2 12.5GB 0.02; got 2 fast 0.02" in (
        capsys.readouterr().err
    )


OWN = "--num-layers 2 --micro-batch-size=1 --tensor-model-parallel-size 2 --sequence-parallel --recompute-modules a b"


def test_flags_of_a_command_line_are_replaced() -> None:
    arguments = OWN.split()
    same = {"--micro-batch-size": "1", "--tensor-model-parallel-size": "2", "--sequence-parallel": ""}
    assert with_changes(arguments, same) == (tuple(arguments), {})
    changes = {"--sequence-parallel": None, "--recompute-modules": None, "--micro-batch-size": "4"}
    found, differ = with_changes(arguments, changes)
    assert (
        shlex.join(found) == "--num-layers 2 --tensor-model-parallel-size 2 --micro-batch-size 4" and differ == changes
    )
    one = ["--context-parallel-size", "1"]
    assert with_changes(one, {"--context-parallel-size": None}) == (tuple(one), {})
    alone = ["--sequence-parallel"]  # has no effect on one tensor-parallel rank
    assert with_changes(alone, settings_of(alone)["tensor parallelism"][0])[1] == {}


def _evaluated(
    script: Path, world_size: int, cluster: Cluster, each: search.Candidate, slowest: float = 0.0
) -> search.Candidate:
    """Tensor parallelism and recomputation save memory and take time; larger micro-batches do the opposite."""
    words = dict(zip(each.arguments, (*each.arguments[1:], ""), strict=True))
    batch, tensor = int(words["--micro-batch-size"]), int(words.get("--tensor-model-parallel-size", 1))
    if tensor * int(words.get("--context-parallel-size", 1)) > world_size:
        return dataclasses.replace(each, refusal="too few ranks")
    again = words.get("--recompute-granularity") == "full"
    seconds = (1 + again) * (1 + 0.1 * tensor) / batch
    waits = {"unshard": 0.1 * seconds, "reduce": 0.0, "other communication": 0.0}
    tokens = batch if "--tokens-per-batch" in words else 1  # of a step
    step = CommandStep(seconds * tokens, 0.0, 1 / seconds, 0.5, waits, {}, "")
    return dataclasses.replace(each, step=step, memory=8 * batch // tensor // (1 + again), capacity=int(words["--fit"]))


def _use_threads(monkeypatch: pytest.MonkeyPatch, evaluate: Callable[..., search.Candidate]) -> None:
    monkeypatch.setattr(search, "evaluate", evaluate)
    thread = lambda *unused: concurrent.futures.ThreadPoolExecutor(1)  # noqa: E731
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", thread)


def _search(monkeypatch: pytest.MonkeyPatch, words: str, goal: str = "tokens_per_second") -> search.Search:
    _use_threads(monkeypatch, _evaluated)
    found = search.Search(Path("train.py"), words.split(), 4, H100, goal, 60, lambda candidate: None)
    found.run()
    return found


def test_a_search_finds_settings_that_help_only_together(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _search(monkeypatch, "--micro-batch-size 1 --fit 9")
    best = found.ordered()[0]
    # A micro-batch of 8 fits with four tensor-parallel ranks and recomputation only.
    assert best.step is not None and best.step.seconds == pytest.approx(2 * 1.4 / 8)
    assert found.found[0].text == "your command line" and "too few ranks" in {each.refusal for each in found.found}
    assert len({each.arguments for each in found.found}) == len(found.found)
    assert any(search.START.items() <= each.changes.items() for each in found.found)
    assert "compute 0.990 -> 0.315" in search.explained(found.found[0], best)
    assert _search(monkeypatch, "--micro-batch-size 1 --fit 9", "memory").ordered()[0].memory == 1
    assert search.explained(dataclasses.replace(best, capacity=0), best).startswith("Your command line does not fit by")
    closest = _search(monkeypatch, "--micro-batch-size 1 --fit 0").ordered()[0]
    assert not closest.fits and closest.memory == 1 and "too much" in search.table([closest], 4)


def _true_step(change: Change) -> tuple[CommandStep | None, int]:
    """A world of 64 ranks, in which what settings do is more than a product of factors."""
    names = "micro-batch-size", "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"
    batch, tensor, stages, context = (int(change.get(f"--{name}") or 1) for name in names)
    if tensor * context > 8 or (context > 1 and "--num-distributed-optimizer-instances" in change):
        return None, 0
    again = change.get("--recompute-granularity") == "full"
    whole = change.get("--data-parallel-sharding-strategy") == "optim"
    compute = (1 + again / 3) * (1 + 0.1 * math.log2(tensor)) * (1 + 0.05 * math.log2(context))
    sent = 0.01 if whole else 6.0 * tensor * context / batch
    bubble = max(compute, sent) * (1 - 1 / stages) * batch / 16
    waits = {"unshard": max(sent - compute, 0.0)}
    peak = {"shards": 60 * GIB // (tensor * stages) if whole else GIB, "activations": 40 * GIB * batch // tensor}
    peak["activations"] = peak["activations"] // context // (4 if again else 1)
    seconds = max(compute, sent) + bubble
    return CommandStep(seconds, bubble, 1 / seconds, 0.5, waits, peak, "", communication=sent), sum(peak.values())


def test_estimates_find_the_best_of_many_combinations() -> None:
    space = Space(["--micro-batch-size", "1"], {}, False)
    found: dict[Place, float] = {}
    changes: list[Change] = []
    for _ in range(25):
        place = space.best(-math.inf)
        assert place is not None
        space.begin(place)
        changes.append(space.change(place))
        step, memory = _true_step(changes[-1])
        space.note(place, step, memory, 80 * GIB)
        found[place] = -math.inf if step is None else space.score(step, memory)
    every = [_true_step(space.change(place)) for place in itertools.product(*map(range, space.shape))]
    scores = sorted(space.score(step, memory) for step, memory in every if step is not None)
    assert len(space) == len(every) > 40_000
    assert max(found.values()) > scores[-1] - 0.05
    assert sum(score > scores[-1] - 0.05 for score in scores) < 0.01 * len(scores)
    assert sum(score == -math.inf for score in found.values()) < 10
    sizes = [change["--tensor-model-parallel-size"] for change in changes if "--tensor-model-parallel-size" in change]
    assert [*dict.fromkeys(sizes)] == ["2", "4", "8"][: len({*sizes})]
    assert sum(score < scores[-1] - 10 for score in found.values() if score > -math.inf) < 4  # far too large


def test_changes_to_a_line_that_does_not_start_are_not_tried() -> None:
    space = Space(["--micro-batch-size", "1"], {}, False)
    place = space.best(-math.inf)
    assert place is not None
    space.begin(place)
    assert space.best(-math.inf) is not None  # it is not known yet
    space.note(place, None, 0, 80 * GIB)
    assert space.best(-math.inf) is None


def test_what_is_known_of_pipelines_is_estimated() -> None:
    """Stages divide what a strategy keeps whole, and the bubble of more stages grows less and less."""
    own = "--micro-batch-size 16 --data-parallel-sharding-strategy optim_grads_params"
    space = Space(own.split(), {}, False)
    whole = {"--data-parallel-sharding-strategy": "optim"}
    places = {tuple(space.change(place).items()): place for place in itertools.product(*map(range, space.shape))}
    for stages, strategy, tolerance in ((1, {}, 9), (1, whole, 9), (2, {}, 9), (2, whole, 0.02), (4, {}, 0.02)):
        change: Change = {"--pipeline-model-parallel-size": str(stages)} if stages > 1 else {}
        change |= {"--decoder-last-pipeline-num-layers": None} if stages > 1 else {}
        place = places[tuple((change | strategy).items())]
        step, memory = _true_step(change | strategy | {"--micro-batch-size": "16"})
        assert step is not None
        estimate = float(space.scores(torch.tensor([place])))
        space.begin(place)
        space.note(place, step, memory, 675 * GIB)
        assert estimate == pytest.approx(space.score(step, memory), abs=tolerance)


@pytest.mark.parametrize(("layers", "stages", "last"), [(61, 4, "13"), (61, 16, "1"), (60, 4, None), (61, 1, None)])
def test_the_last_of_uneven_stages_has_fewer_layers(layers: int, stages: int, last: str | None) -> None:
    change = {"--pipeline-model-parallel-size": str(stages) if stages > 1 else None}
    words = ["--num-layers", str(layers)]
    assert uneven(words, change) == {**change, "--decoder-last-pipeline-num-layers": last}
    laid_out = [*words, "--pipeline-model-parallel-layout", "Et*61L"]
    assert uneven(laid_out, change)["--decoder-last-pipeline-num-layers"] is None


def test_what_is_estimated_to_be_too_slow_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """HSDP does not fit alone. With tensor parallelism it does, which computes more slowly than ten others train."""

    def evaluated(
        script: Path, world_size: int, cluster: Cluster, each: search.Candidate, slowest: float
    ) -> search.Candidate:
        slow = "--tensor-model-parallel-size" in each.arguments
        large = "--num-distributed-optimizer-instances" in each.arguments
        step = CommandStep(1.0 + 2 * slow, 0.0, 1 / (1.0 + 2 * slow), 0.5, {"unshard": 0.1}, {}, "")
        return dataclasses.replace(each, step=step, memory=2 * large - slow, capacity=1)

    _use_threads(monkeypatch, evaluated)
    found = search.Search(
        Path("train.py"), ["--micro-batch-size", "1"], 4, H100, "tokens_per_second", 60, lambda c: None
    )
    found.run()
    changes = [each.changes.keys() for each in found.found]
    both = {"--tensor-model-parallel-size", "--num-distributed-optimizer-instances"}
    assert any("--tensor-model-parallel-size" in each for each in changes) and not any(both <= e for e in changes)


def test_an_offloaded_optimizer_takes_time_and_no_memory_of_the_device() -> None:
    """Gradients are copied to the host, which updates; each unshard copies weights back."""
    h100 = H100.device

    def step(offload: bool, pcie: float = 1e9, host: float = 1e9) -> Prediction:
        device = dataclasses.replace(h100, offload={"PCIe": pcie, "host": host}, efficiency={})
        return small._predict(
            FSDPConfig(3, mixed_precision_policy=FP32_GRADS, offload_optimizer=offload), device=device
        )

    here, offloaded = step(False), step(True)
    for name in ("optimizer", "shards"):
        assert here.peak.bytes[name] > 1e6 and offloaded.peak.bytes.get(name, 0) < 1000  # numbers of steps
    own = 4 * sum(parameter.numel() for parameter in small._model("plain").parameters()) / small.PAIR.size
    copied = (step(True, pcie=5e8).step_seconds - offloaded.step_seconds) * 1e9 / own
    updated = (step(True, host=5e8).step_seconds - offloaded.step_seconds) * 1e9 / own
    assert 1.5 < copied < 3.1  # gradients, and weights in forward and backward, which overlap in part
    assert updated > 7  # the weight, its gradient and two moments are read, and all but the gradient written
    on_cpu = [small._predict(FSDPConfig(3, offload_optimizer=offload)) for offload in (False, True)]
    assert on_cpu[0].step_seconds == pytest.approx(on_cpu[1].step_seconds, rel=0.02)
    assert on_cpu[0].peak.total == on_cpu[1].peak.total


def test_a_fused_optimizer_writes_weights_and_state() -> None:
    costs: list[Cost] = []
    with Ghosts(costs.append, lambda *unused: None, lambda *unused: None):
        weight = torch.zeros(1000, requires_grad=True)
        weight.grad = torch.zeros(1000)
        torch.optim.AdamW([weight], fused=True).step()
    assert [cost.bytes for cost in costs if cost.name == "_fused_adamw_"] == [pytest.approx(28_000, rel=0.01)]


def test_a_row_of_the_table_has_speed_per_gpu_and_memory_by_category() -> None:
    peak = {"shards": GIB, "unsharded units": GIB, "activations": GIB, "logits": 2 * GIB, "temporary": GIB // 2}
    step = CommandStep(2.0, 0.5, 800.0, 0.5, {"unshard": 1.0}, peak, "decoder")
    row = search.table([search.Candidate((), {}, step, 6 * GIB, 8 * GIB)], 4).splitlines()[1]
    units = {name: {"compute": 1.0, "unshard": wait, "reduce": 0.0} for name, wait in (("a", 2), ("b", 0), ("c", 0))}
    lines = search.explained(*2 * [search.Candidate((), {}, dataclasses.replace(step, units=units), 0, 1)]).splitlines()
    assert lines[1].startswith("a: compute 1.000 s, unshard 2.000 s") and lines[1].endswith("bound by unshard")
    assert lines[2:] == ["b to c: compute 1.000 s, unshard 0.000 s, reduce 0.000 s, bound by compute"]
    assert row.split()[:11] == "2.000 800 200 50.0% 6.0 2.0 0.0 0.0 3.0 0.5 unshard".split()


def test_a_line_that_does_not_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even if the search's other start was predicted before."""
    started = threading.Event()

    def evaluated(
        script: Path, world_size: int, cluster: Cluster, each: search.Candidate, slowest: float
    ) -> search.Candidate:
        if each.changes:
            started.set()
            return _evaluated(script, world_size, cluster, each)
        assert started.wait(10)
        return dataclasses.replace(each, refusal="no")

    _use_threads(monkeypatch, evaluated)
    monkeypatch.setattr(sys, "argv", ["plan", *f"--gpus 8 {__file__} --micro-batch-size 1 --fit 99".split()])
    assert main() == 1
    assert capsys.readouterr().out == "ERROR  no\n"


def test_a_search_goes_on_if_a_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that the system kills for want of memory."""

    def evaluated(
        script: Path, world_size: int, cluster: Cluster, each: search.Candidate, slowest: float
    ) -> search.Candidate:
        if each.changes == {"--micro-batch-size": "2"}:
            raise concurrent.futures.BrokenExecutor("killed")
        return _evaluated(script, world_size, cluster, each)

    made: list[int] = []
    _use_threads(monkeypatch, evaluated)
    worker = search._worker
    monkeypatch.setattr(search, "_worker", lambda: made.append(1) or worker())
    words = "--micro-batch-size 1 --fit 99".split()
    found = search.Search(Path("train.py"), words, 4, H100, "tokens_per_second", 60, lambda each: None)
    found.run()
    (killed,) = [each for each in found.found if each.refusal == "not predicted: killed"]
    assert killed.text == "--micro-batch-size 2" and len(made) == 1 + max(search.PROCESSES, 2)
    assert len(found.ordered()) > 5


def test_a_search_counts_tokens_per_second_and_not_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    best = _search(monkeypatch, "--micro-batch-size 1 --fit 99 --tokens-per-batch").ordered()[0]
    assert best.step is not None and best.step.seconds == pytest.approx(1.2)
    assert best.step.tokens_per_second == pytest.approx(16 / 1.2)


def test_a_search_tries_8_bits_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it may end before: nothing that is known says how much they save."""
    found = _search(monkeypatch, "--micro-batch-size 1 --fit 99").found
    assert any("--fp8-format" in each.changes for each in found[:6])


def test_kept_flags_are_not_varied(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--micro-batch-size 1 --fit 9"
    assert _kept("fp8-format, --micro-batch-size") == ["--fp8-format", "--micro-batch-size"] and not _kept("")
    with pytest.raises(ValueError, match="--keep fp9-format: expected some of micro-batch-size, recompute-"):
        _kept("fp9-format")
    _use_threads(monkeypatch, _evaluated)
    kept = ["--micro-batch-size", "--data-parallel-sharding-strategy"]
    found = search.Search(Path("train.py"), words.split(), 4, H100, "tokens_per_second", 60, lambda each: None, kept)
    found.run()
    assert len(found.found) > 1 and all({*kept}.isdisjoint(each.changes) for each in found.found)


@pytest.mark.parametrize(("experts", "varies"), [("--num-experts 8", True), ("--num-experts=8", True), ("", False)])
def test_expert_parallelism_is_varied_with_experts(monkeypatch: pytest.MonkeyPatch, experts: str, varies: bool) -> None:
    found = _search(monkeypatch, f"--micro-batch-size 1 --fit 9 {experts}").found
    assert any("--expert-model-parallel-size" in each.changes for each in found) == varies


def test_ctrl_c_prints_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    begun = 0

    def interrupted(*given: Any) -> search.Candidate:
        nonlocal begun
        begun += 1
        if begun == 3:
            raise KeyboardInterrupt
        return _evaluated(*given)

    _use_threads(monkeypatch, interrupted)
    own = f"--gpus 4 {__file__} --micro-batch-size 1 --fit 99"
    monkeypatch.setattr(sys, "argv", ["plan", *own.split()])
    assert main() == 0
    shown = capsys.readouterr()
    assert "interrupted: the best so far" in shown.err
    assert re.search("the best of [12] command lines", shown.out) and "your command line" in shown.out
