"""What is said of ranks that stopped agreeing."""

import json
import time

import torch.distributed as dist

from megatron.fsdp.device import Handle
from megatron.fsdp.journal import JOURNAL, KEPT, Journal, Watchdog, describe
from tests.ranks import RankPool


class Task(Handle):
    ended = False

    def wait(self) -> None: ...


def _answer(*whats: str, peers: tuple[int, ...] = (0, 1), unfinished: tuple[int, ...] = ()) -> dict:
    return {"issued": {str(n): what for n, what in enumerate(whats)}, "peers": peers, "open": unfinished}


def test_a_journal_keeps_what_was_issued_last() -> None:
    journal, tasks = Journal(peers=[0, 1]), [Task(), Task()]
    for number in range(KEPT + 2):
        journal.note(f"gather {number}", [tasks[number % 2]])
    tasks[0].ended = True
    found = json.loads(journal.as_json())
    assert len(found["issued"]) == KEPT and found["issued"][str(KEPT + 1)] == f"gather {KEPT + 1}"
    assert found["open"] == [number for number in range(2, KEPT + 2) if number % 2]
    del tasks
    assert json.loads(journal.as_json())["open"] == []


def test_the_first_difference_is_named() -> None:
    lines = describe({0: _answer("gather a", "gather b"), 1: _answer("gather a", "reduce a", "gather b")}, 2)
    assert lines[-1] == "They first differ at number 1: rank 0: gather b, rank 1: reduce a"


def test_ranks_of_other_stages_may_do_other_things() -> None:
    answers = {
        rank: _answer("gather a" if rank < 2 else "gather b", peers=(0, 1) if rank < 2 else (2, 3)) for rank in range(4)
    }
    assert describe(answers, 4)[-1] == "As far as they went, they issued the same."


def test_who_does_not_answer_and_what_has_not_ended() -> None:
    lines = describe({0: _answer("gather a", "reduce a", unfinished=(1,))}, 2)
    assert "  rank 0: last issued reduce a (number 1); not ended: reduce a" in lines
    assert "  rank 1: no answer; it has ended, or computes" in lines


def test_it_is_stuck_if_nothing_is_issued_and_something_has_not_ended() -> None:
    journal, task = Journal(), Task()
    assert not journal.is_stuck(0.0)
    journal.note("gather a", [task])
    assert journal.is_stuck(0.0) and not journal.is_stuck(60.0)
    task.ended = True
    assert not journal.is_stuck(0.0)


def _wait_for_ever() -> list[str]:
    """Rank 1 issues something else than rank 0, and neither ever ends."""
    JOURNAL._kept.clear()
    JOURNAL._count, JOURNAL.peers = 0, [0, 1]
    task, told = Task(), list[str]()
    JOURNAL.note("gather a", [task])
    JOURNAL.note("gather b" if dist.get_rank() else "reduce a", [task])
    watchdog = Watchdog(JOURNAL, 0.2, told.append, look_every=0.05)
    watchdog.start()
    end = time.monotonic() + 20
    while not told and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)  # it does not repeat itself
    watchdog.stop()
    JOURNAL._kept.clear()
    return told


def test_what_is_stuck_without_an_error_is_reported_once(ranks: RankPool) -> None:
    told = ranks.run(2, _wait_for_ever)
    assert [len(texts) for texts in told] == [1, 1]
    assert all("nothing has ended for 0 s" in text for (text,) in told)
    (full,) = [text for (text,) in told if "Another rank reports" not in text]
    assert full.count("not ended: gather a") == 2
    assert "rank 0: reduce a, rank 1: gather b" in full


def test_nothing_is_said_while_something_is_issued() -> None:
    told: list[str] = []
    journal, task = Journal(), Task()
    watchdog = Watchdog(journal, 5.0, told.append, look_every=0.01)
    watchdog.start()
    for number in range(10):
        journal.note(f"gather {number}", [task])
        time.sleep(0.03)
    watchdog.stop()
    assert not told
