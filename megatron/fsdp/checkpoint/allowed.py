"""The allow-list for the pickles of a checkpoint: classes that are instantiated, and classes that get placeholders.

A pickle is a program that calls whatever it refers to. Here, every name resolves to something harmless: a built-in
class, a function of this module that does the work of a constructor, or a :class:`Foreign` placeholder that only stores
its arguments. All of these are immutable, because a pickle can also set attributes.
"""

import argparse
import collections
import datetime
import enum
import functools
import io
import operator
import pathlib
import re
import signal
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

# Objects and functions of these packages are represented by placeholders; none of their code runs.
INERT = ("megatron", "transformer_engine", "transformer_engine_torch", "torch.nn", "torch._C._nn")

T = TypeVar("T")

NUMPY_DTYPE = "numpy.dtype"
# Numbers, booleans and text, but neither objects nor records.
_PLAIN_DTYPE = re.compile(r"[<>=|]?[biufcSU?]\d*")


class Sealed(type):
    """Metaclass of the placeholders for classes and functions: a pickle cannot set their attributes."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"{cls!r} is immutable.")

    def __delattr__(cls, name: str) -> None:
        raise AttributeError(f"{cls!r} is immutable.")

    def __repr__(cls) -> str:
        return f"<{cls.__module__}.{cls.__qualname__}>"


class Foreign(metaclass=Sealed):
    """Placeholder for an object whose class is not run and need not be installed.

    Every class has its own subclass of this, with the name and module of that class. The object stores the arguments of
    its constructor and its attributes. An object with a single argument, such as a member of an enumeration, also has
    it as ``value``. :func:`megatron.fsdp.checkpoint.safe_pickle.save_torch` pickles it as the original object.
    """

    __slots__ = ("__dict__", "_arguments", "_state")
    _arguments: tuple[Any, ...]
    _state: Any

    def __new__(cls, *arguments: Any) -> "Foreign":  # noqa: D102 (as __init__)
        made = object.__new__(cls)
        made._arguments, made._state = arguments, None
        if len(arguments) == 1:
            made.__dict__["value"] = arguments[0]
        return made

    def __setstate__(self, state: Any) -> None:
        self._state = state
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update({k: v for k, v in part.items() if isinstance(k, str)})

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self) or not isinstance(other, Foreign):
            return NotImplemented
        return self._arguments == other._arguments and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), self._arguments))

    def __repr__(self) -> str:
        content = [repr(a) for a in self._arguments]
        if not content:
            content = [f"{k}={v!r}" for k, v in self.__dict__.items()]
        return f"<{type(self).__module__}.{type(self).__qualname__}({', '.join(content)})>"


@functools.cache
def foreign(module: str, name: str) -> Sealed:
    """Return the placeholder for a class or function of this name."""
    body = {"__slots__": (), "__module__": module, "__qualname__": name, "__doc__": "Placeholder that runs no code."}
    return Sealed(name.rpartition(".")[2], (Foreign,), body)


def sealed(module: str, name: str, make: Callable[..., Any]) -> Sealed:
    """Return a placeholder for a class or function. Calling it calls ``make``."""

    def new(_cls: type, *arguments: Any) -> Any:
        return make(*arguments)

    body = {"__slots__": (), "__module__": module, "__qualname__": name, "__new__": new}
    return Sealed(name.rpartition(".")[2], (), body)


class Storage(NamedTuple):
    """A tensor's storage while a checkpoint is unpickled.

    Attributes:
        dtype: Of its elements.
        key: Its name in the archive.
        numel: Number of elements.
        data: The memory; None if only the tensor's place in the file is of interest.
    """

    dtype: torch.dtype
    key: str
    numel: int
    data: torch.UntypedStorage | None


class StorageKind(NamedTuple):
    """Placeholder for one of torch's storage classes."""

    dtype: torch.dtype


class StoredTensor(NamedTuple):
    """Layout of a tensor within the storage named ``key``. ``offset`` and ``stride`` count elements."""

    dtype: torch.dtype
    key: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _tensor(
    storage: Storage, offset: int, size: Any, stride: Any, grad: bool = False, hooks: Any = None, extra: Any = None
) -> Any:
    return _tensor_of(storage, offset, size, stride, grad, hooks, storage.dtype, extra)


def _tensor_of(
    storage: Storage,
    offset: int,
    size: Any,
    stride: Any,
    grad: bool,
    hooks: Any,  # always empty in files of torch.save
    dtype: torch.dtype,
    extra: Any = None,
) -> Any:
    if extra:
        raise ValueError("conjugated and negated views of tensors are not supported")
    size, stride = tuple(map(operator.index, size)), tuple(map(operator.index, stride))
    have, used = storage.numel * storage.dtype.itemsize, 0
    if 0 not in size:
        used = (offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))) * dtype.itemsize
    if min(offset, *size, *stride, 0) < 0 or len(size) != len(stride) or used > have:
        raise ValueError(f"a tensor of shape {size} needs {used} bytes of a storage of {have}")
    if storage.data is None:
        return StoredTensor(dtype, storage.key, offset, size, stride)
    tensor = torch.empty(0, dtype=dtype).set_(storage.data, offset, size, stride)
    return tensor.requires_grad_() if grad else tensor


def _meta_tensor(dtype: torch.dtype, size: Any, stride: Any, grad: bool) -> torch.Tensor:
    return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="meta", requires_grad=bool(grad))


def _parameter(data: Any, grad: bool, hooks: Any, state: Any = None) -> Any:
    return data if isinstance(data, StoredTensor) else torch.nn.Parameter(data, bool(grad))


def _not_called(*arguments: Any) -> Any:
    raise ValueError("expected a reference to a tensor class; got a call of it")


def _with_attributes(rebuild: Callable[..., Any], kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    made = rebuild(*arguments)
    if isinstance(made, torch.Tensor) and isinstance(state, dict):
        vars(made).update(state)
    return made


def _layout(name: str) -> torch.layout:
    found = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(found, torch.layout):
        raise ValueError(f"there is no layout {name!r}")
    return found


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8"):
        raise ValueError(f"expected text in latin1; got {encoding!r}")
    return text.encode(encoding)


def _bytes(data: bytes | bytearray = b"") -> bytes:
    return bytes(_short(data, bytes, bytearray))


def _bytearray(data: bytes | bytearray | str = b"", encoding: str = "latin1") -> bytearray:
    if isinstance(data, str):
        return bytearray(_encoded(data, encoding))
    return bytearray(_short(data, bytes, bytearray))


def _text(text: str = "") -> str:
    return str(_short(text, str))


def _short(value: T, *kinds: type) -> T:
    """Check that a constructor's argument is no larger than its pickle.

    ``bytes(10**10)`` allocates as many bytes, and ``str`` of nested tuples can grow exponentially.
    """
    if type(value) not in kinds:
        raise ValueError(f"expected {' or '.join(kind.__name__ for kind in kinds)}; got {type(value).__name__}")
    return value


def plain_dtype(name: Any, align: bool = False, copy: bool = True) -> Any:
    """A numpy dtype of numbers, booleans or text.

    Raises:
        ValueError: The name stands for a different dtype.
    """
    if not isinstance(name, str) or not _PLAIN_DTYPE.fullmatch(name):
        raise ValueError(f"expected a plain numpy dtype; got {name!r}")
    # Copied, because the pickle sets the dtype's state, and numpy shares its own dtypes with the whole process.
    return numpy.dtype(name, align=False, copy=True)


def _empty_array(kind: Any, shape: Any, dtype: Any) -> Any:
    return numpy.ndarray.__new__(numpy.ndarray, (0,), "b")


def _elements(data: Any, dtype: Any) -> Any:
    if not isinstance(dtype, numpy.dtype):
        raise ValueError(f"expected a numpy dtype; got {dtype!r}")
    return numpy.frombuffer(data, dtype)


def _scalar(dtype: Any, data: Any) -> Any:
    found = _elements(data, dtype)
    if found.shape != (1,):
        raise ValueError(f"expected one number; got {len(data)} bytes")
    return found[0]


def _array(data: Any, dtype: Any, shape: Any, order: str = "C") -> Any:
    return _elements(data, dtype).reshape(shape, order=order)


def _plain(kind: type) -> Callable[..., Any]:
    """Return a function that creates objects of a class without running its ``__init__``."""
    return functools.partial(object.__new__, kind)


def _numpy_names() -> dict[str, Callable[..., Any]]:
    names: dict[str, Callable[..., Any]] = {NUMPY_DTYPE: plain_dtype, "numpy.ndarray": _empty_array}
    for core in ("numpy.core", "numpy._core"):
        names |= {f"{core}.multiarray._reconstruct": _empty_array, f"{core}.multiarray.scalar": _scalar}
        names[f"{core}.numeric._frombuffer"] = _array
    return names


def _functions() -> dict[str, Callable[..., Any]]:
    """Constructors by the name that they stand for: functions of this module, and classes that are not immutable."""
    made: dict[str, Callable[..., Any]] = {
        "_codecs.encode": _encoded,
        "argparse.Namespace": _plain(argparse.Namespace),
        "builtins.bytearray": _bytearray,
        "builtins.bytes": _bytes,
        "builtins.range": range,  # the unpickler limits its length
        "builtins.str": _text,
        "collections.Counter": collections.Counter,
        "torch.serialization._get_layout": _layout,
        "torch.Tensor": _not_called,
        "torch.nn.parameter.Parameter": _not_called,
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor_of,
        "torch._utils._rebuild_meta_tensor_no_storage": _meta_tensor,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._tensor._rebuild_from_type_v2": _with_attributes,
        "torch.torch_version.TorchVersion": _text,
        "torch.distributed.checkpoint.filesystem._StorageInfo": _plain(filesystem._StorageInfo),
        # Its module before torch 2.3.
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": _plain(metadata.TensorProperties),
    }
    for module in ("pathlib", "pathlib._local"):
        for name in ("Path", "PosixPath"):
            made[f"{module}.{name}"] = pathlib.Path
        made |= {f"{module}.WindowsPath": pathlib.PureWindowsPath, f"{module}.PureWindowsPath": pathlib.PureWindowsPath}
        made[f"{module}.PurePosixPath"] = pathlib.PurePosixPath
    for kind in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        planner.BytesIOWriteData,
        planner.SavePlan,
        planner.TensorWriteData,
        planner.WriteItem,
    ):
        made[f"{kind.__module__}.{kind.__qualname__}"] = _plain(kind)
    return made | _numpy_names()


def _values() -> dict[str, Any]:
    """Immutable objects that a pickle may refer to directly, by name."""
    kinds = (
        *(bool, complex, dict, float, frozenset, int, list, set, slice, tuple),
        *(collections.OrderedDict, collections.defaultdict, collections.deque),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        *(io.BytesIO, types.SimpleNamespace, torch.Size, torch.device),
    )
    values: dict[str, Any] = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype):
            values[f"torch.{name}"] = value
    storages = {name: dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()}
    for module in ("torch", "torch.cuda"):
        values |= {f"{module}.{name}": StorageKind(dtype) for name, dtype in storages.items()}
    return values | {"torch.storage.UntypedStorage": StorageKind(torch.uint8)}


ENUMERATIONS: dict[str, type[enum.Enum]] = {
    "signal.Signals": signal.Signals,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": metadata._MEM_FORMAT_ENCODING,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": metadata._MEM_FORMAT_ENCODING,
    "torch.distributed.checkpoint.planner.WriteItemType": planner.WriteItemType,
}

ALLOWED: dict[str, Any] = _values() | {
    full: sealed(full.rpartition(".")[0], full.rpartition(".")[2], make) for full, make in _functions().items()
}


def enumeration(module: str, name: str) -> type[enum.Enum] | None:
    """Return the enumeration of this name if its members are allowed, otherwise None.

    Megatron's enumerations are allowed if their module is already imported. A checkpoint never causes an import.
    """
    known = ENUMERATIONS.get(f"{module}.{name}")
    if known is not None or not module.startswith("megatron."):
        return known
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None


@functools.cache
def members(kind: type[enum.Enum]) -> Sealed:
    """Return a placeholder whose calls return members of an enumeration."""
    return sealed(kind.__module__, kind.__qualname__, kind)


def is_inert(module: str) -> bool:
    """Whether everything in this module gets a placeholder."""
    return any(module == package or module.startswith(package + ".") for package in INERT)
