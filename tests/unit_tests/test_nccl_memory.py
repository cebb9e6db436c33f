"""Registration with NCCL, on stand-ins that have the interface of torch's NCCL backend and memory pools."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.comm.registered_memory import NcclMemory


class Backend:
    """A mocked backend that records registrations."""

    mem_allocator = "the allocator"

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def register_mem_pool(self, pool: str, **options: Any) -> None:
        self.calls.append((f"register {pool}", options))

    def deregister_mem_pool(self, pool: str) -> None:
        self.calls.append((f"deregister {pool}", {}))


class Group:
    """A process group with such a backend."""

    def __init__(self, kind: str = "nccl") -> None:
        self.kind, self.backend = kind, Backend()

    def _get_backend(self, device: torch.device) -> Backend:
        return self.backend


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: f"cpu:gloo,cuda:{group.kind}")
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: nullcontext(pool))
    return [Group(), Group()]


@pytest.mark.parametrize("symmetric", [True, False])
def test_memory_is_registered_with_every_group_and_again_only_after_allocations(
    groups: list[Any], symmetric: bool
) -> None:
    memory = NcclMemory(groups, torch.device("cuda", 0), symmetric)
    with memory.allocation() as pool:
        assert pool == "pool of the allocator"
    memory.register(3)
    memory.register(3)
    memory.register(4)
    options: dict[str, Any] = {"symm": True} if symmetric else {}
    register, nothing = (f"register {pool}", options), dict[str, Any]()
    deregister = (f"deregister {pool}", nothing)
    for group in groups:
        assert group.backend.calls == [register, deregister, register]


def test_other_backends_are_refused(groups: list[Any]) -> None:
    with pytest.raises(ValueError, match="expected NCCL as the backend; got 'gloo'"):
        NcclMemory([*groups, Group("gloo")], torch.device("cuda", 0), True)
