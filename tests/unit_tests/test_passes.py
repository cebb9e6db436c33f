"""The state of a model's passes: legal transitions, and detection of a failed backward."""

import gc
from collections.abc import Callable

import pytest
import torch

from megatron.fsdp.helpers.autograd import in_backward
from megatron.fsdp.runtime.passes import Pass, PassState


def _backward(during: Callable[[], object]) -> None:
    """Run a backward in which ``during`` is called once."""
    weight = torch.ones(1, requires_grad=True)
    loss = weight * 2
    loss.register_hook(lambda grad: during() and None)
    loss.sum().backward()


def _state(passes: Pass) -> PassState:
    return passes.state


def _fail() -> None:
    raise ValueError("in backward")


def test_a_backward_begins_and_ends() -> None:
    passes, seen = Pass(), list[object]()

    def during() -> None:
        passes.begin_backward(passes.end_backward)
        seen.extend((passes.state, in_backward(), passes.has_failed))

    _backward(during)
    assert seen == [PassState.BACKWARD, True, False]
    assert _state(passes) is PassState.NO_BACKWARD and not in_backward() and not passes.has_failed


def test_a_backward_cannot_begin_twice() -> None:
    passes = Pass()

    def during() -> None:
        passes.begin_backward(passes.end_backward)
        with pytest.raises(RuntimeError, match="Cannot begin a backward: a backward is running"):
            passes.begin_backward(passes.end_backward)

    _backward(during)
    assert _state(passes) is PassState.NO_BACKWARD


@pytest.mark.parametrize("at_end", [False, True], ids=["in the middle", "in the callback at its end"])
def test_a_backward_that_raises_has_failed_until_it_is_reset(at_end: bool) -> None:
    passes = Pass()

    def during() -> None:
        passes.begin_backward(_fail if at_end else passes.end_backward)
        if not at_end:
            _fail()

    with pytest.raises(ValueError, match="in backward"):
        _backward(during)
    assert passes.has_failed
    gc.collect()  # the traceback
    assert _state(passes) is PassState.FAILED
    with pytest.raises(RuntimeError, match="Cannot begin a backward: an exception ended the last one"):
        passes.begin_backward(passes.end_backward)
    passes.reset()
    assert _state(passes) is PassState.NO_BACKWARD and not passes.has_failed


def test_a_kept_traceback_does_not_fail_a_later_backward() -> None:
    passes, first = Pass(), 1
    passes.state, passes.number = PassState.BACKWARD, 2
    passes.fail(first)
    assert _state(passes) is PassState.BACKWARD
    passes.fail(2)
    assert _state(passes) is PassState.FAILED


def test_a_backward_that_has_ended_cannot_fail() -> None:
    passes = Pass()
    passes.fail(passes.number)
    assert _state(passes) is PassState.NO_BACKWARD


def test_reset_discards_prefetches_and_the_end_of_backward_does_not() -> None:
    passes = Pass()
    passes.prefetched = True
    passes.end_backward()
    assert passes.prefetched
    passes.reset()
    assert not passes.prefetched
