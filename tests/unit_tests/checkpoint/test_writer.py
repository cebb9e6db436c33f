"""New checkpoints are complete or absent, and match the format that torch writes."""

import itertools
import json
import math
import multiprocessing
import os
import resource
import signal
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.fsdp.checkpoint import archive, staging, writer
from megatron.fsdp.checkpoint.checksums import NAME, Checksums, crc32_of
from megatron.fsdp.checkpoint.lazy import LazyTensor, Region
from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.checkpoint.writer import Draft, RawObject, write_checkpoint
from megatron.fsdp.convert.huggingface.folder import Export, export
from megatron.fsdp.convert.options import WriteOptions
from tests.small_checkpoints import DTYPES, PeakMemory, lazily, numbers, same_bits
from tests.small_checkpoints import write_checkpoint as write_checkpoint_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    # The forked processes only copy and write bytes.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]

TENSORS = {"a.b": numbers((40, 9)), "c": numbers((7,), torch.bfloat16), "d": torch.tensor(2.5), "e": numbers((3, 4, 5))}
OBJECTS = {"o": {"betas": (0.9, 0.95)}, "p": [1]}


def write(path: Path, process: int = 0, processes: int = 1, tensors: Any = None, **options: Any) -> None:
    """Write a process's share."""
    draft = Draft(lazily(TENSORS) if tensors is None else tensors, OBJECTS)
    write_checkpoint(draft, path, (process, processes), **{"block": 100, **options})


def write_with(path: Path, processes: int, tensors: Any = None) -> None:
    """Write with several processes."""
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=write, args=(path, p, processes, tensors)) for p in reversed(range(processes))]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [0] * processes


def assert_whole(path: Path, tensors: Mapping[str, torch.Tensor] = TENSORS) -> CheckpointReader:
    """Read the checkpoint with torch and with our reader."""
    state = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()} | dict.fromkeys(OBJECTS)
    dcp.load(state, checkpoint_id=path)
    found = CheckpointReader(path)
    found.check()
    assert set(found.tensors) == set(tensors)
    for key, tensor in tensors.items():
        assert same_bits(state[key], tensor) and same_bits(found.tensors[key].full_tensor(), tensor)
    assert {key: state[key] for key in OBJECTS} == OBJECTS
    assert {key: found.read_object(key) for key in found.objects} == OBJECTS
    assert_checksums(path)
    return found


def assert_checksums(path: Path) -> None:
    """The checksums list exactly the existing files."""
    sums = Checksums.load(path)
    assert sums is not None and sums.metadata == [crc32_of(path / ".metadata")]
    there = {p.name: (p.stat().st_size, crc32_of(p)) for p in path.iterdir()}
    assert {name: tuple(entry) for name, entry in sums.files.items()} == {
        name: fact for name, fact in there.items() if name not in (".metadata", NAME)
    }


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    write(tmp_path / "c")
    found = assert_whole(tmp_path / "c")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]
    assert len(found.chunks("a.b")) == 20 and found.format == "fsdp_dtensor"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = [(), (1,), (5,), (3, 4), (2, 3, 4), (0, 3), (3, 0)]
    tensors = {str(shape): numbers(shape, dtype) for shape in shapes}
    write_checkpoint_of(tmp_path / "c", tensors, OBJECTS, block=3 * dtype.itemsize)
    assert_whole(tmp_path / "c", tensors)


def test_every_block_is_an_archive_of_torch_save(tmp_path: Path) -> None:
    write(tmp_path / "c")
    found = CheckpointReader(tmp_path / "c")
    for key in TENSORS:
        for chunk in found.chunks(key):
            assert math.prod(chunk.sizes) * TENSORS[key].itemsize <= 100
            place = found.place(key, chunk)
            with open(found.path / place.file, "rb") as file:
                file.seek(place.offset)
                (tmp_path / "one").write_bytes(file.read(place.length))
            for mapped in (False, True):
                block = torch.load(tmp_path / "one", weights_only=True, mmap=mapped)
                assert (
                    same_bits(block, TENSORS[key][chunk.slices()]) and block.untyped_storage().nbytes() == block.nbytes
                )
            found.check_contents(key, chunk)


def test_a_view_is_written_without_its_base(tmp_path: Path) -> None:
    base = torch.arange(10_000.0).view(1000, 10)
    with open(tmp_path / "f", "wb") as file:
        archive.ChecksummedFile(file).write_tensor(base[3:5])
    assert (tmp_path / "f").stat().st_size < 1300
    with open(tmp_path / "f", "rb") as file:
        entry = archive.Archive(file, "f").entry("data/0")
        file.seek(entry.offset)
        data, after = file.read(entry.size), file.read(16)
    assert same_bits(torch.load(tmp_path / "f", weights_only=True), base[3:5])
    # Readers that do not start with the table of contents rely on the data descriptor.
    assert after == b"PK\7\x08" + struct.pack("<3I", zlib.crc32(data), 80, 80)
    with pytest.raises(ValueError, match="expected a contiguous tensor"), open(tmp_path / "f", "wb") as file:
        archive.ChecksummedFile(file).write_tensor(base[:, 1])


def test_the_checksum_of_large_data_matches_the_file(tmp_path: Path) -> None:
    tensor, more = numbers((3, 1 << 20)), b"more" * (2 << 20)
    with open(tmp_path / "f", "wb", buffering=0) as file:
        written = archive.ChecksummedFile(file)
        written.write_tensor(tensor)
        assert written.length == (tmp_path / "f").stat().st_size
        assert same_bits(torch.load(tmp_path / "f", weights_only=True), tensor)
        for data in (b"end", more):
            written.write(data)
    assert f"{written.crc32:08x}" == crc32_of(tmp_path / "f") and (tmp_path / "f").read_bytes().endswith(more)


class Hole:
    """A file that keeps its size and its small writes, but not its large ones."""

    def __init__(self) -> None:
        self.size = 0
        self.small: list[tuple[int, bytes]] = []

    def write(self, data: Any) -> int:
        if len(data) < 1 << 20:
            self.small.append((self.size, bytes(data)))
        self.size += len(data)
        return len(data)


def test_the_archive_of_a_tensor_of_more_than_4_gib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    size, real = 5 << 30, zlib.crc32
    (tmp_path / "zeros").touch()
    os.truncate(tmp_path / "zeros", size)
    zeros = torch.from_file(str(tmp_path / "zeros"), shared=False, size=size, dtype=torch.uint8)
    # Only the headers matter here.
    monkeypatch.setattr(archive.zlib, "crc32", lambda data, crc=0: real(data, crc) if len(data) < 1 << 20 else 0)
    hole = Hole()
    archive.ChecksummedFile(hole).write_tensor(zeros)
    with open(tmp_path / "f", "wb") as file:
        for offset, data in hole.small:
            file.seek(offset)
            file.write(data)
    with open(tmp_path / "f", "rb") as file:
        entry = archive.Archive(file, "f").entry("data/0")
    assert entry.size == size and entry.offset % 64 == 0
    reader = torch._C.PyTorchFileReader(str(tmp_path / "f"))
    assert reader.get_record_offset("data/0") == entry.offset and reader.has_record("data/0")


@pytest.mark.parametrize("processes", [2, 3, 7])
def test_several_processes_share_the_work(tmp_path: Path, processes: int) -> None:
    write_with(tmp_path / "c", processes)
    found = assert_whole(tmp_path / "c")
    sizes = dict.fromkeys(range(processes), 0)
    for key in TENSORS:
        for chunk in found.chunks(key):
            process = int(found.place(key, chunk).file[2])
            sizes[process] += math.prod(chunk.sizes) * TENSORS[key].itemsize
    share = sum(t.nbytes for t in TENSORS.values()) / processes
    assert all(abs(size - share) <= 100 for size in sizes.values())


def test_processes_without_anything_to_write(tmp_path: Path) -> None:
    one = {"a": numbers((2,))}
    for process in (1, 2, 0):
        write(tmp_path / "c", process, 3, lazily(one))
    assert_whole(tmp_path / "c", one)


def counted(tensors: Mapping[str, torch.Tensor], after: Callable[[int], None] = lambda n: None) -> Any:
    """Lazy tensors that record the regions read, and call ``after`` with the number of reads before each read."""
    read: list[tuple[str, Region]] = []

    def lazy(key: str, tensor: torch.Tensor) -> LazyTensor:
        def of_region(region: Region) -> torch.Tensor:
            after(len(read))
            read.append((key, region))
            return tensor[region.slices()]

        return LazyTensor(tuple(tensor.shape), tensor.dtype, of_region)

    return {key: lazy(key, tensor) for key, tensor in tensors.items()}, read


class Stop(Exception):
    """Stands for a kill."""


def stop_at(count: int) -> Callable[[int], None]:
    def stop(n: int) -> None:
        if n == count:
            raise Stop

    return stop


BLOCKS = 20 + 1 + 1 + 3


@pytest.mark.parametrize("count", [0, 1, 10, BLOCKS - 1])
def test_a_stopped_run_leaves_nothing_and_can_be_repeated(tmp_path: Path, count: int) -> None:
    tensors, _ = counted(TENSORS, stop_at(count))
    with pytest.raises(Stop):
        write(tmp_path / "c", tensors=tensors)
    assert not (tmp_path / "c").exists()
    done: list[int] = []
    write(tmp_path / "c", progress=done.append)
    assert sum(done) == sum(t.nbytes for t in TENSORS.values())
    assert_whole(tmp_path / "c")


def slowly(processes: int, path: Path, process: int) -> None:
    tensors, _ = counted(TENSORS, lambda n: time.sleep(0.02 * process))
    write(path, process, processes, tensors)


def test_killed_processes_do_not_repeat_finished_shares(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=slowly, args=(2, tmp_path / "c", p)) for p in (0, 1)]
    for process in started:
        process.start()
    while not (tmp_path / "c.partial" / "0.done").exists():
        time.sleep(0.005)
    for process in started:
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert not (tmp_path / "c").exists()
    again = context.Process(target=write, args=(tmp_path / "c", 1, 2))
    again.start()
    tensors, read = counted(TENSORS)
    write(tmp_path / "c", 0, 2, tensors)
    again.join()
    assert not read
    assert_whole(tmp_path / "c")


CHANGES: dict[str, dict[str, Any]] = {
    "source": {"source": "another checkpoint"},
    "block": {"block": 200},
    "tensors": {"tensors": lazily({"z": numbers((50, 9)), **TENSORS})},
    "dtype": {"tensors": lazily({**TENSORS, "c": numbers((7,), torch.float16)})},
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_of_another_source_are_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    def stop(*arguments: Any) -> None:
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(writer, "complete", stop)
        write(tmp_path / "c", tensors=lazily({**TENSORS, "a.b": torch.full((40, 9), 7.0)}))
    assert (tmp_path / "c.partial" / "0.done").exists()
    (tmp_path / "c.partial" / "__5_0.distcp").write_bytes(b"from a run with more processes")
    write(tmp_path / "c", **CHANGES[change])
    wanted = CHANGES[change].get("tensors") or lazily(TENSORS)
    assert_whole(tmp_path / "c", {key: tensor.full_tensor() for key, tensor in wanted.items()})


def test_a_different_number_of_processes_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PATIENCE", 0.1)
    with pytest.raises(RuntimeError, match="made no progress"):
        write(tmp_path / "c", 0, 3)
    tensors, read = counted(TENSORS)
    write(tmp_path / "c", tensors=tensors)
    assert len(read) == BLOCKS
    assert_whole(tmp_path / "c")


def test_a_process_that_is_restarted_late_finds_the_checkpoint_complete(tmp_path: Path) -> None:
    write_with(tmp_path / "c", 2)
    tensors, read = counted(TENSORS)
    write(tmp_path / "c", 1, 2, tensors)
    assert not read and not (tmp_path / "c.partial").exists()
    assert_whole(tmp_path / "c")


def test_nothing_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "c")
    with pytest.raises(FileExistsError, match=r"c: expected no such folder yet"):
        write(tmp_path / "c")

    def meanwhile(n: int) -> None:
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / "mine").write_text("x")

    late, _ = counted(TENSORS, meanwhile)
    with pytest.raises(FileExistsError):
        write(tmp_path / "d", tensors=late)
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["mine"]


def test_a_full_disk(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "c").exists()
    write(tmp_path / "c")
    assert_whole(tmp_path / "c")


@pytest.mark.parametrize("point", ["write_items", "complete", "rename"])
def test_a_stop_at_the_end_leaves_no_incomplete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    calls = itertools.count()

    def stop(*arguments: Any, **options: Any) -> Any:
        if point != "write_items" or next(calls) == 1:  # the second file is that of objects
            raise Stop
        return original(*arguments, **options)

    where: Any = Path if point == "rename" else writer
    original = getattr(where, point)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(where, point, stop)
        write_checkpoint(Draft(lazily(TENSORS), OBJECTS, files={"metadata.json": b"{}"}), tmp_path / "c", block=100)
    assert not (tmp_path / "c").exists()
    tensors, read = counted(TENSORS)
    write(tmp_path / "c", tensors=tensors)
    assert not read or point == "rename"  # by then, what an interrupted run needs is removed
    assert_whole(tmp_path / "c")
    assert not (tmp_path / "c" / "metadata.json").exists()


def test_a_missing_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PATIENCE", 0.2)
    with pytest.raises(RuntimeError, match=r"c.partial/1.done: the process that writes .* made no progress for 0 s"):
        write(tmp_path / "c", 0, 3)
    assert not (tmp_path / "c").exists()


def test_additional_metadata_and_files(tmp_path: Path) -> None:
    planner_data = {key: tuple(key.split(".")) for key in [*TENSORS, *OBJECTS]}
    mcore_data = {"a.b": {"nd_reformulated_orig_global_shape": (360,)}}
    files = {"metadata.json": json.dumps({"sharded_backend": "torch_dist"}).encode(), "common.pt": b"x" * 1000}
    more = {"planner_data": planner_data, "files": files, "attributes": {"mcore_data": mcore_data}}
    found = CheckpointReader(write_checkpoint_of(tmp_path / "c", TENSORS, OBJECTS, **more))
    assert found.format == "torch_dist" and (tmp_path / "c" / "common.pt").read_bytes() == files["common.pt"]
    assert found.metadata.planner_data == planner_data and found.metadata.mcore_data == mcore_data
    assert_checksums(tmp_path / "c")


def test_raw_objects_are_copied_unchanged(tmp_path: Path) -> None:
    write(tmp_path / "c")
    source = CheckpointReader(tmp_path / "c")
    raw = {key: RawObject(source.object_bytes(key)) for key in source.objects}
    write_checkpoint_of(tmp_path / "d", TENSORS, raw)
    copy = CheckpointReader(tmp_path / "d")
    assert {key: copy.object_bytes(key) for key in copy.objects} == raw
    assert_whole(tmp_path / "d")


def test_invalid_calls(tmp_path: Path) -> None:
    for process, processes, block in ((1, 1, 5), (-1, 1, 5), (0, 0, 5), (0, 1, 0)):
        with pytest.raises(ValueError, match="0 <= process < processes"):
            write(tmp_path / "c", process, processes, block=block)
    for name in (".metadata", NAME, "__0_0.distcp", "__0_1.distcp"):
        with pytest.raises(ValueError, match=f"expected other names of files; got .*{name}"):
            write_checkpoint_of(tmp_path / "c", TENSORS, files={name: b""})


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    def rows(region: Region) -> torch.Tensor:
        return torch.full(region.sizes, float(region.offsets[0]))

    tensor = LazyTensor((256, 1 << 18), torch.float32, rows)
    first = LazyTensor((8, 1 << 18), torch.float32, rows)  # of a process: imports, and buffers of threads
    write_checkpoint(Draft({"a": first}), tmp_path / "first", block=4 << 20)
    with PeakMemory() as memory:
        write_checkpoint(Draft({"a": tensor}), tmp_path / "c", block=4 << 20)
    assert memory.growth < tensor.nbytes // 3
    found = CheckpointReader(tmp_path / "c", verify=False).tensors["a"]
    assert found.read(Region((77, 5), (1, 2))).tolist() == [[76.0, 76.0]]


@pytest.mark.parametrize("kind", ["a file of others", "a link", "a link in it"])
def test_a_partial_folder_of_others_is_refused(tmp_path: Path, kind: str) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (others / "thesis").write_text("x")
    partial = tmp_path / "c.partial"
    if kind == "a link":
        partial.symlink_to(others)
    else:
        partial.mkdir()
        (partial / "__0_0.distcp").symlink_to(others / "thesis")
    if kind == "a file of others":
        (partial / "__0_0.distcp").unlink()
        (partial / "thesis").write_text("x")
    with pytest.raises(FileExistsError, match=r"c\.partial: expected no such folder"):
        write_checkpoint_of(tmp_path / "c", {"a": torch.ones(3)})
    plan = Export(lazily({"a": torch.ones(3)}), {}, [], None, [], "source")  # type: ignore[arg-type]
    with pytest.raises(FileExistsError, match=r"c\.partial: expected no such folder"):
        export(plan, tmp_path / "c", 1 << 30, WriteOptions())
    assert (others / "thesis").read_text() == "x" and sorted(others.iterdir()) == [others / "thesis"]
    assert kind != "a file of others" or (partial / "thesis").read_text() == "x"


def test_a_link_is_followed_and_the_current_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        (tmp_path / f"link to {name}").symlink_to(name)
        write_checkpoint_of(tmp_path / f"link to {name}", {"a": torch.ones(2)})
        assert (tmp_path / name / ".metadata").is_file() and (tmp_path / f"link to {name}").is_symlink()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(FileExistsError, match="here: expected a folder other than the current one"):
        write_checkpoint_of(Path(), {"a": torch.ones(2)})
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]
