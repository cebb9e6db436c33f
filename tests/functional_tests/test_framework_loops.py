"""The examples of plain loops train as without sharding: generation, LoRA adapters, resuming."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from tests.launch import ROOT, printed, torchrun
from tests.ranks import RankPool
from tests.slow import all_but_slow

FOLDER = ROOT / "examples" / "frameworks"


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, **size))


# Generation ----------------------------------------------------------------------------------------------------


def _generate(zero: int) -> None:
    from megatron_fsdp import fully_shard

    rank = dist.get_rank()
    models = [_llama() for _ in range(3)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5) for model in models]
    settings = {"fsdp_unit_modules": ["LlamaDecoderLayer"], "zero_dp_strategy": zero}
    wrappers = [fully_shard(m, o, **settings)[0] for m, o in list(zip(models, optimizers, strict=True))[:2]]
    prompt = torch.arange(7, 10 + 2 * rank)[None]
    for step in range(4):
        tokens = torch.randint(61, (2, 10), generator=torch.Generator().manual_seed(step))
        losses = []
        for model, optimizer, rows in zip(models, optimizers, [tokens[[rank]]] * 2 + [tokens], strict=True):
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        # Generating changes no bit of what follows.
        assert torch.equal(losses[0], losses[1])
        dist.all_reduce(losses[0])
        torch.testing.assert_close(losses[0] / 2, losses[2], rtol=1e-5, atol=1e-5)
        if step % 2:
            continue
        answers = []
        with wrappers[0].unsharded():
            # Ranks run different numbers of forwards, and one of them an additional one of the wrapper.
            answers = [models[0].generate(prompt, do_sample=False, max_new_tokens=3 + 4 * rank, pad_token_id=0)]
            if rank == 0:
                logits = wrappers[0](input_ids=prompt).logits
                torch.testing.assert_close(logits, models[2](input_ids=prompt).logits, rtol=1e-4, atol=1e-4)
        # Without the context, transformers' own way keeps ranks in step.
        settings_of_both = {"do_sample": False, "max_new_tokens": 3 + 4 * rank, "pad_token_id": 0}
        in_step = models[1].generate(prompt, synced_gpus=True, **settings_of_both)
        assert torch.equal(in_step, answers[0])
        answers.append(models[2].generate(prompt, do_sample=False, max_new_tokens=3 + 4 * rank, pad_token_id=0))
        assert torch.equal(*answers)
    assert all(p.device.type == "cpu" and hasattr(p, "full_tensor") for p in models[0].parameters())


@pytest.mark.parametrize("zero", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_generate_independently_and_training_goes_on(ranks: RankPool, zero: int) -> None:
    pytest.importorskip("transformers")
    ranks.run(2, _generate, zero)


def _double_buffer() -> None:
    from megatron_fsdp import fully_shard_model

    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(4)))
    sharded = fully_shard_model(model, fsdp_unit_modules=[nn.Linear], fsdp_double_buffer=True)
    with pytest.raises(RuntimeError, match="fsdp_double_buffer"), sharded.unsharded():
        pass
    sharded(torch.ones(1, 4)).sum().backward()  # the model is still usable


def test_units_that_share_a_buffer_cannot_all_be_unsharded(ranks: RankPool) -> None:
    ranks.run(2, _double_buffer)


# The examples --------------------------------------------------------------------------------------------------

# Runs whose losses are those of other runs, one after the other: command lines and numbers of ranks.
EXAMPLES = {
    "plain loop": (
        [("plain_loop.py --steps 6", 1)],
        [("plain_loop.py --steps 3 --save {0}/saved", 2), ("plain_loop.py --steps 6 --save {0}/saved", 1)],
    ),
    "replicas and compilation": (
        [("plain_loop.py --steps 4", 1)],
        [("plain_loop.py --steps 4 --replicas 2 --compile", 4)],
    ),
    "generation": ([("generate_in_training.py", 1)], [("generate_in_training.py", 2)]),
    "adapters": (
        [("lora.py {0}/one", 1), ("lora.py {0}/one --resume", 1)],
        [("lora.py {0}/two", 2), ("lora.py {0}/two --resume", 1)],
    ),
    "lightning": (
        [("lightning_fit.py {0}/ddp --epochs 3 --ddp", 2)],
        [("lightning_fit.py {0}/two --epochs 2", 2), ("lightning_fit.py {0}/two --epochs 3", 2)],
    ),
}
PACKAGES = {"generation": "transformers", "adapters": "peft", "lightning": "lightning"}


def _losses(runs: list[tuple[str, int]], folder: Path) -> list[float]:
    found = []
    for command, ranks in runs:
        output = printed(torchrun(f"{FOLDER}/{command}".format(folder).split(), ranks))
        found += re.findall(r"^step \d+: loss (\d+\.\d+)", output, flags=re.MULTILINE)
        if "generate" in command:
            answers = re.findall(r"^step (\d), rank (\d): \[.*\d\]$", output, flags=re.MULTILINE)
            assert sorted(answers) == [(step, str(rank)) for step in "25" for rank in range(ranks)]
    return [float(loss) for loss in found]


@pytest.mark.parametrize("name", all_but_slow(EXAMPLES, "plain loop"))
def test_example(name: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES.get(name, "torch"))
    expected, found = (_losses(runs, tmp_path) for runs in EXAMPLES[name])
    assert len(expected) >= 3 and found == pytest.approx(expected, abs=1e-4)
    if name == "adapters":
        assert (tmp_path / "two" / "adapter_model.safetensors").stat().st_size < 50_000
        merged = [load_file(tmp_path / each / "merged" / "model.safetensors") for each in ("one", "two")]
        torch.testing.assert_close(merged[1], merged[0], rtol=1e-3, atol=1e-3)
