"""After an exception in any place, all units are resharded, no communication is in flight, and training continues."""

import copy
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import megatron.fsdp.buffers.weights as weights
from megatron.fsdp.comm.streams import CpuStream
from megatron.fsdp.comm.streams import _CpuHandle as CpuHandle
from megatron_fsdp import MegatronFSDP, fully_shard
from tests.exchanges import wrapped
from tests.models import STRATEGIES, Block, Pair, TinyModel, adamw, batches, device, loss_of, without_collector
from tests.ranks import DEVICE, RankPool, on_ranks


class Fragile(Block):
    """A block that raises in forward or backward on request."""

    forward_error: type[BaseException] | None = None
    backward_error: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.norm(x))
        if self.forward_error is not None:
            raise self.forward_error("in forward")
        if self.backward_error is not None:
            x.register_hook(self._raise)
        return self.down(x)

    def _raise(self, grad: torch.Tensor) -> None:
        assert self.backward_error is not None
        raise self.backward_error("in backward")


class FragileModel(TinyModel):
    """A model of such blocks, recomputed or not."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__(depth=4)
        self.blocks = nn.ModuleList(Fragile(13) for _ in range(4))
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


@contextmanager
def _failing(model: nn.Module, which: int, where: str, error: type[BaseException]) -> Iterator[None]:
    block = model.blocks[which]
    setattr(block, f"{where}_error", error)
    try:
        with pytest.raises(error, match=f"in {where}"):
            yield
    finally:
        setattr(block, f"{where}_error", None)


def _assert_sharded(sharded: MegatronFSDP) -> None:
    """All units are sharded, no handle is kept, and no temporary buffer has memory once the stream is empty."""
    assert [unit.label for unit in sharded.engine.units if unit.state.value != "sharded" or unit._depth] == []
    assert not sharded.engine.schedule.reducing and sharded.engine.schedule.passes.kept is None
    sharded.engine.context.stream.run(lambda: None).wait()
    for group in sharded.engine.groups:
        assert not group.has_gradients()
        if group.weights.temporary:
            assert not group.weights.unsharding
            assert group.weights.compute.flat.untyped_storage().nbytes() == 0
        for module, attribute in (site for entry in group.params for site in entry.sites):
            assert any(getattr(module, attribute) is entry.main for entry in group.params)


def _assert_no_gradients(sharded: MegatronFSDP) -> None:
    for group in sharded.engine.groups:
        kept = group.gradients
        kept.wait()
        assert kept.reduced is None and kept.unreduced is None and not kept.owed and not any(group.used)


class Fragiles(Pair):
    """A pair of fragile models; ``model`` is the sharded one, without its wrapper."""

    def __init__(self, strategy: str, recompute: bool = False) -> None:
        self.model = FragileModel(recompute)
        super().__init__(self.model, zero_dp_strategy=strategy)

    def zero_grad(self) -> None:
        for _, optimizer in self.sides:
            optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("error", "which", "direct"),
    [(ValueError, 0, False), (ValueError, 3, True), (KeyboardInterrupt, 1, False), (KeyboardInterrupt, 2, True)],
)
def test_exception_in_a_unit(strategy: str, where: str, error: type[BaseException], which: int, direct: bool) -> None:
    """``direct``: the test calls the wrapped model, so the wrapper does not see the exception."""
    pair = Fragiles(strategy)
    data = batches(steps=5, per_step=dist.get_world_size())
    for number, step in enumerate(data):
        if number in (0, 2):  # before there is a recorded plan, and after
            with _failing(pair.model, which, where, error):
                loss_of(pair.model if direct else pair.sharded, step[0]).backward()
            if where == "forward" and not direct:
                _assert_sharded(pair.sharded)
            pair.zero_grad()
        pair.backward(step, pair.model if direct else None)
        _assert_sharded(pair.sharded)
        _assert_no_gradients(pair.sharded)
        pair.update()
    pair.assert_same_weights()


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_exception_in_a_recomputed_forward(strategy: str) -> None:
    pair = Fragiles(strategy, recompute=True)
    for step in batches(steps=3, per_step=dist.get_world_size()):
        loss = loss_of(pair.sharded, step[0])
        with _failing(pair.model, 1, "forward", KeyError):  # not in forward itself, but where backward repeats it
            loss.backward()
        pair.zero_grad()
        pair.backward(step)
        _assert_sharded(pair.sharded)
        pair.update()
    pair.assert_same_weights()


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_other_micro_batches_outlive_an_exception_in_forward(strategy: str) -> None:
    """A micro-batch whose forward raises has no effect on the micro-batches before and after it."""
    pair = Fragiles(strategy)
    for step in batches(steps=3, per_step=2 * dist.get_world_size()):
        with pair.sharded.no_sync():
            pair.backward(step[:2])
        with _failing(pair.model, 2, "forward", ValueError):
            loss_of(pair.sharded, step[0])
        pair.backward(step[2:])
        pair.update()
    pair.assert_same_weights()


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("where", "error", "direct"), [("backward", ValueError, False), ("forward", KeyboardInterrupt, True)]
)
def test_backward_after_a_failed_pass(strategy: str, where: str, error: type[BaseException], direct: bool) -> None:
    """The backward after a failed pass belongs to an earlier forward: no forward begins in between."""
    pair = Fragiles(strategy)
    for step in batches(steps=3, per_step=dist.get_world_size()):
        losses = [loss_of(pair.reference, tokens) / len(step) for tokens in step]
        kept = loss_of(pair.sharded, step[dist.get_rank()])
        with _failing(pair.model, 1, where, error):
            loss_of(pair.model if direct else pair.sharded, step[0]).backward()
        pair.zero_grad()
        kept.backward()
        sum(losses).backward()
        _assert_sharded(pair.sharded)
        pair.update()
    pair.assert_same_weights()


@contextmanager
def _failing_collective(name: str, number: int) -> Iterator[None]:
    """The collective raises in its ``number``-th call on every rank."""
    calls = 0

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                raise ConnectionError("collective failed")
            original(*args)

        return call

    with wrapped(**{name: failing}), pytest.raises(ConnectionError, match="collective failed"):
        yield


def _collective_fails(strategy: str, name: str, direct: bool) -> None:
    pair = Fragiles(strategy)
    data = batches(steps=6, per_step=dist.get_world_size())
    for number, step in enumerate(data):
        with _failing_collective(name, 1 + number % 5):
            loss_of(pair.model if direct else pair.sharded, step[0]).backward()
        pair.zero_grad()
        pair.backward(step, pair.model if direct else None)
        _assert_sharded(pair.sharded)
        _assert_no_gradients(pair.sharded)
        pair.update()
    pair.assert_same_weights()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_failed_reduction_reaches_the_caller(ranks: RankPool, strategy: str) -> None:
    name = "all_reduce" if strategy == "no_shard" else "reduce_scatter"
    ranks.run(2, _collective_fails, strategy, name, False)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("direct", [False, True])
def test_failed_gather_reaches_the_caller(ranks: RankPool, strategy: str, direct: bool) -> None:
    ranks.run(2, _collective_fails, strategy, "all_gather", direct)


@contextmanager
def _failing_method(owner: type, name: str) -> Iterator[None]:
    """The method raises in its first call, as an allocation does that runs out of memory."""
    original = getattr(owner, name)

    def call(*args: Any) -> None:
        setattr(owner, name, original)
        raise MemoryError("no memory left")

    setattr(owner, name, call)
    try:
        with pytest.raises(MemoryError, match="no memory left"):
            yield
    finally:
        setattr(owner, name, original)


def _gathers_again(strategy: str, outer: str | None, owner: type, name: str) -> None:
    """A unit whose unshard failed is unsharded again after the error, from the main weights at that time."""
    arguments: dict[str, Any] = {"fsdp_unit_modules": [Block], "zero_dp_strategy": strategy}
    if outer is not None:
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("outer", "inner"))
        arguments |= {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
        arguments |= {"outer_dp_sharding_strategy": outer}
    start = TinyModel().to(device(), torch.bfloat16)
    models = []
    for _ in range(2):
        model = copy.deepcopy(start)
        models.append(fully_shard(model, torch.optim.SGD(model.parameters(), lr=1.0), **arguments))
    for tokens in batches(steps=3, per_step=1)[:, 0]:
        losses = []
        for number, (model, optimizer) in enumerate(models):
            if number:
                with _failing_method(owner, name):
                    loss_of(model, tokens)
            losses.append(loss_of(model, tokens))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unshard_after_a_failed_unshard(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _gathers_again, strategy, None, weights.WeightBuffer, "_cast_into")


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
@pytest.mark.parametrize("where", [(weights.WeightBuffer, "_cast_into"), (weights.FlatBuffer, "allocate")])
def test_unshard_after_a_failed_unshard_over_two_axes(ranks: RankPool, outer: str, where: tuple[type, str]) -> None:
    ranks.run(4, _gathers_again, "optim_grads_params", outer, *where)


@contextmanager
def _interrupted_wait(number: int) -> Iterator[None]:
    """Ctrl-C interrupts the ``number``-th wait of the main thread, while the task continues for some time."""
    wait, run, waits = CpuHandle.wait, CpuStream.run, 0

    def interrupted(self: CpuHandle) -> None:
        nonlocal waits
        waits += 1
        if waits == number:
            raise KeyboardInterrupt
        wait(self)

    with (
        patch.object(CpuHandle, "wait", interrupted),
        patch.object(CpuStream, "run", lambda self, task: run(self, lambda: (time.sleep(0.005), task())[1])),
        pytest.raises(KeyboardInterrupt),
    ):
        yield


@on_ranks(2)
@pytest.mark.skipif(DEVICE == "cuda", reason="the host does not wait for a CUDA stream")
@pytest.mark.parametrize(("strategy", "last"), [("no_shard", 5), ("optim_grads", 10), ("optim_grads_params", 13)])
def test_interrupt_while_waiting_for_communication(strategy: str, last: int) -> None:
    """The numbers of unshards and reductions: 5 in forward, 3 in backward, and 5, if the strategy has them."""
    pair = Fragiles(strategy)
    for number, step in enumerate(batches(steps=last, per_step=dist.get_world_size()), start=1):
        with _interrupted_wait(number):
            loss_of(pair.sharded, step[0]).backward()
        pair.zero_grad()
        pair.backward(step)
        _assert_sharded(pair.sharded)
        _assert_no_gradients(pair.sharded)
        pair.update()
    pair.assert_same_weights()


def _raise(*args: Any) -> None:
    raise ValueError("collective failed")


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("what", ["forward", "backward", "collective"])
def test_model_that_is_deleted_after_an_exception_is_freed(strategy: str, what: str) -> None:
    """A cycle through an error and its traceback would not be freed, because the garbage collector is off."""
    adamw([nn.Parameter(torch.zeros(1))])  # torch's own first optimizer is kept by an import that it tries
    failing = wrapped(all_gather=lambda original: _raise, all_reduce=lambda original: _raise)
    with without_collector():
        pair = Fragiles(strategy)
        tokens = batches(1, 1)[0, 0]
        pair.backward(tokens[None].expand(2, -1, -1))
        if what == "collective":
            failing.__enter__()
        else:
            setattr(pair.model.blocks[1], f"{what}_error", ValueError)
        try:  # pytest.raises would keep the error
            loss_of(pair.sharded, tokens).backward()
        except ValueError:
            failed = True
        kept = [weakref.ref(t) for g in pair.sharded.engine.groups for t in (g.weights.compute.flat, g.weights.main)]
        kept += [weakref.ref(each) for each in (pair.sharded, pair.model, *pair.sharded.engine.groups)]
        del pair
        deadline = time.monotonic() + 2
        while any(reference() is not None for reference in kept) and time.monotonic() < deadline:
            time.sleep(0.001)
        alive = [type(reference()).__name__ for reference in kept if reference() is not None]
        assert failed and not alive, alive
    if what == "collective":
        failing.__exit__(None, None, None)
