"""Tracks whether a backward is running, has ended, or has failed."""

import weakref
from collections.abc import Callable
from enum import Enum

from megatron.fsdp.helpers.autograd import at_end_of_backward, in_backward
from megatron.fsdp.runtime.unit import Unit


class PassState(Enum):
    """State of the model's backward. A forward has no state, since any unit may be called at any time."""

    NO_BACKWARD = "no backward is running"
    BACKWARD = "a backward is running"
    FAILED = "an exception ended the last one"


class Pass:
    """State of the forward and backward passes of one model. Only methods change it.

    Attributes:
        state: State of the backward.
        kept: A unit that stays unsharded after its forward because its backward is expected next.
        by_caller: The caller has begun the backward and will end it. It may consist of several of autograd's.
        prefetched: The first unshards of the next forward were started.
        number: Number of backward passes so far.
        was_nested: A backward ran in one of the model since gradients were last synchronized.
    """

    def __init__(self) -> None:
        self.state = PassState.NO_BACKWARD
        self.kept: Unit | None = None
        self.by_caller = False
        self.prefetched = False
        self.number = 0
        self.was_nested = False

    @property
    def has_failed(self) -> bool:
        """True if an exception ended the last backward.

        Autograd then drops the callback that it would have called at the end. A traceback that refers to autograd's
        task may delay this. But if no backward runs, one that has not ended has failed.
        """
        unfinished = self.state is PassState.BACKWARD and not self.by_caller and not in_backward()
        return self.state is PassState.FAILED or unfinished

    @property
    def in_backward(self) -> bool:
        """True if a backward runs. In one that the caller has begun, the forward of another micro-batch may run."""
        return self.state is PassState.BACKWARD and (not self.by_caller or in_backward())

    def begin_callers_backward(self) -> None:
        """Record that a backward has begun which the caller ends, with :meth:`end_backward`."""
        self.state, self.by_caller = PassState.BACKWARD, True
        self.number += 1

    def begin_backward(self, at_end: Callable[[], None]) -> None:
        """Record that a backward has begun.

        Args:
            at_end: Called by autograd when it has ended, unless it fails. It must call :meth:`end_backward`.

        Raises:
            RuntimeError: The last backward has not ended, and was not reset.
        """
        if self.state is not PassState.NO_BACKWARD:
            raise RuntimeError(f"Cannot begin a backward: {self.state.value}.")
        self.state = PassState.BACKWARD
        self.number += 1
        at_end_of_backward(_EndOfBackward(self, at_end))

    def end_backward(self) -> None:
        """Record that the backward has ended."""
        self.state, self.kept, self.by_caller = PassState.NO_BACKWARD, None, False

    def fail(self, number: int) -> None:
        """Record that the backward with this number has failed, unless it has ended. Only the state changes.

        This may run in any thread and while an exception unwinds, so it does not communicate. The next event resets
        the schedule.
        """
        if self.state is PassState.BACKWARD and number == self.number:
            self.state = PassState.FAILED

    def reset(self) -> None:
        """Return to the initial state, without prefetched units."""
        self.end_backward()
        self.prefetched = False


class _EndOfBackward:
    """The callback at the end of one backward. Autograd drops it after calling it, or without if backward fails.

    It refers to the pass weakly: a kept traceback may hold autograd's task, and would otherwise hold the model.
    """

    def __init__(self, of: Pass, at_end: Callable[[], None]) -> None:
        self._pass = weakref.ref(of)
        self._number = of.number
        self._at_end = at_end

    def __call__(self) -> None:
        self._at_end()

    def __del__(self) -> None:
        if (of := self._pass()) is not None:
            of.fail(self._number)
