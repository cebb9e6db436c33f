"""The wrapper is no subclass of Megatron's DDP: where Megatron asks for that class is known."""

import ast
from pathlib import Path

import megatron.core
import megatron.training

# Where Megatron asks whether a wrapper is its DDP. train() then reads `buffers + expert_parallel_buffers`, which must
# be lists; MIMO, which does not take FSDP, removes wrappers.
CHECKS = {"training/training.py", "core/models/mimo/model/base.py"}


def test_megatron_asks_for_its_ddp_where_it_is_known() -> None:
    """If this fails, decide again: docs/design.md gives the reasons for the base class."""
    found = set()
    for package in (megatron.core, megatron.training):
        root = Path(package.__path__[0])
        for path in root.rglob("*.py"):
            text = path.read_text()
            if "DistributedDataParallel" in text and any(
                _asks_for_ddp_alone(node) for node in ast.walk(ast.parse(text))
            ):
                found.add(path.relative_to(root.parent).as_posix())
    assert found == CHECKS


def _asks_for_ddp_alone(node: ast.AST) -> bool:
    """Whether a node is ``isinstance(x, (DDP, ...))`` without a class of Megatron's FSDP in addition to DDP."""
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("isinstance", "issubclass"):
        return False
    classes = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
    return bool(classes & {"DDP", "DistributedDataParallel"}) and "megatron_FSDP" not in classes
