"""The command line for checkpoints: inspect, verify, compare, modify and convert them."""

import click

from megatron.fsdp.convert import convert_commands, huggingface_commands, inspect_commands


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option("1.0")
def cli() -> None:
    """Tools for checkpoints of torch.distributed.checkpoint, as Megatron writes them.

    A checkpoint is its folder, or the folder above it with latest_checkpointed_iteration.txt.
    """


for command in (*inspect_commands.COMMANDS, *convert_commands.COMMANDS, *huggingface_commands.COMMANDS):
    cli.add_command(command)
