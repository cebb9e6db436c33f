"""The models of the sample checkpoints, and their training as it was done when they were written.

Imported by rank processes only: it imports Megatron-Core, after it has been switched to the CPU.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from tests.megatron_models import OptimizerConfig, finalize, get_megatron_optimizer


class Continued(NamedTuple):
    """The results of training from a checkpoint: the loss of evaluation, two losses of training, and the iteration."""

    evaluated: float
    losses: list[float]
    iteration: int


def config_of(meta: dict[str, Any]) -> TransformerConfig:
    """The configuration that ``meta.json`` has as text, for one rank of tensor and expert parallelism."""
    given = {key: value for key, value in meta["model"].items() if key not in ("activation_func", "params_dtype")}
    given |= {"tensor_model_parallel_size": "1"}
    known = {key: _value(text) for key, text in given.items()}
    config = TransformerConfig(
        **{**known, "activation_func": torch.nn.functional.silu, "params_dtype": torch.bfloat16},
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    config.finalize_model_grads_func = finalize
    return config


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def gpt(config: TransformerConfig, meta: dict[str, Any]) -> torch.nn.Module:
    """The model, with other weights than those that were trained."""
    torch.manual_seed(99)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm"),
        vocab_size=meta["vocab"],
        max_sequence_length=meta["seq"],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return Float16Module(config, model)


def optimizer_of(model: torch.nn.Module) -> Any:
    """Adam as the samples were trained with."""
    settings = OptimizerConfig(
        optimizer="adam",
        lr=5e-3,
        min_lr=1e-4,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
        clip_grad=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(settings, [model])


def scheduler_of(optimizer: Any) -> Any:
    """The schedule of the samples' training."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=5e-3,
        min_lr=1e-4,
        lr_warmup_steps=0,
        lr_decay_steps=400,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=400,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=True,
    )


def loss_of(model: torch.nn.Module, meta: dict[str, Any], seed: int) -> torch.Tensor:
    """The loss of the batch that a seed stands for."""
    length = meta["seq"]
    tokens = torch.randint(0, meta["vocab"], (2, length), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(length).unsqueeze(0).expand(2, -1)
    mask = torch.triu(torch.ones(length, length), 1).bool().view(1, 1, length, length)
    return model(tokens, positions, mask, labels=torch.roll(tokens, -1, 1)).float().mean()


def go_on(model: Any, meta: dict[str, Any], load: Callable[[Any, Any], int]) -> Continued:
    """Load a checkpoint, evaluate, and train two steps.

    Args:
        model: In its wrapper.
        meta: What is known of the sample.
        load: Called with optimizer and scheduler; loads and returns the iteration.
    """
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    # What was gathered before loading must not be used after.
    with torch.no_grad():
        loss_of(model.eval(), meta, 7)
    iteration = load(optimizer, scheduler)
    with torch.no_grad():
        evaluated = float(loss_of(model.eval(), meta, 7))
    model.train()
    losses = []
    for step in (3, 4):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = loss_of(model, meta, 1000 * step + dist.get_rank())
        loss.backward()
        model.finish_grad_sync()
        assert optimizer.step()[0]
        scheduler.step(increment=4)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return Continued(evaluated, losses, iteration)
