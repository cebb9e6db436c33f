"""Unmodified Hugging Face models train the same when sharded as unsharded.

The models are built from small configurations with random weights, so nothing is downloaded. Dropout is off.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard_model
from tests.models import assert_same_training, device, whole
from tests.ranks import RankPool

STEPS = 10
VOCABULARY = 61
MASK = VOCABULARY - 1
CLASSES = 5
# Not a power of two: shards of ranks begin and end inside of rows.
WIDTH = 36


class Model(NamedTuple):
    """A model by the names of its classes, so that only the ranks import transformers."""

    task: str
    units: list[str]
    settings: dict[str, Any]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with an epsilon that exceeds the rounding of gradients.

    Adam divides a gradient by its own size. If the true gradient is zero, for example that of a key bias in attention,
    Adam would turn rounding into whole steps. The rounding depends on the order in which ranks and layers are summed.
    """
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-5)


def language_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The model's loss for predicting the next token or, for an encoder and decoder, for reproducing the input."""
    return model(input_ids=tokens, labels=tokens).loss


def masked_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The model's loss for predicting every fourth token, which is masked."""
    masked = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens) % 4 == 1
    return model(input_ids=tokens.masked_fill(masked, MASK), labels=tokens.masked_fill(~masked, -100)).loss


def image_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The model's loss for classifying images of 12 x 12 pixels in 3 colors that are made from the tokens."""
    pixels = (tokens / 15 - 2).repeat(1, 27)[:, : 3 * 12 * 12].view(-1, 3, 12, 12)
    return model(pixel_values=pixels, labels=tokens[:, 0] % CLASSES).loss


BODY = {"hidden_size": WIDTH, "intermediate_size": 50, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT = BODY | {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# So many experts that a batch of 32 tokens leaves some without tokens, as test_experts_without_tokens checks.
EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": 1}
T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 50, "num_heads": 4, "dropout_rate": 0.0}
ENCODER_DECODER = T5 | {"num_layers": 2, "num_decoder_layers": 2, "decoder_start_token_id": 0}
SPARSE = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 12, "router_jitter_noise": 0.0}
MODELS = {
    "llama": Model("LlamaForCausalLM", ["LlamaDecoderLayer"], GROUPED | {"tie_word_embeddings": False}),
    "llama, tied": Model("LlamaForCausalLM", ["LlamaDecoderLayer"], GROUPED | {"tie_word_embeddings": True}),
    # The loss includes the router's auxiliary loss.
    "qwen3-moe": Model(
        "Qwen3MoeForCausalLM",
        ["Qwen3MoeDecoderLayer"],
        GROUPED | EXPERTS | {"num_experts": 40, "output_router_logits": True},
    ),
    # Every other layer attends to a window, and every layer to learned sinks.
    "gpt-oss": Model(
        "GptOssForCausalLM",
        ["GptOssDecoderLayer"],
        GROUPED | EXPERTS | {"num_local_experts": 6, "intermediate_size": 12, "sliding_window": 4},
    ),
    "bert": Model("BertForMaskedLM", ["BertLayer"], TEXT | NO_DROPOUT),
    "vit": Model(
        "ViTForImageClassification",
        ["ViTLayer"],
        BODY | NO_DROPOUT | {"image_size": 12, "patch_size": 4, "num_labels": CLASSES},
    ),
    # All blocks use the first block's position bias, and three modules share one embedding.
    "t5": Model("T5ForConditionalGeneration", ["T5Block"], ENCODER_DECODER),
    # Every expert is a unit inside a unit, and runs only on ranks that have tokens for it.
    "switch": Model(
        "SwitchTransformersForConditionalGeneration",
        ["SwitchTransformersBlock", "SwitchTransformersDenseActDense"],
        ENCODER_DECODER | SPARSE,
    ),
    "mamba": Model(
        "MambaForCausalLM",
        ["MambaBlock"],
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 3, "state_size": 4},
    ),
}
LOSSES: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {"bert": masked_loss, "vit": image_loss}


def build(name: str) -> tuple[nn.Module, list[type[nn.Module]]]:
    """The model, identical on all ranks, and the classes of its units."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # some layers look for compiled kernels there
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    task = getattr(transformers, MODELS[name].task)
    model = task(task.config_class(**MODELS[name].settings)).to(device())
    classes = {type(module).__name__: type(module) for module in model.modules()}
    return model, [classes[unit] for unit in MODELS[name].units]


def batches() -> torch.Tensor:
    """Tokens, [steps, ranks, 2, 16], repeated in every step so that the model can learn them."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, MASK, (1, dist.get_world_size(), 2, 16), generator=generator)
    return tokens.expand(STEPS, -1, -1, -1).to(device())


def _train(name: str) -> None:
    model, units = build(name)
    data, loss = batches(), LOSSES.get(name, language_loss)
    mine = data[0, dist.get_rank()]
    before = loss(model, mine).item()
    # Rounding of the fp32 average of gradients amounts to about 1e-6 of the weights after ten steps.
    sharded = assert_same_training(model, data, adamw, loss, tolerance=1e-5, fsdp_unit_modules=units)
    sharded.eval()
    with torch.no_grad():
        after = loss(sharded, mine).item()
    assert after < 0.9 * before, f"{before} -> {after}"


@pytest.mark.parametrize("name", MODELS)
def test_model(ranks: RankPool, name: str) -> None:
    ranks.run(2, _train, name)


@pytest.mark.parametrize("name", ["llama, tied", "qwen3-moe", "switch"])
def test_model_on_three_ranks(ranks: RankPool, name: str) -> None:
    ranks.run(3, _train, name)


def _checkpointing(options: dict[str, Any]) -> None:
    model, units = build("llama")
    model.gradient_checkpointing_enable(**options)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *unused: calls.append(1))
    assert_same_training(model, batches(), adamw, language_loss, tolerance=1e-5, fsdp_unit_modules=units)
    # Twice per batch, in forward and backward: the reference runs all ranks' batches, the sharded model this rank's.
    assert len(calls) == 2 * STEPS * (dist.get_world_size() + 1)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradient_checkpointing(ranks: RankPool, reentrant: bool | None) -> None:
    options = {} if reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    ranks.run(2, _checkpointing, options)


def _experts_without_tokens(name: str) -> tuple[int, int]:
    """Numbers of experts without a gradient on this rank, and on all ranks."""
    model, units = build(name)
    experts = [p for n, p in model.named_parameters() if "experts" in n]
    language_loss(model, batches()[0, dist.get_rank()]).backward()
    here = _missing([p.grad for p in experts])
    model.zero_grad()
    sharded = fully_shard_model(model, fsdp_unit_modules=units)
    language_loss(sharded, batches()[0, dist.get_rank()]).backward()
    params = [e for e in sharded.engine.params() if "experts" in e.name]
    return here, _missing([None if e.main.grad is None else whole(e, e.main.grad) for e in params])


def _missing(grads: list[torch.Tensor | None]) -> int:
    """Count missing gradients and, in gradients of several experts, [experts, ...], experts whose gradient is zero."""
    return sum(1 if g is None else int((g.flatten(1) == 0).all(1).sum()) if g.dim() == 3 else 0 for g in grads)


@pytest.mark.parametrize("name", ["qwen3-moe", "switch"])
def test_experts_without_tokens(ranks: RankPool, name: str) -> None:
    # The models of test_model have experts without tokens on any rank, and experts with tokens on one rank only.
    replies = ranks.run(2, _experts_without_tokens, name)
    for here, anywhere in replies:
        assert here > anywhere > 0
