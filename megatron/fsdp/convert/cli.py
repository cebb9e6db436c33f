"""The command line for checkpoints: inspect, verify, compare, modify and convert them."""

import click

from megatron.fsdp.convert import convert_commands, huggingface_commands, inspect_commands
from megatron.fsdp.convert.rewrites import FSDP_DTENSOR, TORCH_DIST

# Names of Megatron's own tool, and what they stand for.
ALIASES = {
    "compare-two-checkpoint": ("diff",),
    "convert-torch-dist-to-fsdp-dtensor": ("convert", "--to", FSDP_DTENSOR),
    "convert-fsdp-dtensor-to-torch-dist": ("convert", "--to", TORCH_DIST),
}


class Commands(click.Group):
    """The commands, also by their names in :data:`ALIASES`, which the help does not list."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first word names."""
        return super().resolve_command(ctx, [*ALIASES.get(args[0], args[:1]), *args[1:]])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option("1.0")
def cli() -> None:
    """Tools for checkpoints of torch.distributed.checkpoint, as Megatron writes them.

    A checkpoint is its folder, or the folder above it with latest_checkpointed_iteration.txt.
    """


for command in (*inspect_commands.COMMANDS, *convert_commands.COMMANDS, *huggingface_commands.COMMANDS):
    cli.add_command(command)
