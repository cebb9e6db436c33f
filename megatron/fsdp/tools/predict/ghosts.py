"""Runs torch's operators on tensors that have addresses and no contents, and notes what each of them would cost.

A *ghost* is a plain CPU tensor whose memory is allocated and never touched, so the operating system gives it no pages.
Unlike ``FakeTensor``, it is no subclass: the engine moves, resizes and compares its storages as it always does.
Operators on floating-point numbers are not computed. Operators on integers and booleans only are: routing and indexing
depend on their values. Where such values come from floating-point numbers, as the experts of a token do, they are
spread evenly.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megatron.fsdp.comm.backends import SIMULATED_HOST

aten = torch.ops.aten


class Cost(NamedTuple):
    """Floating-point operations and bytes of an operator, on any device.

    Attributes:
        name: Name of the operator.
        kind: "matmul", "attention" or "memory"; "host" for the host's memory, and "PCIe" for copies to it and from it.
        dtype: Of what it computes, such as "bfloat16".
        flops: Floating-point operations.
        bytes: Bytes that it reads and writes.
        tensors: Number of tensors that it is for. A CPU takes one after the other.
    """

    name: str
    kind: str
    dtype: str
    flops: int
    bytes: int
    tensors: int = 1


def _cpu_attention(query: Any, key: Any, value: Any, *rest: Any, out_val: Any = None, **kwargs: Any) -> int:
    return int(flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape))


def _cpu_attention_backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any) -> int:
    return int(flop_counter.sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}
# Operators that only change which memory a tensor has, or return the same.
_OF_STORAGE = {aten.set_, aten.resize_, aten.lift_fresh, aten._unsafe_view}
# Their integer results say where values lie: these are spread evenly. The place of the dimension among the arguments;
# without one, it is the last dimension (for argmax, all of them).
_CHOOSING = {aten.topk: 2, aten.argmax: 1, aten.sort: 1, aten.argsort: 1, aten.max: 1, aten.multinomial: None}
# They read as many rows of their first argument as they return.
_GATHERING = {aten.embedding, aten.index_select, aten.index, aten.gather}
_RECURRENT = {aten.mkldnn_rnn_layer, aten.mkldnn_rnn_layer_backward}
# Where the arguments of the first one are among those of the second.
_AS_FORWARD = (*range(7), 13, 20, 14, 15, 16, 17, 19, 21, 18)
_ITEM = aten._local_scalar_dense.default
# They take no time.
_EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# More elements than this are not computed, whatever their dtype.
MOST_COMPUTED = 1 << 26
# Categories of memory that does not count. The second one is the memory of the simulated host.
NOWHERE, ON_HOST = "nowhere", "host"
# Collectives of at most this many elements are issued with their values; of integers only, of more.
SMALL, SMALL_INTEGERS = 1 << 12, 1 << 22


# Shapes and cost, by operator and arguments.
_KNOWN: dict[Any, Any] = {}
# What collectives return after their first argument.
_HANDLES: dict[Any, Any] = {}


class Memory:
    """One storage: its bytes, and what they are for."""

    __slots__ = ("nbytes", "category", "reference", "born")

    def __init__(self, category: str, born: int) -> None:
        self.nbytes = 0
        self.category = category
        self.born = born
        self.reference: Any = None


class Ghosts(TorchDispatchMode):
    """While active, operators make ghosts.

    Args:
        on_operator: Called with the cost of every operator that takes time.
        on_collective: Called with the name and the arguments of every collective.
        on_memory: Called with a storage and the change of its bytes.

    Attributes:
        category: What memory is for that is allocated now.
        operators: How many operators have run.
    """

    def __init__(
        self,
        on_operator: Callable[[Cost], None],
        on_collective: Callable[[str, tuple[Any, ...]], None],
        on_memory: Callable[[Memory, int], None],
    ) -> None:
        super().__init__()
        self._on_operator, self._on_collective, self._on_memory = on_operator, on_collective, on_memory
        self._memory: dict[int, Memory] = {}
        self._last_sorted: dict[Any, Any] = {}  # values and results
        self._dead: list[Memory] = []
        self._offloads = False
        self.category = "temporary"
        self.operators = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch wraps no operator's call: nothing is compiled while ghosts are made, and the wrapper takes long."""
        return False

    # Memory ----------------------------------------------------------------------------------------------------

    def memory_of(self, storage: torch.UntypedStorage) -> Memory:
        """The record of a storage, which is made when it is seen for the first time."""
        key = storage._cdata
        found = self._memory.get(key)
        if found is None:
            found = self._memory[key] = Memory(self.category, self.operators)
            found.reference = weakref.ref(storage, lambda _: self._freed(key))
        return found

    def _freed(self, key: int) -> None:
        memory = self._memory.pop(key)
        self._set(memory, 0)
        self._dead.append(memory)

    def freed_since(self, born: int) -> list[Memory]:
        """Forget the storages that have been freed, and return those that were made after ``born`` operators."""
        dead, self._dead = self._dead, []
        return [memory for memory in dead if memory.born >= born]

    def _set(self, memory: Memory, nbytes: int) -> None:
        if nbytes != memory.nbytes and memory.category not in (NOWHERE, ON_HOST):
            change, memory.nbytes = nbytes - memory.nbytes, nbytes
            self._on_memory(memory, change)

    def see(self, tensor: torch.Tensor) -> None:
        """Count the memory of a tensor."""
        storage = tensor.untyped_storage()
        self._set(self.memory_of(storage), storage.nbytes())

    @contextmanager
    def follow_storages(self) -> Iterator[None]:
        """Count memory that storages get and lose by themselves."""
        swap, ghosts = getattr(torch.UntypedStorage, "_swap_data_ptr_", None), self
        own_resize: Any = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            own_resize(storage, 0)  # contents would be copied, and get pages
            own_resize(storage, size)
            ghosts._set(ghosts.memory_of(storage), storage.nbytes())

        def copy_(storage: torch.UntypedStorage, source: torch.UntypedStorage) -> torch.UntypedStorage:
            # Recomputed values take the place of freed ones. On a GPU, Megatron makes them share their memory.
            resize_(source, 0)
            return storage

        def _swap_data_ptr_(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
            swap(storage, other)  # type: ignore[misc]
            first, second = ghosts.memory_of(storage), ghosts.memory_of(other)
            # Nothing is allocated or freed, so the sum must not change in between.
            change = second.nbytes - first.nbytes
            first.nbytes, second.nbytes = second.nbytes, first.nbytes
            ghosts._on_memory(first, change)
            ghosts._on_memory(second, -change)

        given: dict[str, Any] = {
            "resize_": resize_,
            "copy_": copy_,
            **({"_swap_data_ptr_": _swap_data_ptr_} if swap else {}),
        }
        with mock.patch.multiple(torch.UntypedStorage, **given):
            yield

    # Operators -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # it calls operators on its local tensor
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if func.namespace in ("c10d", "_c10d_functional"):
            self._on_collective(packet.__name__, args)
            return _communicated(func, args, kwargs)
        if func.is_view or packet in _OF_STORAGE:
            result = func(*args, **kwargs)
            for tensor in _tensors([result]):
                self.see(tensor)
            return result
        if func.namespace == "profiler" or (func is _ITEM and not args[0].is_floating_point()):
            return func(*args, **kwargs)
        if func is _ITEM:
            return 1.0
        self.operators += 1
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        result, cost = self._result(func, packet, args, kwargs)
        cost = self._on_host(cost, args, kwargs, result)
        for tensor in _tensors([result]):
            self.see(tensor)
        if packet not in _EMPTY:
            self._on_operator(cost)
        return result

    def _on_host(self, cost: Cost, args: tuple, kwargs: dict[str, Any], result: Any) -> Cost:
        """The cost of an operator, some of whose tensors may be in the host's memory. New ones are where others are.

        Tensors without dimensions, which are numbers, count on neither side.
        """
        device = kwargs.get("device")
        self._offloads = self._offloads or device == SIMULATED_HOST
        if not self._offloads:
            return cost
        given = {t.untyped_storage()._cdata: t for t in _tensors([*args, *kwargs.values()]) if t.dim()}
        found = ((self._memory.get(key), tensor) for key, tensor in given.items())
        there = [tensor for memory, tensor in found if memory is not None and memory.category == ON_HOST]
        stays = len(there) == len(given) and device in (None, SIMULATED_HOST)
        if device == SIMULATED_HOST or (there and stays):
            for tensor in _tensors([result]):
                self.memory_of(tensor.untyped_storage()).category = ON_HOST
        if not there:
            return cost
        return cost._replace(kind="host") if stays else cost._replace(kind="PCIe", bytes=sum(t.nbytes for t in there))

    def _result(self, func: Any, packet: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Cost]:
        """The results of an operator, and its cost. Shapes and cost are found once for equal arguments."""
        given = _tensors([*args, *kwargs.values()])
        if _is_computed(given, kwargs):
            result = self._sorted(func, args, kwargs) if packet is aten.sort else func(*args, **kwargs)
            return result, _cost(func, args, kwargs, given, result)
        graph = packet in _RECURRENT and torch.is_grad_enabled()
        key: Any = (func, graph, _key(args), *kwargs, _key(kwargs.values()))
        try:
            shapes, cost, inside = _KNOWN.get(key, (None, None, 0))
        except TypeError:
            key, shapes, cost, inside = None, None, None, 0
        written = _written(func)
        if written is not None:
            found = [args[place] if place < len(args) else kwargs[name] for place, name in written]
            result = tuple(found) if len(found) > 1 else found[0] if found else None
        else:
            if shapes is None:
                shapes = _shapes(func, packet, args, kwargs, given)
                if packet in _RECURRENT:
                    shapes, inside = _of_recurrent(packet, args, shapes)
            result = (
                _made(shapes, _choices(packet, args, kwargs)) if given or _is_real(shapes) else func(*args, **kwargs)
            )
        if cost is None:
            cost = _cost(func, args, kwargs, given, result)
            if key is not None and packet is not aten.masked_select:
                _KNOWN[key] = shapes, cost, inside
        if inside:
            memory = Memory("temporary", self.operators)
            self._set(memory, inside)
            self._set(memory, 0)
        return result, cost

    def _sorted(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """As layers route tokens alike, the last values are often sorted again, which would take long."""
        key = (func, _key(args), *kwargs.items())
        values, result = self._last_sorted.get(key, (None, ()))
        if values is None or not torch.equal(values, args[0]):
            result = func(*args, **kwargs)
            self._last_sorted[key] = args[0].clone(), result
        return tuple(tensor.clone() for tensor in result)


def _is_computed(given: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether an operator takes integers and booleans only, and does not make real numbers of them."""
    dtype = kwargs.get("dtype")
    asked = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
    if not given or asked or any(map(_is_real, given)):
        return False
    return sum(tensor.numel() for tensor in given) < MOST_COMPUTED


def _shapes(func: Any, packet: Any, args: tuple, kwargs: dict[str, Any], given: list[torch.Tensor]) -> Any:
    """The results on the meta device."""
    if packet is aten.masked_select:
        # Masks are computed, and say how many elements there are.
        size = int(args[1].expand(torch.broadcast_shapes(*(t.shape for t in args))).sum())
        return args[0].new_empty(size, device="meta")
    on_meta = {**kwargs, "device": torch.device("meta")} if "device" in kwargs or not given else kwargs
    try:
        return func(*_on_meta(args), **_on_meta(on_meta))
    except (NotImplementedError, RuntimeError) as error:
        # torch's own operators raise the first error, and torch.library.custom_op the second.
        if not isinstance(error, NotImplementedError) and "fake impl" not in str(error):
            raise
        raise NotImplementedError(
            f"The step cannot be predicted: operator {func} has no shapes without computing ({error})."
        ) from error


def _cost(func: Any, args: tuple, kwargs: dict[str, Any], given: list[torch.Tensor], result: Any) -> Cost:
    packet = func._overloadpacket
    count: Any = _ATTENTION.get(packet) or flop_counter.flop_registry.get(packet)
    flops = 0 if count is None else int(count(*args, **kwargs, out_val=result))
    read, made = given[1:] if packet in _GATHERING else given, _tensors([result])
    # Those that return nothing write arguments in place. Expanded tensors are read once.
    written = made or _tensors(args[place] for place in _updated(func))
    size = sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in (*read, *written))
    name = packet.__name__
    kind = "memory" if count is None else "attention" if "attention" in name else "matmul"
    dtypes = [t.dtype for t in (*given, *made) if t.dtype.is_floating_point]
    dtype = min(dtypes, key=lambda d: d.itemsize) if dtypes else torch.int64
    tensors = len(args[0]) if name.startswith("_foreach_") else 1
    return Cost(name, kind, str(dtype).removeprefix("torch."), flops, size, tensors)


def _communicated(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The results of a collective.

    The fake backend copies tensors, for every rank of the group: it gets empty ones, and only once for each collective
    whose result is its first argument and a handle, which has ended.
    """
    tensors = _tensors(args)
    most = SMALL if any(map(_is_real, tensors)) else SMALL_INTEGERS
    if sum(tensor.numel() for tensor in tensors) <= most:
        return func(*args, **kwargs)
    if func in _HANDLES:
        return args[0], *_HANDLES[func]
    empty = tree_map_only(torch.Tensor, lambda tensor: tensor.new_empty(0), args)
    # Nor do they have parts of the sizes that an all-to-all is given.
    empty = tuple([] if isinstance(a, list) and all(isinstance(n, int) for n in a) else a for a in empty)
    result = func(*empty, **kwargs)
    if not isinstance(result, tuple):
        return result
    _HANDLES[func] = result[1:]
    return args[0], *result[1:]


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among arguments or results of an operator, as ``tree_leaves``, which takes longer."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _is_real(value: Any) -> bool:
    """Whether a tensor has floating-point numbers, also as bytes of quantized weights, which are not computed."""
    return value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.uint8


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    """Of arguments, all that shapes and cost depend on. Expanded tensors cost as much as their storage has."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            stride = value.stride()
            found.append((value.shape, stride, value.dtype, 0 in stride and value.untyped_storage().nbytes()))
        else:
            found.append(_key(value) if isinstance(value, list | tuple) else (type(value), value))
    return tuple(found)


def _on_meta(values: Any) -> Any:
    def meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return tree_map_only(torch.Tensor, meta, values)


def _choices(packet: Any, args: tuple, kwargs: dict[str, Any]) -> int:
    """The number of values from which each result of an operator is chosen; 0 if it does not choose."""
    if packet not in _CHOOSING or not args[0].dim():
        return 0
    place = _CHOOSING[packet]
    dim = -1 if place is None else kwargs.get("dim", args[place] if len(args) > place else None)
    if dim is None and packet is aten.argmax:
        return int(args[0].numel())
    return args[0].shape[-1 if dim is None else dim] or 1


def _made(shapes: Any, choices: int = 0) -> Any:
    """Ghosts with the shapes of tensors on the meta device, alone or in lists. Choices are spread evenly."""
    if isinstance(shapes, list | tuple):
        return type(shapes)(_made(each, choices) for each in shapes)
    if not isinstance(shapes, torch.Tensor):
        return shapes
    made = torch.empty_strided(shapes.shape, shapes.stride(), dtype=shapes.dtype)
    if _is_real(made) or made.numel() > MOST_COMPUTED:
        return made
    if choices and made.dtype == torch.int64:
        return made.copy_(torch.arange(made.numel()).view(made.shape) % choices)
    return made.zero_()


def _of_recurrent(packet: Any, args: tuple, shapes: Any) -> tuple[Any, int]:
    """The results of a recurrent layer of oneDNN, and the most bytes in its course, with them.

    It packs weights anew and takes memory for all steps; for its backward it keeps some, which the operator on the meta
    device leaves empty. Bytes grow with the steps, the first dimension of ``args[0]``: the operator itself says how
    many at a few.
    """
    steps, few = len(args[0]), min(len(args[0]), 33)
    one, more = (_of_few_steps(packet, args, n) for n in (1, few))
    kept, most = (a + (b - a) * (steps - 1) // max(few - 1, 1) for a, b in zip(one, more, strict=True))
    if packet is aten.mkldnn_rnn_layer:
        shapes = (*shapes[:3], torch.empty(kept, dtype=torch.uint8, device="meta") if kept else None)
    return shapes, most


def _of_few_steps(packet: Any, args: tuple, steps: int) -> tuple[int, int]:
    """Bytes that a recurrent layer keeps for its backward, and the most in its course."""
    given = list(args)
    for place, value in enumerate(args):
        if isinstance(value, torch.Tensor):  # of the inputs, the outputs and their gradients, a few steps
            given[place] = torch.zeros_like(value[:steps] if place in (0, 7, 10) else value)
    if packet is aten.mkldnn_rnn_layer_backward:
        with torch.enable_grad():  # it keeps something only then
            given[-1] = aten.mkldnn_rnn_layer(*(given[place] for place in _AS_FORWARD))[3]
    result, most = allocated(lambda: packet(*given))
    return 0 if result[3] is None else result[3].nbytes, most


def allocated(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a call, and the most bytes in its course, also within operators."""
    profiler: Any = torch.autograd  # its successor, torch.profiler, would look for GPUs, and print
    only, more = (profiler.ProfilerState.CPU, False, True), torch._C._profiler._ExperimentalConfig()
    profiler._enable_profiler_legacy(profiler.ProfilerConfig(*only, False, False, False, more))
    try:
        result = call()
    finally:
        events = [event for thread in profiler._disable_profiler_legacy() for event in thread]
    changes = [event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"]
    return result, max(itertools.accumulate(changes), default=0)


@functools.cache
def _updated(func: Any) -> list[int]:
    """Places of the arguments that an operator writes. Fused optimizers write gradients only if they scale them."""
    arguments = enumerate(func._schema.arguments)
    return [n for n, a in arguments if a.alias_info and a.alias_info.is_write and a.name != "grads"]


@functools.cache
def _written(func: Any) -> list[tuple[int, str]] | None:
    """Places and names of the arguments that an operator writes and returns; None for one that makes new tensors."""
    returns, arguments = func._schema.returns, func._schema.arguments
    if any(r.alias_info is None for r in returns):
        return None
    places = {frozenset(a.alias_info.before_set): (n, a.name) for n, a in enumerate(arguments) if a.alias_info}
    return [places[frozenset(r.alias_info.before_set)] for r in returns]
