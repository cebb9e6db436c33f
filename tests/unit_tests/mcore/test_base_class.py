"""The wrapper is a ``_BaseDataParallel``, as Megatron-Core's FSDP is, and not a subclass of Megatron's DDP."""

import ast
from pathlib import Path

import pytest
from torch import nn

from megatron.fsdp.mcore import FullyShardedDataParallel, cpu
from tests.ranks import DEVICE

cpu.enable()

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="Megatron runs on the CPU here")

# Where Megatron asks whether a wrapper is its DDP. train() then reads `buffers + expert_parallel_buffers`, which must
# be lists; MIMO, which does not take FSDP, removes wrappers.
CHECKS = {"training/training.py", "core/models/mimo/model/base.py"}


def test_the_base_class_is_that_of_megatrons_fsdp() -> None:
    from megatron.core.distributed import DistributedDataParallel, data_parallel_base

    assert issubclass(FullyShardedDataParallel, data_parallel_base._BaseDataParallel)
    assert not issubclass(FullyShardedDataParallel, DistributedDataParallel)


def test_buffers_are_those_of_a_module() -> None:
    """Megatron's DDP has a list of communication buffers under this name, which hides the method of nn.Module."""
    assert FullyShardedDataParallel.buffers is nn.Module.buffers
    assert not hasattr(FullyShardedDataParallel, "expert_parallel_buffers")


def test_megatron_asks_for_its_ddp_where_it_is_known() -> None:
    """If this fails, decide again: docs/design.md gives the reasons for the base class."""
    import megatron.core
    import megatron.training

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
    """Whether a node is ``isinstance(x, (DDP, ...))`` without a class of Megatron's FSDP beside DDP."""
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("isinstance", "issubclass"):
        return False
    classes = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
    return bool(classes & {"DDP", "DistributedDataParallel"}) and "megatron_FSDP" not in classes
