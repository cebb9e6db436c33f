"""The safetensors reader and writer: files equal those of the library, are read in regions, and are validated."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fsdp.checkpoint.lazy import LazyTensor, Region, of
from megatron.fsdp.convert.huggingface.safetensors_file import DTYPES, read_tensors, write_tensors


def tensors_of_all_dtypes() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, dtype in DTYPES.items():
        values = torch.randint(0, 2 if dtype == torch.bool else 100, (5, 3), generator=generator)
        found[name] = values.to(dtype)
    return {**found, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "odd": torch.arange(3, dtype=torch.uint8)}


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return first.numel() == 0 or torch.equal(
        first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8)
    )


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    expected = tensors_of_all_dtypes()
    safetensors.torch.save_file(expected, tmp_path / "a.safetensors", metadata={"format": "pt"})
    found = read_tensors(tmp_path / "a.safetensors")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].shape, found[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        assert same(found[name].full_tensor(), tensor), name


@pytest.mark.parametrize("block", [1, 7, 16, 1 << 20])
def test_the_library_reads_what_is_written(tmp_path: Path, block: int) -> None:
    expected = tensors_of_all_dtypes()
    counts: list[int] = []
    write_tensors(tmp_path / "a.safetensors", {k: of(v) for k, v in expected.items()}, block, counts.append)
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert set(found) == set(expected)
    assert all(same(found[name], tensor) for name, tensor in expected.items())
    assert sum(counts) == sum(tensor.nbytes for tensor in expected.values())
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@settings(max_examples=200, deadline=None)
@given(shape=st.lists(st.integers(1, 5), min_size=0, max_size=4), data=st.data())
def test_any_region_is_read_exactly(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "part.safetensors"
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    safetensors.torch.save_file({"before": torch.zeros(3, dtype=torch.uint8), "a": tensor}, path)
    offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
    sizes = tuple(data.draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    part = read_tensors(path)["a"].read(Region(offsets, sizes))
    assert torch.equal(part, tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))])


def test_writing_holds_one_block(tmp_path: Path) -> None:
    largest = 0

    def read(region: Region) -> torch.Tensor:
        nonlocal largest
        part = torch.zeros(region.sizes)
        largest = max(largest, part.nbytes)
        return part

    write_tensors(tmp_path / "a.safetensors", {"a": LazyTensor((1000, 256), torch.float32, read)}, 4096)
    assert largest == 4096
    assert safetensors.torch.load_file(tmp_path / "a.safetensors")["a"].shape == (1000, 256)


def file_with(path: Path, header: object, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": ENTRY}, b"1234567"),
        ({"a": ENTRY}, b"123456789"),
        ({"a": {**ENTRY, "data_offsets": [0, 4]}}, b"1234"),
        ({"a": {**ENTRY, "data_offsets": [4, 12]}}, b"123456789012"),
        ({"a": {**ENTRY, "data_offsets": [-8, 0]}}, b""),
        ({"a": {**ENTRY, "shape": [-2, -1]}}, b"12345678"),
        ({"a": ENTRY, "b": ENTRY}, b"12345678"),
        ({"a": {**ENTRY, "dtype": "F31"}}, b"12345678"),
        ({"a": {"dtype": "F32"}}, b"12345678"),
        ({"a": 3}, b""),
        ([1, 2], b""),
    ],
)
def test_a_damaged_file_raises_with_its_path(tmp_path: Path, header: object, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"broken\.safetensors: .*expected"):
        read_tensors(file_with(tmp_path / "broken.safetensors", header, data))


@pytest.mark.parametrize("content", [b"", b"12345", (1 << 60).to_bytes(8, "little") + b"{}", b"\x02\0\0\0\0\0\0\0{"])
def test_files_of_another_format_raise(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.safetensors: expected a safetensors file"):
        read_tensors(tmp_path / "broken.safetensors")


def test_a_file_that_shrinks_while_being_read_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"a": torch.arange(1000)}, path)
    tensor = read_tensors(path)["a"]
    with path.open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(ValueError, match="more bytes at .*; the file ends there"):
        tensor.full_tensor()


def test_unsupported_dtypes_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a: expected a dtype of F64.*got torch\.complex64"):
        write_tensors(tmp_path / "a.safetensors", {"a": of(torch.zeros(1, dtype=torch.complex64))}, 16)
    with pytest.raises(ValueError, match=r"b\.safetensors: a: expected a dtype of F64.*got F31\."):
        read_tensors(file_with(tmp_path / "b.safetensors", {"a": {**ENTRY, "dtype": "F31"}}, b"12345678"))
