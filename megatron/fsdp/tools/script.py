"""Command lines of the form ``[OPTIONS] SCRIPT ARGS...``, and running such a script as ``python SCRIPT`` does."""

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for the options of a command that runs a script. :func:`parse` adds the script and its arguments.

    Args:
        module: Name of the module in ``python -m``.
        description: The module's docstring.
    """
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parse(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse a command line that ends with ``script`` and its ``arguments``. Exits if the script does not exist."""
    options.add_argument("script", type=Path)
    options.add_argument("arguments", nargs=argparse.REMAINDER)
    parsed = options.parse_args()
    if not parsed.script.is_file():
        options.error(f"no such script: {parsed.script}")
    return parsed


def run(script: Path, arguments: Sequence[str]) -> None:
    """Run a script as ``__main__``, with its folder first in ``sys.path``, as ``python SCRIPT`` does."""
    argv, folder = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[0] = argv, folder
