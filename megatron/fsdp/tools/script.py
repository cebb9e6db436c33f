"""Command lines of the form ``[OPTIONS] [-m] SCRIPT ARGS...``, and running such a script as ``python`` does."""

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.fsdp.helpers.extras import require


def parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for the options of a command that runs a script. :func:`parse` adds the script and its arguments.

    Args:
        command: Name of the installed command.
        description: The docstring of its module.
    """
    return argparse.ArgumentParser(
        prog=command,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parse(options: argparse.ArgumentParser, *unless: str) -> argparse.Namespace:
    """Parse a command line that ends with ``script`` and its ``arguments``. Exits if the script does not exist.

    After ``-m``, the script is the name of a module.

    Args:
        options: The parser.
        unless: Attributes of options that take the place of a script.
    """
    options.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT names a module, as in python -m")
    script = options.add_argument("script", type=Path)
    rest = options.add_argument("arguments", nargs=argparse.REMAINDER)
    script.required = rest.required = not unless
    parsed = options.parse_args()
    if unless and all(getattr(parsed, name) is None for name in unless) == (parsed.script is None):
        names = [action.option_strings[0] for action in options._actions if action.dest in unless]
        options.error(f"expected either {', '.join(names)} or a script")
    if parsed.script is not None and not parsed.is_module and not parsed.script.is_file():
        options.error(f"no such script: {parsed.script}")
    return parsed


def prepare_megatron() -> None:
    """Make Megatron run on this machine, with or without CUDA. Exits if Megatron is not installed."""
    require("mcore")
    from megatron.fsdp.mcore import cpu

    cpu.enable()


def run(script: Path, arguments: Sequence[str]) -> None:
    """Run a script as ``__main__``, with its folder first in ``sys.path``, as ``python SCRIPT`` does; or a module."""
    argv, folder = sys.argv, sys.path[0]
    if not script.is_file():
        sys.argv = [str(script), *arguments]
        runpy.run_module(str(script), run_name="__main__", alter_sys=True)
        return
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[0] = argv, folder
