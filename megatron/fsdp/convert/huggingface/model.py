"""A description of a model that Hugging Face's configuration and Megatron's arguments are both converted to."""

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Sizes of the whole model.

    Attributes:
        layers: Number of decoder layers.
        hidden: Hidden size.
        ffn: Intermediate size of a dense MLP.
        vocabulary: Number of tokens, without padding.
        positions: Length of the longest supported sequence, in tokens.
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
        query_rank: Rank of the compressed queries; None if queries are not compressed.
        key_value_rank: Rank of the compressed keys and values.
        plain: Size of the part of a query or key head without position embedding.
        rotary: Size of the part with rotary position embedding.
        value: Size of a value head.
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
        heads: Number of query heads.
        groups: Number of key and value heads.
        head_size: Size of a head; with ``latent``, size of a query or key head.
        bias: Whether all linear layers, of attention and of dense MLPs, have biases.
        norm: Whether queries and keys are normalized per head.
        latent: Set for multi-latent attention, where ``groups`` equals ``heads``.
    """

    heads: int
    groups: int
    head_size: int
    bias: bool = False
    norm: bool = False
    latent: Latent | None = None


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings: non-interleaved halves, or interleaved pairs with multi-latent attention.

    Attributes:
        base: Base of the frequencies.
        kind: ``default``, ``llama3`` or ``yarn``.
        factor: Ratio of the extended sequence length to ``original``.
        original: Sequence length before the extension, in tokens.
        beta_fast: For ``yarn``: frequencies with more rotations than this within ``original`` are kept.
        beta_slow: For ``yarn``: frequencies with fewer rotations than this are divided by ``factor``.
        mscale: For ``yarn``: weight of the logarithm of ``factor`` in the scale of rotated queries and keys.
        mscale_all: For ``yarn``: likewise for the scale of all attention scores, which divides the former.
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
    """How tokens are routed to experts.

    Attributes:
        chosen: Experts per token.
        score: Score function: ``softmax`` or ``sigmoid``.
        normalized: Whether the weights of the chosen experts sum to one before scaling.
        scale: Factor on the weights of the chosen experts.
        groups: Number of groups of experts; 1 without group-limited routing.
        chosen_groups: Number of groups that a token's experts are chosen from.
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
        count: Experts per layer.
        ffn: Intermediate size of an expert.
        shared_ffn: Intermediate size of the shared expert; 0 without one.
        layers: For every decoder layer, whether it has experts instead of a dense MLP.
        router: How tokens are routed to experts.
    """

    count: int
    ffn: int
    shared_ffn: int
    layers: tuple[bool, ...]
    router: Router


@dataclass(frozen=True)
class Model:
    """A decoder-only language model: RMSNorm before every block, gated SiLU MLPs, rotary position embeddings.

    Attributes:
        architecture: Hugging Face's ``model_type``.
        sizes: Sizes of the whole model.
        attention: Attention of every layer.
        rope: Rotary position embeddings.
        experts: None if all MLPs are dense.
        epsilon: Epsilon of all norms.
        tied: Whether the output layer shares the embedding's weight.
        mtp_layers: Number of multi-token prediction layers.
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
        """Whether a layer has experts. Multi-token prediction layers, which follow the decoder's, are like its last."""
        return self.experts is not None and self.experts.layers[min(layer, self.sizes.layers - 1)]

    @property
    def features(self) -> frozenset[str]:
        """Properties that decide which tensors exist, as the words in ``Entry.when`` of the name tables."""
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

    @property
    def dimensions(self) -> dict[str, int]:
        """Sizes of the dimensions of tensors, by the words in ``Entry.shape`` of the name tables."""
        sizes, attention = self.sizes, self.attention
        found = {
            "vocabulary": sizes.vocabulary,
            "hidden": sizes.hidden,
            "both": 2 * sizes.hidden,
            "ffn": sizes.ffn,
            "head": attention.head_size,
            "queries": attention.heads * attention.head_size,
            "keys": attention.groups * attention.head_size,
            "attended": attention.heads * attention.head_size,
        }
        if (latent := attention.latent) is not None:
            found |= {
                "attended": attention.heads * latent.value,
                "key_value_rank": latent.key_value_rank,
                "compressed": latent.key_value_rank + latent.rotary,
                "expanded": attention.heads * (latent.plain + latent.value),
                "query_rank": latent.query_rank or 0,
            }
        if (experts := self.experts) is not None:
            found |= {"experts": experts.count, "expert": experts.ffn, "shared": experts.shared_ffn}
        return found


def differences(first: Model, second: Model) -> list[str]:
    """List the settings in which two models differ, each as ``name: value, value``."""
    lines: list[str] = []
    _compare("", dataclasses.asdict(first), dataclasses.asdict(second), lines)
    return lines


def _compare(name: str, first: Any, second: Any, lines: list[str]) -> None:
    if isinstance(first, dict) and isinstance(second, dict):
        for key in first:
            _compare(f"{name}.{key}" if name else key, first[key], second[key], lines)
    elif first != second:
        lines.append(f"{name}: {first}, {second}")
