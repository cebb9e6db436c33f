"""The commands of checkpoint_inspector.py that inspect and modify checkpoints, with text and JSON output."""

import argparse
import json
import math
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.fsdp.checkpoint.checksums import NAME
from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.checkpoint.safe_pickle import UnsafePickle
from megatron.fsdp.convert import comparing
from megatron.fsdp.convert.cli import ALIASES
from megatron.fsdp.convert.modifying import parse_operation, rename
from tests.checkpoints import FSDP_DTENSOR, ROOT, TORCH_DIST, meta, sample
from tests.needs import project_is_installed
from tests.small_checkpoints import DTYPES, NAMES, Injected, numbers, same_bits, sample_checkpoint, write_checkpoint
from tools.checkpoint.checkpoint_inspector import cli

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

LEGACY = "torch_dist_tp2dp2_legacy_fsms_mcore013"
TENSORS = {"w": numbers((40, 3)), "b": numbers((5,), torch.bfloat16), "n": torch.arange(4)}
OBJECTS = {"o": {"betas": (0.9, 0.95)}, "args": argparse.Namespace(lr=0.1)}


def call(*arguments: object, status: int = 0) -> Result:
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def text(*arguments: object, status: int = 0) -> str:
    return call(*arguments, status=status).stdout


def as_json(*arguments: object, status: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text(*arguments, "--json", status=status), parse_constant=pytest.fail)
    return found


def error_of(*arguments: object) -> str:
    """Run a command that must fail; return its error message, which must be a single line."""
    result = call(*arguments, status=1)
    assert result.stdout == "" and result.stderr.count("\n") == 1 and result.stderr.startswith("Error: ")
    return result.stderr


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "small", TENSORS, OBJECTS, block=100)


def test_the_group() -> None:
    assert "1.0" in text("--version")
    assert set(cli.commands) == {
        *("inspect", "print-tensor", "modify-state-dict", "print-torch-dcp-in-json", "verify", "diff"),
        *("convert", "export-safetensors", "import-safetensors"),
    }
    listed = text("--help")
    for name in cli.commands:
        assert f"  {name}" in listed and "--json" in text(name, "--help")
    for name, words in ALIASES.items():
        assert name not in listed and text(name, "--help") == text(words[0], "--help")
    assert "No such command 'compare'" in call("compare", status=2).stderr


@pytest.mark.skipif(not project_is_installed(), reason="this project is only on PYTHONPATH")
def test_it_runs_as_a_script_from_anywhere(tmp_path: Path, small: Path) -> None:
    script = ROOT / "tools" / "checkpoint" / "checkpoint_inspector.py"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(script), "inspect", "small", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["total_tensors"] == 3


@pytest.mark.parametrize("name", NAMES)
def test_inspect_samples(name: str) -> None:
    folder = sample_checkpoint(name)
    found, printed = as_json("inspect", folder), text("inspect", folder)
    reader = CheckpointReader(folder)
    assert set(found["tensors"]) == set(reader.tensors)
    known = meta(name).get("file_tensors", {})
    for key, fact in known.items():
        assert found["tensors"][key]["dtype"] == fact["dtype"] and found["tensors"][key]["shape"] == fact["shape"]
        assert f"► {key} [{fact['dtype']}, shape={tuple(fact['shape'])}" in printed
    assert found["format"] == ("torch_dist" if name in TORCH_DIST else "fsdp_dtensor")
    assert found["common_state"]["iteration"] == 3 and found["common_state"]["args"]["hidden_size"] == 64
    assert f"COMMON STATE ({len(found['common_state'])})" in printed and "► iteration: 3" in printed
    ignored = sum("param_to_group_meta" in key for key in reader.objects)
    assert found["ignored_param_to_group_meta"] == ignored and (ignored > 0) == (name not in TORCH_DIST)
    assert len(found["objects"]) == len(reader.objects) - ignored
    assert f"ignored param to group meta: {ignored}\n" in printed
    assert found["total_elements"] == sum(math.prod(t.shape) for t in reader.tensors.values())
    assert f"total tensors: {len(reader.tensors)}\ntotal elements: {found['total_elements']:,}\n" in printed
    assert ("mcore data: none" in printed) == (name != LEGACY) == (found["mcore_data"] is None)
    everything = as_json("inspect", folder, "--not-ignore-param-to-group-meta")
    assert len(everything["objects"]) == len(reader.objects) and everything["ignored_param_to_group_meta"] == 0


def test_a_parent_folder_stands_for_its_latest_checkpoint() -> None:
    folder = sample("fsdp_dtensor_dp2")
    assert as_json("inspect", folder) == as_json("inspect", folder / "iter_0000003")


def test_inspect_reads_no_tensors(small: Path) -> None:
    (small / "__0_0.distcp").unlink()
    printed = text("inspect", small)
    assert "► w [torch.float32, shape=(40, 3), < 0.001 GiB, chunks=5]" in printed
    assert "OBJECTS (2)\n► args\n► o\n" in printed and "► args: 1 settings" in printed


def test_sizes_are_in_gib(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", {"a": numbers((1 << 21,))})
    assert "► a [torch.float32, shape=(2097152,), 0.008 GiB]" in text("inspect", folder)
    assert as_json("inspect", folder)["tensors"]["a"]["bytes"] == 1 << 23


def test_print_tensor(small: Path) -> None:
    found = as_json("print-tensor", small, "w")
    values = TENSORS["w"].double()
    assert found["values"] == TENSORS["w"].tolist() and found["shape"] == [40, 3] and found["dtype"] == "torch.float32"
    assert found["minimum"] == values.min() and found["maximum"] == values.max()
    assert found["mean"] == pytest.approx(values.mean()) and found["norm"] == pytest.approx(values.norm())
    assert [c["offsets"] for c in found["chunks"]] == [[0, 0], [8, 0], [16, 0], [24, 0], [32, 0]]
    printed = text("print-tensor", small, "w")
    assert "key: w\ndtype: torch.float32\nshape: (40, 3)\n" in printed
    assert "\n ".join(f"[{', '.join(f'{v:.4e}' for v in row)}]," for row in TENSORS["w"].tolist()[:2]) in printed
    assert as_json("print-tensor", small, "n")["values"] == [0, 1, 2, 3]
    assert "[0, 1, 2, 3]" in text("print-tensor", small, "n")


def test_print_tensor_shows_the_ends_of_a_large_one(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(20_000).reshape(20, 5, 200), "scalar": torch.tensor(2.5), "none": torch.empty(0, 2)}
    folder = write_checkpoint(tmp_path / "c", tensors, block=4000)
    printed = text("print-tensor", folder, "a")
    assert "[[[0, 1, 2, ..., 197, 198, 199],\n  [200, 201, 202, ..., 397, 398, 399]," in printed
    assert printed.count("\n ...,") == 1 and "[19800, 19801, 19802, ..., 19997, 19998, 19999]]]" in printed
    assert as_json("print-tensor", folder, "a")["values"] is None
    assert "2.5000e+00" in text("print-tensor", folder, "scalar")
    assert as_json("print-tensor", folder, "none") == {
        **{"key": "none", "dtype": "torch.float32", "shape": [0, 2], "values": []},
        **{"chunks": []},
        **dict.fromkeys(("minimum", "maximum", "mean", "norm"), "nan"),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_print_tensor_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    values = numbers((6,), dtype)
    folder = write_checkpoint(tmp_path / "c", {"a": values, "large": numbers((1001,), dtype)})
    found = as_json("print-tensor", folder, "a")
    wide = values.abs() if dtype.is_complex else values.double()
    assert found["dtype"] == str(dtype) and found["maximum"] == wide.max().item()
    if not dtype.is_complex:
        assert found["values"] == values.double().tolist()
    assert f"dtype: {dtype}" in text("print-tensor", folder, "a") and "..." in text("print-tensor", folder, "large")


def test_pairs_of_4_bit_floats_are_bytes(tmp_path: Path) -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no float4_e2m1fn_x2")
    pairs = torch.arange(1200).to(torch.uint8)
    other = torch.cat([pairs[:-1], pairs[:1]])
    first, second = (
        write_checkpoint(tmp_path / name, {"a": whole.view(torch.float4_e2m1fn_x2), "b": whole[:3].contiguous()})
        for name, whole in (("c", pairs), ("d", other))
    )
    found = as_json("print-tensor", first, "a")
    assert found["maximum"] == 255 and found["dtype"] == "torch.float4_e2m1fn_x2"
    assert "0, 1, 2, ..., 173, 174, 175" in text("print-tensor", first, "a")
    (different,) = as_json("diff", first, second)["tensors"]
    assert different["key"] == "a" and different["different_elements"] == 1


def test_statistics_of_nan_are_nan(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", {"a": torch.tensor([1.0, math.nan, 2.0])})
    found = as_json("print-tensor", folder, "a")
    assert {found[name] for name in ("minimum", "maximum", "mean", "norm")} == {"nan"}
    assert found["values"] == [1.0, "nan", 2.0]


def test_print_tensor_of_an_object_and_of_an_unknown_key(small: Path) -> None:
    assert as_json("print-tensor", small, "o") == {"key": "o", "object": {"betas": [0.9, 0.95]}}
    assert "object: {'betas': (0.9, 0.95)}" in text("print-tensor", small, "o")
    write_checkpoint(small.with_name("named"), {"decoder.weight": numbers((2,))})
    assert "expected one of its keys; got 'decoder.weigth'. Did you mean 'decoder.weight'?" in error_of(
        "print-tensor", small.with_name("named"), "decoder.weigth"
    )


@pytest.mark.parametrize("name", ["torch_dist_dp2", "torch_dist_moe_ep2", "torch_dist_dp2_main"])
def test_group_maps_of_the_samples(name: str, tmp_path: Path) -> None:
    original = sample(name) / "param_to_param_group_map"
    folder = tmp_path / "map"
    shutil.copytree(original, folder, ignore=shutil.ignore_patterns("*.json"))
    found = as_json("print-torch-dcp-in-json", folder)
    written = folder / "param_to_param_group_map.json"
    assert json.loads(written.read_text()) == found
    assert found["model.module.embedding.word_embeddings.weight"] == 0
    assert found["model.module.decoder.layers.0.input_layernorm.weight"] == 1
    if (original / written.name).is_file():
        assert json.loads((original / written.name).read_text()) == found
    printed = text("print-torch-dcp-in-json", folder)
    assert printed.startswith(f"torch dcp content: {found}") and str(written) in printed


def test_a_group_map_of_a_model_in_float32(tmp_path: Path) -> None:
    dcp.save({"module.decoder.a.weight": 0, "module.decoder.b.weight": 1}, checkpoint_id=tmp_path)
    found = as_json("print-torch-dcp-in-json", tmp_path)
    assert found == {"model.module.decoder.a.weight": 0, "model.module.decoder.b.weight": 1}


@pytest.mark.parametrize("name", NAMES)
def test_modify_samples(name: str, tmp_path: Path) -> None:
    folder, target = sample_checkpoint(name), tmp_path / "new" / "iter_0000003"
    operations = ["remove exp_avg_sq", r"rename (decoder\.layers.*)weight (\1)", "rename mlp MLP", r"rename '[()]' _"]
    options = [word for operation in operations for word in ("--op", operation)]
    report = as_json("modify-state-dict", folder, target, *options)
    before, after = CheckpointReader(folder), CheckpointReader(target)
    after.check()
    keys = {**report["renamed"], **{k: k for k in [*before.tensors, *before.objects] if k not in report["renamed"]}}
    kept = {old: new for old, new in keys.items() if old not in report["removed"]}
    assert kept and all("exp_avg_sq" in key for key in report["removed"])
    assert bool(report["removed"]) == any("exp_avg_sq" in key for key in before.tensors)
    assert {kept[key] for key in before.tensors if key in kept} == set(after.tensors)
    assert {kept[key] for key in before.objects if key in kept} == set(after.objects)
    for old, new in kept.items():
        if old in before.tensors:
            assert same_bits(before.tensors[old].full_tensor(), after.tensors[new].full_tensor())
        else:
            assert before.object_bytes(old) == after.object_bytes(new)
    assert after.format == before.format and report["bytes"] == sum(t.nbytes for t in after.tensors.values())
    for extra in ("metadata.json", "common.pt"):
        assert (target / extra).is_file() == (folder / extra).is_file()
        if (folder / extra).is_file():
            assert (target / extra).read_bytes() == (folder / extra).read_bytes()
    if name not in TORCH_DIST:
        assert {".".join(map(str, path)) for path in after.metadata.planner_data.values()} == set(kept.values())
    if name == LEGACY:
        wanted = {kept[key]: value for key, value in before.metadata.mcore_data.items() if key in kept}
        assert after.metadata.mcore_data == wanted != {}
    assert sorted(p.name for p in target.parent.iterdir()) == ["iter_0000003"]


def test_modify_keeps_the_nesting_of_keys(tmp_path: Path) -> None:
    tensors = {"model": {"module.a.weight": numbers((2,))}, "optimizer": {"state": {"a.b": {"exp_avg": numbers((3,))}}}}
    dcp.save(tensors, checkpoint_id=tmp_path / "c")
    text("modify-state-dict", tmp_path / "c", tmp_path / "d", "--op", r"rename a\.(\w+) new.name.\1")
    assert CheckpointReader(tmp_path / "d").metadata.planner_data == {
        "model.module.new.name.weight": ("model", "module.new.name.weight"),
        "optimizer.state.new.name.b.exp_avg": ("optimizer", "state", "new.name.b", "exp_avg"),
    }


class NotAllowed:
    """A class that is not on the allow-list."""


def test_modify_does_not_unpickle(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "o": NotAllowed()}, checkpoint_id=tmp_path / "c")
    reader = CheckpointReader(tmp_path / "c")
    with pytest.raises(UnsafePickle):
        reader.read_object("o")
    text("modify-state-dict", tmp_path / "c", tmp_path / "d", "--op", "rename ^w$ v")
    assert CheckpointReader(tmp_path / "d").object_bytes("o") == reader.object_bytes("o")


def test_modify_rejects_invalid_operations(tmp_path: Path, small: Path) -> None:
    target = tmp_path / "d"
    for operation, message in {
        "remove": "expected 'remove REGEX' or 'rename REGEX REPLACEMENT'",
        "remove a b": "expected 'remove REGEX' or",
        "rename a": "expected 'remove REGEX' or",
        "drop a": "expected 'remove REGEX' or",
        "": "expected 'remove REGEX' or",
        "remove (": "expected 'remove REGEX' or",
        r"rename a \2": "expected 'remove REGEX' or",
        "remove .": "leave some of 5 keys; they remove all",
        "rename [wb] x": "x: expected one key of this name; got w and b",
    }.items():
        assert message in error_of("modify-state-dict", small, target, "--op", operation)
    assert "expected no such folder yet" in error_of("modify-state-dict", small, small, "--op", "remove w")
    assert not target.exists() and not (tmp_path / "d.partial").exists()
    assert "Missing option '--op'" in call("modify-state-dict", small, target, status=2).stderr


def test_modify_is_shared_by_processes(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")

    def modify(rank: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        printed = text("modify-state-dict", small, tmp_path / "d", "--op", "rename ^w$ v")
        assert bool(printed) == (rank == 0)

    others = [multiprocessing.get_context("fork").Process(target=modify, args=(rank,)) for rank in (2, 1)]
    for other in others:
        other.start()
    modify(0)
    for other in others:
        other.join(60)
    assert [other.exitcode for other in others] == [0, 0]
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    text("modify-state-dict", tmp_path / "d", tmp_path / "e", "--op", "rename ^v$ w")
    assert as_json("diff", small, tmp_path / "e")["same"]


def test_operations() -> None:
    remove, renaming = parse_operation(r"remove \.exp_avg$"), parse_operation(r"rename '^a (\d+)' 'b \1'")
    assert [remove.apply(k) for k in ("a.exp_avg", "a.exp_avg_sq")] == [None, "a.exp_avg_sq"]
    assert [renaming.apply(k) for k in ("a 12", "a")] == ["b 12", "a"]
    assert parse_operation("remove (?i)WEIGHT|bias").apply("x.weight") is None
    kept = rename(["a", "b", "c"], [parse_operation("rename a b1"), parse_operation("remove ^b1?$")])
    assert kept == ({"c": "c"}, ["a", "b"])


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A checkpoint with every kind of difference to ``small``."""
    tensors = {
        "w": TENSORS["w"].clone(),
        "b": TENSORS["b"].float(),
        "n": torch.arange(5),
        "o": torch.zeros(2),
        "new": torch.ones(1),
    }
    tensors["w"][30, 2] += 2
    tensors["w"][3, 1] *= 1 + 1e-6
    return write_checkpoint(tmp_path / "other", tensors, {"args": argparse.Namespace(lr=0.2), "more": 1})


def test_compare_two_checkpoint(small: Path, other: Path) -> None:
    found = as_json("compare-two-checkpoint", small, other)
    assert found["only_in_1"] == [] and found["only_in_2"] == ["more", "new"]
    assert found["tensor_in_one_only"] == ["o"] and found["different_objects"] == ["args"]
    assert [d["key"] for d in found["different_tensors"]] == ["b", "n", "w"]
    printed = text("compare-two-checkpoint", small, other)
    assert "ONLY IN 2 (2)\n► more\n► new" in printed
    assert "► b: (5,), torch.bfloat16 | torch.float32: 0 of 5 elements differ" in printed
    assert "► n: (4,) | (5,), torch.int64\n" in printed and "2 of 120 elements differ, by 2 at most" in printed
    found = as_json("compare-two-checkpoint", other, small)
    assert found["only_in_1"] == ["more", "new"] and found["only_in_2"] == []


def test_close_tensors_are_not_among_the_different_ones(tmp_path: Path, small: Path) -> None:
    close = write_checkpoint(tmp_path / "close", {**TENSORS, "w": TENSORS["w"] * (1 + 1e-6)}, OBJECTS)
    assert as_json("compare-two-checkpoint", small, close)["different_tensors"] == []
    (found,) = as_json("diff", small, close)["tensors"]
    assert found["key"] == "w" and 0 < found["max_relative"] < 2e-6 and found["close"]


def test_diff(small: Path, other: Path) -> None:
    found = as_json("diff", small, other)
    assert not found["same"] and found["same_tensors"] == 0
    facts = {d["key"]: d for d in found["tensors"]}
    w, changed = TENSORS["w"].double(), CheckpointReader(other).tensors["w"].full_tensor().double()
    gaps = (w - changed).abs()
    assert facts["w"]["different_elements"] == 2 and facts["w"]["max_absolute"] == gaps.max()
    scale = torch.maximum(w.abs(), changed.abs())
    assert facts["w"]["max_relative"] == (gaps / scale).nan_to_num(0).max()
    assert facts["b"] == {
        **{"key": "b", "shapes": [[5], [5]], "dtypes": ["torch.bfloat16", "torch.float32"], "close": True},
        **{"different_elements": 0, "max_absolute": 0.0, "max_relative": 0.0},
    }
    assert facts["n"]["shapes"] == [[4], [5]] and facts["n"]["different_elements"] is None
    printed = text("diff", small, other)
    assert printed == text("compare-two-checkpoint", small, other) and "0 of 3 tensors are the same." in printed


def test_differences_are_summed_over_blocks(small: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = as_json("diff", small, other)
    monkeypatch.setattr(comparing, "BLOCK", 24)
    assert as_json("diff", small, other) == at_once
    (w,) = (d for d in at_once["tensors"] if d["key"] == "w")
    assert not w["close"] and w["different_elements"] == 2


def test_diff_of_equal_checkpoints_in_other_chunks(small: Path, tmp_path: Path) -> None:
    again = write_checkpoint(tmp_path / "again", TENSORS, OBJECTS, block=33)
    for arguments in ((small, again), (small, again, "--exit-code")):
        found = as_json("diff", *arguments)
        assert found["same"] and found["tensors"] == [] and found["same_tensors"] == 3
    assert len(as_json("diff", small, again, "--all")["tensors"]) == 3
    assert "3 of 3 tensors are the same." in text("diff", small, again, "--exit-code")


def test_exit_status_of_comparisons(small: Path, other: Path) -> None:
    text("compare-two-checkpoint", small, other)
    text("diff", small, other)
    assert "w" in text("diff", small, other, "--exit-code", status=1)
    assert not as_json("diff", small, other, "--exit-code", status=1)["same"]


def test_diff_of_special_values(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    pairs = {
        "nan": ([nan, inf, -inf, 0.0], [nan, inf, -inf, -0.0]),
        "one nan": ([nan, 1.0], [2.0, 1.0]),
        "infinite": ([inf, 1.0], [-inf, 1.0]),
        "to zero": ([1.0, 3.0], [0.0, 3.0]),
        "large integers": ([1 << 62, 3], [(1 << 62) + 1, 3]),
    }
    for side in (0, 1):
        write_checkpoint(tmp_path / f"{side}", {key: torch.tensor(pair[side]) for key, pair in pairs.items()})
    found = {d["key"]: d for d in as_json("diff", tmp_path / "0", tmp_path / "1", "--all")["tensors"]}
    numbers_of = {key: (d["different_elements"], d["max_absolute"], d["max_relative"]) for key, d in found.items()}
    assert numbers_of == {
        "nan": (0, 0.0, 0.0),
        "one nan": (1, "inf", "inf"),
        "infinite": (1, "inf", "inf"),
        "to zero": (1, 1.0, 1.0),
        "large integers": (1, 1.0, 1 / 2**62),
    }
    assert [key for key, d in found.items() if d["close"]] == ["large integers", "nan"]


def test_diff_of_samples() -> None:
    folder = sample_checkpoint("torch_dist_dp2_main")
    assert as_json("diff", folder, folder, "--exit-code")["same"]
    found = as_json("diff", folder, sample_checkpoint(LEGACY))
    assert len(found["tensors"]) > 10 and found["only_in_1"] and found["only_in_2"]


@pytest.mark.parametrize("name", NAMES)
def test_verify_samples(name: str) -> None:
    folder = sample_checkpoint(name)
    found, reader = as_json("verify", folder), CheckpointReader(folder)
    assert found["complete"] and found["problems"] == [] and found["checked_by"] == "chunk headers"
    assert set(found["files"]) == {".metadata", *reader.files(), *(["common.pt"] * (folder / "common.pt").is_file())}
    counts = f"{len(reader.tensors)} tensors, {len(reader.objects)} objects"
    assert f"{counts}, checked by chunk headers: complete." in text("verify", folder)


def test_verify_a_checkpoint_with_checksums(small: Path) -> None:
    found = as_json("verify", small)
    assert found["complete"] and found["checked_by"] == NAME and found["unused"] == []
    (small / "__9_0.distcp").write_bytes(b"x")
    found = as_json("verify", small)
    assert found["complete"] and found["unused"] == ["__9_0.distcp"]
    assert "FILES OF NO TENSOR OR OBJECT (1)\n► __9_0.distcp\n" in text("verify", small)


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__0_1.distcp"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_verify_detects_damage(small: Path, checksums: bool, name: str, harm: str) -> None:
    if not checksums:
        (small / NAME).unlink()
    path, place = small / name, CheckpointReader(small).stored("w", CheckpointReader(small).chunks("w")[1]).start
    data = bytearray(path.read_bytes())
    # Damage a byte of a tensor, of a class name, or of text in an object.
    text_at = {".metadata": b"TensorStorageMetadata", "__0_1.distcp": b"betas"}
    data[data.index(text_at[name]) if name in text_at else place] ^= 0x55
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(data if harm == "flip" else data[:-1])
    if (name, harm) == (".metadata", "remove"):
        assert "got neither" in error_of("verify", small)
        return
    found = as_json("verify", small, status=1)
    assert not found["complete"] and any(name in problem for problem in found["problems"])
    assert "problems." in text("verify", small, status=1)
    assert [file for file, entry in found["files"].items() if entry["problem"]] == [name]


def test_verify_reports_every_problem(small: Path) -> None:
    metadata = CheckpointReader(small).metadata
    metadata.storage_data[MetadataIndex("n", (0,))].relative_path = "lost.distcp"
    metadata.state_dict_metadata["w"].chunks.pop()
    (small / ".metadata").write_bytes(pickle.dumps(metadata))
    (small / NAME).unlink()
    found = as_json("verify", small, status=1)["problems"]
    assert any("lost.distcp: expected a file; got none" in p for p in found)
    assert any("expected the chunks of w to tile it" in p for p in found)


def test_verify_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"a": torch.zeros(2), "o": 1}, checkpoint_id=tmp_path / "c")
    state = {"a": torch.zeros(2), "o": Injected(os.system, "touch injected")}
    dcp.save(state, checkpoint_id=tmp_path / "d")
    torch.save({"args": Injected(os.system, "touch injected")}, tmp_path / "c" / "common.pt")
    for name, file in (("c", "common.pt"), ("d", "__0_0.distcp")):
        (problem,) = as_json("verify", name, status=1)["problems"]
        assert "posix.system, which is not allowed" in problem and file in problem
    for command in (["inspect", "d"], ["print-tensor", "d", "o"]):
        assert "posix.system, which is not allowed" in error_of(*command)
    assert not (tmp_path / "injected").exists()


def test_verify_detects_missing_keys(tmp_path: Path) -> None:
    for name, pattern, message in (
        (FSDP_DTENSOR[0], r"^args$", "expected args; got none"),
        (FSDP_DTENSOR[0], r"^iteration$", "expected iteration; got none"),
        (FSDP_DTENSOR[0], r"^model\.module\.output_layer.weight$", "expected the weight of an optimizer state"),
        (FSDP_DTENSOR[0], r"layers.0.*qkv.weight.exp_avg_sq$", "qkv.weight: expected exp_avg_sq in the optimizer"),
        (FSDP_DTENSOR[0], r"param_to_group_meta.*output_layer", "output_layer.weight: expected the settings"),
        (TORCH_DIST[1], r"common_state", "expected common.pt or common_state"),
        (TORCH_DIST[0], r"state.exp_avg.output_layer.weight", "expected it with the other states of output_layer"),
    ):
        target = tmp_path / str(len(list(tmp_path.iterdir())))
        text("modify-state-dict", sample_checkpoint(name), target, "--op", f"remove '{pattern}'")
        found = as_json("verify", target, status=1)["problems"]
        assert len(found) == 1 and message in found[0]


def test_verify_accepts_other_optimizers_and_checkpoints_without_megatron(tmp_path: Path) -> None:
    source = sample_checkpoint(FSDP_DTENSOR[0])
    operations = ["remove exp_avg_sq", "rename exp_avg momentum_buffer"]
    text("modify-state-dict", source, tmp_path / "sgd", *(w for o in operations for w in ("--op", o)))
    assert as_json("verify", tmp_path / "sgd")["complete"]
    model = {"weight": numbers((2, 3))}
    dcp.save(
        {"model": model, "optimizer": {"state": {"weight": {"exp_avg": numbers((4,))}}}}, checkpoint_id=tmp_path / "p"
    )
    assert as_json("verify", tmp_path / "p")["complete"]


def test_errors_are_one_line(tmp_path: Path, small: Path) -> None:
    missing = tmp_path / "missing"
    for arguments in (
        ("inspect", missing),
        ("print-tensor", missing, "a"),
        ("print-torch-dcp-in-json", missing),
        ("modify-state-dict", missing, tmp_path / "d", "--op", "remove a"),
        ("compare-two-checkpoint", small, missing),
        ("diff", missing, small),
        ("verify", missing),
    ):
        assert f"{missing}: expected a folder with .metadata" in error_of(*arguments)
        assert f"{missing}: expected a folder with .metadata" in error_of(*arguments, "--json")
    (small / ".metadata").write_bytes(b"x")
    assert ".metadata: expected the CRC-32" in error_of("diff", small, small)
    assert ".metadata: expected a pickle of a checkpoint" in error_of("inspect", small)


def test_the_multi_storage_client_must_be_installed(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "multistorageclient", None)
    commands = [["inspect", small], ["verify", small], ["diff", small, small], ["compare-two-checkpoint", small, small]]
    commands.append(["modify-state-dict", small, small.with_name("d"), "--op", "remove w"])
    for arguments in commands:
        error = error_of(*arguments, "--enable-msc")
        assert "--enable-msc: expected the package multistorageclient to be installed" in error
    monkeypatch.setitem(sys.modules, "multistorageclient", pytest)
    assert as_json("inspect", small, "--enable-msc") == as_json("inspect", small)
    assert "expected a folder in a file system" in error_of("import-safetensors", small, "s3://b/run")
    assert "expected one of s3://, gs://, msc://" in error_of("inspect", "hdfs://host/run")


def test_only_the_first_process_prints(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for arguments in (("inspect", small), ("verify", small), ("diff", small, small), ("print-tensor", small, "w")):
        assert text(*arguments) == ""
