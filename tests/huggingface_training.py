"""Small models, data and settings for training with Hugging Face's libraries on a CPU, without downloads."""

import os
import random
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY = 32
LENGTH = 8


def fresh_process() -> None:
    """Make accelerate and the random states forget what earlier tests in this process did."""
    from accelerate.state import AcceleratorState, GradientState

    # As a launcher sets them.
    os.environ.update(MASTER_ADDR="localhost", LOCAL_WORLD_SIZE=str(dist.get_world_size()))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    random.seed(0)
    torch.manual_seed(0)


def llama(seed: int = 0, **changes: Any) -> Any:
    """A Llama with two layers, whose head is tied to its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.2}
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **layers, **tokens, **changes}))


def samples(count: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Random sequences whose labels have different numbers of ignored tokens, as padded text has."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        ignored = int(torch.randint(0, LENGTH // 2, (), generator=generator))
        labels = tokens.clone()
        labels[:ignored] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def arguments(folder: Any, world_batch: int = 4, **changes: Any) -> dict[str, Any]:
    """Settings of a Trainer with a global micro-batch of ``world_batch`` samples, on any number of ranks."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": world_batch // dist.get_world_size(),
        "per_device_eval_batch_size": world_batch // dist.get_world_size(),
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-5,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        **changes,
    }


def history(trainer: Any) -> dict[str, list[float]]:
    """A Trainer's log of each step or evaluation."""
    logs = trainer.state.log_history
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return {name: [float(entry[name]) for entry in logs if name in entry] for name in names}
