"""Parts that all commands share: readable and JSON output, error messages, progress, division of work."""

import argparse
import enum
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from megatron.fsdp.checkpoint.allowed import Foreign
from megatron.fsdp.checkpoint.reader import checkpoint_folder
from megatron.fsdp.convert.inspecting import SHOWN, listed

# Errors that a user, a file or the system can cause. Any other error is a bug and keeps its traceback.
EXPECTED = (ValueError, OSError, NotImplementedError, RuntimeError)
# Columns of output to a file, enough to keep long names on one line.
_WIDTH = 160

_Command = TypeVar("_Command", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
msc_option = click.option("--enable-msc", is_flag=True, help="Require the Multi-Storage Client to be installed.")


def layer_options(command: _Command) -> _Command:
    """Add the options that describe a model's layers, for ``torch_dist`` checkpoints that do not."""
    implementation = click.option(
        "--transformer-impl",
        type=click.Choice(["local", "transformer_engine"]),
        help="The implementation of the model's layers, if a torch_dist checkpoint does not record it.",
    )
    grouped = click.option(
        "--moe-grouped-gemm/--no-moe-grouped-gemm",
        default=None,
        help="Whether the experts of a layer are one grouped module, if a torch_dist checkpoint does not record it.",
    )
    return implementation(grouped(command))


def directory(name: str) -> Callable[[_Command], _Command]:
    """Add an argument for the folder of a checkpoint, or for its parent with a tracker file."""
    return click.argument(name, type=click.Path(path_type=Path))


def handled(command: Callable[..., Any]) -> Callable[..., Any]:
    """Print expected errors as one line on standard error and exit with status 1; check ``--enable-msc``."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            if options.pop("enable_msc", False):
                require_msc()
            return command(*arguments, **options)
        except EXPECTED as error:
            lines = str(error).split("\n")
            raise click.ClickException(" ".join(line.strip() for line in lines) or type(error).__name__) from error

    return run


def require_msc() -> None:
    """Raise an error unless the Multi-Storage Client can be used.

    Raises:
        NotImplementedError: It is not installed.
    """
    try:
        __import__("multistorageclient")
    except ImportError:
        raise NotImplementedError(
            "--enable-msc: expected the package multistorageclient to be installed; it is not. "
            "Leave the option out for checkpoints in a file system."
        ) from None


def folder_of(path: Path) -> Path:
    """The checkpoint in or below a folder, see ``checkpoint_folder``.

    Raises:
        FileNotFoundError: There is none, or the path is on object storage.
    """
    if str(path).startswith("msc:/"):
        raise FileNotFoundError(f"{path}: expected a folder in a file system; mount the storage to read from it.")
    return checkpoint_folder(path)


def worker() -> tuple[int, int]:
    """The rank of this process and the number of processes, from torchrun or srun; 0 and 1 without them."""
    # SLURM_NTASKS is set in a batch script too, which is a single process. Only srun sets SLURM_STEP_NUM_TASKS.
    for rank, processes in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        if rank in os.environ and processes in os.environ:
            return int(os.environ[rank]), int(os.environ[processes])
    return 0, 1


def is_first() -> bool:
    """Whether this process prints the output for all processes that torchrun or srun started."""
    return worker()[0] == 0


def console() -> Console:
    """The console for readable output."""
    found = Console(highlight=False, soft_wrap=False)
    return found if found.is_terminal else Console(highlight=False, width=_WIDTH)


def heading(out: Console, text: str) -> None:
    """Print the title of a section."""
    out.print()
    out.print(Text(text, style="bold cyan"))


def line(out: Console, text: str, style: str = "") -> None:
    """Print a line verbatim, without wrapping or markup."""
    out.print(Text(text, style=style), soft_wrap=True)


def table(title: str, *columns: str) -> Table:
    """An empty table. Columns whose name begins with ``>`` are aligned to the right."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        right = name.startswith(">")
        made.add_column(name.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    return made


def gib(nbytes: int) -> str:
    """A size in GiB."""
    size = nbytes / 2**30
    return f"{size:,.3f} GiB" if size >= 0.0005 or not nbytes else "< 0.001 GiB"


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    click.echo(as_json_text(value))


def as_json_text(value: Mapping[str, Any]) -> str:
    """A JSON object, see :func:`plain`."""
    return json.dumps(plain(value), indent=1, allow_nan=False)


def plain(value: Any) -> Any:
    """Convert a value to JSON's types; other types become text.

    Large tensors become their dtype and shape. Numbers that JSON lacks (nan, inf) become text.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(entry) for entry in value), key=str)
    if isinstance(value, argparse.Namespace):
        return plain(vars(value))
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if isinstance(value, (bytes, bytearray)):
        return f"<{len(value)} bytes>"
    return str(value)


def _plain_tensor(tensor: torch.Tensor) -> Any:
    if tensor.numel() > SHOWN or tensor.is_meta:
        return {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}
    return plain(listed(tensor))


def short(value: Any, limit: int = 200) -> str:
    """A value as one line of text, cut off at a limit."""
    if isinstance(value, torch.Tensor):
        text = f"tensor of {tuple(value.shape)}, {value.dtype}"
    elif isinstance(value, argparse.Namespace):
        text = f"{len(vars(value))} settings"
    elif isinstance(value, Foreign):
        text = repr(value)
    else:
        text = " ".join(str(value).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error: bytes, speed, time left. Only the first process shows it, on a terminal.

    Args:
        what: The description of the work.
        total: The number of bytes.

    Yields:
        A function to call with the number of bytes processed since the last call.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    error = Console(stderr=True)
    with Progress(*columns, console=error, disable=not (sys.stderr.isatty() and is_first())) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.update(task, advance=nbytes)
