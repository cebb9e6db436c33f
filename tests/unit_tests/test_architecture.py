"""Imports go one way, the engine needs torch only, and files and functions keep to their size."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "megatron" / "fsdp"

# Each module imports only from those before it.
ORDER = [
    "weak",
    "names",
    "strategy",
    "mesh",
    "precision",
    "layout",
    "ownership",
    "device",
    "journal",
    "pool",
    "nccl_memory",
    "config",
    "gloo",
    "ragged",
    "reductions",
    "whole",
    "ragged_dtensor",
    "torch_patches",
    "buffer",
    "uneven_dtensor",
    "parameter",
    "weights",
    "gradients",
    "parameter_group",
    "other_engines",
    "partition",
    "structure",
    "agreement",
    "deferred",
    "materialize",
    "unit",
    "plan",
    "schedule",
    "state_dict",
    "megatron_fsdp",
    "consistency",
    "export",
    "optimizer_classes",
    "local_step",
    "fresh_state",
    "optimizer",
    "forward_methods",
    "fully_shard",
    "marked",
    "compat",
    "__init__",
]
# The trace tool stands on the engine, in this order, and nothing on it.
TRACE_ORDER = ["clock", "timeline", "recorder", "plot", "__init__", "watch", "__main__"]
# The adapter stands on the engine, in this order; launch on both.
ADAPTER_ORDER = [
    "arguments",
    "estimate",
    "layouts",
    "topology",
    "adapter",
    "checkpoint",
    "replicas",
    "checkpointing",
    "statistics",
    "initialization",
    "plugin",
    "doctor",
    "verify",
    "__init__",
]
# Checkpoints on disk need torch only, and nothing of the engine.
CHECKPOINT_ORDER = [
    "__init__",
    "lazy",
    "checksums",
    "archive",
    "allowed",
    "safe_pickle",
    "reader",
    "writer",
    "backend",
    "newest",
    "matching",
    "loading",
]
# Commands; they stand on everything.
COMMANDS = {"script", "launch", "doctor", "verify"}

SOURCES = sorted([*ENGINE.rglob("*.py"), *(ROOT / "megatron_fsdp").glob("*.py"), ROOT / "pretrain_gpt.py"])
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
TOOLS = sorted(path for name in ("tools", "examples", "tests", "benchmarks") for path in (ROOT / name).rglob("*.py"))


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def _modules_of(imports: set[str], package: str) -> set[str]:
    """Which modules directly inside ``package`` these imports name."""
    prefix = package + "."
    return {name.removeprefix(prefix).split(".")[0] for name in imports if name.startswith(prefix)}


def test_every_module_of_the_engine_has_its_place() -> None:
    assert {path.stem for path in ENGINE.glob("*.py")} == {*ORDER, *COMMANDS}
    assert {path.stem for path in (ENGINE / "mcore").glob("*.py")} == set(ADAPTER_ORDER)
    assert {path.stem for path in (ENGINE / "trace").glob("*.py")} == set(TRACE_ORDER)
    assert {path.stem for path in (ENGINE / "checkpoint").glob("*.py")} == set(CHECKPOINT_ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_engine_imports_go_one_way(module: str) -> None:
    before = set(ORDER[: ORDER.index(module)])
    later = (
        _modules_of(_imports(ENGINE / f"{module}.py"), "megatron.fsdp") & {*ORDER, *COMMANDS, "mcore", "trace"} - before
    )
    assert not later, f"{module} imports {sorted(later)}, which come later"


@pytest.mark.parametrize("module", TRACE_ORDER)
def test_trace_imports_go_one_way(module: str) -> None:
    before = set(TRACE_ORDER[: TRACE_ORDER.index(module)])
    imports = _imports(ENGINE / "trace" / f"{module}.py")
    if module == "timeline":  # draws only when asked to
        imports -= {"megatron.fsdp.trace.plot", "megatron.fsdp.trace.plot.draw"}
    later = _modules_of(imports, "megatron.fsdp.trace") & set(TRACE_ORDER) - before
    assert not later, f"trace/{module} imports {sorted(later)}, which come later"
    allowed = {"torch", "megatron", *sys.stdlib_module_names} | ({"matplotlib"} if module == "plot" else set())
    assert {name.split(".")[0] for name in imports} <= allowed


@pytest.mark.parametrize("module", CHECKPOINT_ORDER)
def test_imports_of_checkpoints_go_one_way(module: str) -> None:
    before = set(CHECKPOINT_ORDER[: CHECKPOINT_ORDER.index(module)])
    imports = _imports(ENGINE / "checkpoint" / f"{module}.py")
    later = _modules_of(imports, "megatron.fsdp.checkpoint") & set(CHECKPOINT_ORDER) - before
    assert not later, f"checkpoint/{module} imports {sorted(later)}, which come later"
    allowed = {"torch", "numpy", "megatron", *sys.stdlib_module_names}
    assert {name.split(".")[0] for name in imports} <= allowed
    engine = {name for name in imports if name.startswith("megatron.fsdp.") and ".checkpoint" not in name}
    assert _modules_of(engine, "megatron.fsdp") <= {"names"}


def test_tracing_without_drawing_needs_torch_only() -> None:
    code = "import megatron.fsdp.trace.__main__, sys; print('matplotlib' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert output.stdout.strip() == "False"


@pytest.mark.parametrize("module", ADAPTER_ORDER)
def test_adapter_imports_go_one_way(module: str) -> None:
    before = set(ADAPTER_ORDER[: ADAPTER_ORDER.index(module)])
    imports = _imports(ENGINE / "mcore" / f"{module}.py")
    if module == "arguments":  # a wrapper's settings are looked up in the engine's table
        imports -= {"megatron.fsdp.strategy", "megatron.fsdp.strategy.INNER"}
    later = _modules_of(imports, "megatron.fsdp.mcore") & set(ADAPTER_ORDER) - before
    assert not later, f"mcore/{module} imports {sorted(later)}, which come later"


@pytest.mark.parametrize("path", sorted(ENGINE.glob("*.py")), ids=lambda path: path.name)
def test_engine_needs_torch_only(path: Path) -> None:
    if path.stem in COMMANDS:
        return
    # Imported when files of that format are asked for, and not before.
    optional = {"safetensors"} if path.stem == "export" else set()
    allowed = {"torch", "megatron", *sys.stdlib_module_names, *optional}
    for name in _imports(path):
        assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
        assert not name.startswith(("megatron.core", "megatron.training", "megatron.fsdp.mcore")), (
            f"{path.name}: {name}"
        )


def test_importing_the_engine_imports_nothing_of_megatron_core() -> None:
    code = (
        "import megatron_fsdp, sys; print([m for m in sys.modules if m.startswith('megatron.') and '.fsdp' not in m])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert output.stdout.strip() == "[]"


@pytest.mark.parametrize("path", [*SOURCES, *TOOLS], ids=lambda path: str(path.relative_to(ROOT)))
def test_size(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= 600
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            code = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            assert (node.end_lineno or 0) - code[0].lineno < 60, f"{node.name} has over 60 lines"
            if node.name == "__init__" and path.stem != "mesh":  # whose arguments are those its users know
                parameters = len(node.args.args) + len(node.args.kwonlyargs) - 1
                assert parameters <= 8, f"a constructor at line {node.lineno} has {parameters} parameters"


@pytest.mark.parametrize("path", [*SOURCES, *BENCHMARKS], ids=lambda path: str(path.relative_to(ROOT)))
def test_file_opens_with_what_it_is_for(path: Path) -> None:
    assert (ast.get_docstring(ast.parse(path.read_text())) or "").strip()
