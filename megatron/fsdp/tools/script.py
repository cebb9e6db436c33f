"""Command lines of the form ``[OPTIONS] [-m] SCRIPT ARGS...``: running them as ``python`` does, and their steps."""

import argparse
import itertools
import re
import runpy
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.fsdp.helpers.extras import require
from megatron.fsdp.tools.devices import GIB

# Columns of memory in tables, and the categories that they sum. The last one has all others.
MEMORY = {
    "weights": ("shards", "unsharded units"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "logits"),
    "other": (),
}


def memory_columns(peak: Mapping[str, int]) -> list[str]:
    """GiB at the peak of a step in the columns of ``MEMORY``."""
    sums = [sum(peak.get(name, 0) for name in names) for names in MEMORY.values()]
    return [f"{size / GIB:.1f}" for size in (*sums[:-1], sum(peak.values()) - sum(sums))]


# Values of flags: None leaves a flag out, and "" is one without a value.
Change = dict[str, str | None]
# Of flags that begin with --recompute-.
RECOMPUTATION = "granularity", "method", "num-layers", "modules"


def recomputation(granularity: str | None, **more: str) -> Change:
    """Flags of recomputation in place of others."""
    none: Change = {f"--recompute-{name}": None for name in RECOMPUTATION}
    given = {f"--recompute-{name.replace('_', '-')}": value for name, value in more.items()}
    return {**none, "--recompute-activations": None, "--recompute-granularity": granularity, **given}


@dataclass(frozen=True)
class CommandStep:
    """One step of one rank.

    Attributes:
        seconds: Its time, with the pipeline's bubble.
        bubble: Seconds that the pipeline takes to fill and to drain.
        tokens_per_second: Of all ranks.
        mfu: Floating-point operations of the model, without recomputation, as a part of the devices' peak.
        waits: Seconds that the computation waits, by what it waits for.
        peak: Bytes of tensors at the moment with the most, by category.
        module: The module that computes at that moment.
        units: Seconds of each unit that was run: "compute", and as the computation waits for it, "unshard", "reduce"
            and "other communication". Of equal layers, the first few.
        communication: Seconds that unshards and reductions take, also while the computation goes on.
        optimizer: Seconds of the optimizer's step, without waits.
    """

    seconds: float
    bubble: float
    tokens_per_second: float
    mfu: float
    waits: dict[str, float]
    peak: dict[str, int]
    module: str
    units: dict[str, dict[str, float]] = field(default_factory=dict)
    communication: float = 0.0
    optimizer: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by what takes them."""
        compute = self.seconds - self.bubble - self.optimizer - sum(self.waits.values())
        return {"compute": compute, **self.waits, "optimizer": self.optimizer, "pipeline bubble": self.bubble}

    @property
    def unit_lines(self) -> list[str]:
        """Seconds of each unit by what takes them, and which takes most. Equal neighbours are one line."""
        lines = []
        for text, units in itertools.groupby(self.units, lambda unit: _times(self.units[unit])):
            names = list(units)
            lines.append(f"{' to '.join(dict.fromkeys((names[0], names[-1])))}: {text}")
        return lines

    @property
    def bound(self) -> str:
        """The part that takes most of the step."""
        return max(self.parts, key=lambda name: self.parts[name])


def _times(of_unit: dict[str, float]) -> str:
    parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in of_unit.items())
    return f"{parts}, bound by {max(of_unit, key=of_unit.__getitem__)}"


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


def edited(arguments: Sequence[str], changes: Change) -> tuple[list[str], Change]:
    """A command line with other values of some flags, and the values that they had."""
    found: list[str] = []
    before: Change = dict.fromkeys(changes)
    kept = True
    for word in arguments:
        if re.match("--?[A-Za-z]", word):  # other words are values, also negative numbers
            flag, _, given = word.partition("=")
            kept = flag not in changes
            if not kept:
                before[flag] = given
        elif not kept:
            before[flag] = f"{before[flag]} {word}".strip()
        if kept:
            found.append(word)
    for flag, value in changes.items():
        found += [flag, *value.split()] if value is not None else []
    return found, before


def options_without(arguments: Sequence[str], flags: Iterable[str]) -> tuple[str, ...]:
    """The options of a command line without some flags, each with its values, sorted."""
    rest, _ = edited(arguments, dict.fromkeys(flags))
    return tuple(sorted(re.split(" (?=--?[A-Za-z])", " ".join(rest))))


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
