"""Only ``megatron.fsdp.comm`` compares names of devices and backends, and it recognizes them in every spelling."""

import ast
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import megatron.fsdp
from megatron.fsdp.comm.backends import backend_of, local_device, moves_data
from megatron.fsdp.comm.process_groups import new_group
from tests.ranks import RankPool

ENGINE = Path(megatron.fsdp.__file__).parent
NAMES = {"nccl", "gloo", "fake", "cuda", "cpu"}
# Packages that start programs or read files of other programs, and choose devices and process groups for them.
OUTSIDE = ("comm", "mcore", "checkpoint", "convert", "tools")
# The first replays the calls of a model's constructor, whose arguments contain devices. The second is for a library
# that needs CUDA, and compares the device with what the library's formats need.
EXCEPTIONS = ("init/deferred.py", "quantized/transformer_engine.py")


def _literals(file: Path) -> list[str]:
    texts = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
    return [f"{file.name}: {text}" for text in texts if isinstance(text, str) and text.partition(":")[0] in NAMES]


def test_device_and_backend_names_occur_in_comm_only() -> None:
    paths = {file.relative_to(ENGINE): file for file in ENGINE.rglob("*.py")}
    engine = [f for path, f in paths.items() if path.parts[0] not in OUTSIDE and path.as_posix() not in EXCEPTIONS]
    assert len(engine) > 40
    assert [found for file in engine for found in _literals(file)] == []


@pytest.mark.parametrize("config", ["cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"])
def test_a_group_has_a_backend_for_each_device(monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    group: dist.ProcessGroup = object()  # type: ignore[assignment]
    cpu, cuda = backend_of(group, torch.device("cpu")), backend_of(group, torch.device("cuda", 3))
    assert cpu.prefers_sends and not cpu.can_average and not cpu.ends_process
    assert cuda.can_average and cuda.registers_memory and cuda.ends_process
    assert not cuda.prefers_sends and not cuda.holds_tensors
    assert moves_data(group)


@pytest.mark.parametrize(
    ("given", "current", "devices", "expected"),
    [
        ("cuda", 0, 4, 2),  # nothing was chosen: by LOCAL_RANK
        ("cuda", 3, 4, 3),  # torch.cuda.set_device was called
        ("cuda", 0, 1, 0),  # the launcher shows each process a single device
        ("cuda:1", 0, 4, 1),
    ],
)
def test_a_process_computes_on_its_own_device(
    monkeypatch: pytest.MonkeyPatch, given: str, current: int, devices: int, expected: int
) -> None:
    chosen: list[int] = []
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1] if chosen else current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert local_device(given) == torch.device("cuda", expected)
    # Collectives of objects, and tensors that the user makes, go to the current device.
    assert chosen == ([2] if expected == 2 else [])
    assert local_device("cpu") == torch.device("cpu")


def _of_real_groups() -> list[tuple[str, bool]]:
    groups = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([0, 1], backend="cpu:gloo")]
    found = [backend_of(group, torch.device("cpu")) for group in groups if group is not None and moves_data(group)]
    assert groups[0] is not None and backend_of(groups[0], torch.device("meta")).name == ""
    return [(backend.name, backend.prefers_sends) for backend in found]


@pytest.mark.skipif(torch.cuda.is_available(), reason="groups over gloo on the CPU")
def test_gloo_is_recognized_in_every_kind_of_group(ranks: RankPool) -> None:
    assert ranks.run(2, _of_real_groups) == [[("gloo", True)] * 3] * 2


def _without_split() -> tuple[list[None], list[int]]:
    """Two of three ranks make a group, after ``init_process_group`` was given a device."""
    everyone, bound = dist.distributed_c10d._get_default_group(), torch.device("cuda", 0)
    everyone.bound_device_id = bound
    asked: list[None] = []
    ranks: list[int] = []
    with patch.object(dist.distributed_c10d, "_get_split_source", lambda group: asked.append(None)):
        if dist.get_rank():
            ranks = dist.get_process_group_ranks(new_group([1, 2], everyone, "test"))
        assert everyone.bound_device_id == bound
    everyone.bound_device_id = None
    return asked, ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="groups over gloo on the CPU")
def test_a_new_group_is_no_split_of_all_ranks(ranks: RankPool) -> None:
    """A split of NCCL's communicator waits for all of its ranks."""
    assert ranks.run(3, _without_split) == [([], []), ([], [1, 2]), ([], [1, 2])]
