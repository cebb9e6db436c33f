"""Unpickles the objects of a checkpoint without running code, except for what is on an allow-list."""

import _compat_pickle
import copyreg
import enum
import io
import pickle
import signal
import struct
import types
from collections.abc import Callable
from typing import IO, Any

import torch

from megatron.fsdp.checkpoint.allowed import (
    ALLOWED,
    NUMPY_DTYPE,
    Foreign,
    Sealed,
    Storage,
    StorageKind,
    StoredTensor,
    enumeration,
    foreign,
    is_inert,
    members,
    plain_dtype,
    sealed,
)
from megatron.fsdp.checkpoint.archive import Archive
from megatron.fsdp.checkpoint.checksums import DamagedCheckpoint

# Errors that unpickling raises for damaged or malicious data, besides UnsafePickle.
_ERRORS = (
    pickle.UnpicklingError,
    struct.error,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    ImportError,
    MemoryError,
    AssertionError,
)


class UnsafePickle(ValueError):
    """A pickle refers to a class or function that is not on the allow-list. The message names both it and the file."""


class _Unpickler(pickle.Unpickler):
    """Resolves names only to objects that are immutable and harmless, whatever arguments they are called with."""

    def __init__(self, stream: IO[bytes], source: str) -> None:
        super().__init__(stream)
        self._source = source
        self._members: dict[enum.Enum, dict[str, Any]] = {}
        self._dtypes: list[Any] = []

    def find_class(self, module: str, name: str, /) -> Any:
        # Pickles of protocol 2, which torch.save writes, use the names of Python 2.
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        full = f"{module}.{name}"
        if full == NUMPY_DTYPE and full in ALLOWED:
            return sealed(module, name, self._dtype)
        if full in ALLOWED:
            return ALLOWED[full]
        # Python 3.10 pickles a signal, which Megatron's arguments contain, by its name in the module.
        signals = signal.Signals.__members__ if module == "signal" else {}
        kind = signal.Signals if name in signals else enumeration(module, name)
        if kind is not None:
            # A pickle can set attributes of a member, and members belong to the whole process: see _check_changes.
            self._members |= {member: dict(vars(member)) for member in kind.__members__.values()}
            return signals[name] if name in signals else members(kind)
        if is_inert(module):
            return foreign(module, name)
        raise UnsafePickle(f"{self._source}: refers to {full}, which is not allowed in a checkpoint; nothing was run.")

    def persistent_load(self, identity: Any, /) -> Any:
        raise pickle.UnpicklingError("the pickle refers to data outside of itself")

    def load(self) -> Any:
        try:
            return super().load()
        except (UnsafePickle, DamagedCheckpoint):
            raise
        except _ERRORS as error:
            raise DamagedCheckpoint(
                f"{self._source}: expected a pickle of a checkpoint; got {type(error).__name__}: {error}."
            ) from error
        finally:
            self._check_changes()

    def _dtype(self, *arguments: Any) -> Any:
        self._dtypes.append(plain_dtype(*arguments))
        return self._dtypes[-1]

    def _check_changes(self) -> None:
        """Raise an error if the pickle has modified a dtype or an enumeration's member, and restore the member."""
        if any(dtype.fields is not None or dtype.subdtype is not None for dtype in self._dtypes):
            raise UnsafePickle(f"{self._source}: creates a numpy dtype of records, which is not allowed.")
        for member, attributes in self._members.items():
            if vars(member) != attributes:
                vars(member).clear()
                vars(member).update(attributes)
                raise UnsafePickle(f"{self._source}: modifies {member!r}, which is not allowed in a checkpoint.")


class _TorchUnpickler(_Unpickler):
    """Unpickles the object in an archive of ``torch.save``."""

    def __init__(self, archive: Archive, with_data: bool) -> None:
        super().__init__(io.BytesIO(archive.read("data.pkl")), archive.source)
        self._archive = archive
        self._with_data = with_data
        self._storages: dict[str, Storage] = {}

    def persistent_load(self, identity: Any, /) -> Any:
        what, kind, key, _, count = identity
        if what != "storage" or not isinstance(kind, StorageKind) or not isinstance(count, int) or count < 0:
            raise pickle.UnpicklingError(f"the pickle refers to {what!r}, which is not a storage")
        if key not in self._storages:
            have, need = self._archive.entry(f"data/{key}").size, count * kind.dtype.itemsize
            if have < need:
                raise ValueError(f"storage {key} has {have} bytes; its tensors need {need}")
            data = self._archive.storage(key) if self._with_data else None
            self._storages[key] = Storage(kind.dtype, key, count, data)
        return self._storages[key]


def loads(data: bytes, source: str) -> Any:
    """Load a plain pickle, such as ``.metadata``.

    Args:
        data: The pickle.
        source: Its name in error messages.

    Raises:
        UnsafePickle: The pickle refers to something that is not on the allow-list.
        DamagedCheckpoint: The data is not a complete pickle.
    """
    return _Unpickler(io.BytesIO(data), source).load()


def load_torch(stream: IO[bytes], source: str) -> Any:
    """Load a file that ``torch.save`` wrote, with its tensors on the CPU.

    Args:
        stream: Seekable stream that holds exactly the file.
        source: Its name in error messages.

    Raises:
        UnsafePickle: The file refers to something that is not on the allow-list.
        DamagedCheckpoint: The stream does not hold a complete file of ``torch.save``.
    """
    return _TorchUnpickler(Archive(stream, source), with_data=True).load()


def stored_tensor(archive: Archive) -> StoredTensor:
    """Describe where a file of ``torch.save`` stores its only tensor, without reading the tensor's elements.

    Raises:
        UnsafePickle: The file refers to something that is not on the allow-list.
        DamagedCheckpoint: The file is damaged, or does not hold a single tensor.
    """
    found = _TorchUnpickler(archive, with_data=False).load()
    if not isinstance(found, StoredTensor):
        raise DamagedCheckpoint(f"{archive.source}: expected a tensor; got {type(found).__name__}.")
    return found


class _Pickler(pickle._Pickler):
    """Pickles the stand-ins of :mod:`.allowed` as the classes, functions and objects that they stand for."""

    # Attributes of the base class that its type stubs lack.
    proto: int
    write: Callable[[bytes], Any]
    save: Callable[[Any], Any]
    memoize: Callable[[Any], Any]

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Foreign):
            return NotImplemented
        if value._arguments and value._state is None:
            return type(value), value._arguments
        return copyreg.__newobj__, (type(value), *value._arguments), value._state  # type: ignore[attr-defined]

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not isinstance(obj, Sealed):
            super().save_global(obj, name)  # type: ignore[misc]
            return
        if self.proto < 4:
            self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__qualname__}\n".encode())
        else:
            self.save(obj.__module__)
            self.save(obj.__qualname__)
            self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)


_PICKLE_MODULE = types.SimpleNamespace(__name__="pickle", Pickler=_Pickler)


def save_torch(value: Any, stream: IO[bytes]) -> None:
    """Write an object as ``torch.save`` does. Stand-ins are written as the objects that they stand for."""
    torch.save(value, stream, pickle_module=_PICKLE_MODULE)
