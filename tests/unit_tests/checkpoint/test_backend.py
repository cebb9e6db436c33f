"""Saves and loads through torch.distributed.checkpoint: atomic replacement, checksums, damage, and unsafe pickles."""

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.two_tensor import TwoTensor

from megatron.fsdp.checkpoint import backend
from megatron.fsdp.checkpoint.backend import Planner, Writer
from megatron.fsdp.checkpoint.checksums import NAME, Checksums, DamagedCheckpoint, crc32_of
from megatron.fsdp.checkpoint.loading import load, load_objects
from megatron.fsdp.checkpoint.matching import Reaction, Strictness
from megatron.fsdp.checkpoint.newest import newest_complete
from megatron.fsdp.checkpoint.reader import open_checkpoint
from megatron.fsdp.checkpoint.safe_pickle import UnsafePickle
from tests.ranks import on_ranks
from tests.small_checkpoints import Injected

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def state(value: float) -> dict[str, Any]:
    tensors = {"a.b": torch.full((3, 5), value), "c": torch.arange(7) + int(value)}
    return {"model": tensors, "iteration": int(value), "settings": {"betas": (0.9, 0.95), "names": ["x"]}}


def save(folder: Path, value: float, planner: Planner | None = None) -> None:
    dcp.save(state(value), storage_writer=Writer(folder), planner=planner or Planner())


def loaded(folder: Path, **options: Any) -> dict[str, Any]:
    into = state(0)
    into["settings"] = {"betas": None, "names": None}
    load(into, folder, **options)
    return into


def same(found: dict[str, Any], value: float) -> bool:
    wanted = state(value)
    tensors = all(torch.equal(found["model"][k], v) for k, v in wanted["model"].items())
    return tensors and all(found[key] == wanted[key] for key in ("iteration", "settings"))


def test_round_trip(tmp_path: Path) -> None:
    save(tmp_path, 3)
    assert same(loaded(tmp_path), 3)


def test_lazily_conjugated_and_negated_tensors(tmp_path: Path) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    wanted = {"conjugated": numbers.conj(), "negated": numbers.conj().imag}
    dcp.save(wanted, storage_writer=Writer(tmp_path), planner=Planner())
    into = {"conjugated": torch.zeros_like(numbers), "negated": torch.zeros(2)}
    load(into, tmp_path)
    assert all(torch.equal(into[name], wanted[name]) for name in wanted)


def test_keys_that_are_numbers(tmp_path: Path) -> None:
    wanted = {"state": {0: {"step": 3, "sum": torch.ones(2)}, "1": {"step": 4}}, "milestones": {5: 1}}
    dcp.save(wanted, storage_writer=Writer(tmp_path), planner=Planner())
    into = {"state": {0: {"step": 0, "sum": torch.zeros(2)}, "1": {"step": 0}}, "milestones": {5: 0}}
    load(into, tmp_path)
    assert torch.equal(into["state"][0].pop("sum"), wanted["state"][0].pop("sum"))
    assert into == wanted


def test_keys_that_are_neither_text_nor_numbers(tmp_path: Path) -> None:
    wanted: dict[Any, Any] = {("a", 1): 5, None: 3, 1.5: 2, True: 7, "x": torch.ones(2)}
    backend.save(wanted, tmp_path)
    into: dict[Any, Any] = {("a", 1): 0, None: 0, 1.5: 0, True: 0, "x": torch.zeros(2)}
    load(into, tmp_path)
    assert torch.equal(into.pop("x"), wanted.pop("x")) and into == wanted


# Of the checkpoint and of the state dict.
CHANGED: dict[str, tuple[Any, Any]] = {
    "a number for several elements": (5, torch.zeros(3)),
    "a fraction for an integer": (5.5, torch.zeros((), dtype=torch.int64)),
    "a large number for a small integer": (300, torch.zeros(1, dtype=torch.uint8)),
    "text for a tensor": ("text", torch.zeros(())),
    "several elements for a number": (torch.ones(3), 0),
    "floats for integers": (torch.ones(3), torch.zeros(3, dtype=torch.int32)),
    "complex for real": (torch.ones(3, dtype=torch.complex64), torch.zeros(3)),
    "integers for booleans": (torch.ones(3, dtype=torch.int32), torch.zeros(3, dtype=torch.bool)),
    "large integers": (torch.tensor([1, 300]), torch.zeros(2, dtype=torch.uint8)),
    "negative integers": (torch.tensor([1, -1], dtype=torch.int8), torch.zeros(2, dtype=torch.uint8)),
    "negative integers for the largest": (torch.tensor([-1]), torch.zeros(1, dtype=torch.uint64)),
    "beyond the range of float16": (torch.tensor([1.0, 1e5]), torch.zeros(2, dtype=torch.float16)),
    "elements that share memory": (torch.ones(3), torch.zeros(1).expand(3)),
}


@pytest.mark.parametrize("case", CHANGED)
def test_values_that_would_change_are_refused(tmp_path: Path, case: str) -> None:
    stored, target = CHANGED[case]
    backend.save({"x": stored, "y": torch.ones(2)}, tmp_path)
    with pytest.raises(CheckpointException, match=r"x: expected .*; got .*\. (Load into|Choose) "):
        load({"x": target, "y": torch.zeros(2)}, tmp_path)


@pytest.mark.parametrize(
    ("stored", "target"),
    [
        (5, torch.zeros(1, dtype=torch.int8)),
        (0.1, torch.zeros(())),
        (True, torch.zeros(())),
        (torch.tensor(7.0), torch.zeros((), dtype=torch.int64)),
        (torch.tensor([1.5, torch.inf, torch.nan]), torch.zeros(3, dtype=torch.float16)),
        (torch.tensor([1, 255]), torch.zeros(2, dtype=torch.uint8)),
        (torch.tensor([1, 2]), torch.zeros(2)),
    ],
)
def test_values_of_another_dtype_are_loaded(tmp_path: Path, stored: Any, target: torch.Tensor) -> None:
    backend.save({"x": stored}, tmp_path)
    load({"x": target}, tmp_path)
    torch.testing.assert_close(target, torch.as_tensor(stored).to(target.dtype).view_as(target), equal_nan=True)


class Own:
    """An object that loading refuses."""


def test_objects_that_loading_refuses_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"settings\.own: refers to .*Own"):
        backend.save({"settings": {"own": Own()}, "x": torch.ones(2)}, tmp_path)
    assert not (tmp_path / ".metadata").exists()


def test_a_tensor_of_tensors_is_not_saved(tmp_path: Path) -> None:
    pair = TwoTensor(torch.ones(2), torch.zeros(2))
    with pytest.raises(CheckpointException, match="weight: expected a tensor with memory of its own; got a TwoTensor"):
        backend.save({"weight": pair}, tmp_path)


@on_ranks(2)
def test_of_values_that_differ_the_first_rank_s_are_saved(tmp_path: Path) -> None:
    rank = dist.get_rank()
    names = [f"v{i}" for i in range(6)]
    values = {name: torch.full((1 + i % 3,), float(rank)) for i, name in enumerate(names)}
    backend.save({**values, "step": rank, f"only.{rank}": rank}, tmp_path)
    into: dict[str, Any] = {**{name: value + 5 for name, value in values.items()}, "step": 7, f"only.{rank}": 7}
    load(into, tmp_path)
    assert not any(into[name].any() for name in names)
    assert into["step"] == 0 and into[f"only.{rank}"] == rank


def test_plain_torch_reads_it(tmp_path: Path) -> None:
    save(tmp_path, 3)
    into = state(0)
    dcp.load(into, checkpoint_id=tmp_path)
    assert same(into, 3)


def test_it_reads_what_plain_torch_wrote(tmp_path: Path) -> None:
    dcp.save(state(3), checkpoint_id=tmp_path)
    assert same(loaded(tmp_path), 3)


def test_every_file_has_its_checksum(tmp_path: Path) -> None:
    save(tmp_path, 3)
    sums = Checksums.load(tmp_path)
    assert sums is not None
    assert set(sums.files) == {path.name for path in tmp_path.glob("*.distcp")} != set()
    for name in sums.files:
        sums.check_file(tmp_path, name)
    sums.check_metadata(tmp_path)


def test_saving_again_replaces_and_cleans_up(tmp_path: Path) -> None:
    save(tmp_path, 3)
    before = {path.name for path in tmp_path.glob("*.distcp")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch.distributed is")
        save(tmp_path, 4)
    after = {path.name for path in tmp_path.glob("*.distcp")}
    assert same(loaded(tmp_path), 4)
    assert not before & after, "files of the earlier checkpoint were overwritten"
    sums = Checksums.load(tmp_path)
    assert sums is not None and set(sums.files) == after and len(sums.metadata) == 1


STOPS: dict[str, tuple[str, str]] = {
    "while files are written": ("ChecksummedFile", "write_tensor"),
    "before the checksums": ("Checksums", "save"),
    "before the metadata": ("", "write_file"),
}


@pytest.mark.parametrize("stop", STOPS)
def test_a_failed_save_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    save(tmp_path, 3)
    owner, name = STOPS[stop]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(getattr(backend, owner) if owner else backend, name, fail)
        with pytest.raises((OSError, CheckpointException), match="No space left"):
            save(tmp_path, 4)
    assert same(loaded(tmp_path), 3)
    save(tmp_path, 5)
    assert same(loaded(tmp_path), 5)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "first byte": lambda path: flip(path, 0),
    "middle": lambda path: flip(path, path.stat().st_size // 2),
    "last byte": lambda path: flip(path, -1),
    "truncated": truncate,
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", ["data", ".metadata"])
def test_damage_is_detected_and_the_file_is_named(tmp_path: Path, damage: str, which: str) -> None:
    save(tmp_path, 3)
    path = next(tmp_path.glob("*.distcp")) if which == "data" else tmp_path / which
    DAMAGES[damage](path)
    into = state(0)
    with pytest.raises((DamagedCheckpoint, FileNotFoundError), match=which if which != "data" else path.name):
        load(into, tmp_path)
    assert same(into, 0), "values were loaded from a damaged checkpoint"


def flip_in(folder: Path, tensor: torch.Tensor) -> Path:
    """Flip a bit of a tensor in its file; return the file."""
    pattern = tensor.numpy().tobytes()
    (path,) = (path for path in folder.glob("*.distcp") if pattern in path.read_bytes())
    flip(path, path.read_bytes().index(pattern) + 6)
    return path


@pytest.mark.parametrize("way", ["load", "newest_complete"])
def test_damage_is_detected_without_checksums_of_files(tmp_path: Path, way: str) -> None:
    """The archives that torch and Megatron-Core write contain checksums."""
    folder = tmp_path / "iter_0000003"
    dcp.save(state(3), checkpoint_id=folder)
    path = flip_in(folder, state(3)["model"]["a.b"])
    if way == "newest_complete":
        assert newest_complete(tmp_path, 3) is None
        assert newest_complete(tmp_path, 3, check=False) == 3
        return
    into = state(0)
    with pytest.raises(DamagedCheckpoint, match=rf"{path.name} \(model.a.b\): .*CRC-32"):
        load(into, folder)
    assert torch.equal(into["model"]["a.b"], torch.zeros(3, 5))
    assert not same(loaded(folder, check=False), 3), "without checking, the damage is loaded"


def test_unlisted_files_are_checked(tmp_path: Path) -> None:
    dcp.save(state(3), checkpoint_id=tmp_path)
    Checksums({}, [crc32_of(tmp_path / ".metadata")]).save(tmp_path)  # as after a killed save
    assert same(loaded(tmp_path), 3)
    flip_in(tmp_path, state(3)["model"]["a.b"])
    with pytest.raises(DamagedCheckpoint, match="CRC-32"):
        loaded(tmp_path)


def test_checking_can_be_disabled(tmp_path: Path) -> None:
    save(tmp_path, 3)
    path = next(tmp_path.glob("*.distcp"))
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(DamagedCheckpoint):
        loaded(tmp_path)
    assert same(loaded(tmp_path, check=False), 3)


def test_the_newest_complete_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for iteration in (10, 20, 30, 40):
        save(tmp_path / f"iter_{iteration:07d}", iteration)
    assert newest_complete(tmp_path, 40) == 40
    assert newest_complete(tmp_path, 30) == 30, "checkpoints that are newer than the tracker file's are ignored"
    assert newest_complete(tmp_path, None) == 40
    (tmp_path / "iter_0000040" / ".metadata").unlink()
    assert newest_complete(tmp_path, 40) == 30
    flip(next((tmp_path / "iter_0000030").glob("*.distcp")), 700)
    assert newest_complete(tmp_path, 40) == 20
    assert newest_complete(tmp_path, 40, check=False) == 30, "without checking, a flipped bit is not detected"
    assert "iter_0000030" in caplog.text and "CRC-32" in caplog.text
    truncate(next((tmp_path / "iter_0000020").glob("*.distcp")))
    assert newest_complete(tmp_path, 40, check=False) == 30
    flip(tmp_path / "iter_0000010" / ".metadata", 50)
    assert newest_complete(tmp_path, 40) is None


def test_an_object_cannot_run_code(tmp_path: Path) -> None:
    folder, proof = tmp_path / "checkpoint", tmp_path / "proof"
    dcp.save({"model": torch.ones(2), "args": Injected(os.system, f"touch {proof}")}, checkpoint_id=folder)
    proof.unlink(missing_ok=True)
    with pytest.raises(UnsafePickle, match="posix.system|os.system"):
        load_objects(folder, ["args"])
    assert not proof.exists()


def test_metadata_cannot_run_code(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    save(tmp_path / "c", 3)
    (tmp_path / "c" / NAME).unlink()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Injected(os.system, f"touch {proof}")))
    with pytest.raises(UnsafePickle, match=r"system"):
        open_checkpoint(tmp_path / "c")
    assert not proof.exists()


# Mismatched keys -----------------------------------------------------------------------------------------------------


def test_one_report_before_anything_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, 3)
    into = state(0)
    into["model"] |= {"a.bb": torch.zeros(2), "a.b": torch.zeros(4, 5), "zzz": torch.zeros(1)}
    before = {key: value.clone() for key, value in into["model"].items()}
    with pytest.raises(ValueError) as error:
        load(into, tmp_path)
    message = str(error.value)
    assert "2 keys missing" in message and "model.zzz" in message
    assert "model.a.bb. Did you mean 'model.a.b'?" in message
    assert "model.a.b: expected (4, 5); the checkpoint has (3, 5)" in message
    assert all(torch.equal(into["model"][key], value) for key, value in before.items())


@pytest.mark.parametrize("reaction", Reaction)
def test_unexpected_keys(tmp_path: Path, reaction: Reaction, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 3)
    into = {"model": {"c": torch.zeros(7, dtype=torch.int64)}}
    strictness = Strictness(unexpected=reaction)
    if reaction is Reaction.RAISE:
        with pytest.raises(RuntimeError, match="unexpected:\n  model.a.b"):
            load(into, tmp_path, strictness=strictness)
        return
    load(into, tmp_path, strictness=strictness)
    assert into["model"]["c"][0] == 3
    assert ("model.a.b" in caplog.text) == (reaction is Reaction.LOG)


@pytest.mark.parametrize(
    ("stored", "into", "lost"),
    [
        ({"state": {0: {"sum": torch.ones(2)}}}, {"state": {}}, r"optimizer\.state\.0\.sum"),
        ({"losses": [torch.ones(2), torch.ones(2)]}, {"losses": [torch.zeros(2)]}, r"optimizer\.losses\.1"),
    ],
)
def test_entries_without_a_place_are_not_left_out(
    tmp_path: Path, stored: dict[str, Any], into: dict[str, Any], lost: str
) -> None:
    backend.save({"optimizer": stored, "x": torch.ones(2)}, tmp_path)
    with pytest.raises(RuntimeError, match=f"1 key unexpected, in an empty dict .* Give it entries .*:\n  {lost}"):
        load({"optimizer": into}, tmp_path)
    backend.save({"optimizer": into, "x": torch.ones(2)}, tmp_path)
    load({"optimizer": into, "x": torch.zeros(2)}, tmp_path)


def test_optional_keys_may_be_missing(tmp_path: Path) -> None:
    save(tmp_path, 3)
    into = state(0) | {"more": 1}
    with pytest.raises(RuntimeError, match="1 key missing:\n  more"):
        load(into, tmp_path)
    load(into, tmp_path, strictness=Strictness(optional=lambda key: key == "more"))
    assert into["more"] == 1 and into["iteration"] == 3


def test_aliases_and_conversion_between_tensors_and_numbers(tmp_path: Path) -> None:
    dcp.save({"group": {"step": 5}, "state": {"count": torch.tensor(8.0)}}, checkpoint_id=tmp_path)
    names = {"tensor": "group.step", "number": "state.count"}
    into: dict[str, Any] = {"tensor": torch.zeros(()), "number": 0}
    load(into, tmp_path, aliases=lambda key: [names[key]])
    assert into["tensor"] == 5 and into["number"] == 8


def test_a_planner_can_skip_objects(tmp_path: Path) -> None:
    planner = Planner(writes_objects=False)
    planner.set_up_planner(state(1))
    assert not planner.create_local_plan().items
