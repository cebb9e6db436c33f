"""The examples of plain loops train as without sharding: generation, LoRA adapters, resuming."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.launch import ROOT, printed, python, torchrun
from tests.ranks import RankPool, on_ranks

FOLDER = ROOT / "examples" / "frameworks"
RAY = ROOT / ".ray"


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


@on_ranks(2)
def test_units_that_share_a_buffer_cannot_all_be_unsharded() -> None:
    from megatron_fsdp import fully_shard_model

    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(4)))
    sharded = fully_shard_model(model, fsdp_unit_modules=[nn.Linear], fsdp_double_buffer=True)
    with pytest.raises(RuntimeError, match="fsdp_double_buffer"), sharded.unsharded():
        pass
    sharded(torch.ones(1, 4)).sum().backward()  # the model is still usable


# The examples --------------------------------------------------------------------------------------------------


def _run(command: str, ranks: int = 2) -> str:
    return printed(torchrun(f"{FOLDER}/{command}".split(), ranks))


def _losses(*outputs: str) -> list[float]:
    return [float(loss) for text in outputs for loss in re.findall(r"^step \d+: loss (\d+\.\d+)", text, re.MULTILINE)]


def _plain_loop(steps: int) -> list[float]:
    """The losses of the example's model in a loop of one process, without sharding."""
    spec = importlib.util.spec_from_file_location("plain_loop", FOLDER / "plain_loop.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    model, losses = example.build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 3)
        optimizer.zero_grad()
        tokens = torch.cat([example.batch(step, micro, 0, 1) for micro in range(2)])
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_plain_loop_resumes_in_a_new_process(tmp_path: Path) -> None:
    first = _run(f"plain_loop.py --steps 3 --save {tmp_path}")
    second = _run(f"plain_loop.py --steps 6 --save {tmp_path}", ranks=1)
    assert _losses(first, second) == pytest.approx(_plain_loop(6), abs=2e-5)
    assert len(_losses(second)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-6"]


@pytest.mark.slow
def test_plain_loop_with_replicas_and_compilation() -> None:
    output = _run("plain_loop.py --steps 4 --replicas 2 --compile", ranks=4)
    assert _losses(output) == pytest.approx(_plain_loop(4), abs=2e-5)


def _step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.slow
def test_example_of_generation() -> None:
    pytest.importorskip("transformers")
    output, model = _run("generate_in_training.py"), _llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    generator, expected, answers = torch.Generator().manual_seed(1), [], []
    for step in range(6):
        starts = torch.randint(61, (4, 1), generator=generator)
        expected.append(_step(model, optimizer, (starts + torch.arange(12)).remainder(61)))
        for rank in range(2) if step % 3 == 2 else ():
            prompt = torch.arange(7, 10 + 2 * rank)[None]
            answer = model.generate(prompt, do_sample=False, max_new_tokens=4 + 3 * rank, pad_token_id=0)
            answers.append(f"step {step}, rank {rank}: {answer[0].tolist()}")
    assert _losses(output) == pytest.approx(expected, abs=2e-5)
    assert sorted(re.findall(r"^step \d, rank .*$", output, re.MULTILINE)) == answers


def test_example_of_generation_in_another_process() -> None:
    pytest.importorskip("transformers")
    output, model = _run("refresh_generator.py"), _llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    generator, answers = torch.Generator().manual_seed(1), []
    for step in range(6):
        starts = torch.randint(61, (4, 1), generator=generator)
        _step(model, optimizer, (starts + torch.arange(12)).remainder(61))
        if step % 3 == 2:
            answer = model.generate(torch.arange(7, 10)[None], do_sample=False, max_new_tokens=6, pad_token_id=0)
            answers.append(f"step {step}: {answer[0].tolist()}")
    assert re.findall(r"^step \d: \[.*$", output, re.MULTILINE) == answers


@pytest.mark.slow
def test_example_of_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    outputs = [_run(f"lora.py {tmp_path}"), _run(f"lora.py {tmp_path} --resume", ranks=1)]
    model, expected = peft.get_peft_model(_llama(), peft.LoraConfig(r=4, target_modules="all-linear")), []
    for _ in outputs:
        # As in the example, the optimizer restarts in the second process.
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        expected += [_step(model, optimizer, torch.randint(61, (4, 12), generator=generator)) for _ in range(5)]
    assert _losses(*outputs) == pytest.approx(expected, abs=1e-4)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 50_000
    merged, tokens = type(_llama()).from_pretrained(tmp_path / "merged"), torch.arange(24).view(2, 12)
    torch.testing.assert_close(merged(tokens).logits, model(tokens).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_example_of_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    expected = _losses(_run(f"lightning_fit.py {tmp_path}/ddp --epochs 3 --ddp"))
    found = _losses(*(_run(f"lightning_fit.py {tmp_path}/sharded --epochs {epochs}") for epochs in (2, 3)))
    assert len(expected) == 3 and found == pytest.approx(expected, abs=2e-5)


@pytest.mark.timeout(600)
def test_example_of_ray_train(tmp_path: Path) -> None:
    """A worker fails, and the run resumes: losses are those of the model without Ray and without sharding."""
    if not RAY.exists():
        pytest.skip("needs Ray; make test-merge installs it")
    # Ray writes a token into the home folder.
    patient = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300", "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "300"}
    options: dict[str, Any] = {"packages": str(RAY), "timeout": 580, "HOME": str(tmp_path), **patient}
    output = printed(python(FOLDER / "ray_train.py", tmp_path / "run", "--fail-at", "4", **options))
    found = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", output)}
    assert "resumes from step_4" in output and found.keys() == set(range(6))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step_2", "step_4", "step_6"]
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True) for _ in range(2))
    model = nn.Sequential(*layers, nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(6):
        x = torch.randn(8, 4, 32, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.sum(-1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert found[step] == pytest.approx(loss.item(), abs=2e-5)
