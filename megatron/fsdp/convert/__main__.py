"""Runs ``python -m megatron.fsdp.convert``."""

from megatron.fsdp.convert.cli import cli

if __name__ == "__main__":
    cli(prog_name="python -m megatron.fsdp.convert")
