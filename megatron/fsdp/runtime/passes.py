"""Whether a backward runs, has ended, or has failed."""

import weakref
from collections.abc import Callable
from enum import Enum

from megatron.fsdp.runtime.autograd import at_end_of_backward, in_backward
from megatron.fsdp.runtime.unit import Unit


class PassState(Enum):
    """Where the model is. A forward has no state, since any unit may be called, with gradients or without."""

    NO_BACKWARD = "no backward runs"
    BACKWARD = "a backward runs"
    FAILED = "an exception ended a backward"


class Pass:
    """The state of the passes through one model: every change is a call of a method here.

    Attributes:
        state: Where the model is.
        kept: A unit that stays unsharded after its forward because its backward is expected next.
        prefetched: Versions of all main weights when the first unshards of the next forward were started; None if none
            were started.
        number: How many backwards have begun.
    """

    def __init__(self) -> None:
        self.state = PassState.NO_BACKWARD
        self.kept: Unit | None = None
        self.prefetched: list[list[int]] | None = None
        self.number = 0

    @property
    def has_failed(self) -> bool:
        """True if an exception ended the last backward.

        Autograd then drops the callback that it would have called at the end. A traceback that refers to autograd's
        task may delay this. But if no backward runs, one that has not ended has failed.
        """
        return self.state is PassState.FAILED or (self.state is PassState.BACKWARD and not in_backward())

    def begin_backward(self, at_end: Callable[[], None]) -> None:
        """A backward has begun.

        Args:
            at_end: Called by autograd when it has ended, unless it fails. It must call :meth:`end_backward`.

        Raises:
            RuntimeError: The last backward has not ended, and was not reset.
        """
        if self.state is not PassState.NO_BACKWARD:
            raise RuntimeError(f"A backward cannot begin where {self.state.value}.")
        self.state = PassState.BACKWARD
        self.number += 1
        at_end_of_backward(_EndOfBackward(self, at_end))

    def end_backward(self) -> None:
        """The backward has ended."""
        self.state, self.kept = PassState.NO_BACKWARD, None

    def fail(self, number: int) -> None:
        """The backward of this number has failed, if it has not ended. Only the state changes.

        This may run in any thread and while an exception unwinds, so it does not communicate. The next event resets
        the schedule.
        """
        if self.state is PassState.BACKWARD and number == self.number:
            self.state = PassState.FAILED

    def reset(self) -> None:
        """Forget everything that was going on."""
        self.end_backward()
        self.prefetched = None


class _EndOfBackward:
    """The callback at the end of one backward. Autograd drops it either after it has called it, or uncalled.

    It does not keep the pass alive: a traceback that keeps autograd's task would keep the model with it.
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
