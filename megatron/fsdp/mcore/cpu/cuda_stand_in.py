"""What Megatron sees as torch.cuda when there is none: finished streams, real clocks, this process' memory."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import psutil
import torch

CPU = torch.device("cpu")

# Megatron asks the architecture only to demand settings of older GPUs (CUDA_DEVICE_MAX_CONNECTIONS=1 before 10.x).
CAPABILITY = (10, 0)


class Stream:
    """A stream whose work is always finished: on a CPU an operation is over when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept what torch.cuda.Stream accepts (device, priority) and keep nothing of it."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the only priority there is, as (least, greatest)."""
        return (0, 0)

    def wait_stream(self, stream: Any) -> None:
        """Return at once: the other stream's work is finished."""

    def wait_event(self, event: Any) -> None:
        """Return at once: what the event marks is finished."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that holds the present time."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: nothing is in flight."""
        return True


class Event:
    """A point in time, so that elapsed_time() tells the truth."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept what torch.cuda.Event accepts (enable_timing, blocking) and note the present time."""
        self.seconds = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Note the present time."""
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to `end`."""
        return (end.seconds - self.seconds) * 1e3

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: what the event marks is finished."""
        return True


class Generators:
    """torch.cuda.default_generators: whatever the device, the CPU's one default generator."""

    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator


class Profiler:
    """torch.cuda.cudart(): any function of it can be called and reports success."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args: 0


class NoTriton:
    """Stands in for triton and everything in it: decorators return the function as it is, which must not be called."""

    def __getattr__(self, name: str) -> NoTriton:
        return self

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as it is."""
        return function


THE_STREAM = Stream()


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: there is no device to act on, or its work is already done."""


def yes() -> bool:
    """Answer True."""
    return True


def no() -> bool:
    """Answer False."""
    return False


def unknown(device: Any = None) -> int:
    """Stand in for a sensor's reading: 0."""
    return 0


def current_device(*args: Any) -> torch.device:
    """Return the CPU as a device object, which every `device=` argument and `.to()` accepts."""
    return CPU


def device_count() -> int:
    """Return the number of processes of this machine: each of them has its own 'device'."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def current_stream(*args: Any) -> Stream:
    """Return the one stream."""
    return THE_STREAM


def in_context(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """Return a context that changes nothing: a CPU has no streams or devices to select."""
    return nullcontext()


def call(function: Callable[[], None], **kwargs: Any) -> None:
    """Call what torch.cuda would put off until CUDA is initialized."""
    function()


def device_name(device: Any = None) -> str:
    """Return the name of the 'device'."""
    return "CPU"


def capability(device: Any = None) -> tuple[int, int]:
    """Return the architecture's (major, minor)."""
    return CAPABILITY


def device_properties(device: Any = None) -> SimpleNamespace:
    """Return the properties Megatron reads: name, architecture, memory in bytes, processors."""
    return SimpleNamespace(
        name=device_name(),
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=os.cpu_count() or 1,
    )


def resident_bytes(device: Any = None) -> int:
    """Return the bytes of this process that are in memory now."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes(device: Any = None) -> int:
    """Return the most bytes of this process that were ever in memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    # The kernel updates the maximum late, so that it can lie below the present value.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, resident_bytes())


def used_machine_bytes(device: Any = None) -> int:
    """Return the bytes of the machine's memory that are in use, by any process."""
    return psutil.virtual_memory().used


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return the memory statistics Megatron logs. The allocation count is not known and is 0."""
    now, peak = resident_bytes(), peak_resident_bytes()
    return {
        "allocated_bytes.all.current": now,
        "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": now,
        "reserved_bytes.all.peak": peak,
        "allocation.all.current": 0,
    }


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Return the state of the CPU's random numbers."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Set the state of the CPU's random numbers."""
    torch.set_rng_state(new_state)


def manual_seed(seed: int) -> None:
    """Seed the CPU's random numbers."""
    torch.manual_seed(seed)
