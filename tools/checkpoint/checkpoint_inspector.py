"""Inspects, verifies, compares, modifies and converts checkpoints, without a model, a GPU or a process group."""

from megatron.fsdp.convert.cli import cli

__all__ = ["cli"]

if __name__ == "__main__":
    cli()
