"""The commands export-safetensors and import-safetensors, with both checkpoint formats."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result

from megatron.fsdp.checkpoint.lazy import LazyTensor, Region
from megatron.fsdp.convert.cli import cli
from megatron.fsdp.convert.huggingface import transfer
from megatron.fsdp.convert.huggingface.folder import export
from megatron.fsdp.convert.huggingface_commands import Size
from megatron.fsdp.convert.options import WriteOptions
from megatron.fsdp.convert.run import read_state, write_state
from tests.checkpoints import ITERATION, sample
from tests.huggingface_models import CASES, save

ROOT = Path(__file__).resolve().parents[3]
FORMATS = ("fsdp_dtensor", "torch_dist")
SPECS = ("transformer_engine", "local")


def call(name: str, *words: Any) -> Result:
    return CliRunner().invoke(cli, [name, *map(str, words)])


def succeeded(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in safetensors.torch.load_file(path).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_import_and_export_are_inverse(case: str, tmp_path: Path) -> None:
    save(case, tmp_path / "in")
    expected = files_of(tmp_path / "in")
    for number, (format_, spec) in enumerate((f, s) for f in FORMATS for s in SPECS):
        middle, out = tmp_path / f"middle{number}", tmp_path / f"out{number}"
        options = ("--format", format_, "--layer-spec", spec, "--make-vocab-size-divisible-by", 16)
        succeeded(call("import-safetensors", tmp_path / "in", middle, *options))
        state = read_state(middle)
        assert state.weights["embedding.word_embeddings.weight"].shape == (32, 24)
        assert state.args.transformer_impl == spec
        succeeded(call("export-safetensors", middle, out, "--dtype", "float32"))
        assert_same(files_of(out), expected)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_converted_checkpoint_records_its_layer_spec(format_: str, spec: str, tmp_path: Path) -> None:
    save("llama", tmp_path / "in")
    succeeded(call("import-safetensors", tmp_path / "in", tmp_path / "a", "--format", format_, "--layer-spec", spec))
    other = next(name for name in FORMATS if name != format_)
    write_state(read_state(tmp_path / "a"), tmp_path / "b" / "release", other)
    for folder in ("a", "b"):
        for asked in SPECS:
            out = tmp_path / f"{folder}{asked}"
            result = call("export-safetensors", tmp_path / folder, out, "--transformer-impl", asked)
            assert (result.exit_code == 0) == (asked == spec), result.output
            assert asked == spec or "the checkpoint has layers of the other" in result.output
    assert read_state(tmp_path / "a").weights.keys() == read_state(tmp_path / "b").weights.keys()


def test_bfloat16_is_bit_identical_after_float32_main_weights(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path / "in")
    # As published: everything in bfloat16 except the router's bias.
    expected = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(torch.bfloat16)
        for name, tensor in files_of(tmp_path / "in").items()
    }
    safetensors.torch.save_file(expected, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    for format_ in FORMATS:
        succeeded(call("import-safetensors", tmp_path / "in", tmp_path / format_, "--format", format_))
        weights = read_state(tmp_path / format_).weights
        # fsdp_dtensor stores the main weights, torch_dist the model's own weights.
        wanted = torch.float32 if format_ == "fsdp_dtensor" else torch.bfloat16
        assert {tensor.dtype for tensor in weights.values()} == {wanted}
        succeeded(call("export-safetensors", tmp_path / format_, tmp_path / f"{format_}-out"))
        assert_same(files_of(tmp_path / f"{format_}-out"), expected)


def test_transformers_loads_an_exported_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for case in ("llama-one-group-scaled", "qwen3-tied-yarn", "qwen3_moe-some-dense", "deepseek_v3-yarn"):
        model = save(case, tmp_path / case)
        succeeded(call("import-safetensors", tmp_path / case, tmp_path / f"{case}-mid"))
        out = tmp_path / f"{case}-out"
        succeeded(call("export-safetensors", tmp_path / f"{case}-mid", out, "--dtype", "float32"))
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        tokens = torch.arange(12).unsqueeze(0)
        loaded.set_attn_implementation("eager")
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, loaded.eval()(tokens).logits)


def test_configuration_and_tokenizer_come_from_the_original_folder(tmp_path: Path) -> None:
    save("llama", tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    config |= {"max_position_embeddings": 1000, "something": "kept"}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    succeeded(call("import-safetensors", tmp_path / "in", tmp_path / "mid"))
    succeeded(call("export-safetensors", tmp_path / "mid", tmp_path / "out", "--config", tmp_path / "in"))
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found == {**{k: v for k, v in config.items() if k != "dtype"}, "torch_dtype": "bfloat16"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_another_models_folder_raises_an_error(tmp_path: Path) -> None:
    save("llama", tmp_path / "in")
    save("llama-one-group-scaled", tmp_path / "other")
    succeeded(call("import-safetensors", tmp_path / "in", tmp_path / "mid"))
    result = call("export-safetensors", tmp_path / "mid", tmp_path / "out", "--config", tmp_path / "other")
    assert result.exit_code == 1
    assert "attention.groups: 1, 2" in result.output and "rope.kind: llama3, default" in result.output
    assert not (tmp_path / "out").exists()


def test_json_output(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path / "in")
    result = succeeded(call("import-safetensors", tmp_path / "in", tmp_path / "mid", "--json"))
    found = json.loads(result.stdout)
    assert (found["architecture"], found["format"], found["notes"]) == ("qwen3_moe", "fsdp_dtensor", [])
    assert found["checkpoint"] == str(tmp_path / "mid" / "release")
    state = read_state(tmp_path / "mid")
    assert found["tensors"] == len(state.weights) and found["bytes"] == sum(t.nbytes for t in state.weights.values())
    flags = found["flags"]
    assert flags[flags.index("--num-experts") + 1] == "5"
    result = succeeded(call("export-safetensors", tmp_path / "mid", tmp_path / "out", "--json"))
    found = json.loads(result.stdout)
    assert found["files"] == ["model.safetensors"] and found["architecture"] == "qwen3_moe"
    assert found["bytes"] == sum(tensor.nbytes for tensor in files_of(tmp_path / "out").values())


def test_text_output(tmp_path: Path) -> None:
    save("deepseek_v3-no-query-rank", tmp_path / "in")
    result = succeeded(call("import-safetensors", tmp_path / "in", tmp_path / "mid"))
    assert "GiB" in result.output and "deepseek_v3" in result.output
    assert "NOTES (2)\n" in result.output and "► q_lora_rank is null" in result.output
    assert "► 1 of 1 multi-token prediction layers are missing" in result.output
    assert "--multi-latent-attention" in result.output


def test_the_tracker_file_and_the_arguments_are_written(tmp_path: Path) -> None:
    save("llama", tmp_path / "in")
    succeeded(call("import-safetensors", tmp_path / "in", tmp_path / "mid"))
    assert (tmp_path / "mid" / "latest_checkpointed_iteration.txt").read_text() == "release"
    script = f'source {tmp_path / "mid" / "args.sh"} && printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split("\n")
    assert words[words.index("--hidden-size") + 1] == "24" and "--swiglu" in words
    state = read_state(tmp_path / "mid")
    assert (state.args.hidden_size, state.common["iteration"], state.common["checkpoint_version"]) == (24, 0, 3.0)
    assert not state.optimizer_state


def test_the_size_of_files_is_limited(tmp_path: Path) -> None:
    save("llama", tmp_path / "in")
    succeeded(call("import-safetensors", tmp_path / "in", tmp_path / "mid"))
    options = ("--max-shard-size", "8KB", "--dtype", "float32")
    succeeded(call("export-safetensors", tmp_path / "mid", tmp_path / "out", *options))
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) > 3 and max(sizes) < 8000 + 2000
    assert_same(files_of(tmp_path / "out"), files_of(tmp_path / "in"))


@pytest.mark.parametrize(
    ("text", "count"), [("5GiB", 5 << 30), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("77", 77), ("2g", 2 * 10**9)]
)
def test_sizes(text: str, count: int) -> None:
    assert Size().convert(text, None, None) == count


@pytest.mark.parametrize("text", ["", "GiB", "5XB", "-5MB", "0"])
def test_invalid_sizes_are_usage_errors(text: str) -> None:
    with pytest.raises(click.BadParameter, match="expected a size such as 5GiB or 500MB"):
        Size().convert(text, None, None)


def test_errors_are_one_line_and_leave_no_files(tmp_path: Path) -> None:
    save("llama", tmp_path / "in")
    for words in (
        ("import-safetensors", tmp_path / "absent", tmp_path / "out"),
        ("export-safetensors", tmp_path / "absent", tmp_path / "out"),
        ("export-safetensors", tmp_path / "in", tmp_path / "out"),
    ):
        result = call(*words)
        assert result.exit_code == 1 and result.output.startswith("Error: ")
        assert len(result.output.strip().splitlines()) == 1
    (tmp_path / "in" / "model.safetensors").write_bytes(b"")
    assert "expected a safetensors file" in call("import-safetensors", tmp_path / "in", tmp_path / "out").output
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    save("llama", tmp_path / "in")
    succeeded(call("import-safetensors", tmp_path / "in", tmp_path / "mid"))
    assert call("import-safetensors", tmp_path / "in", tmp_path / "mid").exit_code == 1
    result = call("export-safetensors", tmp_path / "mid", tmp_path / "in")
    assert result.exit_code == 1 and "expected no such folder yet" in result.output


def recording(tensors: dict[str, LazyTensor], largest: list[int]) -> dict[str, LazyTensor]:
    """Tensors that record the size of each read in bytes."""

    def noting(tensor: LazyTensor) -> LazyTensor:
        def read(region: Region) -> torch.Tensor:
            part = tensor.read(region)
            largest.append(part.nbytes)
            return part

        return LazyTensor(tensor.shape, tensor.dtype, read)

    return {name: noting(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("format_", FORMATS)
def test_at_most_one_block_is_held(format_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = 256
    read: list[int] = []
    save("deepseek_v3", tmp_path / "in")
    weights_of = transfer.read_weights
    monkeypatch.setattr(transfer, "read_weights", lambda folder: recording(weights_of(folder), read))
    options = transfer.ImportOptions(format_, write=WriteOptions(block=block))
    plan = transfer.prepare_import(tmp_path / "in", options)
    assert not read
    transfer.import_(plan, tmp_path / "mid", options, lambda count: None)
    assert 0 < max(read) <= block
    del read[:]
    state = read_state(tmp_path / "mid")
    state = dataclasses.replace(state, weights=recording(state.weights, read))
    exported = transfer.prepare_export(state, torch.float32)
    assert not read
    export(exported, tmp_path / "out", 5000, WriteOptions(block=block))
    assert 0 < max(read) <= block
    assert_same(files_of(tmp_path / "out"), files_of(tmp_path / "in"))


@pytest.mark.parametrize(
    "name", ["fsdp_dtensor_dp2", "torch_dist_dp2", "torch_dist_dp2_main", "torch_dist_tp2dp2_legacy_fsms_mcore013"]
)
def test_exporting_checkpoints_of_megatron(name: str, tmp_path: Path) -> None:
    succeeded(call("export-safetensors", sample(name) / ITERATION, tmp_path / "out", "--dtype", "keep"))
    found, weights = files_of(tmp_path / "out"), read_state(sample(name) / ITERATION).weights
    # Four query heads of 16 rows in two groups: the rows of the fused tensor, written out.
    fused = weights["decoder.layers.1.self_attention.linear_qkv.weight"].full_tensor()
    prefix = "model.layers.1.self_attn"
    assert torch.equal(found[f"{prefix}.q_proj.weight"], torch.cat([fused[0:32], fused[64:96]]))
    assert torch.equal(found[f"{prefix}.k_proj.weight"], torch.cat([fused[32:48], fused[96:112]]))
    assert torch.equal(found[f"{prefix}.v_proj.weight"], torch.cat([fused[48:64], fused[112:128]]))
    assert torch.equal(found["lm_head.weight"], weights["output_layer.weight"].full_tensor())


def test_a_model_without_a_counterpart_raises_an_error(tmp_path: Path) -> None:
    result = call("export-safetensors", sample("fsdp_dtensor_moe_ep2") / ITERATION, tmp_path / "out")
    assert result.exit_code == 1 and "qk_layernorm: expected True; got False" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_several_processes_share_the_work(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path / "in")
    steps = (
        ("import-safetensors", tmp_path / "in", tmp_path / "mid"),
        ("export-safetensors", tmp_path / "mid", tmp_path / "out", "--dtype", "float32", "--max-shard-size", "8KB"),
    )
    for words in steps:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "megatron.fsdp.convert", *map(str, words)],
                env={"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        assert outputs[0][0] and not outputs[1][0]
    assert_same(files_of(tmp_path / "out"), files_of(tmp_path / "in"))
