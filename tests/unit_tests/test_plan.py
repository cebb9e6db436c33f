"""The order of communication: literal plans, and ranks that skip operations or request others."""

from megatron.fsdp.runtime.plan import Op, OpKind, Plan, hoist_unshards, merge_recorded


def _ops(text: str) -> list[Op]:
    kinds = {"G": OpKind.UNSHARD, "R": OpKind.REDUCE}
    return [Op(kinds[word[0]], int(word[1:])) for word in text.split()]


def _text(ops: list[Op]) -> str:
    return " ".join(f"{'G' if op.kind is OpKind.UNSHARD else 'R'}{op.unit_index}" for op in ops)


def _issue_order(text: str, distance: int) -> str:
    asked = _ops(text)
    return _text([asked[index] for index in hoist_unshards(asked, distance)])


def test_gathers_move_ahead_of_one_reduction() -> None:
    assert _issue_order("G0 G3 R3 G2 R2 G1 R1 R0", 1) == "G0 G3 G2 R3 G1 R2 R1 R0"


def test_gathers_keep_their_order_when_they_move_further() -> None:
    assert _issue_order("G3 R3 G2 R2 G1 R1", 2) == "G3 G2 G1 R3 R2 R1"
    assert _issue_order("G3 R3 G2 R2 G1 R1", 0) == "G3 R3 G2 R2 G1 R1"


def test_what_is_asked_in_order_leaves_nothing_out() -> None:
    plan = Plan(_ops("G0 G1 R1 R0"), distance=1)
    assert [list(plan.request(op) or ()) for op in plan.requested] == [[0], [1], [2], [3]]
    assert list(plan.finish()) == []


def test_what_was_not_asked_for_comes_before_what_is() -> None:
    plan = Plan(_ops("G0 G1 R1 G2 R2 R0"), distance=1)
    assert list(plan.request(Op(OpKind.UNSHARD, 0)) or ()) == [0]
    assert list(plan.request(Op(OpKind.UNSHARD, 2)) or ()) == [1, 2, 3]
    assert list(plan.finish()) == [4, 5]


def test_what_the_plan_does_not_have_ahead_changes_nothing() -> None:
    plan = Plan(_ops("G0 G1"), distance=1)
    plan.request(Op(OpKind.UNSHARD, 1))
    assert plan.request(Op(OpKind.UNSHARD, 0)) is None
    assert list(plan.finish()) == []
    assert _text(plan.recorded) == "G1 G0"


def test_issued_counts_in_the_order_of_issue() -> None:
    plan = Plan(_ops("G2 R2 G1 R1"), distance=1)
    plan.issued = 2
    assert [plan.is_issued(index) for index in range(4)] == [True, False, True, False]
    assert plan.ahead() == Op(OpKind.REDUCE, 2)
    plan.issued = 4
    assert plan.ahead() is None


def test_recorded_orders_merge_into_the_one_that_holds_the_others() -> None:
    assert merge_recorded([_ops("G0 G2"), _ops("G0 G1 G2"), _ops("G0 G1 G2")]) == _ops("G0 G1 G2")


def test_recorded_orders_that_contradict_do_not_merge() -> None:
    assert merge_recorded([_ops("G0 G2 G1"), _ops("G0 G1 G2")]) is None
