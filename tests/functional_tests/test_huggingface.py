"""Imported and exported models compute the same as the originals, in transformers and in Megatron-Core."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from megatron.fsdp.convert.cli import cli
from tests.huggingface_models import CASES, VOCABULARY, save, with_further_layer
from tests.launch import ROOT, printed, python, torchrun

transformers = pytest.importorskip("transformers")

SAMPLES = ROOT.parent / "shared" / "samples"
# Relative to the largest logit: rounding of float32 sums in different orders, over a few layers.
ROUNDING = 5e-6
FURTHER = "-further-token"
ALL_CASES = (*CASES, f"deepseek_v3{FURTHER}")
# Flags for training, and flags that disable what requires Transformer Engine or CUDA.
TRAINING = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-3 --tokenizer-type NullTokenizer --mock-data "
    "--seq-length 16 --eval-iters 0 --log-interval 1 --use-distributed-optimizer --distributed-backend gloo "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion "
    "--no-persist-layer-norm --no-rope-fusion"
).split()


def further_output(model: Any, tensors: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Output of transformers' multi-token prediction layer, [sequences, tokens, hidden], for its model's output."""
    from transformers.modeling_layers import MtpLayer

    decoder, prefix = model.model, f"model.layers.{model.config.num_hidden_layers}."
    layer = MtpLayer(decoder.config, type(decoder.layers[-1]), type(decoder.norm), decoder.config.num_hidden_layers)
    state = layer.state_dict()
    for name in state:
        key = prefix + name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if key.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            start, projection = key.rsplit(".", 1)
            parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[projection]
            state[name] = torch.stack(
                [torch.cat([tensors[f"{start}.{e}.{part}.weight"] for part in parts]) for e in range(len(state[name]))]
            )
        else:
            state[name] = tensors[key]
    layer.load_state_dict(state, strict=True)
    # Megatron uses token 0 for the last position, which has no next token.
    following = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1)
    length = tokens.shape[1]
    positions = torch.arange(length).unsqueeze(0)
    mask = torch.full((length, length), float("-inf")).triu(1).view(1, 1, length, length)
    output = decoder(tokens).last_hidden_state
    rotation = decoder.rotary_emb(output, positions)
    return layer.eval()(decoder.embed_tokens(following), output, rotation, mask, positions, None)


def prepare(case: str, folder: Path, tokens: torch.Tensor) -> None:
    """Write the original model of a case, and transformers' results."""
    model = save(case.removesuffix(FURTHER), folder / "in")
    with torch.no_grad():
        torch.save(model(tokens).logits, folder / "expected.pt")
        if case.endswith(FURTHER):
            file = folder / "in" / "model.safetensors"
            tensors = with_further_layer(safetensors.torch.load_file(file))
            safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
            torch.save(further_output(model, tensors, tokens), folder / "expected_further.pt")
    torch.save(tokens, folder / "tokens.pt")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per case, with transformers' logits (``expected.pt``) and Megatron's (``logits.pt``) of equal tokens."""
    folder = tmp_path_factory.mktemp("logits")
    tokens = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(3))
    for case in ALL_CASES:
        prepare(case, folder / case, tokens)
        options = ("--format", "torch_dist", "--layer-spec", "local", "--make-vocab-size-divisible-by", "16")
        words = [str(folder / case / "in"), str(folder / case / "checkpoint"), *options]
        result = CliRunner().invoke(cli, ["import-safetensors", *words])
        assert result.exit_code == 0, result.output
    printed(python("-m", "tests.huggingface_logits", folder, *ALL_CASES))
    return folder


def results(folder: Path, *names: str) -> list[torch.Tensor]:
    """Load tensors of a case, or fail with Megatron's error."""
    error = folder / "error.txt"
    assert not error.exists(), error.read_text()[-4000:]
    return [torch.load(folder / name) for name in names]


@pytest.mark.parametrize("case", ALL_CASES)
def test_megatron_computes_the_logits_of_transformers(case: str, compared: Path) -> None:
    expected, found = results(compared / case, "expected.pt", "logits.pt")
    assert found.dtype == expected.dtype == torch.float32
    assert found.shape == (2, 16, 32)
    assert expected.abs().max() > 0.1
    difference = (found[..., :VOCABULARY] - expected).abs().max() / expected.abs().max()
    assert difference < ROUNDING, f"{case}: {difference:.2e}"
    # The rows of padding tokens are zero.
    assert torch.count_nonzero(found[..., VOCABULARY:]) == 0


def test_multi_token_prediction_computes_what_transformers_does(compared: Path) -> None:
    expected, found = results(compared / f"deepseek_v3{FURTHER}", "expected_further.pt", "further.pt")
    found = found.transpose(0, 1)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() / expected.abs().max() < ROUNDING


def first_losses(folder: Path, format_: str, *flags: str) -> list[float]:
    """Losses of two steps of Megatron's training loop on two ranks, starting from an imported checkpoint."""
    words = ["--format", format_, "--layer-spec", "local", "--make-vocab-size-divisible-by", "16", "--json"]
    result = CliRunner().invoke(cli, ["import-safetensors", str(folder / "in"), str(folder / format_), *words])
    assert result.exit_code == 0, result.output
    model = json.loads(result.stdout)["flags"]
    load = ["--load", str(folder / format_), "--finetune"]
    run = torchrun(["pretrain_gpt.py", *model, *TRAINING, *load, *flags], ranks=2, timeout=240)
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-4000:]
    assert f"successfully loaded checkpoint from {folder / format_}" in output
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", output)]


@pytest.mark.slow
def test_training_starts_the_same_from_either_format(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path / "in")
    sharded = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params")
    losses = first_losses(tmp_path, "fsdp_dtensor", *sharded)
    assert len(losses) == 2
    # Megatron's own data parallelism reads torch_dist, whose logits are compared above.
    assert first_losses(tmp_path, "torch_dist") == losses


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="needs the sample checkpoints")
@pytest.mark.parametrize("name", ["fsdp_dtensor_dp2", "torch_dist_dp2", "torch_dist_tp2dp2_legacy_fsms_mcore013"])
def test_transformers_reaches_the_loss_that_megatron_had(name: str, tmp_path: Path) -> None:
    words = [str(SAMPLES / name / "iter_0000003"), str(tmp_path / "out"), "--dtype", "float32"]
    result = CliRunner().invoke(cli, ["export-safetensors", *words])
    assert result.exit_code == 0, result.output
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 128), torch.roll(tokens, -1, 1).reshape(-1))
    expected = json.loads((SAMPLES / name / "meta.json").read_text())
    # Megatron computed its loss in bfloat16.
    assert loss.item() == pytest.approx(expected["eval_loss"], abs=5e-4)
