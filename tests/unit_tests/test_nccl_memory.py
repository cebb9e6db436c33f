"""Registration with NCCL, on mocks that have the interface of torch's NCCL backend and memory pools."""

import gc
import logging
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp.buffers.pool import FixedPool, sufficient
from megatron.fsdp.comm import registered_memory
from megatron.fsdp.comm.registered_memory import NcclMemory, check_can_register
from megatron_fsdp import FSDPConfig, FSDPDistributedIndex, MegatronFSDP
from tests.models import TinyModel, logged
from tests.nccl_recorder import Communicator, Event, Recorder, assert_alike
from tests.ranks import RankPool, on_ranks

CPU = torch.device("cpu")


class Group:
    """A process group of the given backend for CUDA tensors."""

    def __init__(self, kind: str = "nccl") -> None:
        self.kind = kind


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: f"cpu:gloo,cuda:{group.kind}")
    return [Group(), Group()]


def test_groups_with_several_backends_are_recognized(groups: list[Any]) -> None:
    check_can_register(groups, torch.device("cuda", 1))
    with pytest.raises(ValueError, match="expected NCCL as the backend; got 'gloo'"):
        check_can_register([*groups, Group("gloo")], torch.device("cuda", 1))


def test_torch_must_not_register_everything_besides(groups: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "1")
    with pytest.raises(ValueError, match="HOOK torch registers the memory, too. Unset it"):
        check_can_register(groups, torch.device("cuda", 1))


class Backend:
    mem_allocator = "the allocator"
    has_multicast = True

    def __init__(self, calls: list[str], number: int) -> None:
        self.calls, self.number = calls, number

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return self.has_multicast

    def register_mem_pool(self, pool: str, **options: Any) -> None:
        self.calls.append(f"register with {self.number} {options}")

    def deregister_mem_pool(self, pool: str) -> None:
        self.calls.append(f"deregister from {self.number}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of two backends and of torch.cuda, in order."""
    found: list[str] = []

    @contextmanager
    def current(device: torch.device) -> Any:
        found.append(f"current device {device}")
        yield
        found.append("device before")

    def use(pool: str, device: torch.device) -> Any:
        found.append(f"allocate in {pool} on {device}")
        return nullcontext()

    monkeypatch.setattr(registered_memory, "nccl_backends", lambda groups, device: [Backend(found, i) for i in (0, 1)])
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: found.append(f"pool of {allocator}") or "the pool")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.append(f"synchronize {device}"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append("empty the cache"))
    return found


@pytest.mark.parametrize("symmetric", [True, False])
def test_everything_is_done_on_the_models_device(calls: list[str], symmetric: bool) -> None:
    memory = NcclMemory([], torch.device("cuda", 1))
    memory.allocate(lambda: calls.append("free"), lambda: calls.append("allocate"))
    memory.register(symmetric)
    assert memory.registered
    options = {"symm": True} if symmetric else {}
    assert calls == [
        *("synchronize cuda:1", "free", "empty the cache"),
        *("current device cuda:1", "pool of the allocator", "device before"),
        *("allocate in the pool on cuda:1", "allocate"),
        *("synchronize cuda:1", f"register with 0 {options}"),
        *("synchronize cuda:1", f"register with 1 {options}"),
    ]
    calls.clear()
    del memory
    end = ["synchronize cuda:1", "deregister from 0", "deregister from 1"]
    assert calls == end
    registered_memory.deregister_all()
    assert calls == end


def test_without_multicast_memory_of_torchs_allocator_is_registered(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backend, "has_multicast", False)
    memory = NcclMemory([], torch.device("cuda", 1))
    memory.allocate(lambda: None, lambda: None)
    assert "pool of None" in calls and not memory.has_multicast


def test_after_an_error_the_groups_end_without_waiting_for_the_device(calls: list[str]) -> None:
    memory = NcclMemory([], torch.device("cuda", 1))
    memory.allocate(lambda: None, lambda: None)
    memory.register(True)
    calls.clear()
    try:
        raise RuntimeError("a collective failed")
    except RuntimeError:
        registered_memory.deregister_all()
    del memory
    assert calls == []


def test_buffers_suffice_for_every_rank() -> None:
    first, second = FixedPool(2, CPU), FixedPool(2, CPU)
    for pool, sizes in ((first, [10, 40]), (second, [30, 20, 5])):
        taken = [pool.scratch(size, torch.float32, CPU, True) for size in sizes]
        pool.give_back(taken[0])
        pool.for_unit(0, 1, inner_apart=False).reserve(sizes[0], torch.float32, CPU)
    merged = sufficient([first.buffers(), second.buffers()])
    assert [size for *_, size in merged] == [120, 5, 20, 40]
    slot = first.for_unit(0, 1, inner_apart=False).reserve(10, torch.float32, CPU)
    first.renew(merged, CPU)
    assert first.buffers() == merged and not first.grown
    assert slot.untyped_storage().nbytes() == 120
    # Parts of one allocation, in the order of the list.
    begin, *others = first.addresses()
    assert [other - begin for other in others] == [256, 512, 768]
    assert first.scratch(25, torch.float32, CPU, True).untyped_storage().nbytes() == 160
    assert not first.grown
    first.scratch(25, torch.float32, CPU, True)
    assert first.grown
    first.for_unit(0, 1, inner_apart=False).reserve(50, torch.float32, CPU)
    assert slot.untyped_storage().nbytes() == 200


# Training on recorders ---------------------------------------------------------------------------------------------


class Expert(nn.Linear):
    """Its parameters are marked as Megatron-Core marks experts."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        for parameter in self.parameters():
            parameter.allreduce = False


class Block(nn.Module):
    """Dense layers and an expert, which may have a different size on other expert-parallel ranks."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.expert = nn.LayerNorm(width), Expert(width, hidden)
        self.up, self.down = nn.Linear(width, 30), nn.Linear(30, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(self.up(y)) + self.expert(y).sum(-1, keepdim=True)


class Model(nn.Module):
    """Blocks, of which a rank can skip some."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(12, hidden) for _ in range(4))
        self.skipped: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x)
        return x


def _index(hybrid: bool) -> FSDPDistributedIndex:
    """Four ranks, with two expert-parallel ones that have experts of their own; or two times two of HSDP."""
    if hybrid:
        dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "dp"))
        experts = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("outer", "dp", "ep"))
        return FSDPDistributedIndex(
            dense, "dp", "outer", expt_device_mesh=experts, hsdp_outer_dp_shard=False, fsdp_group_ag=_second(dense)
        )
    dense = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    return FSDPDistributedIndex(
        dense, "dp", expt_device_mesh=experts, fsdp_group_ag=_second(dense), expt_fsdp_group_ag=_second(experts)
    )


def _second(mesh: Any) -> Any:
    """A second group for every row of the mesh's axis ``dp``; this rank's."""
    rows = mesh.mesh.movedim((mesh.mesh_dim_names or ()).index("dp"), -1).reshape(-1, mesh["dp"].size()).tolist()
    made = [dist.new_group(row) for row in rows]
    return next(group for group, row in zip(made, rows, strict=True) if dist.get_rank() in row)


def _sharded(model: nn.Module, index: FSDPDistributedIndex | None, **settings: Any) -> MegatronFSDP:
    config = FSDPConfig(nccl_ub=True, **settings)
    return MegatronFSDP(model, index, fsdp_unit_modules=[Block], device="cpu", config=config)


def _step(model: MegatronFSDP, micro_batches: int = 1, skipped: Callable[[int], tuple[int, ...]] | None = None) -> None:
    for number in range(micro_batches):
        model.module.skipped = () if skipped is None else skipped(number)
        model.is_last_microbatch = number == micro_batches - 1
        model(torch.ones(2, 12) * (1 + dist.get_rank())).sum().backward()
    model.finish_grad_sync()
    model.zero_grad_buffer()


def _skip(number: int) -> tuple[int, ...]:
    """Each rank skips another block, and all but one of the first micro-batch of the step."""
    return (dist.get_rank(),) if number else (dist.get_rank(), (dist.get_rank() + 1) % 4)


Record = tuple[list[Event], list[int]]


def _train(strategy: str, hybrid: bool, skips: bool, micro_batches: int, hidden: int = 12) -> Record:
    with Recorder().installed() as recorder:
        model = _sharded(Model(hidden), _index(hybrid), zero_dp_strategy=strategy, sync_model_each_microbatch=False)
        for _ in range(4):
            _step(model, micro_batches, _skip if skips else None)
        (pool,) = recorder.registered
        known = {each.group for each in recorder.events if each.what == "window"}
        used = {each.group for each in recorder.events if each.what in ("all_gather", "reduce_scatter")}
        assert used <= known
        del model
        gc.collect()
        assert recorder.registered == []
    return recorder.events, [segment.memory.nbytes() for segment in pool.segments]


@pytest.mark.parametrize("hybrid", [False, True], ids=["experts", "hybrid"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_all_groups_are_registered_alike_and_once(ranks: RankPool, strategy: str, hybrid: bool) -> None:
    found = ranks.run(4, _train, strategy, hybrid, False, 2)
    assert_alike([events for events, _ in found])
    for events, sizes in found:
        windows = [event for event in events if event.what == "window"]
        groups = {event.group for event in windows}
        # dense: inner, gather, and outer if hybrid; experts: likewise, with one gather group less if hybrid
        assert len(groups) == (5 if hybrid else 4)
        assert len(windows) == len(groups) * len(sizes), "each once"
        later = events[events.index(windows[-1]) :]
        reductions = [
            event for event in later if event.what == ("all_reduce" if strategy == "no_shard" else "reduce_scatter")
        ]
        assert any(event.details[0] is not None for event in reductions)
        assert all(None not in event.details for event in reductions if event.what == "reduce_scatter")


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_ranks_that_use_other_units_register_and_use_the_same_windows(ranks: RankPool, strategy: str) -> None:
    assert_alike([events for events, _ in ranks.run(4, _train, strategy, False, True, 2)])


def _unequal_experts() -> tuple[list[Event], bool]:
    warned: list[str] = []
    logger = logging.getLogger("megatron.fsdp.runtime.registration")
    with patch.object(logger, "warning", lambda *said: warned.append(said)), Recorder().installed() as recorder:
        model = _sharded(Model(12 + dist.get_rank() % 2), _index(False))
        _step(model)
        del model
    return recorder.events, bool(warned)


def test_experts_of_other_sizes_are_registered_without_windows(ranks: RankPool) -> None:
    for events, warned in ranks.run(4, _unequal_experts):
        assert warned
        assert {event.what for event in events} >= {"local", "deregister"}
        assert not any(event.what == "window" for event in events)


def _different_offsets(rank: int) -> tuple[list[Event], list[str]]:
    """One rank's pool gets another allocation before that of the buffers."""
    renew = FixedPool.renew

    def renew_late(pool: FixedPool, *args: Any) -> None:
        kept = torch.empty(4096) if dist.get_rank() == rank else None
        renew(pool, *args)
        del kept

    with logged() as texts, Recorder().installed() as recorder, patch.object(FixedPool, "renew", renew_late):
        model = _sharded(Model(12), _index(False))
        _step(model)
        del model
    return recorder.events, [text for text in texts if "different offsets" in text]


def test_buffers_at_different_offsets_are_registered_without_windows(ranks: RankPool) -> None:
    for events, texts in ranks.run(4, _different_offsets, 2):
        assert len(texts) == 1 and not any(event.what == "window" for event in events)


def _windows_fail(failing: list[int], also_local: bool) -> tuple[list[Event], list[str], torch.Tensor]:
    """Registering windows, or any, with the second group fails on these ranks, after a part of the segments."""
    register = Communicator.register_mem_pool

    def fail(self: Communicator, pool: Any, symm: bool = False) -> None:
        register(self, pool, symm)
        if (symm or also_local) and len(pool.registered_with) == 2 and dist.get_rank() in failing:
            raise RuntimeError("NCCL error: unhandled system error")

    with (
        logged() as texts,
        Recorder().installed() as recorder,
        patch.object(Communicator, "register_mem_pool", fail if failing else register),
    ):
        torch.manual_seed(3)
        model = _sharded(Model(12), _index(False), sync_model_each_microbatch=False)
        for _ in range(3):
            _step(model)
        for pool in recorder.registered:
            assert pool.windows is not bool(failing) and len(pool.registered_with) == 4
        assert len(recorder.registered) == (not also_local)
        weights = model(torch.ones(2, 12)).detach()
        del model
        gc.collect()
    return recorder.events, [text for text in texts if "register" in text], weights


@pytest.mark.parametrize("also_local", [False, True])
@pytest.mark.parametrize("failing", [[1], [0, 1, 2, 3]], ids=["one", "all"])
def test_all_ranks_register_local_memory_or_none_if_windows_fail(
    ranks: RankPool, failing: list[int], also_local: bool
) -> None:
    found = ranks.run(4, _windows_fail, failing, also_local)
    assert_alike([events for events, *_ in found])
    assert [len(texts) for _, texts, _ in found] == [1 + also_local, 0, 0, 0]
    assert "all ranks register local memory" in found[0][1][0]
    assert not also_local or "no rank registers memory" in found[0][1][1]
    for (events, _, output), (_, _, expected) in zip(found, ranks.run(4, _windows_fail, [], False), strict=True):
        assert len({event.group for event in events if event.what == "local"}) == (2 if also_local else 4)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)


def _added(registration: dict[str, bool]) -> tuple[list[Event], list[int], int]:
    with Recorder().installed() as recorder:
        model = _sharded(Model(12), _index(False), sync_model_each_microbatch=False, **registration)
        numbers = []
        for step in range(6):
            _step(model)
            if step == 2 and dist.get_rank() == 3:
                assert model.engine.pool is not None
                model.engine.pool.give_back(model.engine.pool.scratch(50_000, torch.float32, CPU, False))
            if registration.get("fsdp_manual_registration") and step in (0, 3):
                model.register_buffers()
            numbers.append(len(recorder.pools))
        (pool,) = recorder.registered
        del model
    return recorder.events, numbers, pool.largest


@pytest.mark.parametrize(
    "registration, expected",
    [
        # What is asked at the end of one step is answered at the end of the next.
        ({}, [1, 1, 1, 1, 2, 2]),
        ({"fsdp_manual_registration": True}, [1, 1, 1, 2, 2, 2]),
        ({"cuda_graph_mode": True}, [1, 1, 1, 1, 1, 1]),
    ],
    ids=["automatic", "manual", "graph"],
)
def test_a_buffer_of_one_rank_makes_all_ranks_register_again(
    ranks: RankPool, registration: dict[str, bool], expected: list[int]
) -> None:
    found = ranks.run(4, _added, registration)
    assert_alike([events for events, *_ in found])
    for _, pools, largest in found:
        assert pools == expected
        assert (largest >= 200_000) is (expected[-1] == 2)


def _too_little_memory() -> str:
    with Recorder().installed() as recorder:
        model = _sharded(Model(12), _index(False))
        failing = patch.object(FixedPool, "renew", side_effect=torch.OutOfMemoryError("no memory"))
        with failing if dist.get_rank() == 1 else nullcontext(), pytest.raises(RuntimeError) as caught:
            _step(model)
        assert recorder.registered == []
        del model
    return str(caught.value)


def test_all_ranks_raise_if_one_has_too_little_memory(ranks: RankPool) -> None:
    other = "nccl_ub: another rank could not allocate memory to register with NCCL."
    assert ranks.run(4, _too_little_memory) == [other, "no memory", other, other]


def _end_first() -> list[str]:
    with Recorder().installed() as recorder:
        model = _sharded(Model(12), _index(False))
        _step(model)
        assert recorder.registered
        dist.destroy_process_group()
        assert recorder.registered == []
        with pytest.MonkeyPatch.context() as patched:
            said: list[str] = []
            patched.setattr(registered_memory.logger, "warning", lambda *args: said.append(str(args)))
            del model
            gc.collect()
    return said


def test_a_model_may_end_after_the_process_groups(ranks: RankPool) -> None:
    assert ranks.run(4, _end_first) == [[]] * 4


@on_ranks(1)
def test_buffers_of_other_models_cannot_be_registered() -> None:
    model = MegatronFSDP(TinyModel(), fsdp_unit_modules=[], device="cpu")
    with pytest.raises(RuntimeError, match="register_buffers: expected nccl_ub=True"):
        model.register_buffers()
