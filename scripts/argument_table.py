"""Writes what follows from the settings: the signature and the docstring of fully_shard_model.

    python scripts/argument_table.py --write

A setting is a field of ``FSDPConfig``. ``--write`` adds new fields to the signature of ``fully_shard_model``, which
``fully_shard`` shares, and copies the fields' descriptions into the docstring, which the reference shows.
"""

import dataclasses
import inspect
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.fsdp import FSDPConfig  # noqa: E402

# What follows the last argument in the docstring of fully_shard_model.
AFTER_SETTINGS = "\n\n    Returns:\n        The sharded model. Its"


def described(documented: object, section: str = "Args:") -> dict[str, str]:
    """Descriptions by name, each on one line, from a section of a docstring."""
    documentation = inspect.getdoc(documented) or ""
    block = documentation.partition(section)[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", block, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in found}


def settings() -> dict[str, str]:
    """The settings, and how each is declared in a signature."""
    fields = [field for field in dataclasses.fields(FSDPConfig) if field.init]
    return {
        field.name: f"    {field.name}: {inspect.formatannotation(field.type)} = {field.default!r},\n".replace("'", '"')
        for field in fields
    }


def with_settings(source: str) -> str:
    """The text of fully_shard.py, with every setting in the signature and described as in ``FSDPConfig``."""
    descriptions = described(FSDPConfig, "Attributes:")
    for name, declaration in settings().items():
        if not re.search(rf"^    {name}: ", source, flags=re.MULTILINE):
            source = source.replace("\n) -> MegatronFSDP", f"\n{declaration}) -> MegatronFSDP")
            source = source.replace(AFTER_SETTINGS, f"\n        {name}: .{AFTER_SETTINGS}")
        entry = textwrap.fill(
            f"{name}: {descriptions[name]}",
            width=120,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_on_hyphens=False,
        )
        source = re.sub(
            rf"^ {{8}}{name}: .*(?:\n {{12}}.*)*", entry.replace("\\", r"\\"), source, count=1, flags=re.MULTILINE
        )
    return source


def write() -> None:
    """Bring fully_shard.py up to date."""
    path = ROOT / "megatron" / "fsdp" / "api" / "fully_shard.py"
    path.write_text(with_settings(path.read_text()))


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
