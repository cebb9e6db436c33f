"""Unpickles the objects of a checkpoint without running code, except for what is on an allow-list."""

import _compat_pickle
import copyreg
import enum
import io
import operator
import pickle
import pickletools
import signal
import sys
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

# The steps that a pickle may take, see _Costs.
_SPARE = 1 << 20
_STEPS_PER_BYTE = 128
# Tuples in tuples. Python computes their hash by recursion, and overflows the stack somewhere above 100,000.
_DEEPEST = 1000

# By opcode: the length of its argument, negative if it varies; how many values it takes from the stack, None for those
# above the last mark.
_LENGTHS = {ord(opcode.code): opcode.arg.n if opcode.arg else 0 for opcode in pickletools.opcodes}
_TAKEN: dict[int, int | None] = {
    code: count for count, codes in enumerate((b"]}\x8f", b"\x85abQ", b"\x86R\x81\x93s", b"\x87\x92")) for code in codes
} | dict.fromkeys(b"tldeu\x90\x91oi")
_ADDING, _TUPLES, _CALLS = frozenset(b"abseu\x90"), frozenset(b"t\x85\x86\x87"), frozenset(b"R\x81\x92oi")
_STOP, _MARK, _MEMOIZE, _GET, _PUT = 46, 40, 148, frozenset(b"hjg"), frozenset(b"qrp")
_STACK, _NOTHING = frozenset(b"012"), frozenset(b"\x80\x95\x98")


class UnsafePickle(ValueError):
    """A pickle refers to a class or function that is not on the allow-list. The message names both it and the file."""


class _Container:
    """A value that contains others: the steps that visiting all of it takes, and how deep its tuples are nested."""

    __slots__ = ("depth", "is_shared", "size")

    def __init__(self, size: int, depth: int) -> None:
        self.size, self.depth, self.is_shared = size, depth, False


class _Costs:
    """Bounds the steps and the memory that it takes to unpickle, hash, copy or print a value, without unpickling it.

    A pickle can refer to a value any number of times, so that some hundred bytes stand for a value that takes years to
    visit. The costs are the sum of the sizes of all containers, in units of 8 bytes, where each reference counts as a
    copy.

    Args:
        data: The pickle.

    Attributes:
        limit: The largest costs that are allowed, in proportion to the pickle's length.
        calls: Number of functions and classes that the pickle calls.
    """

    def __init__(self, data: bytes) -> None:
        self.limit, self.calls = _SPARE + _STEPS_PER_BYTE * len(data), 0
        self._data = data
        self._stack: list[Any] = []  # containers, and the sizes of values that contain nothing
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._spent, self._factor, self._large_integers = 0, 1, 0

    def check(self) -> None:
        """Add up the costs.

        Raises:
            ValueError: They exceed the limit.
            LookupError: The pickle is incomplete.
        """
        data, stack, memo, at = self._data, self._stack, self._memo, 0
        while (code := data[at]) != _STOP:
            begin, length = at + 1, _LENGTHS[code]
            at = begin + length if length >= 0 else self._end(code, begin)
            if code == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif code in _GET:
                self._push(memo[_index(code, data[begin:at])])
            elif code in _TAKEN:
                self._take(code)
            elif code == _MARK:
                self._marks.append(len(stack))
            elif code in _PUT:
                self._put(_index(code, data[begin:at]))
            elif code in _STACK:
                self._rearrange(code)
            elif code not in _NOTHING:
                stack.append(1 + (at - begin >> 3))

    def _end(self, code: int, begin: int) -> int:
        """Find the end of an argument whose length varies."""
        data, kind = self._data, _LENGTHS[code]
        if kind == pickletools.UP_TO_NEWLINE:
            end = data.index(b"\n", begin) + 1
            return data.index(b"\n", end) + 1 if code in b"ci" else end
        width = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT8U: 8}.get(kind, 4)
        end = begin + width + int.from_bytes(data[begin : begin + width], "little")
        if code in b"\x8a\x8b" and end - begin > 8:
            # All multiples of 2**61 - 1 have the same hash. A dict compares each such key with all before it.
            self._large_integers += 1
            self._spend(self._large_integers)
        return end

    def _push(self, value: Any) -> None:
        if value.__class__ is _Container:
            value.is_shared = True
        self._stack.append(value)

    def _put(self, index: int) -> None:
        if index > len(self._data):  # the unpickler allocates memory up to it
            raise ValueError(f"expected a number of a value below {len(self._data)}; got {index}")
        self._memo[index] = self._stack[-1]

    def _rearrange(self, code: int) -> None:
        stack, marks = self._stack, self._marks
        if code == b"2"[0]:
            self._push(stack[-1])
        elif marks and (code == b"1"[0] or marks[-1] == len(stack)):
            del stack[marks.pop() :]
        else:
            stack.pop()

    def _take(self, code: int) -> None:
        """Put values into a container: a new one, or the one below them on the stack."""
        stack, count = self._stack, _TAKEN[code]
        start = self._marks.pop() if count is None else len(stack) - count
        size, depth = 1, 0
        for value in stack[start:]:
            if value.__class__ is _Container:
                size += value.size
                depth = max(depth, value.depth)
            else:
                size += value
        del stack[start:]
        self.calls += code in _CALLS
        if code not in _ADDING:
            stack.append(_Container(size, depth + (code in _TUPLES)))
        elif stack[-1].__class__ is _Container:
            stack[-1].size += size
            if stack[-1].is_shared:  # also larger where it was counted before
                self._factor *= 1 + size
        if depth >= _DEEPEST:
            raise ValueError(f"expected at most {_DEEPEST} tuples in each other; got more")
        self._spend(size)

    def _spend(self, steps: int) -> None:
        self._spent += steps
        if self._spent * self._factor > self.limit:
            raise ValueError(f"expected {len(self._data)} bytes that take at most {self.limit} steps; they take more")


def _index(code: int, argument: bytes) -> int:
    """The number of a value that the pickle refers to; opcodes of protocol 0 have it as text."""
    return int(argument) if code in b"gp" else int.from_bytes(argument, "little")


class _Unpickler(pickle.Unpickler):
    """Resolves names only to objects that are immutable and harmless, whatever arguments they are called with.

    Args:
        data: The pickle.
        source: Its name in error messages.
        archive: The archive of ``torch.save`` that it is from, with the tensors that it refers to.
        with_data: Whether to read these tensors. If not, a :class:`StoredTensor` describes each.
    """

    def __init__(self, data: bytes, source: str, archive: Archive | None = None, with_data: bool = True) -> None:
        super().__init__(io.BytesIO(data))
        self._source, self._archive, self._with_data = source, archive, with_data
        self._storages: dict[str, Storage] = {}
        self._costs = _Costs(data)
        self._in_ranges = 0
        self._members: dict[enum.Enum, dict[str, Any]] = {}
        self._dtypes: list[Any] = []

    def find_class(self, module: str, name: str, /) -> Any:
        # Pickles of protocol 2, which torch.save writes, use the names of Python 2.
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        full = f"{module}.{name}"
        if full == NUMPY_DTYPE and full in ALLOWED:
            return sealed(module, name, self._dtype)
        if full == "builtins.range":
            return sealed(module, name, self._range)
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
        if self._archive is None:
            raise pickle.UnpicklingError("the pickle refers to data outside of itself")
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

    def load(self) -> Any:
        try:
            self._costs.check()
            return super().load()
        except (UnsafePickle, DamagedCheckpoint, OSError):
            raise
        except Exception as error:
            raise DamagedCheckpoint(
                f"{self._source}: expected a pickle of a checkpoint; got {type(error).__name__}: {error}."
            ) from error
        finally:
            self._check_changes()

    def _dtype(self, *arguments: Any) -> Any:
        self._dtypes.append(plain_dtype(*arguments))
        return self._dtypes[-1]

    def _range(self, *bounds: Any) -> range:
        """A range whose elements may be copied by each of the pickle's calls, within the limit."""
        made = range(*map(operator.index, bounds))
        if made and max(abs(made[0]), abs(made[-1])) >= sys.hash_info.modulus:
            raise ValueError(f"expected a range of integers below 2**61 - 1; got {made}")
        self._in_ranges += len(made)
        if self._in_ranges * self._costs.calls > self._costs.limit:
            raise ValueError(f"expected short ranges; got {made} among {self._costs.calls} calls")
        return made

    def _check_changes(self) -> None:
        """Raise an error if the pickle has modified a dtype or an enumeration's member, and restore the member."""
        if any(dtype.fields is not None or dtype.subdtype is not None for dtype in self._dtypes):
            raise UnsafePickle(f"{self._source}: creates a numpy dtype of records, which is not allowed.")
        for member, attributes in self._members.items():
            if vars(member) != attributes:
                vars(member).clear()
                vars(member).update(attributes)
                raise UnsafePickle(f"{self._source}: modifies {member!r}, which is not allowed in a checkpoint.")


def loads(data: bytes, source: str) -> Any:
    """Load a plain pickle, such as ``.metadata``.

    Args:
        data: The pickle.
        source: Its name in error messages.

    Raises:
        UnsafePickle: The pickle refers to something that is not on the allow-list.
        DamagedCheckpoint: The data is not a complete pickle.
    """
    return _Unpickler(data, source).load()


def load_torch(stream: IO[bytes], source: str) -> Any:
    """Load a file that ``torch.save`` wrote, with its tensors on the CPU.

    Args:
        stream: Seekable stream that holds exactly the file.
        source: Its name in error messages.

    Raises:
        UnsafePickle: The file refers to something that is not on the allow-list.
        DamagedCheckpoint: The stream does not hold a complete file of ``torch.save``.
    """
    archive = Archive(stream, source)
    return _Unpickler(archive.read("data.pkl"), source, archive).load()


def stored_tensor(archive: Archive) -> StoredTensor:
    """Describe where a file of ``torch.save`` stores its only tensor, without reading the tensor's elements.

    Raises:
        UnsafePickle: The file refers to something that is not on the allow-list.
        DamagedCheckpoint: The file is damaged, or does not hold a single tensor.
    """
    found = _Unpickler(archive.read("data.pkl"), archive.source, archive, with_data=False).load()
    if not isinstance(found, StoredTensor):
        raise DamagedCheckpoint(f"{archive.source}: expected a tensor; got {type(found).__name__}.")
    return found


class _Pickler(pickle._Pickler):
    """Pickles the placeholders of :mod:`.allowed` as the classes, functions and objects that they stand for."""

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


def save_torch(value: Any) -> bytes:
    """Pickle an object as ``torch.save`` does. Placeholders are written as the objects that they stand for."""
    stream = io.BytesIO()
    torch.save(value, stream, pickle_module=_PICKLE_MODULE)
    return stream.getvalue()
