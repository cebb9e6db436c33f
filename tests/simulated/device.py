"""The simulated device: the dispatch mode that sees every kernel, and the names of torch that it replaces."""

import contextlib
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed.tensor import DTensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron.fsdp.comm import backends, journal, streams
from megatron.fsdp.dtensor import torch_patches
from megatron.fsdp.dtensor.ragged_dtensor import make_like
from megatron.fsdp.quantized.reference.base import ReferenceTensor
from tests.simulated.checker import HOST, Checker, Race, Range
from tests.simulated.kernels import Call
from tests.simulated.memory import Memory, Place, has_storage
from tests.simulated.streams import Event, Stream, StreamContext, Timeline

# Tensors of both are CPU tensors to torch. Only this model tells the two apart.
DEVICE = torch.device("cpu", 0)
HOST_DEVICE = torch.device("cpu")


class DeviceMismatch(AssertionError):
    """A kernel has tensors of the device and of the host, which CUDA refuses."""


class SimulatedDevice(TorchDispatchMode):
    """Computes on CPU tensors at once, and notes what CUDA would do when.

    Args:
        kernel_time: Time of a kernel on the device; a launch takes the host 1.

    Attributes:
        timeline: Streams, and the host's clock.
        memory: Storages, and the allocator.
        ignoring: The threads whose queries end no capture.
        on_kernel: Called after each kernel with the number of its stream, the operator, its arguments and its result.
    """

    def __init__(self, kernel_time: float = 1.0) -> None:
        super().__init__()
        self._checker = Checker()
        self.timeline = Timeline(self._checker, kernel_time)
        self.memory = Memory(self._checker, self.timeline)
        self.on_kernel: Callable[[int, Any, tuple, dict, Any], None] | None = None
        # Where the copy goes that is being made; torch itself does not know the difference.
        self._target: Place | None = None
        self.ignoring: set[threading.Thread] = set()
        # NCCL's stream of each process group, and what asynchronous collectives have recorded there.
        self._of_groups: dict[str, Stream] = {}
        self._works: dict[int, tuple[dist.Work, Event]] = {}

    @property
    def races(self) -> list[Race]:
        """The findings."""
        return self._checker.races

    @property
    def peak_bytes(self) -> int:
        """The most bytes of the device that were in use since :meth:`reset_peak`."""
        return self.memory.allocator.peak

    def reset_peak(self) -> None:
        """Count the peak from now on."""
        self.memory.allocator.peak = self.memory.allocator.active

    @contextlib.contextmanager
    def no_host_wait(self) -> Iterator[None]:
        """Context in which everything that makes the host wait for the device raises :class:`HostWait`."""
        before, self.timeline.forbids_waits = self.timeline.forbids_waits, True
        try:
            yield
        finally:
            self.timeline.forbids_waits = before

    # Kernels ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # They call operators on the tensors that they are made of.
        if any(issubclass(t, (DTensor, ReferenceTensor)) for t in types):
            return NotImplemented
        kwargs = dict(kwargs or {})
        call = Call.of(func, args, kwargs)
        ranges = [[self._range(t) for t in tensors] for tensors in (call.reads, call.writes)]
        result = func(*args, **kwargs)
        new = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and self._is_new(t, call)]
        on_device = self._is_kernel(call)
        for tensor in new:
            self.memory.add(tensor, self._place_of_result(call, on_device))
        on_device |= any(self.memory.place(t) is Place.DEVICE for t in new)
        if call.writes_result:
            ranges[1] += [self._range(t) for t in new]
        reads, writes = ([r for r in found if r is not None] for found in ranges)
        if not reads and not writes:
            return result
        if on_device and call.group is not None:
            self._run_beside(call, reads, writes, result)
        elif on_device:
            self._run_kernel(call, reads, writes, new)
            if self.on_kernel is not None:
                self.on_kernel(self.timeline.current[-1].number, func, args, kwargs, result)
        else:
            self._checker.launch(HOST, call.name, reads, writes)
        return result

    def _range(self, tensor: torch.Tensor) -> Range | None:
        return self.memory.bytes_of(tensor) if has_storage(tensor) else None

    def _is_new(self, tensor: torch.Tensor, call: Call) -> bool:
        return has_storage(tensor) and not call.views and not self.memory.knows(tensor)

    def _is_kernel(self, call: Call) -> bool:
        return any(has_storage(t) and self.memory.place(t) is Place.DEVICE for t in call.inputs)

    def _place_of_result(self, call: Call, on_device: bool) -> Place:
        if self._target is not None:
            return self._target
        if call.pinned:
            return Place.PINNED
        return Place.DEVICE if on_device or call.device == DEVICE else Place.PAGEABLE

    def _run_kernel(self, call: Call, reads: list[Range], writes: list[Range], new: list[torch.Tensor]) -> None:
        """Run a kernel on the current stream. The host reads what it passes by value, and makes it wait for copies."""
        places = {self.memory.place(t) for t in [*call.reads, *call.writes, *new] if t.dim() or call.copies}
        stream = self.timeline.current[-1]
        stream.run_kernel()
        if not call.copies:
            if places - {Place.DEVICE}:
                raise DeviceMismatch(f"{call.name} has tensors of the host and of the device")
            if by_value := [r for r in reads if r.space == HOST]:
                self._checker.launch(HOST, call.name, by_value, [])
                reads = [r for r in reads if r.space != HOST]
        self._checker.launch(stream.number, call.name, reads, writes)
        crosses = len(places) > 1
        if call.waits or (crosses and (Place.PAGEABLE in places or not call.non_blocking)):
            stream.synchronize(call.name)

    def _run_beside(self, call: Call, reads: list[Range], writes: list[Range], result: Any) -> None:
        """Run a collective on the stream of its group, which waits for the current one, until ``Work.wait``."""
        if call.group not in self._of_groups:
            self._of_groups[str(call.group)] = Stream(self.timeline)
        stream = self._of_groups[str(call.group)]
        stream.wait_stream(self.timeline.current[-1])
        stream.run_kernel()
        self._checker.launch(stream.number, call.name, reads, writes)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.ScriptObject):
                work = dist.Work.unbox(leaf)
                self._works[id(work)] = work, stream.record_event()

    def wait(self, work: dist.Work) -> None:
        """Follow ``Work.wait`` of an asynchronous collective: the current stream waits."""
        if id(work) in self._works:
            self._works[id(work)][1].wait()

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run autograd in a thread of its own, whose current stream is that of the forward."""
        results: list[Any] = []
        stream, threads = self.timeline.current[-1], torch.get_num_threads()

        def run() -> None:
            torch.set_num_threads(threads)  # each thread has a number of its own
            try:
                with self, StreamContext(self.timeline, stream):
                    results.append(_RUN_BACKWARD(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - raised below
                results.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        result = results.pop()
        if isinstance(result, BaseException):
            try:
                raise result
            finally:
                del result  # a cycle with this frame, which autograd's own thread does not leave behind
        return result

    # Replacements ----------------------------------------------------------------------------------------------

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the simulated device."""
        if isinstance(tensor, DTensor):
            return self.is_here(tensor._local_tensor)
        return has_storage(tensor) and self.memory.place(tensor) is Place.DEVICE

    def copy_to(self, tensor: torch.Tensor, place: Place, **arguments: Any) -> torch.Tensor:
        """A copy of a tensor elsewhere."""
        self._target = place
        try:
            return torch.clone(tensor) if not arguments else _TO(tensor, copy=True, **arguments)
        finally:
            self._target = None


_RUN_BACKWARD = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
_TO = torch.Tensor.to
_BY_DEVICE = "_group_tensors_by_device_and_dtype"
_DEVICE_OF = torch.Tensor.device.__get__  # type: ignore[attr-defined]


def _tensor_methods(device: SimulatedDevice) -> dict[str, Any]:
    """Replacements for methods of tensors."""

    def device_of(tensor: torch.Tensor) -> torch.device:
        return DEVICE if device.is_here(tensor) else _DEVICE_OF(tensor)

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        copy = kwargs.pop("copy", False)
        target, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        dtype = dtype or tensor.dtype
        here = device.is_here(tensor)
        if target is None or target == (DEVICE if here else HOST_DEVICE):
            return _TO(tensor, dtype, copy=copy)
        if isinstance(tensor, DTensor):
            return make_like(to(tensor._local_tensor, target, dtype, non_blocking=non_blocking), tensor)
        if target not in (DEVICE, HOST_DEVICE):
            return _TO(tensor, target, dtype, copy=copy)
        place = Place.DEVICE if target == DEVICE else Place.PAGEABLE
        return device.copy_to(tensor, place, dtype=dtype, non_blocking=non_blocking)

    def read_by_host(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(tensor.cpu() if device.is_here(tensor) else tensor, *args, **kwargs)

        return read

    return {
        "device": property(device_of),
        "to": to,
        "cpu": lambda tensor, *_, **__: to(tensor, HOST_DEVICE),
        "tolist": read_by_host("tolist"),
        "numpy": read_by_host("numpy"),
        "pin_memory": lambda tensor, *_: device.copy_to(tensor, Place.PINNED),
        "is_pinned": lambda tensor, *_: device.memory.place(tensor) is Place.PINNED,
        "record_stream": lambda tensor, stream: device.memory.record_stream(tensor, stream.number),
    }


def _factory(device: SimulatedDevice, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Replace ``torch.tensor`` or ``torch.as_tensor``: the value is made on the host and copied from there."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        target, pinned = torch.device(kwargs.pop("device", None) or "cpu"), kwargs.pop("pin_memory", False)
        made = original(*args, **kwargs)
        if pinned:
            return made.pin_memory()
        return made.to(target).requires_grad_(made.requires_grad) if target == DEVICE else made

    return make


def _names_of_cuda(device: SimulatedDevice) -> dict[str, Any]:
    """Replacements for names of ``torch.cuda``."""
    timeline = device.timeline
    return {
        "Stream": lambda *_, **__: Stream(timeline),
        "Event": lambda *_, **__: Event(timeline),
        "stream": lambda stream: StreamContext(timeline, stream),
        "current_stream": lambda *_: timeline.current[-1],
        "default_stream": lambda *_: timeline.streams[0],
        "synchronize": lambda *_: timeline.synchronize(),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
    }


def _names_of_backends() -> dict[str, Any]:
    """Replacements for the functions with which the engine asks what a device is."""
    backend_of = backends.backend_of
    return {
        "runs_ahead": lambda device: device == DEVICE,
        "is_on_host": lambda device: device != DEVICE,
        "local_device": lambda device_type: DEVICE,
        "compute_device": lambda module, device=None: DEVICE,
        # Collectives are kernels, unless the host exchanges objects.
        "backend_of": lambda group, device: backends.Backend(backend_of(group, device).name, on_host=False),
    }


def _waiting(device: SimulatedDevice, wait: Callable[..., bool]) -> Callable[..., bool]:
    """Replace ``Work.wait``."""

    def wait_for(work: dist.Work, *args: Any) -> bool:
        device.wait(work)
        # gloo copies some results here. On CUDA this is part of the collective.
        with _disable_current_modes():
            return wait(work, *args)

    return wait_for


def _by_device_and_dtype(lists: Any, with_indices: bool = False) -> dict[Any, Any]:
    """Replacement for the function with which torch's optimizers and clipping sort tensors."""
    found: dict[Any, Any] = {}
    for place, tensors in enumerate(zip(*(each or itertools.repeat(None) for each in lists), strict=False)):
        of_key, indices = found.setdefault((tensors[0].device, tensors[0].dtype), ([[] for _ in lists], []))
        indices.append(place)
        # A list may be empty, or have None for a tensor, as SGD's momentum before the first step.
        for listed, given, tensor in zip(of_key, lists, tensors, strict=True):
            listed += [tensor] if given else []
    return found


@contextlib.contextmanager
def simulated_device(kernel_time: float = 1.0) -> Iterator[SimulatedDevice]:
    """Context in which the engine finds a CUDA device at ``DEVICE``. The process group must take CPU tensors.

    Args:
        kernel_time: Time of a kernel on the device; a launch takes the host 1.
    """
    device = SimulatedDevice(kernel_time)
    collects = gc.isenabled()
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> None:
        resize(storage, nbytes)
        device.memory.resized(storage)

    # torch caches this list of its functions. It must not be made while some of them are replaced.
    _device_constructors()
    torch_patches.apply()  # if a model applied them in this context, its end would put back what they replaced
    with contextlib.ExitStack() as stack:
        # The collector would free memory at any time, also while the allocator looks for some. Cycles live on until the
        # program calls ``gc.collect``.
        gc.disable()
        if collects:
            stack.callback(gc.enable)
        for name, value in _tensor_methods(device).items():
            stack.enter_context(patch.object(torch.Tensor, name, value))
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_))
        for kind in (dist.Work, FakeWork):
            stack.enter_context(patch.object(kind, "wait", _waiting(device, kind.wait)))
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", device.run_backward))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(patch.object(torch, name, _factory(device, getattr(torch, name))))
        for name, value in _names_of_cuda(device).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch.accelerator, "current_stream", torch.cuda.current_stream))
        for name, value in _names_of_backends().items():
            original = getattr(backends, name)
            for module in [m for m in [*sys.modules.values()] if vars(m).get(name) is original]:
                stack.enter_context(patch.object(module, name, value))
        stack.enter_context(patch.dict(streams._STREAMS, clear=True))
        stack.enter_context(
            patch.object(journal, "ignore_captures", lambda: device.ignoring.add(threading.current_thread()))
        )
        for name in ("torch.optim.optimizer", "torch.nn.utils.clip_grad"):
            stack.enter_context(patch.object(sys.modules[name], _BY_DEVICE, _by_device_and_dtype))
        with device:
            yield device
        # Models that are deleted later would look for the streams of the real ``torch.cuda``.
        gc.collect()
