"""Hugging Face's Trainer with a sharded model: it trains, saves and resumes as it does without sharding."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.huggingface_training import arguments, fresh_process, history, llama, samples
from tests.ranks import RankPool, on_ranks

pytest.importorskip("transformers")
STEPS = 6


def class_of(base: Any, strategy: int | None) -> Any:
    """A class of trainers that is sharded by a strategy, or not at all."""
    from megatron.fsdp.integrations.transformers import sharded

    return base if strategy is None else sharded(base, zero_dp_strategy=strategy)


def trainer_of(model: Any, folder: Path, strategy: int | None, data: tuple[int, int] = (48, 8), **changes: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    callbacks = changes.pop("callbacks", None)
    return class_of(Trainer, strategy)(
        model=model,
        args=TrainingArguments(**arguments(folder, **changes)),
        train_dataset=samples(data[0]),
        eval_dataset=samples(data[1], seed=2),
        callbacks=callbacks,
    )


def full_weights(model: Any) -> dict[str, torch.Tensor]:
    """All full parameters, on every rank."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: getattr(p, "full_tensor", p.clone)() for name, p in parameters.items()}


Trained = tuple[dict[str, list[float]], dict[str, torch.Tensor]]


def run(
    folder: Path, strategy: int | None, changes: dict[str, Any], model: dict[str, Any], checkpoint: Any = None
) -> Trained:
    """Train from the start or from a checkpoint."""
    fresh_process()
    trainer = trainer_of(llama(**model), folder, strategy, **changes)
    trainer.train(resume_from_checkpoint=checkpoint)
    return history(trainer), full_weights(trainer.model)


def assert_same(found: Trained, expected: Trained) -> None:
    assert found[0].keys() == expected[0].keys()
    for name, values in expected[0].items():
        assert found[0][name] == pytest.approx(values, rel=2e-4), name
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=2e-5)


EVALUATED = {"max_steps": STEPS, "eval_strategy": "steps", "eval_steps": 2}


def test_training_equals_unsharded(ranks: RankPool, tmp_path: Path) -> None:
    (expected,) = ranks.run(1, run, tmp_path, None, EVALUATED, {})
    assert len(expected[0]["loss"]) == STEPS and len(expected[0]["eval_loss"]) == STEPS // 2
    # All gradients are clipped, and the learning rate falls.
    assert min(expected[0]["grad_norm"]) > 0.5
    assert len(set(expected[0]["learning_rate"])) == STEPS
    for strategy in (1, 3):
        for found in ranks.run(2, run, tmp_path, strategy, EVALUATED, {}):
            assert_same(found, expected)


# Two epochs of data that neither batches nor accumulation divide.
UNEVEN = {"data": (21, 7), "num_train_epochs": 2, "eval_strategy": "epoch"}


def test_last_batches_are_as_with_ddp(ranks: RankPool, tmp_path: Path) -> None:
    expected, _ = ranks.run(2, run, tmp_path, None, UNEVEN, {})
    for found in ranks.run(2, run, tmp_path, 2, UNEVEN, {}):
        assert_same(found, expected)


# Checkpoints at steps 2 and 4 of an epoch of six.
SAVING = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}


@pytest.mark.parametrize(
    "strategy", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_resumed_training_is_bit_equal(ranks: RankPool, tmp_path: Path, strategy: int) -> None:
    # The dropout shows whether random states are restored, and the seed whether weights are.
    changes, model = {"max_steps": STEPS, **SAVING}, {"attention_dropout": 0.2}
    whole = ranks.run(2, run, tmp_path, strategy, changes, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-6"]
    # A run that was killed while it saved leaves a folder without the state that is written last.
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()
    resumed = ranks.run(2, run, tmp_path, strategy, changes, {**model, "seed": 7}, True)
    for (logs, weights), (expected_logs, expected_weights) in zip(resumed, whole, strict=True):
        assert logs == expected_logs
        assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())


@on_ranks(2)
def test_best_model_and_saved_model(tmp_path: Path) -> None:
    """The model gets worse after some steps; ranks generate; the best model is loaded and saved as a usual folder."""
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM, TrainerCallback

    fresh_process()
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2}
    at_step: dict[int, dict[str, torch.Tensor]] = {}

    class Remember(TrainerCallback):
        generated: list[list[int]] = []

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **unused: Any) -> None:
            at_step[state.global_step] = full_weights(model)
            # Ranks finish after different numbers of tokens.
            prompt = torch.arange(1, 4)[None]
            tokens = model.generate(prompt, max_new_tokens=3 + 4 * dist.get_rank(), do_sample=False)
            self.generated.append(tokens[0].tolist())

    remember = Remember()
    # The learning rate is too high.
    changes = {"learning_rate": 0.3, "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "callbacks": [remember]}
    trainer = trainer_of(llama(), tmp_path, 3, max_steps=STEPS, **SAVING, **best, **changes)
    trainer.train()
    losses = history(trainer)["eval_loss"]
    assert min(losses) < losses[-1] - 0.1
    best_step = 2 * (losses.index(min(losses)) + 1)
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best_step}")
    loaded = full_weights(trainer.model)
    assert all(torch.equal(loaded[name], value) for name, value in at_step[best_step].items())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses))
    assert len(remember.generated) == STEPS and all(
        len(tokens) == 6 + 4 * dist.get_rank() for tokens in remember.generated
    )

    trainer.save_model(tmp_path / "final")
    dist.barrier()
    assert {path.name for path in (tmp_path / "final").iterdir()} >= {"config.json", "model.safetensors"}
    assert "lm_head.weight" not in load_file(tmp_path / "final" / "model.safetensors")
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "final")
    assert saved.lm_head.weight is saved.model.embed_tokens.weight
    assert all(torch.equal(parameter, loaded[name]) for name, parameter in saved.named_parameters())


ADAPTERS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1},
    # Of which PEFT saves what an encoder computes.
    "PromptTuningConfig": {"num_virtual_tokens": 3},
}


def adapters(folder: Path, strategy: int | None, kind: str, seed: int, checkpoint: Any) -> tuple[dict, dict]:
    """Train adapters, with checkpoints, bfloat16 and activation checkpointing."""
    import peft

    fresh_process()
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **ADAPTERS[kind])
    model = llama()
    torch.manual_seed(seed)
    changes = {"max_steps": STEPS, "bf16": True, "activation_checkpointing": True}
    trainer = trainer_of(peft.get_peft_model(model, config), folder, strategy, **SAVING, **changes)
    trainer.train(resume_from_checkpoint=checkpoint)
    return history(trainer), full_weights(trainer.model)


@pytest.mark.parametrize("kind", [pytest.param("LoraConfig", marks=pytest.mark.slow), "PromptTuningConfig"])
def test_adapters(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("peft")
    ((logs, weights), _) = ranks.run(2, adapters, tmp_path, 3, kind, 0, None)
    assert not (tmp_path / "checkpoint-4" / "model.safetensors").exists()
    assert json.loads((tmp_path / "checkpoint-4" / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"
    for found_logs, found_weights in ranks.run(2, adapters, tmp_path, 3, kind, 7, str(tmp_path / "checkpoint-4")):
        assert found_logs == logs
        assert all(torch.equal(found_weights[name], value) for name, value in weights.items())
    expected = ranks.run(2, adapters, tmp_path / "ddp", None, kind, 0, None)
    assert logs["loss"] == pytest.approx(expected[0][0]["loss"], rel=1e-3)


@on_ranks(2)
def test_a_save_that_fails_on_rank_0_fails_on_all(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    fresh_process()
    trainer = trainer_of(llama(), tmp_path, 3, max_steps=2, **SAVING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", Mock(side_effect=OSError("disk full")))
        with pytest.raises(RuntimeError, match="could not be saved: disk full"):
            trainer.train()


@on_ranks(2)
def test_a_different_number_of_parameter_groups(tmp_path: Path) -> None:
    fresh_process()
    trainer_of(llama(), tmp_path, 3, max_steps=2, **SAVING).train()  # a group with weight decay, and one without
    fresh_process()
    trainer = trainer_of(model := llama(), tmp_path, 3, max_steps=4)
    trainer.optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match="different number of parameter groups"):
        trainer.train(resume_from_checkpoint=True)


def rejected(folder: Path) -> None:
    for name in ("auto_find_batch_size", "bf16_full_eval", "save_on_each_node", "torch_compile"):
        fresh_process()
        message = "torch.compile" if name == "torch_compile" else f"{name}: expected False"
        with pytest.raises(ValueError, match=message):
            trainer_of(llama(), folder, 3, **{name: True})
    fresh_process()
    with pytest.raises(ValueError, match="found none"):
        trainer_of(llama(), folder / "empty", 3).train(resume_from_checkpoint=True)


def test_what_does_not_work_raises_an_error(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, rejected, tmp_path)


def translate(folder: Path, strategy: int | None) -> list[Any]:
    """Train an encoder and decoder, whose predictions are generated: the encoder then runs alone."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    fresh_process()
    sizes = {"vocab_size": 32, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    data = [{"input_ids": each["input_ids"], "labels": each["input_ids"].flip(0)} for each in samples(24)]
    changes = {"max_steps": 3, "predict_with_generate": True, "generation_max_length": 9}
    trainer = class_of(Seq2SeqTrainer, strategy)(
        model=T5ForConditionalGeneration(T5Config(**sizes, **tokens, dropout_rate=0.0)),
        args=Seq2SeqTrainingArguments(**arguments(folder, **changes)),
        train_dataset=data,
        eval_dataset=data[:7],
        compute_metrics=lambda found: {"tokens": int(found.predictions.sum())},
    )
    trainer.train()
    found = trainer.evaluate()
    return [*history(trainer)["loss"], found["eval_loss"], found["eval_tokens"]]


def test_generated_predictions_of_an_encoder_and_decoder(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(2, translate, tmp_path, None)[0]
    assert len(expected) == 5
    for found in ranks.run(2, translate, tmp_path, 3):
        assert found == pytest.approx(expected, rel=2e-4)


def preferences(folder: Path, strategy: int | None) -> list[float]:
    """Train on pairs of answers with TRL, which needs a reference model."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    fresh_process()
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 32)}}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    rows = [{"prompt": f"w{i + 2} w4", "chosen": f" w{i + 3}", "rejected": f" w{i + 5} w9"} for i in range(24)]
    trainer = class_of(DPOTrainer, strategy)(
        model=llama(0, eos_token_id=1),
        ref_model=llama(1, eos_token_id=1),
        args=DPOConfig(**arguments(folder, max_steps=3, bf16=False)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    return history(trainer)["loss"]


@pytest.mark.slow
def test_preferences_with_a_reference_model(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    (expected,) = ranks.run(1, preferences, tmp_path, None)
    assert len(expected) == 3
    for found in ranks.run(2, preferences, tmp_path, 3):
        assert found == pytest.approx(expected, rel=2e-4)
