"""Runs ``python -m megatron.fsdp.convert`` and the installed commands for checkpoints."""

from megatron.fsdp.helpers.extras import require


def main(program: str | None = None) -> None:
    """Run the command line. ``program`` is the name that its help shows, by default that of the running script."""
    require("convert")
    from megatron.fsdp.convert.cli import cli

    cli(prog_name=program)


if __name__ == "__main__":
    main("python -m megatron.fsdp.convert")
