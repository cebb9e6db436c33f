"""Checksums detect damaged files and name them; files are written atomically."""

import os
import random
import zlib
from pathlib import Path

import pytest

from megatron.fsdp.checkpoint import checksums
from megatron.fsdp.checkpoint.checksums import (
    NAME,
    Checksums,
    DamagedCheckpoint,
    FileSum,
    as_hex,
    combine,
    crc32_of,
    write_file,
)
from megatron.fsdp.checkpoint.reader import CheckpointReader
from tests.small_checkpoints import numbers, write_checkpoint

DATA = bytes(range(256)) * 5


def with_file(folder: Path) -> Checksums:
    (folder / "data").write_bytes(DATA)
    return Checksums({"data": FileSum(len(DATA), as_hex(zlib.crc32(DATA)))}, ["00000001", as_hex(zlib.crc32(b"new"))])


def test_save_and_load(tmp_path: Path) -> None:
    assert Checksums.load(tmp_path) is None
    sums = with_file(tmp_path)
    sums.save(tmp_path)
    assert Checksums.load(tmp_path) == sums
    sums.fingerprint = "abc"
    sums.save(tmp_path)
    assert Checksums.load(tmp_path) == sums
    assert sorted(p.name for p in tmp_path.iterdir()) == [NAME, "data"]


def test_the_file_has_the_documented_format(tmp_path: Path) -> None:
    Checksums({"__0_0.distcp": FileSum(3, "89abcdef")}, ["01234567"]).save(tmp_path)
    text = "".join((tmp_path / NAME).read_text().split())
    assert text == (
        '{"algorithm":"crc32","files":{"__0_0.distcp":{"bytes":3,"crc32":"89abcdef"}},"metadata":["01234567"]}'
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", "[", "[]", "{}", '{"algorithm": "md5"}', '{"algorithm": "crc32", "files": {"a": 3}, "metadata": []}'),
        '{"algorithm": "crc32", "files": {"../a": {"bytes": 3, "crc32": "89abcdef"}}, "metadata": []}',
    ],
)
def test_invalid_checksums_are_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(DamagedCheckpoint, match=NAME):
        Checksums.load(tmp_path)


def test_an_intact_file_passes(tmp_path: Path) -> None:
    sums = with_file(tmp_path)
    sums.check_file(tmp_path, "data")
    sums.check_file(tmp_path, "not listed")


@pytest.mark.parametrize("position", [0, 600, len(DATA) - 1])
def test_a_flipped_bit_is_detected(tmp_path: Path, position: int) -> None:
    sums = with_file(tmp_path)
    damaged = bytearray(DATA)
    damaged[position] ^= 1
    (tmp_path / "data").write_bytes(damaged)
    expected = f"data: expected the CRC-32 {as_hex(zlib.crc32(DATA))}; got {as_hex(zlib.crc32(damaged))}"
    with pytest.raises(DamagedCheckpoint, match=expected):
        sums.check_file(tmp_path, "data")


@pytest.mark.parametrize("data", [b"", DATA[:-1], DATA + b"x"])
def test_another_length_is_detected(tmp_path: Path, data: bytes) -> None:
    sums = with_file(tmp_path)
    (tmp_path / "data").write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=f"data: expected {len(DATA)} bytes; got {len(data)}"):
        sums.check_file(tmp_path, "data")


def test_a_missing_file_is_detected(tmp_path: Path) -> None:
    sums = with_file(tmp_path)
    (tmp_path / "data").unlink()
    with pytest.raises(DamagedCheckpoint, match="data: expected a file"):
        sums.check_file(tmp_path, "data")
    with pytest.raises(DamagedCheckpoint, match=".metadata: expected a file"):
        sums.check_metadata(tmp_path)


def test_the_metadata_may_match_any_of_several_checksums(tmp_path: Path) -> None:
    sums = with_file(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"new")
    sums.check_metadata(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"newer")
    with pytest.raises(DamagedCheckpoint, match=f".metadata: expected the CRC-32 00000001 or {sums.metadata[1]}"):
        sums.check_metadata(tmp_path)


def test_a_reader_detects_damage_to_every_file_and_names_it(tmp_path: Path) -> None:
    files = {"common.pt": b"some"}
    folder = write_checkpoint(tmp_path / "c", {"a": numbers((40, 3))}, {"o": [1]}, files=files)
    for name, read in {
        ".metadata": lambda: CheckpointReader(folder),
        "__0_0.distcp": lambda: CheckpointReader(folder).tensors["a"].full_tensor(),
        "__0_1.distcp": lambda: CheckpointReader(folder).read_object("o"),
    }.items():
        good = (folder / name).read_bytes()
        for bad in (good[:-1], bytes([*good[:50], good[50] ^ 8, *good[51:]])):
            (folder / name).write_bytes(bad)
            with pytest.raises(DamagedCheckpoint, match=name):
                read()
        (folder / name).write_bytes(good)
        read()


def test_checksums_are_compared_once_and_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "c", {"a": numbers((40, 3)), "b": numbers((2,))})
    checked: list[str] = []
    monkeypatch.setattr(Checksums, "check_file", lambda self, folder, name: checked.append(name))
    for verify, expected in ((False, []), (True, ["__0_0.distcp"])):
        reader = CheckpointReader(folder, verify)
        for _ in range(2):
            reader.tensors["a"].full_tensor()
            reader.tensors["b"].full_tensor()
        assert checked == expected


def test_combining_checksums() -> None:
    random.seed(0)
    for first, second in [(0, 0), (0, 5), (5, 0), (1, 1), (1000, 1), (7, 12345), (300, 1 << 20)]:
        a, b = random.randbytes(first), random.randbytes(second)
        assert combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


def test_the_checksum_of_a_large_file(tmp_path: Path) -> None:
    data = random.Random(1).randbytes((9 << 20) + 5)
    (tmp_path / "data").write_bytes(data)
    assert crc32_of(tmp_path / "data") == f"{zlib.crc32(data):08x}"


def test_a_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_file(path, b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"

    def crash(*arguments: object) -> None:
        raise OSError("disk full")

    for what in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
            patch.setattr(os, what, crash)
            write_file(path, b"newer")
        assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("f", b"new")]


def test_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others, left, mine = tmp_path / "others", tmp_path / "c.json.7.tmp", tmp_path / "c.json.8.tmp"
    others.write_text("x")
    for path in (left, mine):
        path.write_text("")
    os.utime(left, (1, 1))  # of a process that was killed long ago
    checksums.write_file(tmp_path / "c.json", b"{}")
    assert not left.exists() and mine.exists()
    monkeypatch.setattr(checksums.secrets, "token_hex", lambda count: "8")
    mine.unlink()
    mine.symlink_to(others)
    with pytest.raises(FileExistsError):
        checksums.write_file(tmp_path / "c.json", b"[]")
    assert others.read_text() == "x" and mine.is_symlink()
