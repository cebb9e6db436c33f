"""Rules for the sources that neither ruff nor the import contract in pyproject.toml can express."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "megatron" / "fsdp"
TEXTS = ("py", "md", "sh", "bash", "sbatch")
FOLDERS = ("megatron", "megatron_fsdp", "scripts", "tools", "examples", "tests", "benchmarks")
# Packages that may import more than torch, and the distributions that they may import.
NEED_MORE = {"mcore": None, "convert": None, "integrations": None, "tools": None, "checkpoint": {"numpy"}}
# What torch itself requires on every version of Python.
WITH_TORCH = {"torch", "typing_extensions"}
# Distributions that are imported on first use.
OPTIONAL = {"state/export.py": {"safetensors"}, "quantized/torchao.py": {"torchao"}}

# The most lines of code of each package, without blank lines, comments, docstrings and sub-packages that have a row.
BUDGETS = {
    "megatron/fsdp": 423,
    "megatron/fsdp/api": 583,
    "megatron/fsdp/buffers": 1_558,
    "megatron/fsdp/checkpoint": 2_469,
    "megatron/fsdp/comm": 1_151,
    "megatron/fsdp/convert": 3_952,
    "megatron/fsdp/dtensor": 1_150,
    "megatron/fsdp/fsdp2": 704,
    "megatron/fsdp/helpers": 398,
    "megatron/fsdp/init": 453,
    "megatron/fsdp/integrations": 561,
    "megatron/fsdp/mcore": 2_647,
    "megatron/fsdp/mcore/cpu": 671,
    "megatron/fsdp/naming": 248,
    "megatron/fsdp/optim": 1_086,
    "megatron/fsdp/quantized": 299,
    "megatron/fsdp/quantized/reference": 389,
    "megatron/fsdp/runtime": 2_743,
    "megatron/fsdp/sharding": 702,
    "megatron/fsdp/state": 743,
    "megatron/fsdp/tools": 3_251,
    "megatron/fsdp/tools/predict": 2_822,
    "megatron_fsdp": 149,
    "tests": 42_903,
}

# Phrases, as regular expressions, and the word that people of this field search for. A line may end at a space.
WORDS = {
    "[Ww]hole (weight|tensor|state|parameter|gradient|matri|buffer|compute weight)": "full",
    "[Aa](nother) (number of|strategy|dtype|process group|order|shape|size|length)": "a different",
    "the (original)(,? (Megatron-FSDP|engine|package|ZeRO))": "NVIDIA's",
    "[Dd]ivided? (between|over|among|across) (the |all )?ranks": "split, sharded",
    "[Ss]tand-in": "mock, fake, placeholder",
    "matrix (product)": "matmul",
    "[Mm]ulti(processor)s": "SMs",
    "the host (waits) for the (device|GPU)": "host-device sync",
    "start(s|ed) anew": "restarts",
    "[Pp]lanted": "injected",
    r"\b[Bb](eside)\b": "against, next to, in addition to",
    r"\b[Ll]en(ds|t)\b": "allocate, reuse",
    r"\b[Mm](eeting)s?\b": "sync point",
    r'"{3}What\b': "the noun",
    "^(XX|TODO|TBD)+$": "what belongs here",
}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {_distribution(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(_distribution(str(node.module)))
    return found


def _distribution(module: str) -> str:
    """The distribution that contains a module: several share the namespace ``megatron``."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "megatron" else parts[0]


def test_engine_needs_torch_only() -> None:
    for path in ENGINE.rglob("*.py"):
        name = path.relative_to(ENGINE).as_posix()
        more = NEED_MORE.get(name.split("/")[0], OPTIONAL.get(name, set()))
        if more is not None:
            foreign = _imports(path) - {*WITH_TORCH, "megatron.fsdp", *sys.stdlib_module_names, *more}
            assert not foreign, f"{name} imports {sorted(foreign)}"


def _prints(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_importing_the_engine_and_the_trace_tool_imports_neither_megatron_core_nor_matplotlib() -> None:
    loaded = "[m for m in sys.modules if m == 'matplotlib' or m.startswith('megatron.') and '.fsdp' not in m]"
    assert _prints(f"import megatron_fsdp, megatron.fsdp.tools.trace.__main__, sys; print({loaded})") == "[]\n"


def test_files_and_functions_have_a_readable_length() -> None:
    too_long = []
    for path in sorted(path for name in FOLDERS for path in (ROOT / name).rglob("*.py")):
        source = path.read_text()
        name = path.relative_to(ROOT)
        if source.count("\n") > 600:
            too_long.append(f"{name}: {source.count(chr(10))} lines; expected at most 600")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                code = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                if (node.end_lineno or 0) - code[0].lineno >= 60:
                    too_long.append(f"{name}: {node.name} has 60 lines or more, without its docstring")
    assert not too_long


def _lines_of_code(path: Path) -> int:
    """Number of lines that hold more than comments and docstrings."""
    source = path.read_text()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def test_packages_keep_their_budgets() -> None:
    """Sizes grow by a line at a time, which no limit for files and functions stops."""
    found: Counter[str] = Counter()
    for path in (path for name in ("megatron", "megatron_fsdp", "tests") for path in (ROOT / name).rglob("*.py")):
        folders = [
            folder.relative_to(ROOT).as_posix() for folder in path.parents if folder != ROOT and ROOT in folder.parents
        ]
        package = next((folder for folder in folders if folder in BUDGETS), folders[0])
        found[package] += _lines_of_code(path)
    too_large = [
        f"{package}: expected at most {BUDGETS.get(package, 0)} lines of code; got {count}. Remove something. If the "
        "package needs more, raise its budget here, and give the reason in docs/design.md in the same commit."
        for package, count in found.items()
        if count > BUDGETS.get(package, 0)
    ]
    assert not too_large, "\n".join(too_large)


def test_texts_have_the_words_of_the_field() -> None:
    pages = [*ROOT.glob("*.md"), ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    found = []
    for path in [*pages, *(path for name in FOLDERS for kind in TEXTS for path in (ROOT / name).rglob(f"*.{kind}"))]:
        text = path.read_text()
        for phrase, word in WORDS.items():
            for match in re.finditer(phrase.replace(" ", r"\s+(?:# )?"), text, re.MULTILINE):
                number = text.count("\n", 0, match.start()) + 1
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]!r}; write: {word}")
    assert not found, "\n".join(found)
