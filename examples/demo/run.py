"""The demo: prepares data, trains a small GPT with Megatron and this project's FSDP, and shows the results.

    make demo        or        python examples/demo/run.py

A second run reuses the data of the first and resumes training from its last checkpoint.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil
from display import Display
from files import DataMeta, Paths, iteration_folder, latest_iteration, meta_path, read_meta, tokenizer_path
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.status import Status
from rich.table import Table
from rich.text import Text
from train_log import BEGINNING, LogReader, Point, failure_excerpt, read_history, stage, write_history
from training import IMPLEMENTATIONS, ROOT, Machine, Training, command

PROMPT = "def __init__(self"
SECONDS_TO_STOP = 10
OUTPUT = ROOT / "demo_output"


class StepFailed(RuntimeError):
    """A process of the demo failed; ``excerpt`` is the end of its output."""

    def __init__(self, message: str, excerpt: str) -> None:
        super().__init__(message)
        self.excerpt = excerpt


def ranks_of(torchrun: int) -> list[psutil.Process]:
    """The training processes: the children of ``torchrun``, the first rank first."""
    try:
        return sorted(psutil.Process(torchrun).children(), key=lambda child: child.pid)
    except psutil.NoSuchProcess:
        return []


def signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to the processes that still exist."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def stop(process: subprocess.Popen[str]) -> None:
    """Ends the ranks, which would answer a SIGTERM by saving, and torchrun."""
    if process.poll() is None:
        members = [*ranks_of(process.pid), psutil.Process(process.pid)]
        signal_all(members[:-1], signal.SIGKILL)
        signal_all(members[-1:], signal.SIGTERM)
        _, alive = psutil.wait_procs(members, timeout=SECONDS_TO_STOP)
        signal_all(alive, signal.SIGKILL)
    process.wait()


def resident_gigabytes(torchrun: int) -> list[float]:
    """Resident memory of each rank, in GB (10^9 bytes)."""
    try:
        return [rank.memory_info().rss / 1e9 for rank in ranks_of(torchrun)]
    except psutil.NoSuchProcess:
        return []


class Run:
    """One invocation of the training processes. Their output goes to the log, their losses to the history."""

    def __init__(self, training: Training, machine: Machine, paths: Paths, console: Console) -> None:
        self.training, self.machine, self.paths, self.console = training, machine, paths, console
        self.done = latest_iteration(paths.checkpoints)
        self.points = read_history(paths.history, self.done)
        self.first_new = len(self.points)
        self.reader = LogReader(training.sequence, self.points[-1].tokens if self.points else 0)
        self.peak_memory = 0.0

    def new_points(self, kind: str) -> list[Point]:
        """The points of one kind from this invocation."""
        return [point for point in self.points[self.first_new :] if point.kind == kind]

    def memory(self, torchrun: int) -> str:
        """Memory for the display; also records the peak. On CUDA only rank 0 reports its memory."""
        if self.machine.cuda_devices:
            self.peak_memory = max(self.peak_memory, self.reader.max_allocated_mb * 2**20 / 1e9)
            return f"rank 0: {self.peak_memory:.1f} GB"
        ranks = resident_gigabytes(torchrun)
        self.peak_memory = max([self.peak_memory, *ranks])
        return f"{' + '.join(f'{gigabytes:.1f}' for gigabytes in ranks)} GB"

    def follow(self, process: subprocess.Popen[str], display: Display) -> None:
        """Copies the processes' output to the log and displays the losses in it, until the output ends."""
        assert process.stdout is not None
        with self.paths.log.open("a") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                if name := stage(line):
                    display.stage(name)
                    if name == BEGINNING:
                        display.begin()
                elif point := self.reader.read(line):
                    self.points.append(point)
                    self.show(point, display, process.pid)

    def show(self, point: Point, display: Display, torchrun: int) -> None:
        """Displays a loss."""
        memory = self.memory(torchrun)
        if point.kind == "validation":
            display.message(f"  validation loss {point.loss:.2f} after iteration {point.iteration}  ({memory})")
            return
        display.show(point.iteration - self.done, point)
        if point.iteration % self.machine.evaluation_interval == 0:
            display.stage("validating")

    def save_and_exit(self, process: subprocess.Popen[str], display: Display) -> None:
        """Lets the ranks finish their iteration, save and exit. A second Ctrl-C does not wait for them."""
        if self.new_points("train"):
            display.message("  stopping after this iteration, and saving; Ctrl-C again stops at once")
            signal_all(ranks_of(process.pid), signal.SIGTERM)
            self.follow(process, display)
            write_history(self.paths.history, self.points)

    def start(self) -> None:
        """Trains.

        Raises:
            StepFailed: the processes failed or completed no iteration.
        """
        arguments = command(self.training, self.machine, self.paths, self.done)
        self.paths.output.mkdir(parents=True, exist_ok=True)
        with self.paths.log.open("a") as log:
            offset = log.tell()
            log.write("$ " + " ".join(arguments) + "\n")
        process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env=self.machine.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that Ctrl-C reaches this process only, which then stops the others
        )
        display = Display(self.console, self.training.iterations, self.training.minutes)
        try:
            with display.progress:
                display.stage("loading PyTorch and Megatron")
                try:
                    self.follow(process, display)
                except KeyboardInterrupt:
                    self.save_and_exit(process, display)
                    raise
                code = process.wait()
            display.print_line()
        finally:
            stop(process)
        if code or not self.new_points("train"):
            raise StepFailed("the training processes failed", failure_excerpt(self.paths.log, offset))
        write_history(self.paths.history, self.points)


def data_line(meta: DataMeta) -> str:
    """Summarizes the data in one line."""
    files, tokens = meta.files, meta.tokens
    return (
        f"{sum(files.values())} files, {tokens['train'] / 1e6:.2f} million tokens for training and "
        f"{tokens['validation'] / 1e6:.2f} for validation"
    )


def run_script(name: str, paths: Paths, arguments: list[str]) -> str:
    """Runs a script of this folder in another process, so that Megatron's warnings go to the log.

    Returns the script's output.

    Raises:
        StepFailed: the script failed.
    """
    line = [sys.executable, str(Path(__file__).with_name(name)), *arguments]
    paths.output.mkdir(parents=True, exist_ok=True)
    with paths.log.open("a") as log:
        offset = log.tell()
        log.write("$ " + " ".join(line) + "\n")
        log.flush()
        result = subprocess.run(
            line, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, stderr=log, text=True
        )
    if result.returncode:
        raise StepFailed(f"{name} failed", failure_excerpt(paths.log, offset))
    return result.stdout


def prepare_data(paths: Paths) -> DataMeta:
    """Builds the data unless it is complete."""
    if not meta_path(paths.data).exists():
        run_script("prepare_data.py", paths, ["--output", str(paths.data)])
    return read_meta(paths.data)


def write_sample(paths: Paths) -> str:
    """Generates text with the trained model and saves it."""
    arguments = ["--prompt", PROMPT, "--checkpoints", str(paths.checkpoints)]
    text = run_script("generate.py", paths, [*arguments, "--tokenizer", str(tokenizer_path(paths.data))])
    paths.sample.write_text(text)
    return text.rstrip()


def summary(run: Run, meta: DataMeta, seconds: float) -> Table:
    """Results of the training."""
    train, validation = run.new_points("train"), run.new_points("validation")
    steady = sorted(point.tokens_per_second for point in train)
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row(
        "iterations", f"{run.done} -> {train[-1].iteration}, {train[-1].tokens / 1e6:.2f} million tokens seen"
    )
    if train[-1].iteration < run.done + run.training.iterations:
        table.add_row(
            "", f"stopped after {run.training.minutes} minutes instead of {run.training.iterations} iterations"
        )
    table.add_row("training loss", f"{train[-1].loss:.3f}")
    table.add_row("validation loss", f"[bold]{validation[-1].loss:.3f}[/bold] nats per token" if validation else "-")
    table.add_row("unigram entropy", f"[bold]{meta.unigram_entropy:.3f}[/bold] (validation text, training unigrams)")
    table.add_row("", f"{meta.corpus_entropy:.3f} (training text)")
    table.add_row("speed", f"{steady[len(steady) // 2]:,.0f} tokens/s (median iteration)")
    memory = "allocated on rank 0" if run.machine.cuda_devices else "resident, largest rank"
    table.add_row("peak memory", f"{run.peak_memory:.2f} GB {memory}")
    table.add_row("time", f"{seconds:.0f} s")
    return table


def written(run: Run, iteration: int) -> Table:
    """Paths of the files that the demo wrote."""
    paths = run.paths
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, path in {
        "checkpoint": iteration_folder(paths.checkpoints, iteration),
        "loss plot": paths.plot,
        "losses": paths.history,
        "sample": paths.sample,
        "data": paths.data,
        "TensorBoard": paths.tensorboard,
        "log": paths.log,
    }.items():
        table.add_row(name, Text(shown(path), overflow="fold"))
    return table


def shown(path: Path) -> str:
    """The path as the user may type it in the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def next_steps(paths: Paths, iteration: int) -> dict[str, str]:
    """Three things to try next, each with its command."""
    python, folder = shown(Path(sys.executable)), Path(__file__).resolve().parent
    again, generate = ["make", "demo"], [python, shown(folder / "generate.py"), "--prompt", "class Parser"]
    if paths.output != OUTPUT or Path.cwd() != ROOT:
        again = [python, shown(folder / "run.py"), "--output", shown(paths.output)]
        generate += ["--checkpoints", shown(paths.checkpoints), "--tokenizer", shown(tokenizer_path(paths.data))]
    return {
        f"Train on from the checkpoint of iteration {iteration}": shlex.join(again),
        "Let the model continue a text": shlex.join(generate),
        "Look at the curves": shlex.join([python, "-m", "tensorboard.main", "--logdir", shown(paths.tensorboard)]),
    }


def demo(arguments: argparse.Namespace, console: Console) -> int:
    """Runs all steps and returns the exit code: 1 if the model does not beat the unigram entropy."""
    began = time.monotonic()
    paths = Paths(arguments.output.resolve())
    with working(console, "preparing data"):
        meta = prepare_data(paths)
        machine = Machine.detect()
    training = Training(arguments.iterations or machine.iterations, arguments.minutes, arguments.fsdp_implementation)
    console.print(f"[bold]data[/bold]      {data_line(meta)}", soft_wrap=True)
    run = Run(training, machine, paths, console)
    resumed = f", from the checkpoint of iteration {run.done}" if run.done else ""
    console.print(f"[bold]machine[/bold]   {machine.name}", soft_wrap=True)
    console.print(f"[bold]training[/bold]  {training.iterations} iterations{resumed}", soft_wrap=True)
    console.print(f"[bold]log[/bold]       {shown(paths.log)}", soft_wrap=True)
    run.start()
    iteration = latest_iteration(paths.checkpoints)
    with working(console, "drawing the losses, generating text"):
        draw(run, meta)
        text = write_sample(paths)
    console.print(Panel(Text(text), title=f"sample after {PROMPT!r}", title_align="left"))
    console.print(summary(run, meta, time.monotonic() - began))
    console.print(written(run, iteration))
    console.print("\nThree things to try next:")
    for purpose, line in next_steps(paths, iteration).items():
        console.print(f"  {purpose}:\n    [bold]{escape(line)}[/bold]", soft_wrap=True)
    if paths.output == OUTPUT:
        console.print("`make clean-demo` removes what the demo wrote.")
    validation = run.new_points("validation")
    if not validation or validation[-1].loss >= min(meta.unigram_entropy, meta.corpus_entropy):
        console.print("[red]The validation loss is not below the unigram entropy: train for more iterations.[/red]")
        return 1
    return 0


def working(console: Console, what: str) -> Status:
    """Context that says what takes seconds now: on a terminal as long as it takes, elsewhere as a line."""
    if not console.is_terminal:
        console.print(f"  {what}")
    return console.status(what)


def draw(run: Run, meta: DataMeta) -> None:
    """Draws the losses of all invocations."""
    from plot import plot  # imports matplotlib, which takes seconds

    plot(run.points, meta.unigram_entropy, run.paths.plot, "GPT on the source and documentation of Python's library")


def parse_arguments() -> argparse.Namespace:
    """The command line of the demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for all output")
    parser.add_argument("--iterations", type=int, help="iterations of this run (default: depends on the machine)")
    parser.add_argument("--minutes", type=int, default=Training.minutes, help="save and stop training after this time")
    parser.add_argument(
        "--fsdp-implementation",
        choices=IMPLEMENTATIONS,
        default=Training.implementation,
        help="this project's FSDP, or the one inside Megatron-Core",
    )
    return parser.parse_args()


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handles SIGTERM like Ctrl-C, which stops the training processes."""
    raise KeyboardInterrupt


def main() -> int:
    """Command line; returns the exit code."""
    signal.signal(signal.SIGTERM, interrupt)
    console = Console(highlight=False)
    arguments = parse_arguments()
    try:
        return demo(arguments, console)
    except StepFailed as error:
        console.print(Panel(Text(error.excerpt), title=str(error), border_style="red"))
        console.print(f"The complete log: {Paths(arguments.output.resolve()).log}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        iteration = latest_iteration(Paths(arguments.output.resolve()).checkpoints)
        kept = f"the next run resumes after iteration {iteration}" if iteration else "there is no checkpoint yet"
        console.print(f"interrupted: the training processes have ended; {kept}")
        return 130


if __name__ == "__main__":
    sys.exit(main())
