"""Parses losses from Megatron's log lines, and stores them across runs in a file of JSON lines."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

NUMBER = r"([-+0-9.eE]+)"
TRAINING = re.compile(
    rf"iteration +(\d+)/ *\d+ \| consumed samples: +(\d+) \|.*?elapsed time per iteration \(ms\): {NUMBER} \|"
    rf".*?global batch size: +(\d+) \|.*?lm loss: {NUMBER} \|"
)
VALIDATION = re.compile(rf"validation loss at iteration (\d+).*?lm loss value: {NUMBER} \|")
MEMORY = re.compile(rf"\[Rank \d+\].*? memory \(MB\).*?max allocated: {NUMBER}")
# What the ranks begin when Megatron prints a line with this text.
BEGINNING = "the first iteration"
STAGES = {
    "> initializing torch distributed": "connecting the ranks",
    "time to initialize megatron": "building and sharding the model",
    "> building train, validation": "opening the data",
    "[before the start of training step]": BEGINNING,
    "] saving checkpoint at iteration": "saving",
    "Evaluating on": "validating",
}
# The first of torchrun's messages with an exit code names the rank that failed. Torchrun's traceback follows it.
LAUNCHER_FAILURE = re.compile(r"torch/distributed/elastic/.*exitcode")


@dataclass(frozen=True)
class Point:
    """A loss at an iteration, in nats per token. ``tokens`` counts the training tokens so far."""

    kind: str
    iteration: int
    loss: float
    tokens: int
    tokens_per_second: float = 0.0


def stage(line: str) -> str:
    """The state that ranks begin with, by this line of the log; empty if it says nothing of it."""
    return next((name for text, name in STAGES.items() if text in line), "")


class LogReader:
    """Parses log lines. A validation line gets the token count of the last training line before it."""

    def __init__(self, sequence: int, tokens: int = 0) -> None:
        self.sequence = sequence
        self.tokens = tokens
        self.max_allocated_mb = 0.0

    def read(self, line: str) -> Point | None:
        """Returns the point in a line, if there is one. Also records a memory report."""
        if match := TRAINING.search(line):
            iteration, samples, milliseconds, batch, loss = match.groups()
            self.tokens = int(samples) * self.sequence
            speed = int(batch) * self.sequence / (float(milliseconds) / 1000)
            return Point("train", int(iteration), float(loss), self.tokens, speed)
        if match := VALIDATION.search(line):
            return Point("validation", int(match[1]), float(match[2]), self.tokens)
        if match := MEMORY.search(line):
            self.max_allocated_mb = float(match[1])
        return None


def read_history(path: Path, until: int) -> list[Point]:
    """Reads the points up to iteration ``until``, from which training resumes.

    Later points are of a run that stopped before it saved; training will repeat those iterations.
    """
    if not path.exists():
        return []
    points = [Point(**json.loads(line)) for line in path.read_text().splitlines()]
    return [point for point in points if point.iteration <= until]


def write_history(path: Path, points: list[Point]) -> None:
    """Overwrites the file with all points."""
    path.write_text("".join(json.dumps(asdict(point)) + "\n" for point in points))


def failure_excerpt(log: Path, offset: int, lines: int = 30) -> str:
    """The end of a failed run's output after byte ``offset``, without torchrun's own traceback."""
    with log.open("rb") as file:
        file.seek(offset)
        written = file.read().decode(errors="replace").splitlines()
    end = next((index + 1 for index, line in enumerate(written) if LAUNCHER_FAILURE.search(line)), len(written))
    return "\n".join(written[max(0, end - lines) : end])
