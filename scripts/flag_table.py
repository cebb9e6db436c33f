"""Megatron's command line: its parser, and which arguments it reads where FSDP is on."""

import argparse
import ast
import inspect
import textwrap

from megatron.fsdp.mcore import cpu

cpu.enable()

from megatron.fsdp.mcore.options import add_megatron_arguments  # noqa: E402
from megatron.training import arguments  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """Megatron's parser, with the options that this project adds."""
    return add_megatron_arguments(arguments.add_megatron_arguments, argparse.ArgumentParser(allow_abbrev=False))


def read_for_fsdp() -> set[str]:
    """The arguments that Megatron's ``validate_args`` reads where it has found FSDP on."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(arguments.validate_args))))
    branches = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "use_megatron_fsdp" in ast.unparse(n.test)]
    return {
        node.attr
        for branch in branches
        for node in ast.walk(branch)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args"
    }
