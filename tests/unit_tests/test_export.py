"""A sharded model of transformers is written so that from_pretrained() loads it."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

from tests.ranks import DEVICE, RankPool, on_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")


def _write(folder: str, strategy: str, tied: bool, dtype: torch.dtype | None, largest: int) -> dict[str, torch.Tensor]:
    from megatron.fsdp.state.export import save_safetensors
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16)
    layer = type(model.model.layers[0])
    sharded, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        fsdp_unit_modules=[layer],
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32),
    )
    tokens = torch.arange(12, device=DEVICE).view(1, 12)
    sharded(tokens, labels=tokens).loss.backward()
    optimizer.step()
    save_safetensors(sharded, folder, dtype, largest)
    from megatron.fsdp.dtensor.gathering import gather_full

    return {entry.name: gather_full(entry.main).cpu() for entry in sharded.engine.params()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["compute dtype", "fp32"])
@pytest.mark.parametrize(("strategy", "largest"), [("optim_grads_params", 5000), ("no_shard", 1 << 30)])
def test_from_pretrained_loads_the_export(
    ranks: RankPool, strategy: str, largest: int, dtype: torch.dtype | None, tied: bool
) -> None:
    with TemporaryDirectory() as folder:
        expected = ranks.run(3, _write, folder, strategy, tied, dtype, largest)[0]
        files = sorted(path.name for path in Path(folder).iterdir())
        assert not [name for name in files if "unfinished" in name]
        if largest < 1 << 30:
            index = json.loads((Path(folder) / "model.safetensors.index.json").read_text())
            assert len(set(index["weight_map"].values())) > 2
            assert set(index["weight_map"].values()) == {name for name in files if name.endswith(".safetensors")}
        else:
            assert "model.safetensors" in files
        loaded: nn.Module = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype or torch.bfloat16)
        found = dict(loaded.named_parameters())
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value.to(dtype or torch.bfloat16)), name


def _through_the_wrapper(folder: str) -> tuple[dict[str, torch.Tensor], list[int]]:
    from megatron_fsdp import fully_shard_model

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).to(DEVICE)
    expected = {name: value.clone().cpu() for name, value in model.state_dict().items()}
    prompt = torch.arange(4, device=DEVICE).view(1, 4)
    words = model.generate(prompt, max_new_tokens=5, do_sample=False)
    sharded = fully_shard_model(model, fsdp_unit_modules=[type(model.model.layers[0])])
    assert sharded.config is config
    assert torch.equal(sharded.generate(prompt, max_new_tokens=5, do_sample=False), words)
    sharded.save_pretrained(folder)
    return expected, words.tolist()


def test_methods_of_the_model_through_the_wrapper(ranks: RankPool, tmp_path: Path) -> None:
    expected, words = ranks.run(2, _through_the_wrapper, str(tmp_path))[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    prompt = torch.arange(4).view(1, 4)
    assert loaded.generate(prompt, max_new_tokens=5, do_sample=False).tolist() == words


class _OwnFiles(nn.Sequential):
    """Saves each layer to a file of its own, as sentence-transformers and diffusers do."""

    def save_pretrained(self, folder: str, runs: bool = False) -> None:
        if runs:
            self[0](torch.ones(1, 4))
        for name, layer in self.named_children():
            torch.save(layer.state_dict(), f"{folder}/{name}.pt")


def _save_own_files(folder: str) -> dict[str, torch.Tensor]:
    from megatron_fsdp import fully_shard_model

    model = _OwnFiles(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE)
    expected = {name: value.clone().cpu() for name, value in model.state_dict().items()}
    sharded = fully_shard_model(model, fsdp_unit_modules=[nn.Linear])
    with pytest.raises(RuntimeError, match="has called Linear.*Rank 0 saves alone"):
        sharded.save_pretrained(folder, runs=True)
    sharded.save_pretrained(folder)
    assert sharded(torch.ones(1, 4, device=DEVICE)).shape == (1, 4)
    return expected


def test_classes_that_save_files_of_their_own(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(2, _save_own_files, str(tmp_path))[0]
    found = {f"{n}.{key}": value for n in "01" for key, value in torch.load(tmp_path / f"{n}.pt").items()}
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def _statistics_in_a_checkpoint(folder: str) -> list[str]:
    from safetensors.torch import load_file
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from megatron_fsdp import fully_shard_model, save_safetensors

    block = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model = fully_shard_model(nn.Sequential(block, nn.Linear(4, 4)).to(DEVICE), fsdp_unit_modules=[nn.Linear])
    save_safetensors(model, folder)
    return sorted(load_file(f"{folder}/model.safetensors"))


def test_buffers_in_checkpoint_wrappers_are_exported(ranks: RankPool, tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))
    assert ranks.run(2, _statistics_in_a_checkpoint, str(tmp_path))[0] == sorted(plain.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("largest", [16, 1 << 30])
def test_all_ranks_raise_if_the_disk_is_full(tmp_path: Path, largest: int) -> None:
    import safetensors.torch

    from megatron_fsdp import fully_shard_model, save_safetensors

    model = fully_shard_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE), fsdp_unit_modules=[nn.Linear])

    def fail(*unused: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", fail)
        with pytest.raises(RuntimeError, match="save_safetensors: .* No space left"):
            save_safetensors(model, tmp_path, max_shard_size=largest)
    save_safetensors(model, tmp_path, max_shard_size=largest)


@on_ranks(1)
def test_an_export_replaces_an_earlier_one_and_keeps_values(tmp_path: Path) -> None:
    from megatron_fsdp import fully_shard_model, save_safetensors

    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4
    )
    config.dtype = torch.bfloat16
    source = transformers.LlamaForCausalLM(config).to(DEVICE)
    model = fully_shard_model(source, fsdp_unit_modules=[type(source.model.layers[0])])
    for round, largest in enumerate((1 << 30, 5000, 15000, 1 << 30)):
        with torch.no_grad():
            source.model.norm.weight.fill_(1 + round + 2**-12)
        save_safetensors(model, tmp_path, torch.float32, largest)
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        assert loaded.dtype == torch.float32 and model.config.dtype == torch.bfloat16
        assert torch.equal(loaded.model.norm.weight, torch.full((24,), 1 + round + 2**-12))
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    with torch.no_grad():
        source.model.norm.weight.mul_(1e5)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: expected values within .*float16"):
        save_safetensors(model, tmp_path, torch.float16)
