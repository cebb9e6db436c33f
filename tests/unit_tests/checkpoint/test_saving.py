"""Saves by several ranks and several jobs either complete or leave the earlier checkpoint unchanged."""

import os
import queue
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _write_item
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron.fsdp.checkpoint import backend
from megatron.fsdp.checkpoint.backend import Planner, Writer, save
from megatron.fsdp.checkpoint.checksums import NAME
from megatron.fsdp.checkpoint.loading import load
from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.mcore import cpu
from tests.checkpoints import ROOT
from tests.ranks import DEVICE, RankPool

# Must precede every import of Megatron, which some of these tests need.
cpu.enable()

pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda", reason="the files do not depend on the device"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]


def divided(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts = {f"p{i}": DTensor.from_local(torch.full((4, 3), value + i), mesh, [Shard(0)]) for i in range(3)}
    return {"model": parts, "iteration": int(value)}


def is_whole(folder: str, value: float) -> bool:
    found = divided(0)
    load(found, Path(folder))
    same = (torch.equal(p.to_local(), torch.full((4, 3), value + i)) for i, p in enumerate(found["model"].values()))
    return found["iteration"] == int(value) and all(same)


def no_space(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


# The disk is full on one rank -------------------------------------------------------------------------------------


def _full_on_one(folder: str, last: bool, way: str) -> tuple[list[str], bool]:
    if way != "a new folder":
        save(divided(1), folder)
    original = backend.ChecksummedFile.write_tensor

    def write_tensor(*arguments: Any) -> Any:
        if dist.get_rank() == 1:
            # Fail before the other ranks begin, or after they are done.
            time.sleep(0.5 * last)
            no_space()
        time.sleep(0.1 * (not last))
        return original(*arguments)

    before = {path.name for path in Path(folder).glob("*")}
    dist.barrier()
    full = patch.object(backend.ChecksummedFile, "write_tensor", write_tensor)
    with full, pytest.raises(CheckpointException) as caught:
        if way == "Writer alone":
            dcp.save(divided(2), storage_writer=Writer(folder), planner=Planner())
        else:
            save(divided(2), folder)
    assert dist.get_rank() or f"No space left on device: '{folder}/__1_" in str(caught.value)
    dist.barrier()
    left = sorted({path.name for path in Path(folder).glob("*")} - before)
    good = way == "a new folder" or is_whole(folder, 1)
    dist.barrier()
    save(divided(3), folder)
    return left, good and is_whole(folder, 3)


@pytest.mark.parametrize("way", ["a new folder", "over a checkpoint"])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_a_save_without_space_leaves_no_files(ranks: RankPool, tmp_path: Path, last: bool, way: str) -> None:
    assert ranks.run(3, _full_on_one, str(tmp_path / "c"), last, way) == [([], True)] * 3


def test_a_save_without_space_through_torchs_function_leaves_no_files(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(3, _full_on_one, str(tmp_path), True, "Writer alone") == [([], True)] * 3


def _in_megatrons_loop(folder: str) -> list[str]:
    from megatron.fsdp.mcore.storage import torch_view

    checkpoint = torch_view(torch).distributed.checkpoint
    if dist.get_rank() == 1:
        backend.ChecksummedFile.write_tensor, original = no_space, backend.ChecksummedFile.write_tensor
    with pytest.raises(CheckpointException):
        checkpoint.save(divided(2), storage_writer=checkpoint.FileSystemWriter(folder))
    if dist.get_rank() == 1:
        backend.ChecksummedFile.write_tensor = original
    dist.barrier()
    return sorted(path.name for path in Path(folder).glob("*"))


def test_a_save_without_space_in_megatrons_loop_leaves_no_files(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(3, _in_megatrons_loop, str(tmp_path)) == [[]] * 3


def _in_the_background(folder: str) -> list[str]:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.fsdp import mcore
    from megatron.training import async_utils, checkpointing

    filesystem_async._results_queue = queue.Queue()  # otherwise a process holds it
    mcore.install()
    try:
        modules = checkpointing.get_async_strategy("mcore")[1]
        writer = modules["FileSystemWriterAsync"](folder, thread_count=1)
        plan = modules["save_state_dict_async_plan"]
        planned = plan(divided(2), writer, None, 0, planner=DefaultSavePlanner(), enable_cache=False)
        request = async_utils.get_save_and_finalize_callbacks(writer, planned, "mcore")
        if dist.get_rank() == 1:
            filesystem_async._write_item = no_space
        with pytest.raises(CheckpointException):
            request.execute_sync()
    finally:
        mcore.uninstall()
        filesystem_async._write_item, filesystem_async._results_queue = _write_item, None
    dist.barrier()
    return sorted(path.name for path in Path(folder).glob("*"))


def test_a_save_without_space_in_the_background_leaves_no_files(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, _in_the_background, str(tmp_path)) == [[]] * 2


KILLED = """
import os, signal, time
from megatron.fsdp.mcore import cpu
cpu.enable()
from megatron.fsdp import mcore
mcore.install()
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
worker = async_utils.mp.get_context("spawn").Process(target=time.sleep, args=(300,))
worker.start()
manager = filesystem_async.mp.get_context("fork").Manager()
print(worker.pid, manager._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_processes_of_background_saves_end_with_a_killed_rank() -> None:
    command, environment = [sys.executable, "-c", KILLED], {**os.environ, "PYTHONPATH": str(ROOT)}
    # Into a pipe that the worker does not inherit: it would keep it open.
    killed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120)
    left = [Path("/proc", pid, "stat") for pid in killed.stdout.decode().split()]
    assert len(left) == 2 and killed.returncode == -9
    end = time.monotonic() + 60
    while any(path.exists() and path.read_text().split()[2] != "Z" for path in left):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_folder_that_is_named_like_data(tmp_path: Path) -> None:
    (tmp_path / "__1_5_0.distcp").mkdir()
    for value in (1, 2):
        save(state(value), tmp_path)
        assert values(tmp_path) == value
    assert (tmp_path / "__1_5_0.distcp").is_dir()
    backend.remove_save(tmp_path / "__0_5_0.distcp")


def test_the_name_of_a_new_folder_survives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(backend, "sync_folder", synced.append)
    save(state(1), tmp_path / "run" / "iter_0000001")
    assert {tmp_path / "run", tmp_path} <= set(synced)


@pytest.mark.parametrize("with_sums", [True, False])
def test_no_space_for_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_sums: bool) -> None:
    save({"w": torch.ones(5)}, tmp_path)
    if not with_sums:
        (tmp_path / NAME).unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*")}
    with monkeypatch.context() as patch:
        patch.setattr(backend, "write_file", no_space)
        with pytest.raises(CheckpointException, match="No space left"):
            save({"w": torch.zeros(5)}, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*")} == before


def test_a_failure_after_the_metadata_keeps_the_new_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"w": torch.ones(5)}, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(backend.AtomicSaveMixin, "_remove_earlier", no_space)
        with pytest.raises(CheckpointException, match="No space left"):
            save({"w": torch.zeros(5)}, tmp_path)
    found = {"w": torch.full((5,), 7.0)}
    load(found, tmp_path)
    assert torch.equal(found["w"], torch.zeros(5))


# Other jobs and other checkpoints ---------------------------------------------------------------------------------


class Meanwhile(Planner):
    """Calls a function after file names are chosen: before the files are opened, or while they are written."""

    def __init__(self, happens: Callable[[], None], opened: bool) -> None:
        super().__init__()
        self._happens, self._opened = [happens], opened

    def finish_plan(self, plan: Any) -> Any:
        if not self._opened:
            self._happens.pop()()
        return super().finish_plan(plan)

    def resolve_data(self, write_item: Any) -> Any:
        if self._happens:
            self._happens.pop()()
        return super().resolve_data(write_item)


def values(folder: Path) -> float:
    found = {f"w{i}": torch.zeros(5) for i in range(3)}
    load(found, folder)
    (value,) = {float(x) for tensor in found.values() for x in tensor}
    return value


def state(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((5,), value) for i in range(3)}


def test_two_jobs_save_into_one_folder(tmp_path: Path) -> None:
    def another() -> None:
        save(state(2), tmp_path)

    # The other job starts later and finishes first. Its checkpoint stays, and this job gets an error.
    with pytest.raises(CheckpointException, match="Does another job save into this folder"):
        save(state(1), tmp_path, Meanwhile(another, opened=True))
    assert values(tmp_path) == 2
    assert len(list(tmp_path.glob("*.distcp"))) == 1
    save(state(3), tmp_path, Meanwhile(another, opened=False))
    assert values(tmp_path) == 3
    save(state(4), tmp_path)
    assert values(tmp_path) == 4 and len(list(tmp_path.glob("*.distcp"))) == 1


def test_a_job_that_finishes_first_keeps_the_other_jobs_files(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = Planner()
        first.set_up_planner(state(1), is_coordinator=True)
        plans, metadata = first.create_global_plan([writer.prepare_local_plan(first.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(plan, first).wait()

    def finish() -> None:
        writer.finish(metadata, [results])
        assert values(tmp_path) == 1

    save(state(2), tmp_path, Meanwhile(finish, opened=True))
    assert values(tmp_path) == 2 and len(list(tmp_path.glob("*.distcp"))) == 1


def test_file_names_are_never_reused(tmp_path: Path) -> None:
    """Otherwise a job that reads the first checkpoint could find data of the third one."""
    seen: set[str] = set()
    for value in range(4):
        save(state(value), tmp_path)
        (name,) = (path.name for path in tmp_path.glob("*.distcp"))
        assert name not in seen
        seen.add(name)


def test_replacing_a_checkpoint_of_ddp(tmp_path: Path) -> None:
    dcp.save(state(1), checkpoint_id=tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({}, tmp_path / "common.pt")
    save(state(2), tmp_path)
    assert CheckpointReader(tmp_path).format == "fsdp_dtensor" and values(tmp_path) == 2
