"""Parameter names: the indices and halves in them, and the other names that a parameter goes by."""

import re
from dataclasses import dataclass
from typing import NamedTuple

_HALF = re.compile(r"((?:weight|bias)\d*)_[wv]$")
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)|(?<=weight)\d+$|(?<=bias)\d+$")
_NAME = re.compile(
    r"(?:(?P<block>(?:.*\.)?layers\.)(?:(?P<layer>\d+)\.)?)?"
    r"(?:(?P<experts>(?:.*?\.)?experts\.)(?:"
    r"(?P<style>local_experts|experts)\.(?:(?P<expert>\d+)\.)?(?P<listed>.+)"
    r"|(?P<grouped>.+\.(?:weight|bias))(?P<last>\d+)"
    r")|(?P<rest>.*))"
)

# How names count experts: one module each (``local_experts.5.linear_fc1.weight``), as torch_dist stores them
# (``experts.5.linear_fc1.weight``), or as parameters of one grouped module (``linear_fc1.weight5``).
LOCAL, STORED, GROUPED = "local_experts", "experts", ""


def without_half(name: str) -> str:
    """The parameter that a tensor belongs to: the two halves of a gated layer (``_w``, ``_v``) are one parameter."""
    return _HALF.sub(r"\1", name)


def without_indices(name: str) -> str:
    """The name with ``{}`` for each index of a layer or an expert."""
    return _INDEX.sub("{}", name)


@dataclass(frozen=True)
class Name:
    """A name taken apart; ``str`` puts it together again.

    ``decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight_w`` has the block ``decoder.layers.``, the layer
    ``3``, the experts ``mlp.experts.`` of style :data:`LOCAL`, the expert ``5``, the rest ``linear_fc1.weight`` and the
    half ``_w``.

    Attributes:
        block: Everything before the layer's index, with the dot. Empty outside of layers.
        layer: The layer's index. Empty where one tensor stores all layers of the block.
        experts: The path from the layer to the module of its experts, with the dot. Empty for other parameters.
        style: How the name counts experts: :data:`LOCAL`, :data:`STORED` or :data:`GROUPED`.
        expert: The expert's index. Empty where one tensor stores all experts of the layer.
        rest: What remains, without the half.
        half: ``_w`` or ``_v`` for the two halves of a gated layer, else empty.
    """

    block: str
    layer: str
    experts: str
    style: str
    expert: str
    rest: str
    half: str

    @staticmethod
    def parse(text: str) -> "Name":
        """Take a name apart. Every text is a name."""
        whole = without_half(text)
        found = _NAME.fullmatch(whole)
        assert found is not None
        part = found.groupdict(default="")
        part["expert"] += part.pop("last")
        part["rest"] += part.pop("listed") + part.pop("grouped")
        return Name(**part, half=text.removeprefix(whole))

    def __str__(self) -> str:
        expert = f"{self.expert}." if self.expert else ""
        inside = f"{self.style}.{expert}{self.rest}" if self.style else f"{self.rest}{self.expert}"
        return f"{self.beginning}{self.experts}{inside}{self.half}"

    @property
    def beginning(self) -> str:
        """The beginning that all names of the layer share: ``decoder.layers.3.``."""
        return f"{self.block}{self.layer}." if self.layer else self.block

    @property
    def is_stackable(self) -> bool:
        """Whether torch_dist may store the tensor together with those of other layers."""
        return bool(self.layer) and "mtp." not in self.block


class Alias(NamedTuple):
    """Two spellings of one module or parameter: implementations of a layer, or versions of Megatron-Core, differ.

    Attributes:
        stored: The part of the name that checkpoints have.
        live: The same part in the model.
    """

    stored: str
    live: str

    def to_stored(self, name: str) -> str:
        """The name with the stored spelling; other names stay."""
        return name.replace(f".{self.live}", f".{self.stored}")

    def to_live(self, name: str) -> str:
        """The name with the model's spelling; other names stay."""
        return name.replace(f".{self.stored}", f".{self.live}")


# The fused down projection of multi-latent attention, and the projections that it is stored as.
FUSED_DOWN, DOWN = "linear_qkv_down_proj", ("linear_q_down_proj", "linear_kv_down_proj")
DOWN_PROJECTIONS = tuple(Alias(f"{down}.", f"{FUSED_DOWN}.") for down in DOWN)
# A layer's norms: modules of Megatron's own layers, parameters of Transformer Engine's linear layers.
NORMS = (
    Alias("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    Alias("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
# Further norms for which this holds. torch_dist checkpoints have the names in the model for them.
OTHER_NORMS = (
    Alias("q_layernorm.", "linear_q_up_proj.layer_norm_"),
    Alias("kv_layernorm.", "linear_kv_up_proj.layer_norm_"),
    Alias("input_layernorm.", "self_attention.in_proj.layer_norm_"),
    Alias("norm.", "mixer.in_proj.layer_norm_"),
)
# The first norm of a layer whose attention fuses its down projections.
DOWN_NORM = Alias("input_layernorm.", f"self_attention.{FUSED_DOWN}.layer_norm_")
# The layer that predicts a further token, before megatron-core 0.19 and since.
PREDICTION = Alias("transformer_layer.", "mtp_model_layer.")
# Two weights that are one parameter if a model ties them.
TIED_OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"

# A hybrid model's prediction layer holds layers of its own, and has one name everywhere.
_LIVE_PREDICTION = re.compile(r"^(mtp\.layers\.\d+)\.mtp_model_layer\.(?!layers\.)")
_STORED_PREDICTION = re.compile(r"^(mtp\.layers\.\d+)\.transformer_layer\.")


def stored_prediction_name(name: str) -> str:
    """The canonical name of a parameter of a prediction layer; other names stay."""
    return _LIVE_PREDICTION.sub(rf"\1.{PREDICTION.stored}", name)


def live_prediction_name(name: str) -> str:
    """The name of a parameter of a prediction layer in the model; other names stay."""
    return _STORED_PREDICTION.sub(rf"\1.{PREDICTION.live}", name)


def stored_names(name: str) -> tuple[str, ...]:
    """Canonical names of the tensors that store a parameter.

    Multi-latent attention's fused down projection is stored as two, and the norm in it as a module of the layer.

    Args:
        name: The parameter's name in the model.
    """
    name = DOWN_NORM.to_stored(stored_prediction_name(name))
    return tuple(dict.fromkeys(alias.to_stored(name) for alias in DOWN_PROJECTIONS))


def live_names(name: str, fused: bool) -> tuple[str, ...]:
    """The names that a parameter may have in a model, and in its optimizer's groups: the inverse of `stored_names`.

    Args:
        name: The canonical name.
        fused: The model has a fused down projection, which holds the layer's first norm.
    """
    names = dict.fromkeys((name, live_prediction_name(name)))
    if fused:
        for alias in (*DOWN_PROJECTIONS, DOWN_NORM):
            names |= dict.fromkeys(alias.to_live(own) for own in tuple(names))
    return tuple(names)
