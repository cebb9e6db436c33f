"""Hugging Face folders are split by size, indexed, written atomically by several processes, and resumed."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from megatron.fsdp.checkpoint import staging
from megatron.fsdp.checkpoint.lazy import LazyTensor, of
from megatron.fsdp.convert.huggingface.folder import Export, companions, divide, export, read_config, read_weights
from megatron.fsdp.convert.options import WriteOptions

CONFIG = {"model_type": "llama"}


def some_tensors() -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.arange(8, dtype=torch.float32) + i for i in range(5)}


def lazily(tensors: dict[str, torch.Tensor]) -> dict[str, LazyTensor]:
    return {name: of(tensor) for name, tensor in tensors.items()}


def failing_from(tensors: dict[str, torch.Tensor], name: str) -> dict[str, LazyTensor]:
    def fail(box: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    found = lazily(tensors)
    return {**found, name: LazyTensor(found[name].shape, found[name].dtype, fail)}


def whole(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() for name, tensor in read_weights(path).items()}


def write(path: Path, tensors: dict[str, LazyTensor], largest: int = 1 << 30, source: str = "", **more: Any) -> None:
    model, files, progress = None, more.pop("files", []), more.pop("progress", lambda count: None)
    plan = Export(tensors, CONFIG, files, model, [], source)  # type: ignore[arg-type]
    export(plan, path, largest, WriteOptions(**more), progress)


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_tensors_are_distributed_in_order_and_by_size() -> None:
    tensors = lazily(some_tensors())
    assert divide(tensors, 32 * 5) == {"model.safetensors": ["t0", "t1", "t2", "t3", "t4"]}
    assert divide(tensors, 32 * 3 - 1) == {
        "model-00001-of-00003.safetensors": ["t0", "t1"],
        "model-00002-of-00003.safetensors": ["t2", "t3"],
        "model-00003-of-00003.safetensors": ["t4"],
    }
    assert list(divide(tensors, 1)) == [f"model-{i:05}-of-00005.safetensors" for i in range(1, 6)]


@pytest.mark.parametrize("largest", [32 * 2, 1 << 30])
def test_a_folder_can_be_read_back_here_and_by_the_library(tmp_path: Path, largest: int) -> None:
    tensors = some_tensors()
    write(tmp_path / "out", lazily(tensors), largest)
    assert equal(whole(tmp_path / "out"), tensors)
    assert read_config(tmp_path / "out") == CONFIG
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    if largest == 64:
        assert files == ["config.json", *divide(lazily(tensors), 64), "model.safetensors.index.json"]
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": 5 * 32}
        for name, file in index["weight_map"].items():
            assert torch.equal(safetensors.torch.load_file(tmp_path / "out" / file)[name], tensors[name])
    else:
        assert files == ["config.json", "model.safetensors"]
    assert not (tmp_path / "out.partial").exists()


def test_as_in_transformers_a_single_file_is_read_and_an_index_is_not(tmp_path: Path) -> None:
    write(tmp_path / "out", lazily(some_tensors()), 64)
    newer = {name: tensor + 1 for name, tensor in some_tensors().items()}
    safetensors.torch.save_file(newer, tmp_path / "out" / "model.safetensors")
    assert equal(whole(tmp_path / "out"), newer)


def test_companions_are_copied_and_code_is_not(tmp_path: Path) -> None:
    names = ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "merges.txt", "vocab.json"]
    others = ["modeling_it.py", "tokenizer_it.py", "config.json", "model.safetensors", "pytorch_model.bin", "README.md"]
    (tmp_path / "in").mkdir()
    for name in [*names, *others]:
        (tmp_path / "in" / name).write_text(name)
    assert sorted(path.name for path in companions(tmp_path / "in")) == sorted(names)
    write(tmp_path / "out", lazily(some_tensors()), files=companions(tmp_path / "in"))
    for name in names:
        assert (tmp_path / "out" / name).read_text() == name


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="out: expected no such folder yet, or an empty one"):
        write(tmp_path / "out", lazily(some_tensors()))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_folder_is_complete_or_absent_and_a_second_run_resumes(tmp_path: Path) -> None:
    tensors = some_tensors()
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", failing_from(tensors, "t3"), 64)
    assert not (tmp_path / "out").exists()
    first = tmp_path / "out.partial" / "model-00001-of-00003.safetensors"
    identity = first.stat().st_ino
    counts: list[int] = []
    write(tmp_path / "out", lazily(tensors), 64, progress=counts.append)
    assert equal(whole(tmp_path / "out"), tensors)
    assert (tmp_path / "out" / first.name).stat().st_ino == identity
    assert sum(counts) == 5 * 32


@pytest.mark.parametrize("change", ["source", "shape", "size"])
def test_files_of_another_conversion_are_not_reused(tmp_path: Path, change: str) -> None:
    tensors = some_tensors()
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", failing_from(tensors, "t3"), 64, "a")
    others = {name: tensor + 100 for name, tensor in tensors.items()}
    if change == "shape":
        others["t4"] = others["t4"][:4].clone()
    source, size = "b" if change == "source" else "a", 32 if change == "size" else 64
    write(tmp_path / "out", lazily(others), size, source)
    assert equal(whole(tmp_path / "out"), others)


def test_processes_share_the_files(tmp_path: Path) -> None:
    tensors = some_tensors()
    counts: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def work(process: int) -> None:
        write(tmp_path / "out", lazily(tensors), 32, process=process, processes=3, progress=counts[process].append)

    threads = [threading.Thread(target=work, args=(process,)) for process in (2, 1)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join(timeout=60)
    assert equal(whole(tmp_path / "out"), tensors)
    assert {process: sum(count) for process, count in counts.items()} == {0: 64, 1: 64, 2: 32}


def test_a_process_without_work_does_not_wait(tmp_path: Path) -> None:
    write(tmp_path / "out", lazily(some_tensors()), process=1, processes=2)
    assert list(tmp_path.iterdir()) == []


def test_a_stalled_process_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PATIENCE", 0.2)
    with pytest.raises(RuntimeError, match="model-00002-of-00005.safetensors: the process .* made no progress"):
        write(tmp_path / "out", lazily(some_tensors()), 32, processes=2)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_the_expected_files_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a Hugging Face folder with config.json"):
        read_config(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"expected model\.safetensors or model\.safetensors\.index\.json"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../a.safetensors"}}, "expected a file of this folder"),
        ({"weight_map": {"a": "b.safetensors"}}, "expected a file of this folder"),
        ({"weight_map": {"a": "a.safetensors", "b": "a.safetensors"}}, "file and index disagree about tensors"),
        ({"weight_map": {}}, None),
        ({"weight_map": [1]}, "expected a weight_map"),
        ({}, "expected a weight_map"),
        ([], "expected a JSON object"),
    ],
)
def test_an_index_is_not_trusted(tmp_path: Path, index: Any, message: str | None) -> None:
    (tmp_path / "in").mkdir()
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "in" / "a.safetensors")
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    if message is None:
        assert read_weights(tmp_path / "in") == {}
    else:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            read_weights(tmp_path / "in")
