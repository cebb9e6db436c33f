"""Streams: order, errors, and asynchrony."""

import threading
import time

import pytest
import torch

from megatron.fsdp.comm.streams import CpuStream, InlineStream


def test_tasks_run_in_order_beside_the_caller() -> None:
    stream, order, gate = CpuStream(), [], threading.Event()
    first = stream.run(lambda: (gate.wait(10), order.append("first")))
    second = stream.run(lambda: order.append("second"))
    order.append("caller")
    gate.set()
    second.wait()
    first.wait()
    assert order == ["caller", "first", "second"]


def test_wait_returns_when_the_task_is_done() -> None:
    stream, done = CpuStream(), []
    stream.run(lambda: (time.sleep(0.05), done.append(1))).wait()
    assert done == [1]


def test_error_of_a_task_is_raised_where_it_is_waited_for_and_the_stream_goes_on() -> None:
    stream, done = CpuStream(), []

    def fail() -> None:
        raise ValueError("collective failed")

    failed, after = stream.run(fail), stream.run(lambda: done.append(1))
    after.wait()
    assert done == [1]
    with pytest.raises(ValueError, match="collective failed"):
        failed.wait()


@pytest.mark.parametrize("stream", [CpuStream(), InlineStream()])
def test_tasks_record_no_gradients(stream: CpuStream | InlineStream) -> None:
    seen: list[bool] = []
    stream.run(lambda: seen.append(torch.is_grad_enabled())).wait()
    assert seen == [False]
