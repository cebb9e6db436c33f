"""Mistakes that tests inject into the engine."""

from collections.abc import Callable

import pytest

from megatron.fsdp.buffers.weights import WeightBuffer
from megatron.fsdp.comm.streams import CudaStream, Handle, Task
from tests.simulated.streams import Stream


class Ended(Handle):
    """A handle whose wait has been left out."""

    def wait(self) -> None:
        pass

    @property
    def ended(self) -> bool:
        return True


def task_does_not_wait(run: Callable[..., Handle], stream: CudaStream, task: Task) -> Handle:
    """Run a task of a stream without its wait for the compute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "wait_stream", lambda *unused: None)
        return run(stream, task)


def no_wait_for_unshard(wait: Callable[..., None], weights: WeightBuffer) -> None:
    """``WeightBuffer.wait`` that does not wait."""
    weights.unsharding = {Ended(): planes for planes in weights.unsharding.values()}
    wait(weights)
