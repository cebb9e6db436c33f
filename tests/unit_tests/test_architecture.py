"""Rules for the sources that neither ruff nor the import contract in pyproject.toml can express."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "megatron" / "fsdp"
FOLDERS = ("megatron", "megatron_fsdp", "scripts", "tools", "examples", "tests", "benchmarks")
# Packages that may import more than torch, and the distributions that they may import.
NEED_MORE = {"mcore": None, "convert": None, "integrations": None, "tools": None, "checkpoint": {"numpy"}}
# What torch itself requires on every version of Python.
WITH_TORCH = {"torch", "typing_extensions"}
# Distributions that are imported on first use.
OPTIONAL = {"state/export.py": {"safetensors"}, "quantized/torchao.py": {"torchao"}}


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
