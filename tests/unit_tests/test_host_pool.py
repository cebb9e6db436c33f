"""The pool of temporary buffers on a CPU: what is freed is used again, is bounded, and never has two users."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.fsdp.buffers.pool import HostPool
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import MegatronFSDP, fully_shard
from tests.models import Block, TinyModel, batches, loss_of, sgd
from tests.ranks import DEVICE, RankPool, on_ranks

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the pool of a CPU")

CPU = torch.device("cpu")


def _scratch(pool: HostPool, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return pool.scratch(numel, dtype, CPU)


def test_memory_is_lent_again_to_buffers_of_its_size() -> None:
    pool = HostPool(keeps_gradients=False)
    first = _scratch(pool, 1000)
    place = first.data_ptr()
    pool.give_back(first)
    second = _scratch(pool, 2000, torch.bfloat16)
    assert second.data_ptr() == place and second.shape == (2000,)
    assert _scratch(pool, 1000).data_ptr() != place  # it is in use


@pytest.mark.skipif(not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="needs a newer torch")
def test_views_of_unsharded_weights_see_the_memory_that_they_get() -> None:
    pool = HostPool(keeps_gradients=False)
    other = pool.reserve(1000, torch.float32, CPU).fill_(1.0)  # without unsharded weights, nothing would be kept
    flat = pool.reserve(1000, torch.float32, CPU)
    view, place = flat[10:20], flat.data_ptr()
    pool.free(flat)
    assert flat.untyped_storage().nbytes() == 0
    taken = _scratch(pool, 1000)
    assert taken.data_ptr() == place
    pool.give_back(taken.fill_(3.0))
    pool.allocate(flat)
    assert flat.data_ptr() == place and view.tolist() == [3.0] * 10
    pool.allocate(flat)  # it has memory
    assert other.tolist() == [1.0] * 1000


def _given_back(pool: HostPool, numel: int) -> StorageWeakRef:
    tensor = _scratch(pool, numel)
    pool.give_back(tensor)
    return StorageWeakRef(tensor.untyped_storage())


def test_new_memory_takes_the_place_of_as_much_that_is_kept() -> None:
    pool = HostPool(keeps_gradients=False)
    taken = [_scratch(pool, 1000) for _ in range(3)]
    kept = [StorageWeakRef(tensor.untyped_storage()) for tensor in taken]
    while taken:
        pool.give_back(taken.pop(0))
    _scratch(pool, 1500)
    assert [reference.expired() for reference in kept] == [True, True, False]


def test_nothing_is_kept_once_weights_are_resharded_or_gradients_reduced() -> None:
    pool = HostPool(keeps_gradients=False)
    weights = [pool.reserve(10, torch.float32, CPU) for _ in range(2)]
    pool.free(weights[0])
    kept = _given_back(pool, 1000)
    assert not kept.expired()
    pool.free(weights[1])
    assert kept.expired()
    kept = _given_back(pool, 1000)
    pool.trim()
    assert kept.expired()


def test_empty_buffers_are_no_ones_memory() -> None:
    pool = HostPool(keeps_gradients=False)
    for tensor in [_scratch(pool, 0), _scratch(pool, 0)]:
        pool.give_back(tensor)
    assert _scratch(pool, 0).numel() == 0


# Gradients that are not sharded ------------------------------------------------------------------------------------


def _with_full_gradients() -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    model = TinyModel()
    return fully_shard(model, sgd(model.parameters()), fsdp_unit_modules=[Block], zero_dp_strategy="no_shard")


def _places() -> list[list[int]]:
    """Addresses of all gradients in each step, while other tensors take every memory that is freed."""
    sharded, optimizer = _with_full_gradients()
    places, taken = [], []
    for step in batches(steps=3, per_step=1):
        loss_of(sharded, step[0]).backward()
        places.append([local_shard(parameter.grad).data_ptr() for parameter in sharded.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        taken += [torch.empty(group.layout.numel) for group in sharded.engine.groups for _ in range(2)]
    return places


def test_full_gradients_keep_their_memory(ranks: RankPool) -> None:
    for places in ranks.run(2, _places):
        assert places[0] == places[1] == places[2]


@on_ranks(2)
def test_gradients_that_a_user_keeps_are_not_overwritten() -> None:
    sharded, optimizer = _with_full_gradients()
    kept, copies = [], []
    for step in batches(steps=3, per_step=1):
        loss_of(sharded, step[0]).backward()
        kept.append([parameter.grad for parameter in sharded.parameters()])
        copies.append([local_shard(grad).clone() for grad in kept[-1]])
        optimizer.step()
        optimizer.zero_grad()
    for step, copied in zip(kept, copies, strict=True):
        for grad, copy in zip(step, copied, strict=True):
            assert torch.equal(local_shard(grad), copy)


@on_ranks(2)
def test_gradients_that_stay_are_added_to() -> None:
    sharded, optimizer = _with_full_gradients()
    for step in batches(steps=3, per_step=1):
        loss_of(sharded, step[0]).backward()
        loss_of(sharded, step[0]).backward()
        twice = [local_shard(parameter.grad).sum().item() for parameter in sharded.parameters()]
        optimizer.zero_grad(set_to_none=False)
        loss_of(sharded, step[0]).backward()
        once = [local_shard(parameter.grad).sum().item() for parameter in sharded.parameters()]
        assert twice == pytest.approx([2 * value for value in once], rel=1e-4, abs=1e-5)
        optimizer.zero_grad(set_to_none=False)
