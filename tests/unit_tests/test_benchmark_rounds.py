"""Rounds of the benchmark suite: order, noisy turns, peers that die, losses that disagree."""

import pytest

from benchmarks import agreement, quiet
from benchmarks.field import slowest
from benchmarks.rounds import RESTARTS, Sample, measure, order
from benchmarks.workers import WorkerFailure


class _Peer:
    """A mocked peer whose turns take a given time, and which dies in given turns."""

    def __init__(self, milliseconds: float = 1.0, dies_in: tuple[int, ...] = (), stays_dead: bool = False) -> None:
        self.milliseconds = milliseconds
        self.dies_in = dies_in
        self.stays_dead = stays_dead
        self.turns = 0
        self.restarts = 0

    def turn(self) -> Sample:
        self.turns += 1
        if self.turns in self.dies_in:
            raise WorkerFailure("SIGSEGV")
        return {"step": self.milliseconds}

    def restart(self) -> None:
        self.restarts += 1
        if self.stays_dead:
            raise WorkerFailure("does not start")


class _Watch:
    """A mocked watch that returns given numbers of cores used by other processes."""

    def __init__(self, *cores: float) -> None:
        self._cores = list(cores)

    def begin(self) -> None:
        pass

    def end(self) -> float:
        return self._cores.pop(0) if len(self._cores) > 1 else self._cores[0]


def test_order_is_rotated_and_reversed() -> None:
    orders = [order(["a", "b", "c"], number) for number in range(6)]
    assert orders[0] == ["a", "b", "c"]
    assert orders[1] == ["c", "b", "a"]
    assert orders[2] == ["b", "c", "a"]
    assert {names[0] for names in orders} == {"a", "b", "c"}
    assert order([], 3) == []


def test_quiet_rounds() -> None:
    result = measure({"a": _Peer(2.0), "b": _Peer(3.0)}, 3, _Watch(0.0))
    assert result.of("a", "step") == [2.0] * 3
    assert (len(result.kept), result.thrown_away, result.noisy, result.retaken) == (3, [], False, 0)


def test_a_noisy_turn_is_repeated() -> None:
    peer = _Peer()
    result = measure({"a": peer}, 1, _Watch(0.5, 0.1))
    assert (peer.turns, result.retaken, len(result.kept), result.thrown_away) == (2, 1, 1, [])


def test_a_noisy_round_is_discarded() -> None:
    result = measure({"a": _Peer()}, 2, _Watch(0.5, 0.5, 0.5, 0.0))
    assert (len(result.kept), len(result.thrown_away), result.noisy) == (2, 1, False)


def test_waiting_for_quiet_ends() -> None:
    result = measure({"a": _Peer()}, 2, _Watch(0.9))
    assert result.noisy
    assert len(result.kept) == 6


def test_a_peer_that_dies_is_restarted() -> None:
    dying = _Peer(dies_in=(2,))
    result = measure({"a": dying, "b": _Peer()}, 3, _Watch(0.0))
    assert dying.restarts == 1
    assert (result.restarted, result.crashed) == ({"a": 1}, {})
    assert len(result.of("a", "step")) == 3


@pytest.mark.parametrize("dying", [_Peer(dies_in=tuple(range(2, 99))), _Peer(dies_in=(2,), stays_dead=True)])
def test_a_peer_that_keeps_dying_is_reported_and_the_others_continue(dying: _Peer) -> None:
    result = measure({"a": dying, "b": _Peer()}, 4, _Watch(0.0))
    assert dying.restarts == RESTARTS
    assert list(result.crashed) == ["a"]
    assert len(result.of("b", "step")) == 4


def test_cores_used_by_other_processes() -> None:
    assert quiet.cores_of_others((0.0, 10.0, 5.0), (10.0, 25.0, 15.0)) == 0.5
    assert quiet.cores_of_others((0.0, 0.0, 0.0), (1.0, 0.5, 0.6)) == 0.0


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    quick = {"forward": [0.1, 0.1], "backward": [0.2, 0.2], "optimizer": [0.1, 0.1], "step": [0.4, 0.4]}
    late = {"forward": [0.1, 0.3], "backward": [0.2, 0.2], "optimizer": [0.1, 0.1], "step": [0.4, 0.6]}
    sample = slowest([quick, late])
    assert sample["step"] == pytest.approx(500.0)
    assert sample["compute"] == pytest.approx(400.0)


def test_losses() -> None:
    good = [3.0, 2.0]
    assert agreement.check({"ddp": good, "ours-3": [3.0, 2.00001], "alone": [3.0, 1.0]}, "fp32", ["alone"]) < 1e-5
    assert agreement.check({}, "fp32") == 0.0
    with pytest.raises(agreement.LossesDisagree, match=r"step 1: the loss of ours-3 is 2.1, that of ddp is 2.0"):
        agreement.check({"ddp": good, "ours-3": [3.0, 2.1]}, "bf16")
    with pytest.raises(agreement.LossesDisagree, match="alone"):
        agreement.check({"ddp": good, "alone": [3.1, 2.0]}, "fp32", ["alone"])
    with pytest.raises(agreement.LossesDisagree, match="nan"):
        agreement.check({"ddp": good, "ours-3": [3.0, float("nan")]}, "fp32")
