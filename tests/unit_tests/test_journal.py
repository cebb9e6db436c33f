"""Reports about ranks that have issued different collectives."""

import io
import itertools
import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.comm.hang_report import describe, name_ranks
from megatron.fsdp.comm.journal import (
    JOURNAL,
    MAX_KEPT,
    REPORT_AFTER,
    SECONDS_TO_REPORT,
    Journal,
    Log,
    Report,
    Watchdog,
    _rounds,
    _watchdogs,
    report_on_failure,
    seconds_to_report,
    watch,
    whereabouts,
)
from megatron.fsdp.comm.rounds import Round
from megatron.fsdp.comm.streams import CollectiveMismatch, CpuStream, Handle, watch_end
from megatron_fsdp import MegatronFSDP, fully_shard_model
from tests.models import Block, TinyModel, batches, logged, loss_of
from tests.ranks import RankPool


class Task(Handle):
    ended = False

    def wait(self) -> None: ...


def _answer(*whats: str, peers: tuple[int, ...] = (0, 1), unfinished: tuple[int, ...] = ()) -> dict:
    log = {"first": 0, "issued": "\n".join(whats), "before": 0, "peers": peers, "open": unfinished}
    return {"logs": [log], "at": "train.py:3 in main", "ended": None}


def _lines(answers: dict[int, dict], size: int) -> list[str]:
    return describe(answers, size)[0].splitlines()


def test_a_log_keeps_the_latest_operations() -> None:
    log, tasks = Log([0, 1]), [Task(), Task()]
    for number in range(MAX_KEPT + 2):
        log.add(f"gather {number}", [tasks[number % 2].watcher()])
    tasks[0].ended = True
    found = log.answer()
    whats = found["issued"].split("\n")
    assert len(whats) == MAX_KEPT and found["first"] == 2 and whats[-1] == f"gather {MAX_KEPT + 1}"
    assert found["open"] == [number for number in range(2, MAX_KEPT + 2) if number % 2]
    del tasks
    assert log.answer()["open"] == []


def test_the_first_difference_is_reported() -> None:
    text, proven = describe({0: _answer("gather a", "gather b"), 1: _answer("gather a", "reduce a", "gather b")}, 2)
    assert proven
    desync = "Desync (collective mismatch). They first differ at number 1: rank 0: gather b; rank 1: reduce a."
    assert text.startswith(desync)


@pytest.mark.parametrize("first", ["gather 0", "gather 1"])
def test_a_difference_is_found_among_operations_that_are_no_longer_kept(first: str) -> None:
    logs = [Log([0, 1]), Log([0, 1])]
    for number in range(MAX_KEPT + 9):
        logs[0].add(f"gather {number}", [])
        if number < MAX_KEPT + 3:  # a rank that is behind keeps others
            logs[1].add(f"gather {number}" if number else first, [])
    text, proven = describe({rank: {**_answer(), "logs": [log.answer()]} for rank, log in enumerate(logs)}, 2)
    assert proven is (first != "gather 0")
    assert text.startswith("Desync (collective mismatch). They first differ before number 9." if proven else "The op")


def test_ranks_of_different_groups_may_differ() -> None:
    answers = {
        rank: _answer("gather a" if rank < 2 else "gather b", peers=(0, 1) if rank < 2 else (2, 3)) for rank in range(4)
    }
    # Another model, on one of the ranks only, has separate numbers.
    answers[0]["logs"].append(_answer("gather teacher", peers=(0,))["logs"][0])
    assert _lines(answers, 4)[0] == "The operations issued so far agree (no desync)."


def test_silent_ranks_unfinished_operations_and_late_ranks_are_reported() -> None:
    lines = _lines({0: _answer("gather a", "reduce a", unfinished=(1,)), 2: _answer("gather a", peers=(0, 1))}, 3)
    assert "rank 2 issued fewer. Every rank must run the same" in lines[0]
    assert lines[0].endswith("Look at the output of rank 1.") and lines[1] == "Positions of the ranks:"
    assert lines[2] == "  rank 0: last issued reduce a (number 1); at train.py:3 in main; waits for: reduce a"
    assert lines[3] == "  rank 1: no answer; ended, or busy in native code"
    for words in ("only the collectives of Megatron-FSDP", "NCCL timeout", "py-spy dump", "docs/hangs.md"):
        assert words in lines[-1]


def test_ranks_at_one_position_share_a_line() -> None:
    answers = {rank: _answer("gather a", "reduce a", unfinished=(1,), peers=tuple(range(256))) for rank in range(255)}
    answers[255] = _answer("gather a", peers=tuple(range(256)))
    lines = _lines(answers, 256)
    assert "but rank 255 issued fewer." in lines[0]
    assert lines[2].startswith("  ranks 0-254: last issued reduce a (number 1); at train.py:3")
    assert lines[3].startswith("  rank 255: last issued gather a (number 0)") and len(lines) == 5


@pytest.mark.parametrize("same", [0, 100])
def test_a_report_about_256_ranks_that_all_differ_is_short(same: int) -> None:
    """Every second rank of ``same`` is at one position, and all other ranks are at different ones."""
    equal = range(0, 2 * same, 2)
    answers = {
        rank: _answer("gather a", "reduce a" if rank in equal else f"gather {rank}", peers=tuple(range(256)))
        for rank in range(256)
    }
    lines = _lines(answers, 256)
    assert len(lines) <= 38 and max(map(len, lines)) < 500
    assert lines[0].startswith("Desync (collective mismatch). They first differ at number 1: ")
    shown = "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 and 84 more: "
    assert not same or (shown in lines[0] and lines[2].startswith(f"  {shown}last issued reduce a"))
    assert "more operations. Every rank" in lines[0] and lines[-2].endswith("more positions")


def test_hosts_are_named_if_there_are_several() -> None:
    answers = {rank: _answer("gather a", "reduce a", peers=tuple(range(6))) for rank in range(4)}
    answers[4] = _answer("gather a", peers=tuple(range(6)))
    lines = describe(answers, 6, {rank: f"node{rank // 2}" for rank in range(6)})[0].splitlines()
    assert "rank 4 on node2 issued fewer." in lines[0] and lines[0].endswith("Look at the output of rank 5 on node2.")
    assert lines[2].startswith("  ranks 0-3 on node0, node1: last issued reduce a")
    assert lines[4].startswith("  rank 5 on node2: no answer")
    assert describe(answers, 6, dict.fromkeys(range(6), "node0")) == describe(answers, 6)
    many = describe({0: answers[0]}, 6, {rank: f"node{rank}" for rank in range(5)})[0]
    assert "ranks 1-5 on 5 hosts: no answer" in many and "unknown" not in many
    assert "ranks 4-5 on node4, an unknown host" in name_ranks([4, 5], {3: "node3", 4: "node4"})
    differ = describe({0: _answer("gather a"), 1: _answer("reduce a")}, 2, {0: "node0", 1: "node1"})[0]
    assert "number 0: rank 0 on node0: gather a; rank 1 on node1: reduce a." in differ


def _report_with_a_silent_rank() -> str:
    """Rank 1 has sharded a model, and does not answer."""
    with patch("socket.gethostname", return_value=f"node{dist.get_rank()}"):
        MegatronFSDP(TinyModel(), fsdp_unit_modules=[Block])
    if dist.get_rank():
        _watchdogs.pop().stop()
        JOURNAL.clear()
    dist.barrier()
    with patch("megatron.fsdp.comm.rounds.SECONDS_FOR_ANSWERS", 0.2):
        text = "" if dist.get_rank() else _rounds.report().text
    dist.barrier()
    return text


def test_the_host_of_a_rank_that_does_not_answer_is_named(ranks: RankPool) -> None:
    text = ranks.run(2, _report_with_a_silent_rank)[0]
    assert "rank 1 on node1: no answer" in text and "rank 0 on node0: last issued" in text, text


def test_a_late_rank_is_named_with_those_that_it_delays_in_other_groups() -> None:
    """Rank 3 is late. Rank 2, which waits for it in a tensor-parallel group, is the one of the first log."""
    even, odd = (0, 2), (1, 3)
    answers = {rank: _answer("gather a", "gather b", peers=odd if rank % 2 else even) for rank in range(2)}
    answers |= {rank: _answer("gather a", peers=odd if rank % 2 else even) for rank in (2, 3)}
    assert "but ranks 2-3 issued fewer." in _lines(answers, 4)[0]


def _ask_often() -> list[int]:
    """The keys of the store after each of several reports."""
    JOURNAL.clear()
    watchdog = Watchdog(JOURNAL, 60.0, interval=0.02)
    watchdog.start()
    store, found = dist.distributed_c10d._get_default_store(), list[int]()
    for _ in range(6):
        dist.barrier()
        if dist.get_rank() == 0:
            assert "Another rank" not in _rounds.report().text
        dist.barrier()
        found.append(store.num_keys())
    watchdog.stop()
    return found


def test_the_answers_of_earlier_reports_leave_the_store(ranks: RankPool) -> None:
    found = ranks.run(2, _ask_often)[0]
    # What stays of a report is its text and a counter.
    assert {after - before for before, after in itertools.pairwise(found[3:])} == {2}, found


def _ask_a_busy_store() -> float:
    """Seconds of a message while another thread waits in torch's store, as for a communicator of NCCL."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with patch.object(dist.distributed_c10d, "_get_default_store", lambda: store):
        asked = Round("any")
    waiting = threading.Thread(target=store.wait, args=(["end"], timedelta(seconds=8)))
    waiting.start()
    time.sleep(0.3)
    start = time.monotonic()
    asked.publish("key", "text")
    seconds = time.monotonic() - start
    store.clone().set("end", "")  # type: ignore[attr-defined]
    waiting.join()
    return seconds


def test_a_doubt_that_the_thread_has_seen_is_settled() -> None:
    log, journal = MagicMock(return_value=Report("", False)), Journal()
    rounds = MagicMock(report=log, answer=MagicMock(return_value=None))
    journal.doubted = True
    with patch.multiple("megatron.fsdp.comm.journal", _rounds=rounds, _watchdogs=[Watchdog(journal, 1.0)]):
        Watchdog(journal, float("inf"))._check()
        for _ in range(2):
            journal.settle()
    assert log.call_count == 2


def _another_group() -> set[str]:
    """Keys that ranks read in a second process group. Both have one store, and one rank has used it in the first."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    with patch.object(dist.distributed_c10d, "_get_default_store", lambda: store):
        if rank == 0:
            Round("met").publish("old", "")
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=2)
        Round("met").publish(rank, "")
        return set(Round("met").collect([0, 1], time.monotonic() + 5)) | set(Round("met").collect(["old"], 0.0))


def test_a_second_process_group_where_one_rank_has_used_the_store_of_the_first(ranks: RankPool) -> None:
    assert ranks.run(2, _another_group) == [{"0", "1"}] * 2


def test_a_rank_that_waits_in_the_store_can_answer(ranks: RankPool) -> None:
    assert ranks.run(1, _ask_a_busy_store)[0] < 4


def test_the_error_that_ended_a_rank_is_reported() -> None:
    answers = {
        0: _answer("gather a"),
        1: {**_answer("gather a"), "at": None, "ended": "it has ended with ValueError: no"},
    }
    assert "  rank 1: last issued gather a (number 0); it has ended with ValueError: no" in _lines(answers, 2)


def test_a_report_about_256_errors_of_several_lines_is_short() -> None:
    ended = "it has ended with AcceleratorError: CUDA error: of rank {}\n\nCompile with DSA\nto see more.\n"
    answers = {rank: {**_answer("gather a"), "at": None, "ended": ended.format(rank)} for rank in range(256)}
    lines = _lines(answers, 256)
    assert len(lines) <= 38 and lines[2].endswith("CUDA error: of rank 0 Compile with DSA to see more."), lines


def _leave_an_error(error: Exception) -> str:
    """The last answer of a process that this error ends."""
    with (
        patch("megatron.fsdp.comm.journal.error_at_end", return_value=error),
        patch("megatron.fsdp.comm.journal.Round") as ended,
    ):
        _rounds.leave_last_answer()
    return json.loads(ended.return_value.publish.call_args.args[1])["ended"]


def test_the_last_answer_of_a_process_is_one_line(ranks: RankPool) -> None:
    (answer,) = ranks.run(1, _leave_an_error, ValueError("first\n\n  second" + 300 * "."))
    assert answer == "it has ended with ValueError: first second" + 188 * "."


def test_ranks_are_formatted_as_ranges() -> None:
    assert name_ranks([5, 0, 1, 2]) == "ranks 0-2, 5" and name_ranks([7]) == "rank 7"


def test_position_of_the_main_thread_is_the_users_line() -> None:
    # The innermost frames belong to the threading module; the report skips them.
    found: list[str] = []
    asker = threading.Timer(0.2, lambda: found.append(whereabouts()))
    asker.start()
    threading.Event().wait(1.0)
    assert "test_journal.py" in found[0] and found[0].endswith("which has called wait"), found


def test_stuck_means_nothing_issued_and_something_unfinished() -> None:
    journal, first, second = Journal(), Task(), Task()
    assert journal.stuck_for() == 0.0
    channel = journal.channel([0, 1])
    channel.note("gather a", [first])
    channel.note("gather b", [second])
    assert journal.stuck_for() == 0.0
    time.sleep(0.1)
    assert 60.0 > journal.stuck_for() >= 0.1
    first.ended = True  # slow progress
    assert journal.stuck_for() < 0.1
    time.sleep(0.1)
    assert journal.stuck_for() >= 0.1
    second.ended = True
    assert journal.stuck_for() == 0.0


def test_the_device_is_queried_only_if_nothing_is_issued() -> None:
    asked: list[bool] = []

    class Asked(Task):
        def watcher(self) -> Callable[[], bool]:
            return lambda: bool(asked.append(True))

    journal, task = Journal(), Asked()
    channel = journal.channel([0, 1])
    for number in range(3):
        channel.note(f"gather {number}", [task])
        journal.stuck_for()
    assert not asked
    journal.stuck_for()
    assert asked


def test_a_device_is_queried_late_and_not_again_about_what_has_ended() -> None:
    """Event queries may invalidate a capture, and the latest operations of a step stay in the log for long."""
    asked: list[bool] = []

    class Asked(Task):
        def watcher(self) -> Callable[[], bool]:
            return lambda: asked.append(True) or True  # type: ignore[func-returns-value]

    journal = Journal()
    journal.query_after = 0.2
    journal.channel([0, 1]).note("gather", [Asked()])
    for _ in range(3):
        assert journal.stuck_for() == 0.0
    assert not asked
    time.sleep(0.2)
    for _ in range(3):
        assert journal.stuck_for() == 0.0
    assert len(asked) == 1


def test_a_watchdog_of_a_device_queries_late() -> None:
    with (
        patch("megatron.fsdp.comm.journal._watchdogs", []),
        patch.object(Watchdog, "start"),
        patch.object(JOURNAL, "query_after", 0.0),
        patch("megatron.fsdp.comm.journal.moves_data", return_value=True),
        patch("megatron.fsdp.comm.journal.backend_of"),
        patch("megatron.fsdp.comm.journal.Round"),
        patch.object(dist, "get_rank", return_value=0),
        patch("megatron.fsdp.comm.journal.timeout_of", return_value=None),
        patch.object(dist, "get_world_size", return_value=2),
        patch.object(dist, "get_process_group_ranks", return_value=[0, 1]),
    ):
        watch(object(), torch.device("cuda", 0))  # type: ignore[arg-type]
        assert JOURNAL.query_after == 30.0
    JOURNAL.clear()


def test_the_watchdogs_queries_end_no_capture() -> None:
    """The driver keeps a mode for each thread, so the watchdog's own thread has to change it."""
    calls: list[tuple[int, int]] = []

    class Driver:
        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:  # noqa: N802 - the driver's name
            calls.append((threading.get_ident(), mode._obj.value))

    with patch("ctypes.CDLL", lambda name: Driver()):
        watchdog = Watchdog(Journal(), 1.0)
        watchdog.start()
        ident = watchdog.ident
        watchdog.stop()
    assert calls == [(ident, 1)]


def test_models_of_the_same_ranks_are_distinguished_and_have_one_order() -> None:
    journals = Journal(), Journal()
    for rank, journal in enumerate(journals):
        models = [journal.channel([0, 1]), journal.channel([0, 1])]
        for model in models[::-1] if rank else models:
            model.note("gather a", [])
    text, proven = describe({rank: json.loads(journal.as_json()) for rank, journal in enumerate(journals)}, 2)
    assert proven and "differ at number 0: rank 0: gather a; rank 1: model 2: gather a." in text


def _two_models() -> str:
    JOURNAL.clear()
    models = [MegatronFSDP(TinyModel(), fsdp_unit_modules=[Block]) for _ in range(2)]
    for model in models:
        loss_of(model, batches(1, 1)[0, 0]).backward()
    return JOURNAL.as_json()


def test_two_sharded_models_of_one_process_are_distinguished(ranks: RankPool) -> None:
    for text in ranks.run(2, _two_models):
        (log,) = json.loads(text)["logs"]
        whats = [what.partition(",")[0] for what in log["issued"].split("\n")]
        for unit in ("unshard blocks.1", "reduce blocks.1"):
            assert whats.count(unit) == whats.count(f"model 2: {unit}") > 0


def _wait_for_ever() -> tuple[list[str], str]:
    """Rank 1 issues another operation than rank 0, and neither ends."""
    JOURNAL.clear()
    watch_end()  # so that destroying this process group clears the recorded mismatch
    channel, task, told = JOURNAL.channel([0, 1]), Task(), list[str]()
    channel.note("gather a, 12 bytes", [task])
    channel.note("gather b" if dist.get_rank() else "reduce a", [task])
    watchdog = Watchdog(JOURNAL, 0.2, told.append, interval=0.05, compare_after=0.1)
    watchdog.start()
    stream, gate = CpuStream(), threading.Event()
    handle, raised = stream.run(lambda: gate.wait(30)), ""
    try:
        handle.wait()
    except CollectiveMismatch as error:
        raised = str(error)
    time.sleep(0.5)  # time in which a second report could appear
    gate.set()
    stream.finish()
    watchdog.stop()
    JOURNAL.clear()
    return told, raised


def test_a_wait_that_cannot_end_raises_with_one_report(ranks: RankPool) -> None:
    results = ranks.run(2, _wait_for_ever)
    assert sum(len(told) for told, _ in results) <= 1, "more than one rank has printed a report"
    for _, raised in results:
        assert raised.startswith("The ranks have issued different operations"), results
        assert "rank 0: reduce a; rank 1: gather b" in raised, raised
    assert results[0][1].count("waits for: gather a, 12 bytes") == 2 and "test_journal.py" in results[0][1], results


def _fail_together(prints: bool) -> tuple[str, str]:
    """Communication of all ranks fails, first on rank 1. Returns what this rank has printed, and its error."""
    _rounds.clear()
    while dist.get_rank() != 1 and not Round("journal/0").is_judged:
        time.sleep(0.01)
    with patch("sys.stderr", io.StringIO()) as printed:
        try:
            if not prints:
                printed.close()
            with report_on_failure("It has failed."):
                raise RuntimeError("gloo: connection closed")
        except RuntimeError as error:
            raised = str(error)
    _rounds.clear()
    return printed.getvalue() if prints else "", raised


def test_the_rank_that_has_written_a_report_prints_it_and_all_raise_its_conclusion(ranks: RankPool) -> None:
    (none, first), (printed, judge), (nothing, raised) = ranks.run(3, _fail_together, True)
    assert none == nothing == "" and printed.startswith("It has failed.\nThe operations issued so far agree")
    for text in (printed, judge, first):  # the output of rank 0 may be the only one that is kept
        assert text.count("Positions of the ranks:") == text.count("  ranks 0-2: at ") == 1, text
    conclusion, where, error = raised.splitlines()[1:]
    assert conclusion == printed.splitlines()[1] and error == "The error was: gloo: connection closed"
    assert where == "The output of rank 1 has the positions of all ranks."


def test_a_report_that_cannot_be_printed_is_raised_on_all_ranks(ranks: RankPool) -> None:
    for _, raised in ranks.run(3, _fail_together, False):
        assert "Positions of the ranks:" in raised, raised


def _wait_for_each_other() -> list[str]:
    """Both ranks have issued the same operation, which does not end."""
    JOURNAL.clear()
    channel, task, told = JOURNAL.channel([0, 1]), Task(), list[str]()
    channel.note("gather a", [task])
    watchdog = Watchdog(JOURNAL, 0.2, told.append, interval=0.05)
    watchdog.start()
    time.sleep(1.5)
    watchdog.stop()
    JOURNAL.clear()
    return told


def test_one_of_the_ranks_that_wait_prints_the_report(ranks: RankPool) -> None:
    results = ranks.run(2, _wait_for_each_other)
    (report,) = [text for told in results for text in told]
    head, conclusion, *_ = report.splitlines()
    assert head == "Megatron-FSDP: no communication has ended for 0 s."
    assert conclusion == "The operations issued so far agree (no desync)."


def _watch_with_errors() -> tuple[list[str], list[str]]:
    """The first two checks fail."""
    channel, told = JOURNAL.channel([0]), list[str]()
    errors = [RuntimeError(text) for text in ("device failed\nException raised from x", "device failed")]
    stuck_for, task = Journal.stuck_for, Task()
    channel.note("gather a", [task])
    watchdog = Watchdog(JOURNAL, 0.1, told.append, interval=0.02)
    checks = patch.object(Journal, "stuck_for", lambda self: _raise(errors.pop()) if errors else stuck_for(self))
    with logged() as texts, checks:
        watchdog.start()
        time.sleep(1.0)
        watchdog.stop()
    JOURNAL.clear()
    return texts, told


def _raise(error: Exception) -> float:
    raise error


def test_the_watchdog_outlives_errors_and_logs_each_once(ranks: RankPool) -> None:
    ((texts, told),) = ranks.run(1, _watch_with_errors)
    assert texts == ["FSDP: the watchdog could not check whether communication is stuck: RuntimeError: device failed"]
    assert len(told) == 1 and "gather a" in told[0]


def test_the_time_before_a_report_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, seconds in (("", SECONDS_TO_REPORT), ("2.5", 2.5), ("0", float("inf"))):
        monkeypatch.setenv(REPORT_AFTER, given)
        assert seconds_to_report() == seconds
    monkeypatch.setenv(REPORT_AFTER, "10s")
    with pytest.raises(ValueError, match=f"{REPORT_AFTER}: expected seconds.*got '10s'"):
        seconds_to_report()


def test_nothing_is_reported_while_operations_are_issued() -> None:
    told: list[str] = []
    journal, task = Journal(), Task()
    channel = journal.channel([0, 1])
    watchdog = Watchdog(journal, 5.0, told.append, interval=0.01)
    watchdog.start()
    for number in range(10):
        channel.note(f"gather {number}", [task])
        time.sleep(0.03)
    watchdog.stop()
    assert not told


def _read_scalars() -> list[str]:
    model = fully_shard_model(TinyModel(), fsdp_unit_modules=[Block])
    weight, log = next(model.parameters()), model.engine.context.channel.log
    before = log.count
    weight.detach().norm().item()
    bool(torch.isnan(weight).any())
    return log.answer()["issued"].split("\n")[before:]


def test_reductions_of_sharded_tensors_are_recorded(ranks: RankPool) -> None:
    """So a scalar that one rank reads is found, as other collectives are."""
    assert ranks.run(2, _read_scalars) == [["reduce a tensor of shape (31, 13)"] * 2] * 2
