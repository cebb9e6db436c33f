"""The messages that docs/troubleshooting.md quotes exist, and it has all of Megatron's about FSDP."""

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"

OURS = "## Messages of this project"
EITHER = "## Messages of the command line"
THEIRS = "## Messages of the FSDP inside megatron-core"

# The files of Megatron that the quoted messages are from.
MEGATRON = (
    "training/arguments.py",
    "training/models/dist_utils.py",
    "training/utils/common_utils.py",
    "core/fp8_utils.py",
    "core/optimizer/distrib_optimizer.py",
    "core/pipeline_parallel/combined_1f1b.py",
    "core/distributed/fsdp",
)


def _megatron(path: str) -> Path:
    package, _, inside = path.partition("/")
    spec = importlib.util.find_spec(f"megatron.{package}")
    if spec is None or spec.origin is None:
        pytest.skip(f"megatron.{package} is not installed")
    return Path(spec.origin).parent / inside


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("`", "")).strip()


def _texts(tree: ast.AST) -> Iterator[str]:
    """The strings of a syntax tree, with … for each value in an f-string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            yield _plain("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _plain(node.value)


def _texts_of(*paths: Path) -> list[str]:
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    return [text for file in files for text in _texts(ast.parse(file.read_text()))]


@functools.cache
def _sources(heading: str) -> list[str]:
    roots = [] if heading == THEIRS else [ROOT / "megatron" / "fsdp"]
    if heading != OURS:
        roots += [_megatron(path) for path in MEGATRON]
    return _texts_of(*roots)


def _quotes(heading: str) -> list[str]:
    section = PAGE.read_text().partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    assert section, f"docs/troubleshooting.md has no section {heading!r}"
    titles = [title for title in re.findall(r"^### (.+)$", section, re.MULTILINE) if not title.startswith("Other")]
    return titles + re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)


@pytest.mark.parametrize("heading", [EITHER, THEIRS, OURS])
def test_quoted_messages_exist(heading: str) -> None:
    quotes = _quotes(heading)
    assert len(quotes) > 5
    missing = [quote for quote in quotes if not any(_plain(quote) in text for text in _sources(heading))]
    assert not missing, "update these quotes of docs/troubleshooting.md"


def test_all_messages_of_megatrons_command_line_about_fsdp_are_quoted() -> None:
    """Those of assertions, errors and warnings, except the ones about PyTorch's FSDP2."""
    quotes = [_plain(quote) for quote in _quotes(EITHER)]
    tree = ast.parse(_megatron("training/arguments.py").read_text())
    found = 0
    for node in ast.walk(tree):
        message: ast.AST | None = node.msg if isinstance(node, ast.Assert) else None
        if isinstance(node, ast.Raise):
            message = node.exc
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "warn_rank_0":
            message = node.args[0]
        text = max(_texts(message), key=len, default="") if message is not None else ""
        if "fsdp" not in text.lower() or text.startswith(("--use-torch-fsdp2", "FSDP2 ", "FSDP always")):
            continue
        if "Torch-FSDP2" in text or "Emerging optimizer does not support Torch" in text:
            continue
        found += 1
        assert any(quote in text for quote in quotes), f"docs/troubleshooting.md does not have: {text}"
    assert found > 10
