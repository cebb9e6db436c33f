"""Runs ``python -m megatron.fsdp.convert`` and the installed commands for checkpoints."""

import io
import sys

from megatron.fsdp.helpers.extras import require


def main(program: str | None = None) -> None:
    """Run the command line. ``program`` is the name that its help shows, by default that of the running script."""
    require("convert")
    # Names of files need not be UTF-8, and the output may be ASCII.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    from megatron.fsdp.convert.cli import cli

    cli(prog_name=program)


if __name__ == "__main__":
    main("python -m megatron.fsdp.convert")
