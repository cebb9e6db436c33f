"""The order in which Megatron's models register parameters. Gradient buffers store them in reverse order."""

from typing import NamedTuple

from megatron.fsdp.naming.names import LOCAL, Name

# Modules of a transformer layer, in order of registration. No layer has all of them.
_LAYER = (
    "input_layernorm",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.fc1_latent_proj",
    "mlp.fc2_latent_proj",
    "mlp.experts",
    "mlp.shared_experts",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_PREDICTION = ("enorm", "hnorm", "eh_proj", "transformer_layer", "final_layernorm")
_EMBEDDING = ("word_embeddings", "position_embeddings", "tokentype_embeddings")
# Parameters of one module. A shared expert's gate belongs to the module itself, so it precedes those of its layers.
_PARAMETERS = ("softmax_offset", "gate_weight", "layer_norm_weight", "layer_norm_bias", "weight", "bias")
_MLP = ("linear_fc1", "linear_fc2")


class Position(NamedTuple):
    """The position of a parameter in the model. Pipeline stages hold whole units."""

    unit: tuple[int, ...]
    inside: tuple[int, ...]


def place(name: str) -> Position:
    """The position of a parameter in a GPT model.

    Args:
        name: Its canonical name, without halves.

    Raises:
        NotImplementedError: The parameter belongs to no known module.
    """
    parts = name.split(".")
    try:
        if parts[0] == "embedding":
            return Position((0,), (_EMBEDDING.index(parts[1]), *_parameter(parts[2:])))
        if parts[:2] == ["decoder", "layers"]:
            return Position((1, int(parts[2])), _in_layer(".".join(parts[3:])))
        if parts[:2] == ["decoder", "final_layernorm"]:
            return Position((2,), _parameter(parts[2:]))
        if parts[:2] == ["mtp", "layers"]:
            return Position((3, int(parts[2])), _in_prediction(parts[3:]))
        if parts[0] == "output_layer":
            return Position((4,), _parameter(parts[1:]))
    except ValueError:
        pass
    raise NotImplementedError(
        f"{name}: optimizer state of the kind dp_reshardable has no names, and the position of this parameter "
        "in Megatron's buffers is unknown. Load the checkpoint with Megatron and save it with "
        "--dist-ckpt-optim-fully-reshardable."
    )


def _parameter(rest: list[str]) -> tuple[int, ...]:
    if len(rest) != 1:
        raise ValueError(rest)
    return (_PARAMETERS.index(rest[0]),)


def _in_prediction(parts: list[str]) -> tuple[int, ...]:
    module = _PREDICTION.index(parts[0])
    if parts[0] == "transformer_layer":
        return (module, *_in_layer(".".join(parts[1:])))
    return (module, *_parameter(parts[1:]))


def _in_layer(rest: str) -> tuple[int, ...]:
    for index, module in enumerate(_LAYER):
        if not rest.startswith(f"{module}."):
            continue
        if module == "mlp.experts":
            return (index, *_in_experts(Name.parse(rest)))
        inside = rest.removeprefix(f"{module}.")
        *path, parameter = inside.split(".")
        if module == "mlp.shared_experts":
            # The parameter of the module itself precedes those of its child modules.
            return (index, 1 + _MLP.index(path[0]) if path else 0, *_parameter([parameter]))
        if not path:
            return (index, *_parameter([parameter]))
    raise ValueError(rest)


def _in_experts(name: Name) -> tuple[int, ...]:
    linear, _, parameter = name.rest.partition(".")
    first, expert = _MLP.index(linear), int(name.expert)
    return (*((expert, first) if name.style == LOCAL else (first, expert)), *_parameter([parameter]))


def expert_index(name: str) -> int:
    """The index, in the whole layer, of the expert that a parameter belongs to.

    Raises:
        ValueError: The parameter belongs to no expert.
    """
    expert = Name.parse(name).expert
    if not expert:
        raise ValueError(f"expected the parameter of an expert; got {name}.")
    return int(expert)
