"""Pipes and folders instead of files, invalid JSON, and pickles that explode cause an immediate error or a fallback."""

import argparse
import codecs
import copy
import io
import json
import os
import pickle
import subprocess
import sys
import time
import zipfile
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron.fsdp.checkpoint import safe_pickle
from megatron.fsdp.checkpoint.backend import save
from megatron.fsdp.checkpoint.checksums import NAME, DamagedCheckpoint
from megatron.fsdp.checkpoint.lazy import Region
from megatron.fsdp.checkpoint.loading import load
from megatron.fsdp.checkpoint.newest import newest_complete
from megatron.fsdp.checkpoint.reader import TRACKER, CheckpointReader, checkpoint_folder, untiled
from megatron.fsdp.checkpoint.safe_pickle import UnsafePickle
from megatron.fsdp.convert.cli import cli
from megatron.fsdp.convert.huggingface.folder import read_config, read_weights
from megatron.fsdp.convert.verifying import verify
from megatron.fsdp.integrations.lightning_strategy import ShardedStrategy
from tests.checkpoints import ROOT, write_torch_dist
from tests.small_checkpoints import Injected, write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

SECONDS = 5.0


def data_of(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    make(path)


def infinite(folder: Path) -> None:
    content = json.loads((folder / NAME).read_text())
    next(iter(content["files"].values()))["bytes"] = float("inf")
    (folder / NAME).write_text(json.dumps(content))


def crafted(change: Callable[[Any, Any], object]) -> Callable[[Path], None]:
    """Change the entry of the tensor and its place in the metadata."""

    def write(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata.state_dict_metadata["w"], next(iter(metadata.storage_data.values())))
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        (folder / NAME).unlink(missing_ok=True)

    return write


ODD: dict[str, Callable[[Path], object]] = {
    "data is a pipe": lambda folder: replaced(data_of(folder), os.mkfifo),
    "data is a folder": lambda folder: replaced(data_of(folder), os.mkdir),
    "metadata is a pipe": lambda folder: replaced(folder / ".metadata", os.mkfifo),
    "metadata is a folder": lambda folder: replaced(folder / ".metadata", os.mkdir),
    "checksums are a pipe": lambda folder: replaced(folder / NAME, os.mkfifo),
    "checksums are a folder": lambda folder: replaced(folder / NAME, os.mkdir),
    "deep checksums": lambda folder: (folder / NAME).write_text("[" * 200_000),
    "checksums of infinity": infinite,
    "checksums are a number": lambda folder: (folder / NAME).write_text("3"),
    "checksums are no text": lambda folder: (folder / NAME).write_bytes(b"\xff\xfe\x00\xd8"),
    "the format is a pipe": lambda folder: os.mkfifo(folder / "metadata.json"),
    "an offset of a half": crafted(lambda entry, place: setattr(entry.chunks[0], "offsets", (0.5,))),
    "sizes of text": crafted(lambda entry, place: setattr(entry.chunks[0], "sizes", ("a",))),
    "sizes of floats": crafted(lambda entry, place: setattr(entry, "size", (5.0,))),
    "a size beyond all memory": crafted(lambda entry, place: setattr(entry, "size", (1 << 80,))),
    "an infinite length": crafted(lambda entry, place: setattr(place, "length", float("inf"))),
    "a length of True": crafted(lambda entry, place: setattr(place, "length", True)),
    "a deep format": lambda folder: (folder / "metadata.json").write_text('{"a":' * 100_000),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("sums", [True, False], ids=["with sums", "without"])
def test_falling_back(tmp_path: Path, odd: str, sums: bool) -> None:
    for iteration in (1, 2):
        save({"w": torch.full((5,), float(iteration))}, tmp_path / f"iter_{iteration:07d}")
    newest = tmp_path / "iter_0000002"
    if not sums and "infinity" not in odd:
        (newest / NAME).unlink()
    ODD[odd](newest)
    begun = time.monotonic()
    assert newest_complete(tmp_path, 2) == 1
    into = {"w": torch.zeros(5)}
    with pytest.raises((DamagedCheckpoint, FileNotFoundError), match="iter_0000002"):
        load(into, newest)
    assert time.monotonic() - begun < SECONDS and torch.equal(into["w"], torch.zeros(5))


def torch_dist(folder: Path) -> Path:
    return write_torch_dist(folder, {"w": torch.ones(5)}, {"args": argparse.Namespace(transformer_impl="local")})


@pytest.mark.parametrize("odd", [odd for odd in ODD if odd.startswith(("a length", "a size", "an ", "sizes"))])
def test_converting_crafted_metadata_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    source, target = torch_dist(tmp_path / "crafted"), tmp_path / "out"
    ODD[odd](source)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        done = CliRunner().invoke(cli, ["convert", str(source), str(target), "--no-optimizer"])
        assert done.exit_code == 1 and isinstance(done.exception, SystemExit), done
        assert "crafted" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["crafted"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.write_bytes(b"\xff\x00g")], ids=range(3))
def test_odd_trackers(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / TRACKER)
    with pytest.raises((DamagedCheckpoint, FileNotFoundError), match=TRACKER):
        checkpoint_folder(tmp_path)


def test_odd_hugging_face_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="config.json: expected JSON"):
        read_config(tmp_path)
    header = b"[" * 200_000
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="expected the header of a safetensors file"):
        read_weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "pipe"}}')
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError, match="pipe"):
        read_weights(tmp_path)


def test_a_tensor_larger_than_its_file(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(8)}, checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["w"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 50])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpoint, match="w: expected at least 4503599627370496 bytes"):
        CheckpointReader(tmp_path).check()


# Pickles that explode ---------------------------------------------------------------------------------------------


def doubled(times: int) -> Any:
    text: Any = "a"
    for _ in range(times):
        text = Injected(str, (text, text))
    return text


GROWING: dict[str, Any] = {
    "deque": Injected(deque, range(10**13)),
    "set": Injected(set, range(10**13)),
    "frozenset": Injected(frozenset, range(10**13)),
    "list": Injected(list, range(10**10)),
    "Counter": Injected(Counter, range(10**13)),
    "bytes": Injected(set, Injected(bytes, 10**10)),
    "bytearray": Injected(deque, Injected(bytearray, 10**10)),
    "text": doubled(60),
}


def as_key(value: bytes) -> bytes:
    return b"\x80\x02}" + value + b"Ns."


def _large(number: int) -> bytes:
    return b"\x8a\x0a" + number.to_bytes(10, "little")


def _tower(levels: int, level: bytes) -> bytes:
    """Values that each refer to the one before it, which is number 0 in the pickle's memo."""
    return b")q\0" + (level + b"q\0") * levels


def _tower_of_objects(levels: int) -> bytes:
    """Objects that get their state, which refers to the object before them, after a tuple refers to them twice."""
    made = b")q\0" + b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\nq\3" + b"00"
    state = b"}X\3\0\0\0fqnh\0sX\6\0\0\0offsetNs"
    return made + (b"h\3)\x81q\1" + b"h\1h\1\x86q\2" + b"0" + state + b"b0" + b"h\2q\0" + b"0") * levels + b"h\0"


# The same as bytes, of less than two kilobytes but for the keys of one hash and the deepest tuple.
CRAFTED: dict[str, bytes] = {
    "a tower of tuples": as_key(_tower(60, b"h\0\x86")),
    "a tower of objects": as_key(_tower_of_objects(60)),
    "a deep tuple": as_key(b")" + b"\x85" * 300_000),
    "lists of the same lists": b"\x80\x02]" + b"q\0](hhhhhhhhhhe".replace(b"h", b"h\0") * 12 + b".",
    "keys of one hash": b"\x80\x02}(" + b"".join(_large(key * (2**61 - 1)) + b"N" for key in range(80_000)) + b"u.",
    "a range of one hash": pickle.dumps(Injected(set, range(0, (2**61 - 1) << 16, 2**61 - 1))),
    "many lists of one range": pickle.dumps((lambda long: [Injected(list, long) for _ in range(2000)])(range(1 << 16))),
    "many copies of one text": pickle.dumps(
        (lambda text: [Injected(codecs.encode, text, "latin1") for _ in range(2000)])("a" * 100_000)
    ),
    "a far reference": b"\x80\x02Nr\0\0\0\x10.",
}
TRY = """
import io, resource, sys, time
from pathlib import Path
from megatron.fsdp.checkpoint import safe_pickle
from megatron.fsdp.checkpoint.checksums import DamagedCheckpoint
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
for path in sorted(Path(sys.argv[1]).iterdir()):
    begun = time.monotonic()
    try:
        if path.suffix == ".pt":
            safe_pickle.load_torch(io.BytesIO(path.read_bytes()), path.name)
        else:
            safe_pickle.loads(path.read_bytes(), path.name)
    except DamagedCheckpoint as error:
        assert path.name in str(error) and "MemoryError" not in str(error), error
        print(path.name, time.monotonic() - begun, flush=True)
"""


def test_pickles_that_explode_are_rejected(tmp_path: Path) -> None:
    for name, value in GROWING.items():
        (tmp_path / f"{name}.pickle").write_bytes(pickle.dumps({"args": value}))
        torch.save({"args": value}, tmp_path / f"{name}.pt")
    for name, data in CRAFTED.items():
        (tmp_path / f"{name.replace(' ', '_')}.pickle").write_bytes(data)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TRY, str(tmp_path)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout
    seconds = {name: float(text) for name, text in map(str.split, output.splitlines())}
    assert seconds.keys() == {path.name for path in tmp_path.iterdir()}
    assert max(seconds.values()) < SECONDS


def test_values_as_large_as_their_pickle_are_read() -> None:
    value = {
        "range": range(0, -(1 << 16), -1),
        "bytes": [b"", b"\xff" * 9, bytearray(), bytearray(b"\xff\x00")],
        "sets": [{1, "a"}, frozenset({2}), Counter("aab"), deque(range(9), maxlen=12)],
        "text": ["", "ü" * 9],
    }
    for protocol in (2, 4, 5):
        assert safe_pickle.loads(pickle.dumps(value, protocol=protocol), "here") == value


# Many parts, and odd names ------------------------------------------------------------------------------------------


def test_many_chunks_are_read_quickly(tmp_path: Path) -> None:
    begun = time.process_time()
    rows = [Region((i, 0), (1, 9)) for i in range(100_000)]
    columns = [Region((0, i), (9, 1)) for i in range(20_000)]
    assert untiled((100_000, 9), rows) == untiled((9, 20_000), columns) == ""
    assert "overlaps" in untiled((9, 20_000), [*columns, columns[0]])
    write_checkpoint(tmp_path / "c", {"w": torch.ones(5)})
    empty = [ChunkStorageMetadata(torch.Size((0,)), torch.Size((0,))) for _ in range(50_000)]
    crafted(lambda entry, place: entry.chunks.extend(empty))(tmp_path / "c")
    assert not verify(tmp_path / "c").problems
    crafted(lambda entry, place: entry.chunks.extend(empty))(torch_dist(tmp_path / "source"))
    done = CliRunner().invoke(cli, ["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--no-optimizer"])
    assert done.exit_code == 0, done.stderr
    assert time.process_time() - begun < 6 * SECONDS  # it would take minutes to compare each with each


def test_files_of_an_archive_that_overlap(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps("a" * 10_000))
        first = archive.getinfo("archive/data.pkl")
        for name in range(100):
            archive.filelist.append(copy.copy(first))
            archive.filelist[-1].filename = f"archive/{name}"
    with pytest.raises(DamagedCheckpoint, match="its files overlap"):
        safe_pickle.load_torch(stream, "file x")


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xc3\xbc"))
    write_checkpoint(folder, {"w": torch.ones(5)}, {"o": "ü"})
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    source, target = torch_dist(folder / "source"), folder / "out"
    for words in (
        *(["inspect", folder], ["print-tensor", folder, "o"], ["verify", folder / "ü"]),
        ["convert", source, target, "--no-optimizer"],
    ):
        command = [sys.executable, "-m", "megatron.fsdp.convert", *words]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
        shown = done.stdout + done.stderr
        assert b"codec" not in shown and b"Traceback" not in shown, shown
    assert target.is_dir()


def test_lightning_does_not_run_what_the_metadata_refers_to(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "meta.pt")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Injected(os.mkdir, str(tmp_path / "ran"))))
    strategy = object.__new__(ShardedStrategy)
    strategy.broadcast = lambda value: value
    with pytest.raises(UnsafePickle):
        strategy.load_checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()
