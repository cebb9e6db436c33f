"""Shows how far the training is: a progress bar on a terminal, otherwise a line every few seconds."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from train_log import Point

SECONDS_BETWEEN_LINES = 5.0


def minutes_and_seconds(seconds: float) -> str:
    """Format a duration as ``m:ss``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Display:
    """The progress of one invocation, on one line of a terminal of 80 columns.

    A terminal shows the present stage and the numbers of the last iteration in place. Elsewhere, each stage and the
    first iteration are a line, and further iterations are a line every ``SECONDS_BETWEEN_LINES``.

    Args:
        console: Where to print.
        total: Number of iterations.
        minutes: After this time, training stops.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, console: Console, total: int, minutes: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console, self.total, self.clock = console, total, clock
        self.end = clock() + 60 * minutes
        self.step, self.printed_step = 0, 0
        self.stage_name, self.status = "", ""
        self.began = self.printed_at = clock()
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            # Leaves some columns free: where the terminal's own ^C would begin a new line, the bar would be repeated.
            BarColumn(bar_width=max(4, min(40, console.width - 68))),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("starting", total=total, status="")

    def stage(self, name: str) -> None:
        """Show what the ranks do now. Elsewhere than on a terminal, this prints a line if it is something else."""
        if name == self.stage_name:
            return
        self.stage_name = name
        self.progress.update(self.task, description=name)
        if not self.console.is_terminal:
            self.print_line()
            self.console.print(f"  {name}", soft_wrap=True)

    def begin(self) -> None:
        """Start to measure the time that training takes."""
        self.began = self.clock()

    def show(self, step: int, point: Point) -> None:
        """Show the numbers of an iteration, which is the ``step``-th of this invocation."""
        self.step = step
        self.status = f"loss {point.loss:.2f}  {point.tokens_per_second:,.0f} tokens/s"
        if step < self.total:
            left = min((self.clock() - self.began) / step * (self.total - step), self.end - self.clock())
            self.status += f"  {minutes_and_seconds(max(left, 0.0))} left"
        self.stage_name = "training"
        self.progress.update(self.task, description="training", completed=step, status=self.status)
        if step == 1 or self.clock() - self.printed_at >= SECONDS_BETWEEN_LINES:
            self.print_line()

    def print_line(self) -> None:
        """Print the last iteration, unless a progress bar shows it or it has been printed."""
        if not self.console.is_terminal and self.step > self.printed_step:
            self.printed_step, self.printed_at = self.step, self.clock()
            self.console.print(f"  {self.step}/{self.total}  {self.status}", soft_wrap=True)

    def message(self, text: str) -> None:
        """Print a line that stays, above a progress bar."""
        self.print_line()
        self.progress.console.print(text, soft_wrap=True)
