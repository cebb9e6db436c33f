"""What is said of ranks that stopped agreeing."""

import json

from megatron.fsdp.device import Handle
from megatron.fsdp.journal import KEPT, Journal, describe


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
