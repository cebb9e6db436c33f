"""The conversion commands: their output, their errors, and work shared by several processes."""

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result

from megatron.fsdp.convert.cli import cli
from tests.checkpoints import (
    DECAYED,
    ITERATION,
    ROOT,
    optimizer_of,
    plain_metadata,
    plain_objects,
    plain_tensors,
    random_tensors,
    same,
    sample,
    with_optimizer,
    write_torch_dist,
)

TO_FSDP, TO_TORCH_DIST = "convert-torch-dist-to-fsdp-dtensor", "convert-fsdp-dtensor-to-torch-dist"


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def test_command_has_all_options_of_the_original() -> None:
    options = {option for parameter in cli.commands["convert"].params for option in parameter.opts}
    assert options >= {
        "--swiglu",
        "--swiglu-modules",
        "--oom-traceback",
        "--enable-msc",
        "--output-optimizer-state-prefix",
        "--output-model-weight-prefix",
        "--param-to-param-group-map-json",
        "--rename-mtp-keys",
        "--json",
    }


def test_report_as_json(tmp_path: Path) -> None:
    source = sample("torch_dist_moe_ep2")
    # The folder with the tracker file will do.
    result = run(TO_FSDP, source, tmp_path / ITERATION, "--swiglu", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["input_format"] == "torch_dist" and report["output_format"] == "fsdp_dtensor"
    assert (report["iteration"], report["parameters"], report["swiglu_parameters"]) == (3, 29, 8)
    assert report["optimizer_state"] == ["exp_avg", "exp_avg_sq"]
    groups = [(g["parameters"], g["weight_decay"], g["is_expert_parallel"]) for g in report["optimizer_groups"]]
    assert sorted(groups) == [(5, 0.0, False), (8, 0.1, False), (16, 0.1, True)]
    assert report["bytes"] == sum(t.nbytes for t in plain_tensors(tmp_path / ITERATION).values())


def test_report_as_text(tmp_path: Path) -> None:
    result = run(TO_FSDP, sample("torch_dist_dp2") / ITERATION, tmp_path / "a")
    assert result.exit_code == 0, result.output
    assert "GiB" in result.stdout and "OPTIMIZER GROUPS (2)\n► parameters " in result.stdout
    assert f"Converted checkpoint saved to {tmp_path / 'a'}." in result.stdout
    back = run(TO_TORCH_DIST, tmp_path / "a", tmp_path / "b")
    assert back.exit_code == 0 and "output format: torch_dist\n" in back.stdout


def test_the_tracker_file_names_only_what_megatron_finds(tmp_path: Path) -> None:
    from megatron.fsdp.convert.run import _update_tracker, tracked_as

    names = ("iter_0000002", "release", "iter_12345678", "iter_5", "iter_00000005", "output")
    assert [tracked_as(tmp_path / name) for name in names] == ["2", "release", "12345678", "", "", ""]
    _update_tracker(tmp_path / "iter_5")
    assert not list(tmp_path.iterdir())


def test_the_other_format_is_the_default(tmp_path: Path) -> None:
    for source, target in ((sample("torch_dist_dp2") / ITERATION, "a"), (tmp_path / "a", "b")):
        report = json.loads(run("convert", source, tmp_path / target, "--json").stdout)
        assert {report["input_format"], report["output_format"]} == {"torch_dist", "fsdp_dtensor"}
    assert set(plain_tensors(tmp_path / "b")) == set(plain_tensors(sample("torch_dist_dp2") / ITERATION))


def test_prefixes_of_keys_can_be_chosen(tmp_path: Path) -> None:
    prefixes = ("--output-optimizer-state-prefix", "optimizer.state.module", "--output-model-weight-prefix", "model")
    assert run(TO_FSDP, sample("torch_dist_dp2") / ITERATION, tmp_path / "a", *prefixes).exit_code == 0
    metadata = plain_metadata(tmp_path / "a")
    keys = set(metadata.state_dict_metadata)
    assert metadata.planner_data["model.output_layer.weight"] == ("model", "output_layer.weight")
    assert "optimizer.state.module.output_layer.weight.exp_avg" in keys
    assert "optimizer.param_to_group_meta.module.output_layer.weight.step" in keys
    assert run(TO_TORCH_DIST, tmp_path / "a", tmp_path / "b").exit_code == 0
    assert set(plain_tensors(tmp_path / "b")) == set(plain_tensors(sample("torch_dist_dp2") / ITERATION))


@pytest.mark.parametrize(
    ("command", "source", "options", "message"),
    [
        (TO_FSDP, "fsdp_dtensor_dp2", (), "expected a checkpoint to convert to fsdp_dtensor; it already"),
        (TO_TORCH_DIST, "torch_dist_dp2", (), "expected a checkpoint to convert to torch_dist; it already"),
        (TO_FSDP, "torch_dist_dp2", ("--swiglu-modules", "language_model"), "--swiglu-modules"),
        (TO_FSDP, "torch_dist_dp2", ("--transformer-impl", "transformer_engine"), "--transformer-impl"),
        (TO_FSDP, "torch_dist_moe_ep2", ("--moe-grouped-gemm",), "--moe-grouped-gemm"),
        (TO_TORCH_DIST, "fsdp_dtensor_dp2", ("--like", "fsdp_dtensor_dp2"), "expected a torch_dist checkpoint"),
        (TO_TORCH_DIST, "fsdp_dtensor_dp2", ("--rename-mtp-keys",), "--rename-mtp-keys: only for conversions to fsdp"),
        (TO_FSDP, "torch_dist_dp2", ("--like", "fsdp_dtensor_dp2"), "--like: only for conversions to torch_dist"),
        (TO_FSDP, "nothing", (), "expected a folder"),
    ],
)
def test_user_errors_are_one_line(
    tmp_path: Path, command: str, source: str, options: tuple[str, ...], message: str
) -> None:
    folder = tmp_path if source == "nothing" else sample(source)
    located = [sample(option) if option == "fsdp_dtensor_dp2" else option for option in options]
    result = run(command, folder, tmp_path / "out", *located)
    assert result.exit_code == 1
    assert message in result.stderr and result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_existing_output_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out" / "notes").mkdir(parents=True)
    result = run(TO_FSDP, sample("torch_dist_dp2") / ITERATION, tmp_path / "out")
    assert result.exit_code == 1 and "expected no such folder" in result.stderr


def test_tracker_file_never_moves_to_an_earlier_iteration(tmp_path: Path) -> None:
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("5")
    assert run(TO_FSDP, sample("torch_dist_dp2") / ITERATION, tmp_path / ITERATION).exit_code == 0
    assert tracker.read_text() == "5"
    tracker.write_text("2")
    assert run(TO_FSDP, sample("torch_dist_dp2") / ITERATION, tmp_path / "other").exit_code == 0
    assert tracker.read_text() == "2"


@pytest.mark.parametrize("text", ["", "{}"])
def test_empty_map_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "param_to_param_group_map.json"
    path.write_text(text)
    (tmp_path / "out").mkdir()
    source = sample("torch_dist_dp2") / ITERATION
    # As in NVIDIA's documentation: options first, and a map after the folders. The output may be there.
    words = ("--swiglu", f"{source}/", f"{tmp_path}/out/", "--param-to-param-group-map-json", path if text else "")
    result = run(TO_FSDP, *words)
    assert result.exit_code == 0, result.output
    assert any(".param_to_group_meta." in key for key in plain_objects(tmp_path / "out"))
    missing = run(TO_FSDP, source, tmp_path / "other", "--param-to-param-group-map-json", tmp_path / "none.json")
    assert missing.exit_code == 1 and "none.json" in missing.stderr
    again = run(TO_FSDP, *words)
    assert again.exit_code == 1 and "out: expected no such folder yet, or an empty one" in again.stderr


LAUNCHERS = {"torchrun": ("RANK", "WORLD_SIZE"), "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")}


def start(source: Path, target: Path, rank: int, processes: int, launcher: str) -> subprocess.Popen[str]:
    variables = dict(zip(LAUNCHERS[launcher], (str(rank), str(processes)), strict=True))
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megatron.fsdp.convert", TO_FSDP, str(source), str(target), "--json"]
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_share_the_work(tmp_path: Path, launcher: str) -> None:
    source = sample("torch_dist_moe_ep2") / ITERATION
    started = [start(source, tmp_path / ITERATION, rank, 2, launcher) for rank in range(2)]
    outputs = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert json.loads(outputs[0])["output_format"] == "fsdp_dtensor" and not outputs[1]
    assert run(TO_FSDP, source, tmp_path / "alone").exit_code == 0
    shared, alone = plain_tensors(tmp_path / ITERATION), plain_tensors(tmp_path / "alone")
    assert set(shared) == set(alone) and all(same(shared[key], alone[key]) for key in alone)
    assert same(plain_objects(tmp_path / ITERATION), plain_objects(tmp_path / "alone"))
    sizes = {name: (tmp_path / ITERATION / f"__{name}_0.distcp").stat().st_size for name in (0, 1)}
    assert max(sizes.values()) < 1.5 * min(sizes.values())


def test_memory_errors_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> Callable[..., None]:
        raise MemoryError("no more")

    monkeypatch.setattr("megatron.fsdp.convert.convert_commands.read_state", fail)
    source = sample("torch_dist_dp2") / ITERATION
    result = run(TO_FSDP, source, tmp_path / "out")
    assert result.exit_code == 1 and "memory is exhausted" in result.stderr and "Traceback" not in result.stderr
    shown = run(TO_FSDP, source, tmp_path / "out", "--oom-traceback")
    assert shown.exit_code == 1 and "Traceback" in shown.stderr


def damaged(path: Path, tensor: torch.Tensor) -> Path:
    """A checkpoint without checksums of files, with a bit flipped in the middle of a tensor."""
    pattern = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    (file,) = (file for file in path.glob("*.distcp") if pattern in file.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(pattern) + len(pattern) // 2] ^= 1
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("kind", ["", "optimizer.state.exp_avg."])
def test_damaged_data_gets_no_fresh_checksums(tmp_path: Path, kind: str) -> None:
    names = [f"decoder.layers.{i}.mlp.linear_fc{k}.weight" for i in range(2) for k in (1, 2)]
    tensors = with_optimizer(random_tensors({name: (8, 4) if "fc1" in name else (4, 4) for name in names}))
    args = argparse.Namespace(transformer_impl="local", bf16=True, swiglu=True)
    common = {"args": args, "optimizer": optimizer_of(DECAYED)}
    source = write_torch_dist(tmp_path / "source", tensors, common)
    assert run(TO_FSDP, source, tmp_path / "good").exit_code == 0
    name = damaged(source, tensors[f"{kind}{names[2]}"]).name
    for command, *options in ((TO_FSDP,), ("modify-state-dict", "--op", "remove layers.0")):
        result = run(command, source, tmp_path / "bad", *options)
        assert result.exit_code == 1 and name in result.stderr and "CRC-32" in result.stderr, result.output
        assert names[2] in result.stderr and not (tmp_path / "bad").exists()
    asked = run(TO_FSDP, source, tmp_path / "asked", "--no-verify", "--no-optimizer")
    assert asked.exit_code == 0 and "no optimizer state, and weights in bfloat16: add" in asked.output


def test_converting_back_verifies_checksums(tmp_path: Path) -> None:
    weights = random_tensors({"decoder.final_layernorm.weight": (500,)})
    state: dict[str, Any] = {"model": {f"module.{name}": tensor for name, tensor in weights.items()}}
    state |= {"args": argparse.Namespace(), "iteration": 3, "checkpoint_version": 3.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, checkpoint_id=tmp_path / "source", no_dist=True)
    assert run(TO_TORCH_DIST, tmp_path / "source", tmp_path / "good").exit_code == 0
    damaged(tmp_path / "source", weights["decoder.final_layernorm.weight"])
    result = run(TO_TORCH_DIST, tmp_path / "source", tmp_path / "bad")
    assert result.exit_code == 1 and "CRC-32" in result.stderr and not (tmp_path / "bad").exists()
