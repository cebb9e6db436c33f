"""Shows on stderr which phase of a long task runs, and how long each took."""

import io
import time
from typing import TextIO


class Progress:
    """Writes a line per phase with its seconds. In a terminal, the line appears when the phase begins.

    Args:
        stream: Where to write; None for nowhere.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or io.StringIO()
        self._phase = ""
        self._started = 0.0

    def start(self, phase: str) -> None:
        """Begin a phase, which ends the one before."""
        self.end()
        self._phase, self._started = phase, time.monotonic()
        if self._stream.isatty():
            self._write(f"{phase} ...")

    def end(self) -> None:
        """End the current phase, if there is one."""
        if self._phase:
            again = "\r" if self._stream.isatty() else ""
            self._write(f"{again}{self._phase} ... {time.monotonic() - self._started:.1f} s\n")
        self._phase = ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
