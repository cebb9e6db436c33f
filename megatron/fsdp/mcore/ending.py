"""How a run of Megatron's loop is stopped by signals, and the file that says how it ended, next to its checkpoints."""

import importlib.util
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core.rerun_state_machine import EXIT_CODE_RESUME_TO_DISAMBIGUATE
from megatron.fsdp.checkpoint.coordination import rank_and_world_size
from megatron.fsdp.checkpoint.stopping import (
    FAILED,
    FINISHED,
    STOPPED,
    StopSignals,
    describe,
    forget_outcome,
    leave_outcome,
)
from megatron.fsdp.checkpoint.storage import as_path
from megatron.fsdp.mcore.resuming import megatron_arguments


class SignalHandler(StopSignals):
    """Megatron's handler for ``--exit-signal-handler``, which also saves and stops at Ctrl-C.

    Processes that load data ignore both signals: Ctrl-C and the scheduler send them to all processes.

    Args:
        sig: The signal of ``--exit-signal``.
    """

    def __init__(self, sig: signal.Signals = signal.SIGTERM) -> None:
        super().__init__(None, (sig, signal.SIGINT))

    def signals_received(self) -> list[bool]:
        """Whether any rank has received a signal. A collective."""
        return [self.stop_requested()]


@contextmanager
def leaving_outcome() -> Iterator[None]:
    """Context of a training script: leave ``outcome.txt`` in the folder of ``--save`` when the script ends.

    ``finished``: all iterations are done. ``stopped``: it has saved and ended early, because of a signal,
    ``--exit-duration-in-mins`` or ``--exit-interval``. ``failed``: an error, whose first line follows.
    """
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code in (0, None, EXIT_CODE_RESUME_TO_DISAMBIGUATE) and _has_begun():
            _leave(STOPPED if _iterations_left() > 0 else FINISHED)
        elif code in (0, None):  # such as --exit-on-missing-checkpoint: the next run would end in the same way
            _leave(FAILED, "ended with exit code 0 before the first iteration")
        else:
            _leave(FAILED, describe(error))
        raise
    _leave(FINISHED)


def compile_if_missing(original: Callable[[], None]) -> None:
    """Compile the helpers of data sets only if the wheel brought none."""
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        original()


def initialize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Initialize Megatron, and remove the file of an earlier run."""
    result = original(*args, **kwargs)
    if (folder := _folder()) is not None and rank_and_world_size()[0] == 0:
        forget_outcome(folder)
    return result


def _folder() -> Path | None:
    """The folder of ``--save``, unless this is the doctor, which runs scripts with a fake process group."""
    args = megatron_arguments()
    folder = getattr(args, "save", None)
    return as_path(folder) if folder and not getattr(args, "fake_process_group", False) else None


def _has_begun() -> bool:
    """Whether the loop has run an iteration: Megatron sets curr_iteration at its beginning."""
    args = megatron_arguments()
    return args is None or hasattr(args, "curr_iteration")


def _iterations_left() -> int:
    """Iterations that the loop has not run."""
    args: Any = megatron_arguments()
    return 0 if args is None else (args.train_iters or 0) - (getattr(args, "curr_iteration", 0) + 1)


def _leave(outcome: str, reason: str = "") -> None:
    if (folder := _folder()) is not None and (outcome == FAILED or rank_and_world_size()[0] == 0):
        leave_outcome(folder, outcome, reason)
