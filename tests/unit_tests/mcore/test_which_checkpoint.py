"""The checkpoint that Megatron's loop loads, by the tracker file and by which folders are complete."""

import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.fsdp.checkpoint.backend import Planner, Writer
from megatron.fsdp.checkpoint.newest import newest_complete_checkpoint

TRACKER = "latest_checkpointed_iteration.txt"
OURS = {"use_megatron_fsdp": True, "ckpt_format": "fsdp_dtensor"}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Whole checkpoints of iterations 10 and 20, and one of 30 that was not finished."""
    for iteration in (10, 20, 30):
        folder = tmp_path / "run" / f"iter_{iteration:07d}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"weight": torch.ones(3)}, storage_writer=Writer(folder), planner=Planner())
    (folder / ".metadata").unlink()
    return folder.parent


def at_base(monkeypatch: pytest.MonkeyPatch, folder: Path, **arguments: Any) -> tuple[int | None, int | None]:
    """The iteration that Megatron's loader gets without a tracker file, and the arguments left afterwards."""
    from megatron.fsdp.mcore import resuming

    args = SimpleNamespace(**arguments)
    monkeypatch.setattr(resuming, "megatron_arguments", lambda: args)
    found = resuming.load_base_checkpoint(lambda load_dir, args, rank0: args.ckpt_step, str(folder), args, rank0=True)
    return found, args.ckpt_step


def read(monkeypatch: pytest.MonkeyPatch, folder: Path, tracker: str, **arguments: Any) -> tuple[int, bool]:
    from megatron.fsdp.mcore import resuming

    (folder / TRACKER).write_bytes(tracker.encode("latin-1"))
    monkeypatch.setattr(resuming, "megatron_arguments", lambda: SimpleNamespace(**arguments) if arguments else None)
    return resuming.read_metadata(lambda name: (-7, False), str(folder / TRACKER))


@pytest.mark.parametrize("tracker", ["30", "", "garbage", "99", "\xff\0g", "-5", "9" * 5000, "\xb2", "3" * 19])
def test_newest_complete_checkpoint_is_loaded(monkeypatch: pytest.MonkeyPatch, checkpoints: Path, tracker: str) -> None:
    assert read(monkeypatch, checkpoints, tracker, **OURS) == (20, False)


def test_iteration_of_the_tracker_file_is_loaded(monkeypatch: pytest.MonkeyPatch, checkpoints: Path) -> None:
    assert read(monkeypatch, checkpoints, "10", **OURS) == (10, False)
    assert read(monkeypatch, checkpoints, "10") == (10, False), "arguments are not parsed yet"


def test_explicit_iteration_is_loaded(monkeypatch: pytest.MonkeyPatch, checkpoints: Path) -> None:
    assert read(monkeypatch, checkpoints, "10", **OURS, ckpt_step=30) == (30, False)


def test_no_complete_checkpoint_raises(monkeypatch: pytest.MonkeyPatch, checkpoints: Path) -> None:
    for iteration in (10, 20):
        (checkpoints / f"iter_{iteration:07d}" / ".metadata").unlink()
    with pytest.raises(RuntimeError, match="no whole checkpoint"):
        read(monkeypatch, checkpoints, "30", **OURS)


def as_torch_dist(folder: Path, iteration: int) -> None:
    (folder / f"iter_{iteration:07d}" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


def test_checkpoints_of_ddp_are_loaded_like_others(monkeypatch: pytest.MonkeyPatch, checkpoints: Path) -> None:
    as_torch_dist(checkpoints, 10)
    assert read(monkeypatch, checkpoints, "10", **OURS) == (10, False)
    assert read(monkeypatch, checkpoints, "30", **OURS) == (20, False)
    # A run with FSDP that began with this one of DDP was killed while it saved its first.
    (checkpoints / "iter_0000020" / ".metadata").unlink()
    assert read(monkeypatch, checkpoints, "20", **OURS) == (10, False)
    (checkpoints / TRACKER).unlink()
    assert at_base(monkeypatch, checkpoints, **OURS, ckpt_step=None) == (10, None)
    assert read(monkeypatch, checkpoints, "10") == (-7, False), "without arguments, it may be a run with DDP"


def test_format_of_a_checkpoint(checkpoints: Path) -> None:
    from megatron.fsdp.mcore.torch_dist import checkpoint_format

    def format_of(iteration: int, **arguments: Any) -> str:
        folder = str(checkpoints / f"iter_{iteration:07d}")
        return checkpoint_format(lambda name, args: "Megatron's", folder, SimpleNamespace(**arguments))

    as_torch_dist(checkpoints, 10)
    assert format_of(10, **OURS) == "fsdp_dtensor"
    assert format_of(20, **OURS) == "Megatron's"
    assert format_of(10, use_megatron_fsdp=False, ckpt_format="torch_dist") == "Megatron's"


def test_legacy_checkpoint_raises(monkeypatch: pytest.MonkeyPatch, checkpoints: Path) -> None:
    (checkpoints / "iter_0000030" / "mp_rank_00_000").mkdir()
    with pytest.raises(RuntimeError, match="legacy format torch.*--ckpt-format torch_dist"):
        read(monkeypatch, checkpoints, "30", **OURS)


def test_a_legacy_release_raises(checkpoints: Path) -> None:
    from megatron.fsdp.mcore.torch_dist import checkpoint_format

    (checkpoints / "release" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(RuntimeError, match="release: .*legacy format torch"):
        checkpoint_format(lambda name, args: "torch", str(checkpoints / "release"), SimpleNamespace(**OURS))


@pytest.mark.parametrize("format", ["torch_dist", "torch"])
def test_other_formats_are_left_to_megatron(monkeypatch: pytest.MonkeyPatch, checkpoints: Path, format: str) -> None:
    assert read(monkeypatch, checkpoints, "30", use_megatron_fsdp=False, ckpt_format=format) == (-7, False)
    assert read(monkeypatch, checkpoints, "release", **OURS) == (-7, False)


def test_newest_complete_checkpoint_without_a_tracker_file(monkeypatch: pytest.MonkeyPatch, checkpoints: Path) -> None:
    assert at_base(monkeypatch, checkpoints, **OURS, ckpt_step=None) == (20, None)
    assert at_base(monkeypatch, checkpoints, **OURS, ckpt_step=10) == (10, 10), "an explicit iteration is loaded"
    others = {"use_megatron_fsdp": False, "ckpt_format": "torch_dist"}
    assert at_base(monkeypatch, checkpoints, **others, ckpt_step=None) == (None, None), "Megatron's matter"
    (checkpoints / TRACKER).mkdir()
    assert at_base(monkeypatch, checkpoints, **OURS, ckpt_step=None) == (20, None)


def test_a_restart_that_loads_the_first_checkpoint_again_is_told(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a run of DDP is continued with another --save, and the job is queued again with the same command."""
    saved = tmp_path / "saved"
    for save in (None, str(checkpoints), str(saved)):
        assert at_base(monkeypatch, checkpoints, **OURS, ckpt_step=None, save=save) == (20, None)
    saved.mkdir()
    (saved / TRACKER).write_text("30")
    assert "--save" not in caplog.text
    assert at_base(monkeypatch, checkpoints, **OURS, ckpt_step=None, save=str(saved)) == (20, None)
    assert f"--save {saved} has checkpoints, and --load {checkpoints} is loaded. To continue the former" in caplog.text


def test_empty_folder_is_a_first_start(monkeypatch: pytest.MonkeyPatch, checkpoints: Path, tmp_path: Path) -> None:
    assert at_base(monkeypatch, tmp_path / "nothing", **OURS, ckpt_step=None) == (None, None)
    for iteration in (10, 20):
        (checkpoints / f"iter_{iteration:07d}" / ".metadata").unlink()
    # A run that was killed while it saved for the first time.
    assert at_base(monkeypatch, checkpoints, **OURS, ckpt_step=None) == (None, None)
    (checkpoints / TRACKER).write_text("20")
    assert at_base(monkeypatch, checkpoints, **OURS, ckpt_step=None) == (None, None), "that is read elsewhere"


def given(monkeypatch: pytest.MonkeyPatch, folder: Path, step: int | None = None) -> tuple[Any, str, bool]:
    """The result of Megatron's loader for a folder that is a checkpoint: iteration, path, whether a release."""
    from megatron.fsdp.mcore import resuming

    def load(load_dir: str, args: SimpleNamespace) -> tuple[Any, str, bool, str]:
        name = resuming.checkpoint_name(lambda load_dir, iteration: f"{load_dir}/{iteration}", load_dir, args.ckpt_step)
        return args.ckpt_step, name, False, "kind"

    args = SimpleNamespace(**OURS, ckpt_step=step, load=str(folder), pretrained_checkpoint=None)
    monkeypatch.setattr(resuming, "megatron_arguments", lambda: args)
    assert resuming.checkpoint_exists(lambda path: False, str(folder))
    assert resuming.load_path(lambda args, name: "Megatron's", args) == str(folder)
    return resuming.load_base_checkpoint(load, str(folder), args)[:3]


@pytest.mark.parametrize("name", ["output", "iter_0000020", "release", "iter_20"])
def test_a_folder_that_is_a_checkpoint(monkeypatch: pytest.MonkeyPatch, checkpoints: Path, name: str) -> None:
    from megatron.fsdp.mcore import resuming

    folder = checkpoints / name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"weight": torch.ones(3), "iteration": 7}
        dcp.save(state, storage_writer=Writer(folder), planner=Planner())
    assert given(monkeypatch, folder) == (7, str(folder), name == "release")
    assert resuming.checkpoint_name(lambda path: path, "later") == "later"
    assert given(monkeypatch, folder, 7) == given(monkeypatch, folder)
    with pytest.raises(RuntimeError, match="is a checkpoint: expected --ckpt-step 7, or none; got 10"):
        given(monkeypatch, folder, 10)
    # A run that saved into the folder resumes from what it saved.
    shutil.copytree(checkpoints / "iter_0000010", folder / "iter_0000010")
    assert at_base(monkeypatch, folder, **OURS, ckpt_step=None) == (10, None)
    assert at_base(monkeypatch, folder, **OURS, ckpt_step=10) == (10, 10)


UNUSABLE = {
    "a file": (lambda folder: (folder.rmdir(), folder.write_text("")), "expected a folder; got a file"),
    "legacy": (lambda folder: (folder / "iter_0000005" / "mp_rank_00").mkdir(parents=True), "the legacy format torch"),
    "half": (lambda folder: (folder / "__0_0.distcp").touch(), "__0_0.distcp without .metadata.*convert it again"),
    **{
        name: (lambda folder, name=name: (folder / name).touch(), f"got {name}.*import-safetensors.*save_file")
        for name in ("model.safetensors", "pytorch_model-00001-of-00002.bin", "weights.pt", "weights.pth")
    },
    **{
        name: (
            lambda folder, name=name: ((folder / name).mkdir(), (folder / name / ".metadata").touch()),
            f"got {name}. Give .*/run/{name} itself to --load",
        )
        for name in ("iter_5", "output")
    },
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_files_that_cannot_be_loaded_raise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    from megatron.fsdp.mcore import resuming

    make, match = UNUSABLE[kind]
    folder = tmp_path / "run"
    folder.mkdir()
    make(folder)
    with pytest.raises(RuntimeError, match=f"{folder}: .*{match}"):
        at_base(monkeypatch, folder, **OURS, ckpt_step=None)
    with pytest.raises(RuntimeError, match=match):  # and --pretrained-checkpoint is not loaded in its place
        resuming.checkpoint_exists(lambda path: False, str(folder))


def test_a_run_may_write_files_into_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "profile.pt").touch()
    at_base(monkeypatch, tmp_path, **OURS, ckpt_step=None, load=str(tmp_path), save=str(tmp_path))
    with pytest.raises(RuntimeError, match=r"got profile\.pt"):
        at_base(monkeypatch, tmp_path, **OURS, ckpt_step=None, load=str(tmp_path), save="elsewhere")


def test_half_checkpoints_of_another_run_raise(monkeypatch: pytest.MonkeyPatch, checkpoints: Path) -> None:
    other: dict[str, Any] = {**OURS, "ckpt_step": None, "save": "elsewhere"}
    for iteration in (10, 20):
        (checkpoints / f"iter_{iteration:07d}" / ".metadata").unlink()
    with pytest.raises(RuntimeError, match=r"got iter_0000030 without \.metadata"):
        at_base(monkeypatch, checkpoints, load=str(checkpoints), **other)
    (checkpoints / TRACKER).write_text("20")
    with pytest.raises(RuntimeError, match=r"contains such a folder\. Give .* to --load"):
        at_base(monkeypatch, checkpoints.parent, load=str(checkpoints.parent), **other)


def test_unusable_checkpoints_raise(monkeypatch: pytest.MonkeyPatch, checkpoints: Path) -> None:
    for iteration in (10, 20):
        (checkpoints / f"iter_{iteration:07d}" / ".metadata").write_bytes(b"?")
    with pytest.raises(RuntimeError, match=f"expected {TRACKER}"):
        at_base(monkeypatch, checkpoints, **OURS, ckpt_step=None)
    for iteration in (10, 30):
        shutil.rmtree(checkpoints / f"iter_{iteration:07d}")
    (checkpoints / "iter_0000020").rename(checkpoints / "release")
    with pytest.raises(RuntimeError, match="Write the iteration to load, or 'release'"):
        at_base(monkeypatch, checkpoints, **OURS, ckpt_step=None)


def test_pretrained_weights_are_loaded_only_at_the_first_start(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Path
) -> None:
    from megatron.fsdp.mcore import resuming

    def exists(path: str | None) -> bool:
        return resuming.checkpoint_exists(lambda path: path is not None and (Path(path) / TRACKER).is_file(), path)

    monkeypatch.setattr(resuming, "megatron_arguments", lambda: SimpleNamespace(**OURS))
    assert exists(str(checkpoints)) and not exists(None) and not exists(str(checkpoints / "nothing"))
    for iteration in (10, 20):
        (checkpoints / f"iter_{iteration:07d}" / ".metadata").unlink()
    assert not exists(str(checkpoints))
    base = shutil.copytree(checkpoints / "iter_0000010", checkpoints / "base")
    (base / ".metadata").touch()
    monkeypatch.setattr(resuming, "megatron_arguments", lambda: SimpleNamespace(**OURS, pretrained_checkpoint=base))
    assert not exists(str(checkpoints)) and exists(str(base))


def interrupted(folder: Path) -> None:
    """Leave what a killed save leaves."""
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"half")


def test_the_newest_complete_checkpoint_of_any_loop(checkpoints: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert newest_complete_checkpoint(checkpoints) == checkpoints / "iter_0000020"
    assert "the checkpoint iter_0000030 is incomplete" in caplog.text
    for number in (20, 10):
        (checkpoints / f"iter_00000{number}").rename(checkpoints / f"step-{number // 10}")
    shutil.copytree(checkpoints / "step-1", checkpoints / "step-11")
    interrupted(checkpoints / "epoch9999")
    (checkpoints / "notes99").touch()
    for name in ("latest", "tb_20250101", "empty_99999"):
        (checkpoints / name).mkdir()
    (checkpoints / "tb_20250101" / "events.out.tfevents.1").touch()
    assert newest_complete_checkpoint(checkpoints) == checkpoints / "step-11", "11 > 2, unlike the names' order"
    assert "epoch9999" in caplog.text and "tb_2025" not in caplog.text and "empty" not in caplog.text


def test_numbers_of_different_kinds_do_not_tell_the_newest(checkpoints: Path) -> None:
    for number, name in ((10, "run-2026-11-30"), (20, "run-2026-12-01")):
        (checkpoints / f"iter_00000{number}").rename(checkpoints / name)
    with pytest.raises(ValueError, match=r"number at their end only.*; got run-2026-11-30 and run-2026-12-01\. Rename"):
        newest_complete_checkpoint(checkpoints)


def test_a_damaged_checkpoint_is_not_the_newest(checkpoints: Path) -> None:
    data = next((checkpoints / "iter_0000020").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert newest_complete_checkpoint(checkpoints) == checkpoints / "iter_0000010"
    assert newest_complete_checkpoint(checkpoints, check=False) == checkpoints / "iter_0000020"
    data.write_bytes(content[:-1])
    assert newest_complete_checkpoint(checkpoints, check=False) == checkpoints / "iter_0000010"


def test_no_checkpoint(tmp_path: Path) -> None:
    assert newest_complete_checkpoint(tmp_path / "missing") is None
    interrupted(tmp_path / "step_1")
    assert newest_complete_checkpoint(tmp_path) is None
