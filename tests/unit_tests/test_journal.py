"""What is said of ranks that stopped agreeing."""

import threading
import time

import torch.distributed as dist

from megatron.fsdp.comm.journal import JOURNAL, MAX_KEPT, Channel, Journal, Watchdog, describe, name_ranks, whereabouts
from megatron.fsdp.comm.streams import CpuStream, Disagreement, Handle, watch_end
from tests.ranks import RankPool


class Task(Handle):
    ended = False

    def wait(self) -> None: ...


def _answer(*whats: str, peers: tuple[int, ...] = (0, 1), unfinished: tuple[int, ...] = ()) -> dict:
    channel = {"issued": {str(n): what for n, what in enumerate(whats)}, "peers": peers, "open": unfinished}
    return {"channels": [channel], "at": "train.py:3 in main", "ended": None}


def test_a_channel_keeps_what_was_issued_last() -> None:
    channel, tasks = Channel([0, 1]), [Task(), Task()]
    for number in range(MAX_KEPT + 2):
        channel.note(f"gather {number}", [tasks[number % 2]])
    tasks[0].ended = True
    found = channel.answer()
    assert len(found["issued"]) == MAX_KEPT and found["issued"][MAX_KEPT + 1] == f"gather {MAX_KEPT + 1}"
    assert found["open"] == [number for number in range(2, MAX_KEPT + 2) if number % 2]
    del tasks
    assert channel.answer()["open"] == []


def test_the_first_difference_is_named() -> None:
    lines = describe({0: _answer("gather a", "gather b"), 1: _answer("gather a", "reduce a", "gather b")}, 2)
    assert lines[-1].startswith("They first differ at number 1: rank 0: gather b; rank 1: reduce a.")


def test_ranks_of_other_groups_may_do_other_things() -> None:
    answers = {
        rank: _answer("gather a" if rank < 2 else "gather b", peers=(0, 1) if rank < 2 else (2, 3)) for rank in range(4)
    }
    # A model of its own, on one of the ranks, is numbered by itself.
    answers[0]["channels"].append(_answer("gather teacher", peers=(0,))["channels"][0])
    assert describe(answers, 4)[-1] == "As far as they went, they issued the same."


def test_who_does_not_answer_what_has_not_ended_and_who_is_behind() -> None:
    lines = describe({0: _answer("gather a", "reduce a", unfinished=(1,)), 2: _answer("gather a", peers=(0, 1))}, 3)
    assert lines[1] == "  rank 0: last issued reduce a (number 1); at train.py:3 in main; waits for: reduce a"
    assert lines[2] == "  rank 1: no answer; it has ended, or computes"
    assert "rank 2 went less far. Every rank must run the same" in lines[-1]


def test_a_rank_that_has_ended_says_how() -> None:
    answers = {
        0: _answer("gather a"),
        1: {**_answer("gather a"), "at": None, "ended": "it has ended with ValueError: no"},
    }
    assert "  rank 1: last issued gather a (number 0); it has ended with ValueError: no" in describe(answers, 2)


def test_ranks_in_words() -> None:
    assert name_ranks([5, 0, 1, 2]) == "ranks 0-2, 5" and name_ranks([7]) == "rank 7"


def test_where_the_main_thread_is_is_said_by_the_users_line() -> None:
    # Between here and the wait lie frames of threading, which nobody asks for.
    found: list[str] = []
    asker = threading.Timer(0.2, lambda: found.append(whereabouts()))
    asker.start()
    threading.Event().wait(1.0)
    assert "test_journal.py" in found[0] and found[0].endswith("which has called wait"), found


def test_it_is_stuck_if_nothing_is_issued_and_something_has_not_ended() -> None:
    journal, first, second = Journal(), Task(), Task()
    assert not journal.is_stuck(0.0)
    journal.channel([0, 1]).note("gather a", [first])
    journal.channel([0, 1]).note("gather b", [second])
    assert journal.is_stuck(0.0) and not journal.is_stuck(60.0)
    time.sleep(0.1)
    assert journal.is_stuck(0.1)
    first.ended = True  # it goes on, if slowly
    assert not journal.is_stuck(0.1)
    second.ended = True
    assert not journal.is_stuck(0.0)


def _wait_for_ever() -> tuple[list[str], str]:
    """Rank 1 issues something else than rank 0, and neither ever ends."""
    JOURNAL.clear()
    watch_end()  # the end of this process group ends the despair
    channel, task, told = JOURNAL.channel([0, 1]), Task(), list[str]()
    channel.note("gather a, 12 bytes", [task])
    channel.note("gather b" if dist.get_rank() else "reduce a", [task])
    watchdog = Watchdog(JOURNAL, 0.2, told.append, look_every=0.05, doubt_after=0.1)
    watchdog.start()
    stream, gate = CpuStream(), threading.Event()
    handle, raised = stream.run(lambda: gate.wait(30)), ""
    try:
        handle.wait()
    except Disagreement as error:
        raised = str(error)
    time.sleep(0.5)  # it does not repeat itself
    gate.set()
    stream.finish()
    watchdog.stop()
    JOURNAL.clear()
    return told, raised


def test_a_wait_in_vain_ends_with_one_report(ranks: RankPool) -> None:
    results = ranks.run(2, _wait_for_ever)
    for told, raised in results:
        assert raised.startswith("The ranks do different things"), results
        assert raised.count("waits for: gather a, 12 bytes") == 2
        assert "rank 0: reduce a; rank 1: gather b" in raised and "test_journal.py" in raised
        assert len(told) <= 1


def test_nothing_is_said_while_something_is_issued() -> None:
    told: list[str] = []
    journal, task = Journal(), Task()
    watchdog = Watchdog(journal, 5.0, told.append, look_every=0.01)
    watchdog.start()
    for number in range(10):
        journal.channel([0, 1]).note(f"gather {number}", [task])
        time.sleep(0.03)
    watchdog.stop()
    assert not told
