"""Generates text with a trained demo model: loads an ``fsdp_dtensor`` checkpoint into a plain Megatron GPT.

Runs in one process, on the CPU or one CUDA device, however many ranks trained the model. This shows that a sharded
checkpoint is an ordinary one: torch.distributed.checkpoint assembles the shards, without any FSDP object.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from files import iteration_folder, latest_iteration
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedTokenizerFast

MODEL_PREFIX = "model.module."
# The gate and up halves of a SwiGLU projection are saved as separate tensors, so that they can be resharded.
GATE_SUFFIX, UP_SUFFIX = "_w", "_v"
# Transformer Engine fuses a norm into the following linear layer; Megatron's own layers have a separate module.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


class Checkpoint(NamedTuple):
    """Contents of a checkpoint: the training arguments, the iteration and the fp32 weights by name."""

    arguments: SimpleNamespace
    iteration: int
    weights: dict[str, Tensor]


def read_checkpoint(checkpoints: Path) -> Checkpoint:
    """Reads the newest checkpoint's weights, unsharded, and its arguments, but not the optimizer state.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    iteration = latest_iteration(checkpoints)
    if not iteration:
        raise FileNotFoundError(f"no checkpoint in {checkpoints}: expected latest_checkpointed_iteration.txt")
    reader = dcp.FileSystemReader(iteration_folder(checkpoints, iteration))
    saved = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if name.startswith(MODEL_PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    state["args"] = None
    dcp.load(state, storage_reader=reader, no_dist=True)
    arguments = SimpleNamespace(**vars(state.pop("args")))
    weights = {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in state.items()}
    return Checkpoint(arguments, iteration, model_names(weights))


def model_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames checkpoint tensors to the parameters of Megatron's own layers, and concatenates SwiGLU halves."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith(UP_SUFFIX):
            continue
        if name.endswith(GATE_SUFFIX):
            base = name.removesuffix(GATE_SUFFIX)
            renamed[base] = torch.cat([tensor, weights[base + UP_SUFFIX]])
            continue
        for fused, separate in FUSED_NORMS.items():
            name = name.replace(fused, separate)
        renamed[name] = tensor
    return renamed


@contextmanager
def one_process_group() -> Iterator[None]:
    """Context with the process groups that Megatron's layers require even in one process. They use no network."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(os.path.join(folder, "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def build_model(arguments: SimpleNamespace, vocab_size: int) -> nn.Module:
    """Builds a GPT of Megatron's own layers from the training arguments, in fp32 on the CPU."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        ffn_hidden_size=arguments.ffn_hidden_size,
        num_attention_heads=arguments.num_attention_heads,
        num_query_groups=arguments.num_query_groups if arguments.group_query_attention else None,
        normalization=arguments.normalization,
        layernorm_epsilon=arguments.layernorm_epsilon,
        gated_linear_unit=arguments.swiglu,
        activation_func=nn.functional.silu if arguments.swiglu else nn.functional.gelu,
        add_bias_linear=arguments.add_bias_linear,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=arguments.normalization),
        vocab_size=vocab_size,
        max_sequence_length=arguments.seq_length,
        position_embedding_type=arguments.position_embedding_type,
        rotary_base=arguments.rotary_base,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
    )


def load_model(checkpoint: Checkpoint, device: torch.device) -> nn.Module:
    """Builds the model with the checkpoint's weights, for evaluation. Missing or unexpected weights are an error."""
    vocab_size = checkpoint.weights["embedding.word_embeddings.weight"].shape[0]
    model = build_model(checkpoint.arguments, vocab_size)
    result = model.load_state_dict(checkpoint.weights, strict=False)
    missing = [name for name in result.missing_keys if not name.endswith("_extra_state")]
    if missing or result.unexpected_keys:
        raise ValueError(f"checkpoint and model differ: missing {missing}, unexpected {result.unexpected_keys}")
    return model.eval().to(device)


def next_token_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits of the next token, ``(vocabulary,)``, after ``tokens`` of shape ``(length,)``."""
    length = len(tokens)
    positions = torch.arange(length, device=tokens.device)[None]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    return model(tokens[None], positions, mask)[0, -1].float()


@torch.inference_mode()
def sample(
    model: nn.Module, tokens: Tensor, count: int, context: int, top_k: int, temperature: float, end: int, seed: int
) -> Tensor:
    """Continues ``tokens`` by up to ``count`` tokens, stopping at ``end``. ``top_k=1`` is greedy."""
    generator = torch.Generator(device=tokens.device).manual_seed(seed)
    for _ in range(count):
        best = next_token_logits(model, tokens[-context:]).topk(top_k)
        choice = torch.multinomial((best.values / temperature).softmax(0), 1, generator=generator)
        token = best.indices[choice]
        if token.item() == end:
            break
        tokens = torch.cat([tokens, token])
    return tokens


def generate(arguments: argparse.Namespace) -> str:
    """Loads the newest checkpoint and returns the prompt with its continuation."""
    if not torch.cuda.is_available():
        from megatron.fsdp.mcore import cpu

        cpu.enable()  # before the first import of megatron.core
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.tokenizer)
    checkpoint = read_checkpoint(arguments.checkpoints)
    prompt = torch.tensor(tokenizer.encode(arguments.prompt, add_special_tokens=False), device=device)
    with one_process_group():
        model = load_model(checkpoint, device)
        tokens = sample(
            model,
            prompt,
            count=arguments.tokens,
            context=checkpoint.arguments.seq_length,
            top_k=arguments.top_k,
            temperature=arguments.temperature,
            end=tokenizer.eos_token_id,
            seed=arguments.seed,
        )
    return tokenizer.decode(tokens.tolist())


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checkpoints", type=Path, default=Path("demo_output/checkpoints"), help="training's --save")
    parser.add_argument("--tokenizer", type=Path, default=Path("demo_output/data/tokenizer"))
    parser.add_argument("--prompt", default="def __init__(self")
    parser.add_argument("--tokens", type=int, default=120, help="largest number of tokens to generate")
    parser.add_argument("--top-k", type=int, default=20, help="choose among the k most likely tokens; 1 is greedy")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Command line: prints the text."""
    print(generate(parse_arguments()))


if __name__ == "__main__":
    main()
