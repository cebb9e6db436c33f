"""Deleting a model frees its memory at once, without the garbage collector."""

import time
import weakref

import pytest
import torch

from megatron_fsdp import MegatronFSDP
from tests.models import STRATEGIES, TinyModel, adamw, batches, loss_of, shard, without_collector
from tests.ranks import on_ranks


def _buffers(model: MegatronFSDP) -> list[weakref.ref]:
    return [
        weakref.ref(tensor)
        for group in model.engine.groups
        for tensor in (group.weights.compute.flat, group.weights.main, *[e.main for e in group.params])
    ]


def _freed(buffers: list[weakref.ref]) -> bool:
    # gloo's own threads let go of the last collective's tensors a moment after it is done.
    deadline = time.monotonic() + 2
    while any(buffer() is not None for buffer in buffers) and time.monotonic() < deadline:
        time.sleep(0.001)
    return all(buffer() is None for buffer in buffers)


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("when", ["built", "forward", "backward", "step"])
def test_deletion(strategy: str, when: str) -> None:
    # torch's own first optimizer of a process is kept by the frames of an import that it tries.
    adamw([torch.nn.Parameter(torch.zeros(1))])
    with without_collector():
        model = TinyModel(tied=True)
        module = weakref.ref(model)
        sharded, optimizer = shard(model, strategy)
        buffers = _buffers(sharded)
        owner = weakref.ref(sharded)
        loss = None
        if when != "built":
            loss = loss_of(sharded, batches(1, 1)[0, 0])
        if when in ("backward", "step"):
            loss.backward()
        if when == "step":
            optimizer.step()
        # The loss stays: a graph that is still there must not keep the model.
        del model, sharded, optimizer
        if when != "forward":
            assert _freed(buffers)
        assert owner() is None and module() is None
        del loss
        assert _freed(buffers)


def test_stream_keeps_no_task() -> None:
    from megatron.fsdp.comm.streams import CpuStream

    stream = CpuStream()
    tensor = torch.zeros(3)
    reference = weakref.ref(tensor)
    stream.run(lambda t=tensor: t.add_(1)).wait()
    del tensor
    stream.run(lambda: None).wait()
    assert reference() is None
