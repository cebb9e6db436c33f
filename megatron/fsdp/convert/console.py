"""The shared parts of all commands: options, errors, output as text or JSON, progress, and the division of work."""

import argparse
import enum
import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron.fsdp.checkpoint.allowed import Foreign
from megatron.fsdp.checkpoint.storage import REMOTE, as_path
from megatron.fsdp.convert.inspecting import SHOWN, listed
from megatron.fsdp.convert.options import ReadOptions, WriteOptions

# Errors that a user, a file or the system can cause. Any other error is a bug and keeps its traceback.
EXPECTED = (ValueError, OSError, ImportError, NotImplementedError, RuntimeError, MemoryError)

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Options = TypeVar("_Options", ReadOptions, WriteOptions)


class Result(NamedTuple):
    """The output of a command.

    Attributes:
        data: The JSON object of ``--json``, and the readable output; see :func:`plain` for the values.
        text: The entries of the readable output, where they differ from ``data``.
        end: The last lines of the readable output.
        failed: The exit status is 1.
    """

    data: Mapping[str, Any]
    text: Mapping[str, Any] | None = None
    end: str = ""
    failed: bool = False

    def show(self, as_json: bool) -> None:
        """Print it."""
        if as_json:
            click.echo(as_json_text(self.data))
            return
        show(self.data if self.text is None else self.text)
        if self.end:
            click.echo(f"\n{self.end}")


def command(name: str, divided: bool = False, local: bool = False) -> Callable[[Callable[..., Result]], click.Command]:
    """Make a command of a function that returns its result, and add ``--json`` and ``--enable-msc``.

    Expected errors become one line on standard error and the exit status 1.

    Args:
        name: The command's name.
        divided: Whether processes that torchrun or srun started divide the work. Otherwise only the first one runs it.
        local: Whether it works in a file system only.
    """

    def decorate(function: Callable[..., Result]) -> click.Command:
        @functools.wraps(function)
        def run(as_json: bool, enable_msc: bool, **options: Any) -> None:
            if not divided and not is_first():
                return
            traced = options.pop("oom_traceback", None)
            try:
                if enable_msc:
                    require_msc()
                if local:
                    _require_local(options.values())
                result = function(**{k: as_path(v) if isinstance(v, Path) else v for k, v in options.items()})
            except EXPECTED as error:
                if traced and isinstance(error, MemoryError):
                    click.echo(traceback.format_exc(), err=True)
                raise click.ClickException(_one_line(error, hint=traced is False)) from error
            if is_first():
                result.show(as_json)
            if result.failed:
                click.get_current_context().exit(1)

        made = click.command(name)(run)
        made.params += [
            click.Option(["--enable-msc"], is_flag=True, help="Require the Multi-Storage Client to be installed."),
            click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object instead of text."),
        ]
        return made

    return decorate


def _one_line(error: BaseException, hint: bool) -> str:
    text = " ".join(line.strip() for line in str(error).split("\n")) or type(error).__name__
    if not isinstance(error, MemoryError):
        return text
    return f"memory is exhausted: {text}.{' --oom-traceback prints the traceback.' if hint else ''}"


def read_options(command: _Command) -> _Command:
    """Add options with which checkpoints are read: the fields of ``ReadOptions`` with the same names."""
    for option in (
        click.option(
            "--no-verify",
            "verify",
            flag_value=False,
            default=True,
            help="Do not compare files with the checkpoint's checksums.",
        ),
        click.option(
            "--moe-grouped-gemm/--no-moe-grouped-gemm",
            default=None,
            help="Whether a layer's experts are one grouped module, if a torch_dist checkpoint does not record it.",
        ),
        click.option(
            "--transformer-impl",
            type=click.Choice(["local", "transformer_engine"]),
            help="The implementation of the model's layers, if a torch_dist checkpoint does not record it.",
        ),
    ):
        command = option(command)
    return command


def fields_of(kind: type[_Options], values: Mapping[str, Any]) -> _Options:
    """A dataclass of options, from those of the command line that are named like its fields."""
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})


def directory(name: str) -> Callable[[_Command], _Command]:
    """Add an argument for a folder: of a checkpoint or its parent with a tracker file, or one to create."""
    return click.argument(name, type=click.Path(path_type=Path))


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


def _require_local(values: Iterable[Any]) -> None:
    """Raise NotImplementedError if a path is on object storage."""
    for path in values:
        if isinstance(path, Path) and REMOTE.match(str(path)):
            raise NotImplementedError(
                f"{path}: expected a folder in a file system; got an address on object storage. Mount the storage, and "
                "give the mounted folder."
            )


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


def show(entries: Mapping[str, Any]) -> None:
    """Print entries as text: first single values, then each collection under a heading.

    The entries of a mapping are cut off at the length of a line, those of a list are not. ``bytes`` is a size.
    """
    sections: dict[str, Any] = {}
    for name, value in entries.items():
        title = name.replace("_", " ")
        if value and isinstance(value, (Mapping, list)):
            sections[title] = value
        else:
            click.echo(f"{title}: {gib(value) if name == 'bytes' else _in_words(value)}")
    for title, values in sections.items():
        click.secho(f"\n{title.upper()} ({len(values)})", fg="cyan", bold=True)
        is_mapping = isinstance(values, Mapping)
        for entry in values:
            click.echo(f"► {entry}: {short(values[entry])}" if is_mapping else f"► {entry}")


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == [] or value == {}:
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)


def gib(nbytes: int) -> str:
    """A size in GiB."""
    size = nbytes / 2**30
    return f"{size:,.3f} GiB" if size >= 0.0005 or not nbytes else "< 0.001 GiB"


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
