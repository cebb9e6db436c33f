"""The names of this project in the tables of equivalents (docs/coming_from) exist."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_fsdp
from scripts import flag_table
from tests.ranks import ROOT

PAGES = sorted((ROOT / "docs" / "coming_from").glob("*.md"))
ARGUMENTS = inspect.signature(megatron_fsdp.fully_shard_model).parameters
FLAGS = {option for action in flag_table.parser()._actions for option in action.option_strings}
PLAIN = {"none", "always", "the same"}


def rows(text: str) -> Iterator[tuple[str, str]]:
    """The first two cells of each row below a heading ``| theirs | here | remark |``."""
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[1:] == ["here", "remark"]:
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and set(cells[1]) - set("-"):
            yield cells[0], cells[1]


def exists(name: str) -> bool:
    """Whether a name is a flag, an argument, in ``megatron_fsdp``, or can be imported."""
    name = name.removeprefix("torchrun -m ").split()[0].split("=")[0]
    if name.startswith("--"):
        return name in FLAGS
    if name in ARGUMENTS:
        return True
    return importable(name) or importable(f"megatron_fsdp.{name}")


def importable(name: str) -> bool:
    """Whether a dotted name can be reached from the module that begins it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for attribute in parts[length:]:
            # A field without a default is no attribute of its class.
            if not hasattr(found, attribute):
                return attribute in getattr(found, "__annotations__", {})
            found = getattr(found, attribute)
        return True
    return False


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "index.md"], ids=lambda page: page.name)
def test_our_names_exist(page: Path) -> None:
    found = list(rows(page.read_text()))
    assert len(found) > 5
    for theirs, ours in found:
        names = re.findall(r"`([^`]+)`", ours)
        assert names or ours in PLAIN, f"{theirs}: neither names in code nor one of {PLAIN}: {ours}"
        missing = [name for name in names if not exists(name)]
        assert not missing, f"{theirs}: {missing}"


@pytest.mark.parametrize("name", ["--use-megatron-fsdb", "zero_strategy=3", "MegatronFSDP.nosync", "megatron.fsdp.no"])
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert not exists(name)
