"""Inspects, verifies, compares, modifies and converts checkpoints without a model, a GPU or a process group."""

import click

from megatron.fsdp.convert import convert_commands, huggingface_commands, inspect_commands


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option("1.0")
def cli() -> None:
    """Tools for Megatron checkpoints in the format of torch.distributed.checkpoint.

    Name a checkpoint by its folder, or by the folder above it with latest_checkpointed_iteration.txt.
    """


for command in (*inspect_commands.COMMANDS, *convert_commands.COMMANDS, *huggingface_commands.COMMANDS):
    cli.add_command(command)


if __name__ == "__main__":
    cli()
