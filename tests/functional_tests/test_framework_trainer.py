"""Hugging Face's Trainer with a sharded model: it trains, saves and resumes as it does without sharding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.huggingface_training import arguments, fresh_process, history, llama, samples
from tests.ranks import RankPool

pytest.importorskip("transformers")
STEPS = 6


def trainer_of(model: Any, folder: Path, strategy: int | None, data: int = 48, **changes: Any) -> Any:
    """A Trainer that is sharded by a strategy, or not at all."""
    from transformers import Trainer, TrainingArguments

    from megatron.fsdp.integrations.transformers import sharded

    callbacks = changes.pop("callbacks", None)
    trainer_class = Trainer if strategy is None else sharded(Trainer, zero_dp_strategy=strategy)
    return trainer_class(
        model=model,
        args=TrainingArguments(**arguments(folder, **changes)),
        train_dataset=samples(data),
        eval_dataset=samples(8, seed=2),
        callbacks=callbacks,
    )


def whole_weights(model: Any) -> dict[str, torch.Tensor]:
    """All parameters, whole, on every rank."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: getattr(p, "full_tensor", p.clone)() for name, p in parameters.items()}


def run(folder: Path, strategy: int | None) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """Train, with evaluations."""
    fresh_process()
    model = llama()
    trainer = trainer_of(model, folder, strategy, max_steps=STEPS, eval_strategy="steps", eval_steps=2)
    trainer.train()
    return history(trainer), whole_weights(model)


def assert_same(found: Any, expected: Any) -> None:
    assert len(expected[0]["loss"]) == STEPS and len(expected[0]["eval_loss"]) == STEPS // 2
    # All gradients are clipped, and the learning rate falls.
    assert min(expected[0]["grad_norm"]) > 0.5
    assert len(set(expected[0]["learning_rate"])) == STEPS
    assert found[0].keys() == expected[0].keys()
    for name, values in expected[0].items():
        assert found[0][name] == pytest.approx(values, rel=2e-4), name
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=2e-5)


def test_training_equals_unsharded(ranks: RankPool, tmp_path: Path) -> None:
    (expected,) = ranks.run(1, run, tmp_path, None)
    for strategy in (1, 3):
        for found in ranks.run(2, run, tmp_path, strategy):
            assert_same(found, expected)
