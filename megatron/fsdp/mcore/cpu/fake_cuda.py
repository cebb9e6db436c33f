"""Replacements for names of ``torch.cuda`` on a CPU: finished streams, real clocks, this process' memory."""

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

# Megatron reads the architecture only to demand settings for older GPUs (CUDA_DEVICE_MAX_CONNECTIONS=1 before 10.x).
CAPABILITY = (10, 0)
NAME = "CPU"


class Stream:
    """A stream whose work is always finished: on a CPU an operation is finished when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept the arguments of torch.cuda.Stream (device, priority) and ignore them."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the only priority there is, as (least, greatest)."""
        return (0, 0)

    def wait_stream(self, stream: Any) -> None:
        """Return at once: the other stream's work is finished."""

    def wait_event(self, event: Any) -> None:
        """Return at once: the work before the event is finished."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event with the present time."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: nothing is in flight."""
        return True


class Event:
    """A point in time, so that elapsed_time() is right."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept the arguments of torch.cuda.Event (enable_timing, blocking) and note the present time."""
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
        """Return True: the work before the event is finished."""
        return True


class Generators:
    """torch.cuda.default_generators: the CPU's default generator for every device."""

    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator


class Profiler:
    """torch.cuda.cudart(): any function of it can be called and reports success."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args: 0


class NoTriton:
    """triton and everything in it: decorators return the function unchanged, and it must not be called."""

    def __getattr__(self, name: str) -> NoTriton:
        return self

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function unchanged."""
        return function


THE_STREAM = Stream()


def always(value: Any) -> Callable[..., Any]:
    """A function that returns ``value``, whatever it is called with."""
    return lambda *args, **kwargs: value


# There is no device to act on, or its work is already done.
nothing = always(None)


def current_device() -> torch.device:
    """Return the CPU."""
    return CPU


def device_count() -> int:
    """Return the number of processes on this machine: each of them has its own "device"."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def in_context(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """Return a context that changes nothing: a CPU has no streams or devices to select."""
    return nullcontext()


def call(function: Callable[[], None], **kwargs: Any) -> None:
    """Call a function that torch.cuda would call later, when CUDA is initialized."""
    function()


def device_properties(device: Any = None) -> SimpleNamespace:
    """Return the properties that Megatron reads: name, architecture, memory in bytes, processors."""
    return SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=os.cpu_count() or 1,
    )


def resident_bytes(device: Any = None) -> int:
    """Return the bytes of this process that are in memory now."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes(device: Any = None) -> int:
    """Return the largest number of bytes of this process that have been in memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    # The kernel updates the maximum late, so it can be below the present value.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, resident_bytes())


def used_machine_bytes(device: Any = None) -> int:
    """Return the bytes of the machine's memory that any process uses."""
    return psutil.virtual_memory().used


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return the memory statistics that Megatron logs. The number of allocations is unknown and 0."""
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
