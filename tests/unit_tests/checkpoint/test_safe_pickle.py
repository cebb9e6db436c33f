"""Pickles in a checkpoint never run code, wherever they are; plain data is loaded unchanged."""

import argparse
import builtins
import collections
import datetime
import enum
import functools
import importlib
import io
import operator
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex

from megatron.fsdp.checkpoint import allowed, safe_pickle
from megatron.fsdp.checkpoint.allowed import ALLOWED, Foreign, Sealed
from megatron.fsdp.checkpoint.archive import Archive
from megatron.fsdp.checkpoint.checksums import NAME, DamagedCheckpoint
from megatron.fsdp.checkpoint.reader import CheckpointReader, common_state
from megatron.fsdp.checkpoint.safe_pickle import UnsafePickle, load_torch, loads, save_torch
from tests.small_checkpoints import NAMES, Injected, numbers, same_bits, sample_checkpoint, write_checkpoint


def _code(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()"


# Most of these create a file when they run.
INJECTED: dict[str, Callable[[Path], Injected]] = {
    "posix.system": lambda m: Injected(os.system, f"touch {m}"),
    "subprocess.Popen": lambda m: Injected(subprocess.Popen, ["touch", str(m)]),
    "builtins.eval": lambda m: Injected(eval, _code(m)),
    "builtins.exec": lambda m: Injected(exec, _code(m)),
    "io.open": lambda m: Injected(open, str(m), "w"),
    "builtins.getattr": lambda m: Injected(getattr, Injected(importlib.import_module, "os"), "system"),
    "builtins.__import__": lambda m: Injected(builtins.__import__, "os"),
    "functools.partial": lambda m: Injected(functools.partial(os.system, f"touch {m}")),
    "functools.reduce": lambda m: Injected(functools.reduce, operator.add, [1, 2]),
    "operator.methodcaller": lambda m: Injected(operator.methodcaller, "touch"),
    "operator.attrgetter": lambda m: Injected(operator.attrgetter, "os.system"),
    "importlib.import_module": lambda m: Injected(importlib.import_module, "os"),
    "pickle.loads": lambda m: Injected(pickle.loads, pickle.dumps(Injected(os.system, f"touch {m}"))),
    "torch.serialization.load": lambda m: Injected(torch.load, str(m)),
    # Megatron-Core replaces this function: the name is written, which pickle does not do for a lambda.
    "torch.storage._load_from_bytes": lambda m: Injected(lambda: None),
    "shutil.rmtree": lambda m: Injected(shutil.rmtree, str(m)),
    "signal.signal": lambda m: Injected(signal.signal, 10, 1),
    "types.FunctionType": lambda m: Injected(types.FunctionType, 1),
    "builtins.type": lambda m: Injected(type, "X", (), {}),
    "builtins.map": lambda m: Injected(map, eval, [_code(m)]),
    "collections.namedtuple": lambda m: Injected(collections.namedtuple, "X", "a"),
    "torch.distributed.tensor.DTensor": lambda m: Injected(torch.distributed.tensor.DTensor),
}


def injected(name: str, marker: Path, protocol: int) -> bytes:
    try:
        return pickle.dumps({"args": [1, INJECTED[name](marker)]}, protocol=protocol)
    except (pickle.PicklingError, AttributeError):
        # pickle refuses to write these names.
        module, _, function = name.rpartition(".")
        return b"\x80\x02c" + f"{module}\n{function}\n".encode() + b")R."


def zipped(pickled: bytes) -> bytes:
    """An archive of torch.save with another pickle in it."""
    whole, stream = io.BytesIO(), io.BytesIO()
    torch.save([1], whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(stream, "w") as target:
        for entry in source.namelist():
            target.writestr(entry, pickled if entry.endswith("data.pkl") else source.read(entry))
    return stream.getvalue()


def as_metadata(folder: Path, data: bytes) -> Callable[[], object]:
    (folder / ".metadata").write_bytes(data)
    return lambda: CheckpointReader(folder, verify=False)


def as_common(folder: Path, data: bytes) -> Callable[[], object]:
    (folder / "common.pt").write_bytes(zipped(data))
    return lambda: common_state(folder)


def as_object(folder: Path, data: bytes) -> Callable[[], object]:
    blob = zipped(data)
    (folder / "__0_1.distcp").write_bytes(blob)
    reader = CheckpointReader(folder, verify=False)
    reader.metadata.storage_data[MetadataIndex("o")].length = len(blob)
    return lambda: reader.read_object("o")


PLACES = {".metadata": as_metadata, "common.pt": as_common, "__0_1.distcp": as_object}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("written") / "checkpoint", {"a": numbers((3,))}, {"o": [1]})
    (folder / NAME).unlink()
    return folder


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "checkpoint"))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", INJECTED)
def test_an_injected_pickle_is_rejected_and_not_run(
    checkpoint: Path, tmp_path: Path, name: str, place: str, protocol: int
) -> None:
    marker = tmp_path / "touched"
    read = PLACES[place](checkpoint, injected(name, marker, protocol))
    with pytest.raises(UnsafePickle) as error:
        read()
    assert not marker.exists()
    assert str(checkpoint / place) in str(error.value)
    # The module is the one in __module__, which for functions in C may differ from the documented one.
    assert re.search(rf"refers to [\w.]+\.{name.rpartition('.')[2]}, which is not allowed", str(error.value))


@pytest.mark.parametrize("name", ["posix.system", "builtins.eval", "builtins.exec", "io.open", "functools.partial"])
def test_the_same_pickle_does_harm_with_the_standard_unpickler(tmp_path: Path, name: str) -> None:
    pickle.loads(injected(name, tmp_path / "touched", 4))
    assert (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "data", [b"cos\nsystem\n.", b"\x80\x04\x8c\x02os\x8c\x06system\x93.", b"(S'ls'\nios\nsystem\n."]
)
def test_a_reference_without_a_call_is_rejected(data: bytes) -> None:
    with pytest.raises(UnsafePickle, match=r"file x: refers to os.system, which is not allowed"):
        loads(data, "file x")


def test_a_dotted_name_does_not_escape_the_allow_list() -> None:
    for module, name in (("torch", "serialization.os.system"), ("argparse", "_sys.modules"), ("collections", "abc")):
        data = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name)) + b"\x93."
        with pytest.raises(UnsafePickle, match=name):
            loads(data, "file x")


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with importable modules of transformer_engine. Importing one creates the file ``touched``."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    touch = _code(tmp_path / "touched")
    body = f"{touch}\nclass State:\n  def __init__(self, *a): {touch}\n  __new__ = __setstate__ = __init__\n"
    (package / "state.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_placeholder_neither_runs_nor_imports_its_class(importable: Path) -> None:
    for protocol in (2, 4):
        placeholder = allowed.foreign("transformer_engine.state", "State")
        stream = io.BytesIO()
        made = placeholder(1, 2)
        made.__setstate__({"scale": 3})
        safe_pickle._Pickler(stream, protocol=protocol).dump([made, placeholder])
        found, kind = loads(stream.getvalue(), "x")
        assert found.scale == 3 and found == made and kind is placeholder
        assert (kind.__module__, kind.__qualname__) == ("transformer_engine.state", "State")
    assert not (importable / "touched").exists() and "transformer_engine.state" not in sys.modules
    importlib.import_module("transformer_engine.state")
    assert (importable / "touched").exists()
    for name in ("transformer_engine", "transformer_engine.state"):
        del sys.modules[name]


def test_functions_in_settings_get_placeholders() -> None:
    stream = io.BytesIO()
    torch.save(argparse.Namespace(act=torch.nn.functional.silu, init=torch.nn.init.xavier_uniform_), stream)
    found = load_torch(io.BytesIO(stream.getvalue()), "x")
    assert repr(found.act) == "<torch.nn.functional.silu>" and isinstance(found.act, Sealed)
    assert not isinstance(found.act(2), torch.Tensor)
    assert torch.load(io.BytesIO(save_torch(found)), weights_only=False).act is torch.nn.functional.silu


class Backend(enum.Enum):
    FLASH = 1
    LOCAL = 2


@pytest.fixture
def megatron_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An imported module of Megatron."""
    module = types.ModuleType("megatron.core.invented")
    module.Backend = Backend
    monkeypatch.setattr(Backend, "__module__", module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("protocol", [2, 4])
def test_enumerations_of_megatron(
    megatron_module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    data = pickle.dumps([Backend.LOCAL, Backend.FLASH], protocol)
    assert loads(data, "x") == [Backend.LOCAL, Backend.FLASH]
    monkeypatch.delitem(sys.modules, megatron_module.__name__)
    local, flash = loads(data, "x")
    assert isinstance(local, Foreign) and local.value == 2 and flash.value == 1 and local != flash
    assert repr(local) == "<megatron.core.invented.Backend(2)>"
    assert loads(data, "x")[0] == local and hash(loads(data, "x")[0]) == hash(local)
    data = save_torch(argparse.Namespace(backend=local))
    monkeypatch.setitem(sys.modules, megatron_module.__name__, megatron_module)
    assert torch.load(io.BytesIO(data), weights_only=False).backend is Backend.LOCAL


def test_a_class_of_megatron_is_not_run_even_if_imported(megatron_module: types.ModuleType) -> None:
    class Plan:
        ran = False

        def __setstate__(self, state: Any) -> None:
            Plan.ran = True

    Plan.__module__, Plan.__qualname__ = megatron_module.__name__, "Plan"
    megatron_module.Plan = Plan
    plan = Plan()
    plan.items = [1]
    found = loads(pickle.dumps(plan), "x")
    assert type(found) is not Plan and found.items == [1] and not Plan.ran
    pickle.loads(pickle.dumps(plan))
    assert Plan.ran


def build(target: bytes, state: object) -> bytes:
    """A pickle that sets the state of the object that ``target`` leaves on the stack."""
    return target + pickle.dumps(state, 2)[2:-1] + b"b."


@pytest.mark.parametrize(
    "target",
    [
        b"\x80\x02cargparse\nNamespace\n",
        b"\x80\x02ccollections\nOrderedDict\n",
        b"\x80\x02ctorch\nSize\n",
        b"\x80\x02ctorch\nFloatStorage\n",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n",
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadataIndex\n",
        b"\x80\x02cmegatron.core.invented\nThing\n",
    ],
)
def test_referenced_objects_are_immutable(target: bytes) -> None:
    states: list[Any] = [({}, {"__hash__": None, "injected": 1}), {"injected": 1}, (None, {"injected": 1})]
    for state in states:
        with pytest.raises(DamagedCheckpoint):
            loads(build(target, state), "x")
    assert not hasattr(loads(target + b".", "x"), "injected")
    assert not any(hasattr(kind, "injected") for kind in (argparse.Namespace, MetadataIndex, Foreign, torch.Size))


@pytest.mark.parametrize("member", [signal.Signals.SIGTERM, _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT])
def test_members_of_enumerations_are_immutable(member: enum.Enum) -> None:
    before = dict(vars(member))
    kind = f"c{type(member).__module__}\n{type(member).__qualname__}\n".encode()
    data = b"\x80\x02" + kind + b"K" + bytes([member.value]) + b"\x85R"
    assert loads(data + b".", "x") is member
    with pytest.raises(UnsafePickle, match=f"x: modifies .*{member.name}"):
        loads(build(data, {"_value_": 9, "injected": 1}), "x")
    assert vars(member) == before


def test_signals_as_python_3_10_pickles_them() -> None:
    before, data = dict(vars(signal.SIGTERM)), b"\x80\x02csignal\nSIGTERM\n"
    assert loads(data + b".", "x") is signal.SIGTERM
    with pytest.raises(UnsafePickle, match="x: modifies .*SIGTERM"):
        loads(build(data, {"injected": 1}), "x")
    assert vars(signal.SIGTERM) == before


def test_allowed_objects_are_immutable() -> None:
    for name, value in ALLOWED.items():
        with pytest.raises((TypeError, AttributeError)):
            value.injected = 1
            pytest.fail(name)


def plain_data() -> dict[str, Any]:
    return {
        "numbers": [1, 2.5, True, None, 1 << 70, 3 + 4j, b"bytes", bytearray(b"x"), "text", {1, 2}, frozenset({3})],
        "nested": {"a": (1, [2, {"b": slice(1, 2)}]), 3: range(4)},
        "collections": [collections.OrderedDict(a=1), collections.defaultdict(list, a=[1]), collections.deque([1, 2])],
        "counter": collections.Counter("aab"),
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.95), dtype=torch.bfloat16),
        "simple": types.SimpleNamespace(a=1),
        "time": [datetime.timedelta(minutes=10), datetime.datetime(2026, 1, 2, 3)],
        "paths": [pathlib.Path("/a/b"), pathlib.PurePosixPath("c")],
        "signal": signal.SIGTERM,
        "torch": [torch.Size([1, 2]), torch.float8_e4m3fn, torch.device("cpu")],
        "random": random.getstate(),
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_loaded_unchanged(protocol: int) -> None:
    data = plain_data()
    found = loads(pickle.dumps(data, protocol), "x")
    assert found == data
    assert all(type(a) is type(b) for a, b in zip(found.values(), data.values(), strict=True))
    saved = save_torch(data)
    assert load_torch(io.BytesIO(saved), "x") == data
    assert torch.load(io.BytesIO(saved), weights_only=False) == data


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("core", ["numpy._core", "numpy.core"])
def test_arrays_of_both_versions_of_numpy(core: str, protocol: int) -> None:
    numpy.random.seed(3)
    arrays = {
        "state": numpy.random.get_state(),
        "matrix": numpy.arange(6, dtype=">i4").reshape(2, 3),
        "fortran": numpy.asfortranarray(numpy.ones((2, 3), numpy.float16)),
        "flags": numpy.array([True, False]),
        "scalar": numpy.float32(2.5),
        "text": numpy.array(["a", "bc"]),
        "dtype": numpy.dtype("float32"),
    }
    data = pickle.dumps(arrays, protocol)
    arrays = pickle.loads(data)
    if protocol == 2:
        data = data.replace(b"cnumpy._core.", f"c{core}.".encode())
    found = loads(data, "x")
    assert repr(found) == repr(arrays)
    for key in ("matrix", "fortran", "flags", "scalar", "text"):
        assert found[key].dtype == arrays[key].dtype and (found[key] == arrays[key]).all()
        assert type(found[key]) is type(arrays[key])
    numpy.random.seed(4)
    numpy.random.set_state(found["state"])
    numpy_numbers = numpy.random.rand(3)
    numpy.random.seed(3)
    assert (numpy_numbers == numpy.random.rand(3)).all()


def test_arrays_of_objects_are_rejected() -> None:
    with pytest.raises(DamagedCheckpoint, match="plain numpy dtype"):
        loads(pickle.dumps(numpy.array([[], {}], dtype=object)), "x")


def test_numpy_dtypes_are_immutable() -> None:
    before = pickle.dumps(numpy.dtype("f4"))
    target = b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00f4\x89\x89\x87R"
    # A field at an offset far outside of an element.
    state = (3, "<", None, ("a",), {"a": (numpy.dtype("u1"), 1 << 20)}, 4, 4, 16)
    with pytest.raises((UnsafePickle, DamagedCheckpoint)):
        loads(build(target, state), "x")
    assert pickle.dumps(numpy.dtype("f4")) == before and numpy.dtype("f4").names is None


def test_classes_of_tensors_are_not_called() -> None:
    for name in (b"torch\nTensor", b"torch.nn.parameter\nParameter"):
        with pytest.raises(DamagedCheckpoint, match="expected a reference to a tensor class"):
            loads(b"\x80\x02c" + name + b"\nK\x05\x85R.", "x")


def test_compressed_archives_are_rejected() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("archive/data.pkl", pickle.dumps([0] * 10_000))
    with pytest.raises(DamagedCheckpoint, match="data.pkl is compressed"):
        load_torch(io.BytesIO(stream.getvalue()), "x")


def test_tensors_of_every_kind() -> None:
    base = numbers((6, 5))
    tensors = {
        "whole": base,
        "view": base[1:3, 2:],
        "transposed": base.t(),
        "expanded": torch.ones(1).expand(4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "half": base.bfloat16(),
        "eighth": base.to(torch.float8_e5m2),
        "parameter": torch.nn.Parameter(base.clone(), requires_grad=False),
        "shared": base,
        "bytes": io.BytesIO(b"abc"),
        "state": torch.get_rng_state(),
    }
    tensors["parameter"].tensor_model_parallel = True
    stream = io.BytesIO()
    torch.save(tensors, stream)
    found = load_torch(io.BytesIO(stream.getvalue()), "x")
    for key, tensor in tensors.items():
        if key == "bytes":
            assert found[key].getvalue() == b"abc"
        else:
            assert same_bits(found[key].detach(), tensor.detach()) and found[key].stride() == tensor.stride(), key
    assert found["shared"].data_ptr() == found["whole"].data_ptr()
    assert isinstance(found["parameter"], torch.nn.Parameter)


def test_a_tensor_beyond_its_storage_is_damage() -> None:
    stream = io.BytesIO()
    torch.save(torch.zeros(4), stream)
    with zipfile.ZipFile(stream) as source:
        pickled = source.read("archive/data.pkl")
        changed = pickled.replace(b"K\x04\x85", b"K\x05\x85")
        assert changed != pickled
        data = stream.getvalue().replace(pickled, changed)
    for reading in (lambda: load_torch(io.BytesIO(repaired(data)), "file x"), lambda: stored(repaired(data))):
        with pytest.raises(DamagedCheckpoint, match="file x.*needs 20 bytes of a storage of 16"):
            reading()


def repaired(data: bytes) -> bytes:
    """The same files in an archive with valid checksums."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(stream, "w") as target:
        for entry in source.infolist():
            start = data.find(b"PK", entry.header_offset)
            offset = start + 30 + int.from_bytes(data[start + 26 : start + 28], "little")
            offset += int.from_bytes(data[start + 28 : start + 30], "little")
            target.writestr(entry.filename, data[offset : offset + entry.file_size])
    return stream.getvalue()


def stored(data: bytes) -> object:
    return safe_pickle.stored_tensor(Archive(io.BytesIO(data), "file x"))


def test_a_damaged_pickle_is_reported_as_damage() -> None:
    data = pickle.dumps(plain_data(), 4)
    generator = random.Random(0)
    kinds: set[type] = set()
    for _ in range(300):
        changed = bytearray(data[: generator.randrange(len(data))] if generator.random() < 0.3 else data)
        for _ in range(generator.randrange(1, 4)):
            if changed:
                changed[generator.randrange(len(changed))] = generator.randrange(256)
        try:
            kinds.add(type(loads(bytes(changed), "file x")))
        except (DamagedCheckpoint, UnsafePickle) as error:
            kinds.add(type(error))
            assert str(error).startswith("file x: ")
    assert {DamagedCheckpoint, UnsafePickle} <= kinds


def test_a_damaged_torch_file_is_reported_as_damage() -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.zeros(100), "b": [1, 2]}, stream)
    data = stream.getvalue()
    generator = random.Random(0)
    for length in [0, 1, 100, len(data) - 1, *(generator.randrange(len(data)) for _ in range(50))]:
        with pytest.raises(DamagedCheckpoint, match="file x: expected a file of torch.save"):
            load_torch(io.BytesIO(data[:length]), "file x")
    found = 0
    for position in range(0, len(data), 3):
        changed = bytes([*data[:position], data[position] ^ 0x41, *data[position + 1 :]])
        try:
            load_torch(io.BytesIO(changed), "file x")
        except (DamagedCheckpoint, UnsafePickle, NotImplementedError):
            found += 1
    assert found > 100


def test_a_damaged_element_of_an_object_is_detected() -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.full((100,), 2.5)}, stream)
    data = bytearray(stream.getvalue())
    data[data.index(torch.full((100,), 2.5).numpy().tobytes()) + 200] ^= 1
    with pytest.raises(DamagedCheckpoint, match="file x: .*Bad CRC-32 for file 'archive/data/0'"):
        load_torch(io.BytesIO(bytes(data)), "file x")


@pytest.mark.parametrize("name", NAMES)
def test_all_objects_of_the_samples_are_allowed(name: str) -> None:
    reader = CheckpointReader(sample_checkpoint(name))
    assert isinstance(reader.metadata, Metadata)
    for key in reader.objects:
        reader.read_object(key)
    state = (
        common_state(sample_checkpoint(name)) if reader.format == "torch_dist" else {"args": reader.read_object("args")}
    )
    assert state["args"].hidden_size == 64


def test_metadata_of_an_older_megatron_core() -> None:
    old = CheckpointReader(sample_checkpoint("torch_dist_tp2dp2_legacy_fsms_mcore013")).metadata
    key = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    assert old.mcore_data[key] == {"nd_reformulated_orig_global_shape": (2, 64, 160)}
