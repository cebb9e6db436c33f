"""Checkpoints are read in part, exactly, and with little memory; errors name the damaged file."""

import io
import itertools
import os
import pickle
import random
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.fsdp.checkpoint import archive, strided
from megatron.fsdp.checkpoint.checksums import DamagedCheckpoint
from megatron.fsdp.checkpoint.lazy import Region
from megatron.fsdp.checkpoint.reader import CheckpointReader, checkpoint_folder, common_state, intersection, untiled
from tests.checkpoints import TORCH_DIST, meta, sha256
from tests.small_checkpoints import DTYPES, NAMES, PeakMemory, numbers, same_bits, sample_checkpoint, write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("converted")])
def test_every_tensor_of_the_samples(name: str) -> None:
    found = CheckpointReader(sample_checkpoint(name))
    known = meta(name)["file_tensors"]
    assert set(found.tensors) == set(known) and len(known) >= 12
    for key, fact in known.items():
        tensor = found.tensors[key].full_tensor()
        assert (sha256(tensor), list(tensor.shape), str(tensor.dtype)) == (
            fact["sha256"],
            fact["shape"],
            fact["dtype"],
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_samples_are_complete_and_in_the_right_format(name: str) -> None:
    found = CheckpointReader(sample_checkpoint(name))
    found.check()
    assert found.format == ("torch_dist" if name in TORCH_DIST else "fsdp_dtensor")
    for key in found.tensors:
        for chunk in found.chunks(key):
            found.check_contents(key, chunk)
    for key in found.objects:
        found.check_contents(key)


@pytest.mark.parametrize("name", NAMES)
def test_common_state_of_the_samples(name: str) -> None:
    state = common_state(sample_checkpoint(name))
    assert (state["iteration"] == 3) if name in TORCH_DIST else state == {}


class Cut(torch.Tensor):
    """A tensor that torch.distributed.checkpoint writes in several chunks."""

    chunks: list[Region]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)),
                    TensorProperties.create_from_tensor(self.as_subclass(torch.Tensor)),
                    self.shape,
                ),
            )
            for chunk in self.chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        sizes = next(chunk.sizes for chunk in self.chunks if chunk.offsets == tuple(index.offset))
        return self.as_subclass(torch.Tensor)[Region(tuple(index.offset), sizes).slices()]


def cut(tensor: torch.Tensor, *cuts: tuple[int, ...]) -> Cut:
    """A tensor in chunks that end at these indices, per dimension."""
    made = tensor.as_subclass(Cut)
    ends = [[0, *cuts[d], n] for d, n in enumerate(tensor.shape)]
    ranges = [[(a, b - a) for a, b in itertools.pairwise(e)] for e in ends]
    made.chunks = [Region(tuple(o for o, _ in p), tuple(n for _, n in p)) for p in itertools.product(*ranges)]
    return made


def regions(shape: tuple[int, ...], count: int) -> list[Region]:
    generator = random.Random(0)
    whole = Region((0,) * len(shape), shape)
    found = [whole, Region(shape, (0,) * len(shape))]
    for _ in range(count):
        low = [generator.randrange(n + 1) for n in shape]
        found.append(Region(tuple(low), tuple(generator.randrange(n - o + 1) for o, n in zip(low, shape, strict=True))))
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint that torch.distributed.checkpoint wrote, with uneven chunks in two dimensions."""
    tensors = {f"{dtype}": numbers((13, 10), dtype) for dtype in DTYPES}
    tensors |= {"line": numbers((29,)), "cube": numbers((4, 5, 6)), "scalar": torch.tensor(2.5), "row": numbers((1, 7))}
    whole = {"transposed": numbers((6, 9)).t(), "strided": numbers((6, 9))[:, ::2], "empty": torch.empty(0, 3)}
    state: dict[str, Any] = {str(dtype): cut(tensors[str(dtype)], (1, 6), (7,)) for dtype in DTYPES}
    state |= {"line": cut(tensors["line"], (1, 2, 20)), "cube": cut(tensors["cube"], (3,), (1, 4), (5,))}
    state |= {"scalar": tensors["scalar"], "row": cut(tensors["row"], (), (2,)), **whole, "object": {"a": (1, 2)}}
    folder = tmp_path_factory.mktemp("plain")
    dcp.save(state, checkpoint_id=folder)
    return folder, tensors | whole


def test_any_region_of_any_tensor(plain: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, tensors = plain
    found = CheckpointReader(folder)
    found.check()
    assert found.objects == ("object.a",) and found.read_object("object.a") == (1, 2)
    assert {len(found.chunks(key)) for key in tensors} == {6, 4, 12, 1, 2, 0}
    for key, tensor in tensors.items():
        assert found.tensors[key].dtype == tensor.dtype and found.tensors[key].shape == tensor.shape
        for region in regions(tuple(tensor.shape), 30):
            assert same_bits(found.tensors[key].read(region), tensor[region.slices()]), (key, region)


def test_regions_that_are_read_in_several_steps(
    plain: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tensors = plain
    for scratch, gap in ((16, 1 << 20), (64, 1 << 20), (64, 8), (1, 0)):
        monkeypatch.setattr(strided, "SCRATCH", scratch)
        monkeypatch.setattr(strided, "GAP", gap)
        found = CheckpointReader(folder)
        for key, tensor in tensors.items():
            for region in regions(tuple(tensor.shape), 5):
                assert same_bits(found.tensors[key].read(region), tensor[region.slices()]), (key, region)


def test_a_tensor_stored_with_other_strides(tmp_path: Path) -> None:
    """torch.save stores views with their storage, which may be larger or smaller than the view."""
    base = numbers((7, 8))
    for name, tensor in {"view": base[2:5, 1::3], "expanded": base[0, :3].expand(4, 3), "swapped": base.t()}.items():
        folder = write_checkpoint(tmp_path / name, {"a": tensor})
        (folder / "checksums.json").unlink()
        stream = io.BytesIO()
        torch.save(tensor, stream)
        (folder / "__0_0.distcp").write_bytes(stream.getvalue())
        found = CheckpointReader(folder)
        next(iter(found.metadata.storage_data.values())).length = len(stream.getvalue())
        stored = found.stored("a", found.chunks("a")[0])
        with open(folder / "__0_0.distcp", "rb") as file:
            storage = archive.Archive(file, name).entry("data/0").offset
        assert stored.stride == tensor.stride()
        assert stored.start == storage + tensor.storage_offset() * tensor.itemsize
        for region in regions(tuple(tensor.shape), 20):
            assert same_bits(found.tensors["a"].read(region), tensor[region.slices()])


class Sparse(io.RawIOBase):
    """Writes a sparse file, with holes instead of large blocks."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = open(path, "wb", buffering=0)

    def write(self, data: Any) -> int:
        if len(data) < 1 << 20:
            return self.file.write(data)
        self.file.seek(len(data), io.SEEK_CUR)
        return len(data)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor of 512 MiB in one chunk, 4 MiB to a row."""
    folder = tmp_path_factory.mktemp("large") / "c"
    write_checkpoint(folder, {"a": torch.zeros(128, 1 << 10)})
    (folder / "checksums.json").unlink()
    sparse = Sparse(folder / "__0_0.distcp")
    tensor = torch.zeros(128, 1 << 20)
    written = archive.ChecksummedFile(sparse)
    written.write_tensor(tensor)
    sparse.file.close()
    metadata = CheckpointReader(folder).metadata
    entry = metadata.state_dict_metadata["a"]
    entry.size = entry.chunks[0].sizes = torch.Size((128, 1 << 20))
    metadata.storage_data[MetadataIndex("a", (0, 0))].length = written.length
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


@pytest.mark.parametrize(
    "region",
    [
        Region((77, 0), (1, 1 << 20)),  # a row
        Region((0, 12345), (128, 1)),  # a column
        Region((5, 100), (100, 1 << 12)),
    ],
)
def test_a_region_of_a_large_chunk_takes_little_memory(large: Path, region: Region) -> None:
    found = CheckpointReader(large)
    with PeakMemory() as memory:
        part = found.tensors["a"].read(region)
    assert part.shape == region.sizes and not part.any()
    assert memory.growth < found.tensors["a"].nbytes // 8


def test_few_elements_take_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = numbers((64, 1 << 15))
    found, counts, preadv = CheckpointReader(write_checkpoint(tmp_path / "c", {"a": tensor}), False), [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: counts.append(preadv(*arguments)) or counts[-1])
    column = found.tensors["a"].read(Region((0, 5), (64, 2)))
    assert torch.equal(column, tensor[:, 5:7])
    assert 64 * 8 < sum(counts) < 64 << 10 < tensor.nbytes
    counts.clear()
    # Contiguous rows are read at once.
    assert torch.equal(found.tensors["a"].read(Region((3, 0), (9, 1 << 15))), tensor[3:12])
    assert counts == [9 << 17]


def test_a_region_without_a_chunk_is_damage(small: Path) -> None:
    found = changed(small, lambda m: m.state_dict_metadata["a"].chunks.pop(1))
    assert same_bits(found.tensors["a"].read(Region((0, 0), (3, 3))), numbers((8, 3))[:3])
    with pytest.raises(DamagedCheckpoint, match="the chunks of a to tile it; 9 elements of Region"):
        found.tensors["a"].full_tensor()


def test_a_region_outside_of_a_tensor_raises_an_error(plain: tuple[Path, dict[str, torch.Tensor]]) -> None:
    found = CheckpointReader(plain[0])
    for region in (Region((20,), (10,)), Region((-1,), (1,)), Region((0, 0), (1, 1))):
        with pytest.raises(ValueError, match=r"line: expected a region of a tensor of shape \(29,\)"):
            found.tensors["line"].read(region)


def test_unknown_keys(plain: tuple[Path, dict[str, torch.Tensor]]) -> None:
    found = CheckpointReader(plain[0])
    for read in (found.chunks, found.read_object, found.place):
        with pytest.raises(KeyError, match="nothing"):
            read("nothing")
    with pytest.raises(KeyError, match="line"):
        found.read_object("line")


def test_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="got no .metadata"):
            CheckpointReader(path)


@pytest.mark.parametrize("content", [b"", b"abc", pickle.dumps(None), pickle.dumps({"a": 1}), b"\x80\x04}"])
def test_invalid_metadata(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=str(tmp_path / ".metadata")):
        CheckpointReader(tmp_path)


def changed(folder: Path, change: Callable[[Any], None]) -> CheckpointReader:
    """Modify the metadata of a checkpoint and open it."""
    metadata = CheckpointReader(folder).metadata
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return CheckpointReader(folder)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "c", {"a": numbers((8, 3)), "b": numbers((2,))}, {"o": 1}, block=36)
    (folder / "checksums.json").unlink()
    return folder


A_0, A_3 = MetadataIndex("a", (0, 0)), MetadataIndex("a", (3, 0))


def set_attribute(index: MetadataIndex, name: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata.storage_data[index], name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.storage_data.pop(A_3), "expected the place of a at"),
        (lambda m: m.storage_data.pop(MetadataIndex("o")), "expected the place of o"),
        (lambda m: m.state_dict_metadata["a"].chunks.pop(), "the chunks of a to tile it; they have 18 of 24"),
        (lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size((9, 3))), "they have 24 of 27 elements"),
        (lambda m: setattr(m.state_dict_metadata["a"].chunks[1], "sizes", torch.Size((4, 3))), "overlaps with another"),
        (lambda m: setattr(m.state_dict_metadata["a"].chunks[2], "sizes", torch.Size((3, 3))), "is not inside"),
        (set_attribute(A_3, "relative_path", "../c/__0_0.distcp"), "expected a in a file of this folder; got '../c"),
        (set_attribute(A_3, "relative_path", "/etc/passwd"), "expected a in a file of this folder; got '/etc"),
        (set_attribute(A_3, "relative_path", 3), "expected the place of a"),
        (set_attribute(A_3, "offset", -1), "expected the place of a"),
        (set_attribute(A_3, "length", "x"), "expected the place of a"),
        (set_attribute(A_3, "length", 1 << 20), "__0_0.distcp: expected at least"),
        (set_attribute(A_3, "relative_path", "other"), "other: expected a file"),
    ],
)
def test_incomplete_checkpoints_are_detected(small: Path, change: Callable[[Any], None], message: str) -> None:
    CheckpointReader(small).check()
    with pytest.raises(DamagedCheckpoint, match=message):
        changed(small, change).check()


def test_metadata_of_wrong_types_is_rejected(small: Path) -> None:
    for change in (
        lambda m: m.state_dict_metadata.update(c=3),
        lambda m: setattr(m, "storage_data", None),
        lambda m: m.storage_data.update({3: m.storage_data[A_0]}),
        lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size((8,))),
        lambda m: setattr(m.state_dict_metadata["a"].chunks[0], "offsets", torch.Size((0,))),
        lambda m: setattr(m.state_dict_metadata["a"], "chunks", 3),
        lambda m: setattr(m.state_dict_metadata["a"].properties, "dtype", "float32"),
        lambda m: vars(m.state_dict_metadata["a"]).clear(),
    ):
        copy = shutil.copytree(small, small.with_name("copy"), dirs_exist_ok=True)
        with pytest.raises(DamagedCheckpoint, match=".metadata: expected"):
            changed(copy, change)


@pytest.mark.parametrize("cut_at", [0, 1, 30, 500, -100, -1])
def test_a_truncated_file_is_named(small: Path, cut_at: int) -> None:
    path = small / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:cut_at])
    with pytest.raises(DamagedCheckpoint, match="__0_0.distcp"):
        for tensor in CheckpointReader(small).tensors.values():
            tensor.full_tensor()
    with pytest.raises(DamagedCheckpoint, match="__0_0.distcp: expected at least"):
        CheckpointReader(small).check()


def test_a_missing_file_is_named(small: Path) -> None:
    (small / "__0_0.distcp").unlink()
    (small / "__0_1.distcp").unlink()
    found = CheckpointReader(small)
    for read, name in ((found.tensors["a"].full_tensor, "__0_0"), (lambda: found.read_object("o"), "__0_1")):
        with pytest.raises(DamagedCheckpoint, match=rf"{name}.distcp: expected a file; got none"):
            read()


def test_flipped_bytes_only_cause_errors_that_name_the_file(small: Path) -> None:
    path, generator = small / "__0_0.distcp", random.Random(0)
    good, errors = path.read_bytes(), 0
    for _ in range(150):
        position = generator.randrange(len(good))
        path.write_bytes(bytes([*good[:position], good[position] ^ 1 << generator.randrange(8), *good[position + 1 :]]))
        found = CheckpointReader(small)
        try:
            for tensor in found.tensors.values():
                tensor.full_tensor()
        except DamagedCheckpoint as error:
            assert "__0_0.distcp" in str(error)
            errors += 1
        except ValueError as error:
            assert "not allowed in a checkpoint" in str(error) and "__0_0.distcp" in str(error)
            errors += 1
    assert errors > 20


def test_a_damaged_chunk_is_detected_without_checksums_of_files(small: Path) -> None:
    path, found = small / "__0_0.distcp", CheckpointReader(small)
    chunk = found.chunks("a")[1]
    stored = found.stored("a", chunk)
    data = bytearray(path.read_bytes())
    data[stored.start] ^= 1
    path.write_bytes(data)
    found.check_contents("a", found.chunks("a")[0])
    with pytest.raises(DamagedCheckpoint, match=r"__0_0.distcp \(a\): .* data/0 does not match its CRC-32"):
        found.check_contents("a", chunk)


def test_a_chunk_of_another_shape_or_dtype_is_rejected(small: Path) -> None:
    for other in (torch.zeros(3, 3, dtype=torch.float64), torch.zeros(9), torch.zeros(4, 3)):
        blob = io.BytesIO()
        torch.save(other, blob)
        (small / "__0_0.distcp").write_bytes(blob.getvalue())
        found = CheckpointReader(small)
        found.metadata.storage_data[A_0].length = len(blob.getvalue())
        with pytest.raises(DamagedCheckpoint, match=r"\(a\): expected torch.float32 of shape \(3, 3\); got torch"):
            found.tensors["a"].full_tensor()


def test_stored_transforms_are_not_supported(small: Path) -> None:
    found = changed(small, set_attribute(A_3, "transform_descriptors", ["zstd"]))
    with pytest.raises(NotImplementedError, match="a is stored with transforms, which are not supported"):
        found.tensors["a"].full_tensor()


def test_metadata_of_a_derived_class(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of Megatron-Core write such metadata."""

    class MCoreMetadata(Metadata):
        pass

    module = types.ModuleType("megatron.core.invented")
    module.MCoreMetadata = MCoreMetadata
    MCoreMetadata.__module__, MCoreMetadata.__qualname__ = module.__name__, "MCoreMetadata"
    before = CheckpointReader(small)
    made = MCoreMetadata(**vars(before.metadata))
    made.mcore_data = {"a": {"nd_reformulated_orig_global_shape": (24,)}}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        (small / ".metadata").write_bytes(pickle.dumps(made))
    found = CheckpointReader(small)
    found.check()
    assert type(found.metadata) is Metadata and found.metadata.mcore_data == made.mcore_data
    assert torch.equal(found.tensors["a"].full_tensor(), before.tensors["a"].full_tensor())


def test_resolving_a_path_to_a_checkpoint(tmp_path: Path) -> None:
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    with pytest.raises(FileNotFoundError, match="got neither"):
        checkpoint_folder(tmp_path)
    for name in ("iter_0000012", "release"):
        write_checkpoint(tmp_path / name, {"a": numbers((2,))})
    for text, name in (("12", "iter_0000012"), ("12\n", "iter_0000012"), ("release", "release")):
        tracker.write_text(text)
        assert checkpoint_folder(tmp_path) == tmp_path / name
    assert checkpoint_folder(tmp_path / "release") == tmp_path / "release"
    tracker.write_text("13")
    with pytest.raises(FileNotFoundError, match="iter_0000013: expected the checkpoint that"):
        checkpoint_folder(tmp_path)
    for data in (b"../..", b"-1", b"", b"\xff\xfe"):
        tracker.write_bytes(data)
        with pytest.raises(DamagedCheckpoint, match="expected an iteration"):
            checkpoint_folder(tmp_path)


def test_the_fingerprint_changes_with_the_checkpoint(small: Path) -> None:
    before = CheckpointReader(small).fingerprint
    assert CheckpointReader(small).fingerprint == before
    (small / "common.pt").write_bytes(b"x")
    assert CheckpointReader(small).fingerprint != before


def test_intersections_of_boxes() -> None:
    assert intersection(Region((0, 2), (3, 4)), Region((2, 0), (5, 3))) == Region((2, 2), (1, 1))
    assert intersection(Region((0,), (3,)), Region((3,), (2,))) is None
    assert intersection(Region((), ()), Region((), ())) == Region((), ())


def test_boxes_that_tile() -> None:
    assert untiled((4, 2), [Region((0, 0), (1, 2)), Region((1, 0), (3, 1)), Region((1, 1), (3, 1))]) == ""
    assert untiled((), [Region((), ())]) == untiled((0, 3), []) == untiled((0, 3), [Region((0, 0), (0, 3))]) == ""
    assert "overlaps" in untiled((), [Region((), ()), Region((), ())])
    assert "0 of 1 elements" in untiled((), [])
    assert "6 of 8" in untiled((4, 2), [Region((0, 0), (4, 1)), Region((3, 0), (1, 2))])
    assert "overlaps" in untiled((4, 2), [Region((0, 0), (4, 1)), Region((0, 0), (2, 2))])
    assert "is not inside" in untiled((4,), [Region((3,), (2,))])
