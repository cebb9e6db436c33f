"""Estimates the memory of activations of a Megatron transformer from its settings.

It follows Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), and
adds flash attention, grouped queries, multi-latent attention, gated and expert layers. Activations have 2 bytes.
docs/guide/doctor.md has the formulas. They have not been compared with a GPU.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Workload:
    """The inputs of the estimate of one pipeline stage's activations.

    Attributes:
        config: Megatron's ``TransformerConfig``.
        micro_batch: Sequences per micro-batch.
        sequence: Tokens per sequence.
        vocabulary: Padded size of the vocabulary; 0 on stages without an output layer.
        dense: Dense layers of this stage.
        experts: Layers of this stage with experts.
        scores: Attention keeps the matrix of scores, because it is not fused.
        stage: Number of the pipeline stage.
        stages: Number of pipeline stages.
        chunks: Model chunks per stage.
        micro_batches: Micro-batches per step.
        recompute: ``recompute_granularity``, which replaces the config's.
        modules: ``recompute_modules``, which replaces the config's.
        sequence_parallel: Replaces the config's.
    """

    config: Any
    micro_batch: int
    sequence: int
    vocabulary: int
    dense: int
    experts: int
    scores: bool
    stage: int
    stages: int
    chunks: int
    micro_batches: int
    recompute: str | None
    modules: frozenset[str]
    sequence_parallel: bool

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on this rank."""
        return self.micro_batch * self.sequence / self.config.context_parallel_size

    @property
    def divided_tokens(self) -> float:
        """Tokens that this rank keeps of tensors that only sequence parallelism divides."""
        return self.tokens / (self.config.tensor_model_parallel_size if self.sequence_parallel else 1)

    @property
    def in_flight(self) -> float:
        """Micro-batches of the whole stage whose activations are kept at the same time, with a 1F1B schedule."""
        if self.chunks == 1:
            return min(self.stages - self.stage, self.micro_batches)
        started = (self.stages - self.stage - 1) * 2 + (self.chunks - 1) * self.stages + 1
        return min(started, self.micro_batches * self.chunks) / self.chunks


# Modules that --recompute-modules accepts here, and the parts of a layer that they drop.
_PARTS = {
    "core_attn": ("scores",),
    "layernorm": ("norms",),
    "mla_up_proj": ("queries",),
    "mlp": ("mlp",),
    "moe": ("moe", "shared"),
    "shared_experts": ("shared",),
    "moe_act": ("moe_act",),
}


def workload(modules: list[nn.Module], config: Any, args: Any, fused: bool, stage: int) -> Workload | None:
    """The workload of a pipeline stage; None for layers other than transformer layers.

    Args:
        modules: Its model chunks.
        config: Megatron's ``TransformerConfig``.
        args: Megatron's validated command line.
        fused: Attention is fused (flash attention), as with Transformer Engine.
        stage: Number of the stage.
    """
    from megatron.core.ssm.mamba_layer import MambaLayer
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    inside = [module for chunk in modules for module in chunk.modules()]
    layers = [module for module in inside if isinstance(module, TransformerLayer)]
    if not layers or any(isinstance(module, MambaLayer) for module in inside):
        return None
    experts = sum(isinstance(layer.mlp, MoELayer) for layer in layers)
    ranks = args.data_parallel_size * args.micro_batch_size
    return Workload(
        config=config,
        micro_batch=args.micro_batch_size,
        sequence=args.seq_length,
        vocabulary=args.padded_vocab_size if any(getattr(m, "post_process", False) for m in inside) else 0,
        dense=len(layers) - experts,
        experts=experts,
        scores=not fused,
        stage=stage,
        stages=config.pipeline_model_parallel_size,
        chunks=len(modules),
        micro_batches=max((args.global_batch_size or ranks) // ranks, 1),
        recompute=config.recompute_granularity,
        modules=frozenset(config.recompute_modules or ()),
        sequence_parallel=config.sequence_parallel,
    )


def layer_parts(w: Workload, experts: bool) -> dict[str, float]:
    """Bytes that one layer keeps of one micro-batch for backward without recomputation, by part."""
    c, tp = w.config, w.config.tensor_model_parallel_size
    whole, part = w.divided_tokens, w.tokens / tp
    heads, hidden = c.num_attention_heads, c.hidden_size
    parts = {
        "input": 2 * hidden * whole,
        "norms": 4 * hidden * whole,  # the outputs of both
        "between": 2 * hidden * whole,  # the input of the second
        "masks": (2 * hidden * whole) if c.hidden_dropout else 0.0,
        "scores": 5 * heads * w.sequence * part if w.scores else 0.0,
    }
    if c.multi_latent_attention:
        queries, values = c.qk_head_dim + c.qk_pos_emb_head_dim, c.v_head_dim
        latent = 2 * (c.q_lora_rank or 0) + 2 * c.kv_lora_rank + c.qk_pos_emb_head_dim
        parts["latent"] = 2 * latent * whole
        parts["queries"] = 2 * heads * (2 * queries + values) * part
    else:
        values, groups = c.kv_channels, c.num_query_groups or heads
        parts["queries"] = 2 * values * (heads + 2 * groups) * part
    # Its output, and where scores are not kept, a sum of each row of them.
    parts["attention"] = heads * (2 * values + (0 if w.scores else 4)) * part
    # The first matrix's output, which is twice as wide if gated, and its activation.
    wide = 3 if c.gated_linear_unit else 2
    if not experts:
        return {**parts, "mlp": 2 * wide * c.ffn_hidden_size * part}
    routed = whole * c.moe_router_topk
    width = c.moe_ffn_hidden_size or c.ffn_hidden_size
    tokens = routed * (c.expert_tensor_parallel_size or 1)
    parts["moe"] = 2 * hidden * (tokens + routed) + 2 * (wide - 1) * width * routed + 8 * c.num_moe_experts * whole
    parts["moe_act"] = 2 * width * routed
    parts["shared"] = 2 * wide * (c.moe_shared_expert_intermediate_size or 0) * part
    return parts


def layer_bytes(w: Workload, experts: bool) -> tuple[float, float]:
    """Bytes that a layer keeps of a micro-batch, and those that recomputation adds while it runs backward."""
    parts = layer_parts(w, experts)
    whole = sum(parts.values())
    if w.recompute == "full":
        return parts["input"], whole - parts["input"]
    if w.recompute != "selective":
        return whole, 0.0
    dropped = {name for module in w.modules for name in _PARTS.get(module, ()) if name in parts}
    if "moe" in w.modules:
        dropped |= {"moe_act"} & parts.keys()
    return whole - sum(parts[name] for name in dropped), sum(parts[name] for name in dropped)


def activation_bytes(w: Workload) -> int:
    """Bytes of activations of a pipeline stage at the peak of a step."""
    present = {experts: count for experts, count in ((False, w.dense), (True, w.experts)) if count}
    kinds = [(count, *layer_bytes(w, experts)) for experts, count in present.items()]
    kept = sum(count * stays for count, stays, _ in kinds)
    again = max(extra for _, _, extra in kinds)
    # The gradients of a layer's widest tensors exist at the same time, in backward.
    gradients = max(max(layer_parts(w, experts).values()) for experts in present)
    if w.recompute == "full":
        kept, again = _with_full_recomputation(w, kinds)
    # Logits in 2 bytes, and in 4 for the loss. Each further predicted token keeps its own 4.
    further = w.config.mtp_num_layers or 0
    logits = (6 + 4 * further) * w.vocabulary * w.tokens / w.config.tensor_model_parallel_size
    return math.ceil(w.in_flight * kept + again + max(gradients, logits))


def _with_full_recomputation(w: Workload, kinds: list[tuple[int, float, float]]) -> tuple[float, float]:
    """Bytes that a stage keeps of a micro-batch, and those that recomputation adds, for ``--recompute-method``."""
    together = w.config.recompute_num_layers or 1
    layers, (stays, extra) = sum(count for count, _, _ in kinds), max((stays, extra) for _, stays, extra in kinds)
    if w.config.recompute_method == "block":
        kept_whole = max(layers // w.chunks - together, 0) * w.chunks
        return layers * stays + kept_whole * extra, extra
    return math.ceil(layers / together) * stays, together * (stays + extra) - stays
