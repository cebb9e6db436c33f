"""Checkpoints on object storage: saved, replaced, loaded and converted as in a file system, whatever is killed when.

s3 is a server in another process; gs and msc are fakes in memory, which show the calls and no more.
"""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.distributed.checkpoint.api import CheckpointException

from megatron.fsdp.checkpoint import backend, loading, storage
from megatron.fsdp.checkpoint.checksums import METADATA, DamagedCheckpoint
from megatron.fsdp.checkpoint.newest import newest_complete, newest_complete_checkpoint
from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.checkpoint.stopping import FAILED, StopSignals, leave_outcome
from megatron.fsdp.checkpoint.storage import as_path, problem_of
from megatron.fsdp.convert.cli import cli
from tests.checkpoints import sample
from tests.object_storage import BUCKET, fake_storage, s3_server
from tests.ranks import on_ranks

pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """An S3 server."""
    with s3_server() as variables:
        yield variables


@pytest.fixture(params=["s3", "gs", "msc"])
def folder(request: pytest.FixtureRequest) -> Iterator[str]:
    """A folder on each kind of storage."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        yield f"{BUCKET}/{request.function.__name__}"
    else:
        with fake_storage(request.param):
            yield f"{request.param}://bucket/run"


def _state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((300, 200), value), "step": int(value), "rows": torch.arange(24.0).view(4, 6) * value}


def _loaded(folder: str) -> float:
    """The value of the checkpoint, of which everything has to be."""
    found = _state(0.0)
    loading.load(found, folder)
    value = float(found["step"])
    for key, tensor in _state(value).items():
        assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(tensor)), key
    return value


def test_saved_replaced_and_loaded(folder: str) -> None:
    for value in (1.0, 2.0):
        backend.save(_state(value), f"{folder}/iter_0000003")
        assert _loaded(f"{folder}/iter_0000003") == value
    names = sorted(path.name for path in as_path(f"{folder}/iter_0000003").iterdir())
    assert len(names) == 3 and names[::2] == [METADATA, "checksums.json"]
    assert newest_complete(as_path(folder), 7) == 3
    assert as_path(folder.replace("s3:", "S3:")) == as_path(folder)
    newest = newest_complete_checkpoint(folder)
    assert newest is not None and _loaded(str(newest)) == 2.0
    assert newest_complete(as_path(Path(folder)), 2) is None  # a Path of the address has one slash
    data = next(iter(as_path(f"{folder}/iter_0000003").glob("*.distcp")))
    content = data.read_bytes()
    data.write_bytes(content[:2000] + b"x" + content[2001:])
    with pytest.raises(DamagedCheckpoint, match=f"{data}: expected the CRC-32"):
        _loaded(f"{folder}/iter_0000003")
    data.unlink()
    with pytest.raises(DamagedCheckpoint, match="expected a file; got none"):
        _loaded(f"{folder}/iter_0000003")


def test_the_first_outcome_stays_and_a_folder_is_removed(folder: str) -> None:
    with pytest.raises(ZeroDivisionError), StopSignals(folder):
        raise ZeroDivisionError
    backend.save(_state(1.0), f"{folder}/iter_0000003")
    leave_outcome(as_path(folder), FAILED, "too late")
    assert "failed rank 0" in as_path(f"{folder}/outcome.txt").read_text()
    with StopSignals(folder):
        pass
    assert as_path(f"{folder}/outcome.txt").read_text() == "finished\n"
    cast(Any, as_path(folder)).rmtree()
    assert not as_path(folder).exists()


def test_failed_save_leaves_the_earlier_checkpoint(folder: str) -> None:
    backend.save(_state(1.0), folder)
    files = sorted(path.name for path in as_path(folder).iterdir())
    failing = patch.object(backend.ChecksummedFile, "write_tensor", side_effect=OSError("the network is down"))
    with failing, pytest.raises(CheckpointException) as caught:
        backend.save(_state(2.0), folder)
    assert "the network is down" in str(caught.value.failures)
    assert sorted(path.name for path in as_path(folder).iterdir()) == files
    assert _loaded(folder) == 1.0


def test_no_part_is_uploaded_when_an_interrupted_file_is_collected() -> None:
    with fake_storage("msc"):
        path = as_path("msc://bucket/run/data")
        with pytest.raises(ZeroDivisionError), storage.writing(path, 0) as file:
            file.write(b"a part")
            raise ZeroDivisionError
        del file
        gc.collect()
        assert not path.exists()


def _save_until_killed(folder: str, requests: int) -> None:
    """Save, and end like a killed process before a request that would write one more than so many times."""
    from aiobotocore.client import AioBaseClient

    original, count = AioBaseClient._make_api_call, 0

    async def counted(self: Any, operation: str, arguments: Any) -> Any:
        nonlocal count
        count += not operation.startswith(("Head", "List", "Get"))
        if count > requests:
            os.kill(os.getpid(), signal.SIGKILL)
        return await original(self, operation, arguments)

    with patch.object(AioBaseClient, "_make_api_call", counted):
        # Parts of the smallest size that S3 takes: a data file is an upload of several.
        storage._file_system("s3", os.getpid()).default_block_size = 5 << 20
        backend.save({**_state(2.0), "large": torch.ones(4 << 20)}, folder)


def test_killed_at_every_request_of_a_save(s3: dict[str, str]) -> None:
    folder, outcomes = f"{BUCKET}/killed", []
    context = multiprocessing.get_context("fork")
    for requests in range(40):
        for path in list(as_path(folder).iterdir()):
            path.unlink()
        backend.save(_state(1.0), folder)
        process = context.Process(target=_save_until_killed, args=(folder, requests))
        process.start()
        process.join(60)
        outcomes.append(_loaded(folder))
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert process.exitcode == 0 and outcomes == sorted(outcomes)
    assert outcomes.count(1.0) > 4 and outcomes.count(2.0) > 1  # before and after the one request that replaces it
    backend.save(_state(3.0), folder)
    assert _loaded(folder) == 3.0


def _save_on_ranks(folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(70.0).view(7, 10)
    state = {"weight": distribute_tensor(full, mesh, [Shard(0)])}
    backend.save(state, folder)
    zeros = {"weight": distribute_tensor(torch.zeros(7, 10), mesh, [Shard(1)])}
    loading.load(zeros, folder)
    assert torch.equal(zeros["weight"].full_tensor(), full)


@on_ranks(2)
def test_several_ranks(s3: dict[str, str]) -> None:
    with patch.dict(os.environ, s3):
        _save_on_ranks(f"{BUCKET}/ranks")


def test_converter_reads_and_writes(folder: str) -> None:
    source = sample("torch_dist_dp2")
    original = next(path for path in source.iterdir() if (path / METADATA).is_file())
    run, words = CliRunner().invoke, ["convert", str(original), f"{folder}/iter_0000003"]
    for text, status in (("fsdp_dtensor", 0), ("expected no such folder yet", 1)):
        result = run(cli, words)
        assert text in result.output and result.exit_code == status, result.output
        files = [path.name for path in as_path(folder).iterdir() if path.is_file()]
        assert files == ["latest_checkpointed_iteration.txt"]
    result = run(cli, ["convert", folder, f"{folder}-back/iter_0000003"])
    assert result.exit_code == 0, result.output
    found = CheckpointReader(as_path(f"{folder}-back/iter_0000003"))
    expected = CheckpointReader(original)
    assert found.tensors.keys() == expected.tensors.keys()
    for key in list(expected.tensors)[:5]:
        assert torch.equal(found.tensors[key].full_tensor(), expected.tensors[key].full_tensor())


@pytest.mark.parametrize(("scheme", "package"), storage.PACKAGES.items())
def test_missing_package(scheme: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage._file_system.cache_clear()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    expected = f"{scheme}:// needs the packages fsspec and {package}: pip install {package}"
    assert problem_of(f"{scheme}://bucket/run") == problem_of(f"{scheme.upper()}://bucket/run") == expected
    assert problem_of("/mnt/run") == "" and "expected one of s3://, gs://, msc://" in problem_of("hdfs://host/run")
    result = CliRunner().invoke(cli, ["inspect", f"{scheme}://bucket/run"])
    assert result.exit_code == 1 and result.output == f"Error: {expected}\n"
