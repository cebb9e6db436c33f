"""The demo's progress, which is one line on a terminal of 80 columns, and what it suggests to try next."""

import io
import shlex
from pathlib import Path

import pytest
from display import Display
from files import Paths
from rich.console import Console
from run import OUTPUT, next_steps
from train_log import STAGES, Point, stage
from training import ROOT, Machine, Training, schedule_flags

WIDTH = 80
CONTROL_C = 2  # what a terminal prints at the end of the line


class Clock:
    """A clock that a test advances."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def point(iteration: int, speed: float = 1000.0) -> Point:
    return Point("train", iteration, 5.0, 100 * iteration, speed)


@pytest.mark.parametrize("name", ["training", "validating", *STAGES.values()])
def test_a_terminal_shows_one_line_of_80_columns_at_most(name: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=WIDTH)
    display = Display(console, total=1000, minutes=60)
    if name in ("training", "validating", "saving"):  # the others precede the first iteration
        display.end += 3600
        display.began -= 60.0
        display.show(999, Point("train", 999, 12.34, 1, tokens_per_second=2_345_678.0))
        assert display.status.endswith(" left") and "tokens/s" in display.status
    display.stage(name)
    lines = console.render_lines(display.progress.get_renderable(), console.options, pad=False)
    text = ["".join(segment.text for segment in line) for line in lines]
    assert len(text) == 1 and name in text[0] and text[0].rstrip().endswith(display.status or "/1000"), text
    assert len(text[0]) <= WIDTH - CONTROL_C


def test_elsewhere_the_first_iteration_is_printed_at_once_and_others_every_few_seconds() -> None:
    console, clock = Console(file=io.StringIO(), width=WIDTH), Clock()
    display = Display(console, total=6, minutes=1, clock=clock)
    display.stage("the first iteration")
    display.begin()
    for step in range(1, 6):
        clock.now += 3.0
        display.show(step, point(step))
    display.stage("validating")
    display.stage("validating")
    display.print_line()
    clock.now += 20.0
    display.show(6, point(6))
    display.print_line()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "  the first iteration",
        "  1/6  loss 5.00  1,000 tokens/s  0:15 left",
        "  3/6  loss 5.00  1,000 tokens/s  0:09 left",
        "  5/6  loss 5.00  1,000 tokens/s  0:03 left",
        "  validating",
        "  6/6  loss 5.00  1,000 tokens/s",
    ]


def test_the_time_left_is_not_more_than_until_training_stops() -> None:
    clock = Clock()
    display = Display(Console(file=io.StringIO()), total=1000, minutes=4, clock=clock)
    clock.now = 60.0
    display.begin()
    clock.now = 61.0
    display.show(1, point(1))
    assert display.status.endswith("  2:59 left")


def test_stages_are_recognized_in_the_log() -> None:
    line = "[before the start of training step] datetime: 2026-01-01 10:00:00.000000 "
    assert stage(line) == "the first iteration"
    assert stage("[2026-01-01 10:00:00.000000] saving checkpoint at iteration       6 to x") == "saving"
    assert stage("Evaluating iter 1/4") == ""


@pytest.mark.parametrize("output", [OUTPUT, Path("/elsewhere/with a space")])
def test_three_things_to_try_are_commands_of_this_repository(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    steps = next_steps(Paths(output), 7)
    assert len(steps) == 3 and any("iteration 7" in purpose for purpose in steps)
    again, generate, board = (shlex.split(line) for line in steps.values())
    if output == OUTPUT:
        assert again == ["make", "demo"]
        assert generate[2:] == ["--prompt", "class Parser"]
    else:
        assert again[2:] == ["--output", str(output)]
        assert generate[-4:] == ["--checkpoints", f"{output}/checkpoints", "--tokenizer", f"{output}/data/tokenizer"]
    assert board[1:3] == ["-m", "tensorboard.main"]


def test_validations_come_at_the_same_iterations_in_runs_of_any_length() -> None:
    machine = Machine(cuda_devices=0, cores=2)
    flags = [schedule_flags(Training(iterations), machine, done) for iterations, done in ((3, 0), (300, 3), (20, 303))]
    assert len({each[each.index("--eval-interval") + 1] for each in flags}) == 1
