"""What a model is, in words of its own, into which Hugging Face's configuration and Megatron's arguments are put."""

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Sizes of the whole model.

    Attributes:
        layers: Number of layers of the decoder.
        hidden: Size of the residual stream.
        ffn: Size inside a dense MLP.
        vocabulary: Number of tokens, without padding.
        positions: The longest sequence that it is made for, in tokens.
    """

    layers: int
    hidden: int
    ffn: int
    vocabulary: int
    positions: int


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-latent attention.

    Attributes:
        query_rank: Of the compressed queries; None if queries are projected at once.
        key_value_rank: Of the compressed keys and values.
        plain: Of the part of a query or key head that knows no position.
        rotary: Of the part that does.
        value: Of a head of values.
    """

    query_rank: int | None
    key_value_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True)
class Attention:
    """Attention of every layer.

    Attributes:
        heads: Heads of queries.
        groups: Heads of keys and values.
        head_size: Of one head; of queries and keys if ``latent`` is set.
        bias: All linear layers, of attention and of dense MLPs, have biases.
        norm: Queries and keys are normalized per head.
        latent: Set for multi-latent attention, in which case ``groups`` is ``heads``.
    """

    heads: int
    groups: int
    head_size: int
    bias: bool = False
    norm: bool = False
    latent: Latent | None = None


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings; non-interleaved halves, except in multi-latent attention.

    Attributes:
        base: Of the frequencies.
        kind: ``default``, ``llama3`` or ``yarn``.
        factor: How many times longer than ``original`` sequences may be.
        original: Length of sequences before that, in tokens.
        beta_fast: Of ``yarn``: rotations within ``original`` above which a frequency stays.
        beta_slow: Of ``yarn``: rotations below which a frequency is divided by ``factor``.
        mscale: Of ``yarn``: weight of the logarithm of ``factor`` in the size of rotated queries and keys.
        mscale_all: Of ``yarn``: the same for the scale of all attention scores, by which the former is divided.
    """

    base: float
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all: float = 0.0


@dataclass(frozen=True)
class Router:
    """How tokens find their experts.

    Attributes:
        chosen: Experts per token.
        score: ``softmax`` or ``sigmoid``.
        normalized: Weights of the chosen experts sum to one before scaling.
        scale: What they are multiplied with.
        groups: Experts are chosen from ``chosen_groups`` out of as many groups; 1 if there are none.
        chosen_groups: See ``groups``.
    """

    chosen: int
    score: str = "softmax"
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1


@dataclass(frozen=True)
class Experts:
    """Mixture of experts.

    Attributes:
        count: Experts of a layer.
        ffn: Size inside one.
        shared_ffn: Size inside the expert that sees all tokens; 0 without one.
        layers: For every layer of the decoder, whether it has experts in place of a dense MLP.
        router: How tokens find them.
    """

    count: int
    ffn: int
    shared_ffn: int
    layers: tuple[bool, ...]
    router: Router


@dataclass(frozen=True)
class Model:
    """A decoder-only language model: RMSNorm before every block, gated SiLU MLPs, rotary positions.

    Attributes:
        architecture: Hugging Face's ``model_type``.
        sizes: Of the whole.
        attention: Of every layer.
        rope: Positions.
        experts: None if all MLPs are dense.
        epsilon: Of all norms.
        tied: The output layer is the embedding.
        mtp_layers: Additional layers that predict further tokens.
    """

    architecture: str
    sizes: Sizes
    attention: Attention
    rope: Rope
    experts: Experts | None
    epsilon: float
    tied: bool
    mtp_layers: int = 0

    def has_experts(self, layer: int) -> bool:
        """Whether a layer of the decoder has experts. Layers for further tokens are like the last one."""
        return self.experts is not None and self.experts.layers[min(layer, self.sizes.layers - 1)]

    @property
    def features(self) -> frozenset[str]:
        """What decides which tensors there are, by the words that the tables of names use."""
        latent, attention = self.attention.latent, self.attention
        present = {
            "output": not self.tied,
            "bias": attention.bias,
            "norm": attention.norm,
            "query rank": latent is not None and latent.query_rank is not None,
            "no query rank": latent is not None and latent.query_rank is None,
            "shared expert": self.experts is not None and self.experts.shared_ffn > 0,
        }
        return frozenset(word for word, is_present in present.items() if is_present)


def differences(first: Model, second: Model) -> list[str]:
    """Where two models differ in what their tensors compute, one line each: ``name: value, value``."""
    lines: list[str] = []
    _compare("", dataclasses.asdict(first), dataclasses.asdict(second), lines)
    return lines


def _compare(name: str, first: Any, second: Any, lines: list[str]) -> None:
    if isinstance(first, dict) and isinstance(second, dict):
        for key in first:
            _compare(f"{name}.{key}" if name else key, first[key], second[key], lines)
    elif first != second:
        lines.append(f"{name}: {first}, {second}")
