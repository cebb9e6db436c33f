"""The contents of a training checkpoint, whatever its format: every conversion goes through this view."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.fsdp.checkpoint.lazy import LazyTensor
from megatron.fsdp.naming.names import without_half

# By model key or parameter name.
Tensors = dict[str, LazyTensor]
# The key of the state of fp16's gradient scaler.
SCALER = "grad_scaler"

_BUFFER = re.compile(r"\.(?:router\.(?!weight$|bias$)\w+|running_mean|running_var|num_batches_tracked|inv_freq)$")


def transposed(nested: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """The same tensors with the inner key first: by name and kind of state, or by kind and name."""
    result: dict[str, Tensors] = {}
    for outer, inner in nested.items():
        for key, tensor in inner.items():
            result.setdefault(key, {})[outer] = tensor
    return result


def is_buffer(name: str) -> bool:
    """Whether a tensor of the model is a buffer, by its name: a router's ``expert_bias``, running statistics."""
    return _BUFFER.search(name) is not None


@dataclass(frozen=True)
class TrainingState:
    """A checkpoint by canonical names. Tensors are read when they are needed.

    A canonical name is the parameter's name in the model, without the prefixes of wrappers, with global indices of
    layers and experts: ``decoder.layers.0.self_attention.linear_qkv.weight``. The first layer of a gated MLP is
    two tensors, gate and up: ``decoder.layers.0.mlp.linear_fc1.weight_w`` and ``_v``, or, in a grouped expert,
    ``decoder.layers.1.mlp.experts.linear_fc1.weight3_w``. Shapes are those without any parallelism.

    Attributes:
        weights: The float32 main weights where the checkpoint has them, else the model's weights, by name.
        common: ``args`` (a namespace), ``iteration``, ``checkpoint_version``, ``opt_param_scheduler``,
            ``num_floating_point_operations_so_far``, ``content_metadata``, ``grad_scaler`` (numbers), and
            ``rng_state``, a dict of lists by (pipeline rank, tensor rank). Entries that the checkpoint lacks are
            missing.
        buffers: Tensors of the model that are not parameters, such as ``router.expert_bias``.
        optimizer_state: For each name of ``weights`` its states, ``exp_avg`` and so on, of the weight's shape. Empty
            if the checkpoint has none.
        group_of: The settings of each parameter's optimizer group (``lr``, ``step``, ``weight_decay`` ...), by name
            without halves. Empty if ``optimizer_state`` is.
        model_dtypes: The dtype that the model computes a weight in, for those where it is not ``compute_dtype``.
        torch_dist: Plain data that only a conversion back to ``torch_dist`` needs; empty if there is none.
        fsdp_dtensor: Objects that only a conversion back to ``fsdp_dtensor`` needs, pickled, with their paths, by key.
        source: Identifies the files that are read: another conversion's unfinished files are not reused.

    Raises:
        ValueError: A state does not belong to a weight or has a different shape, or a parameter has no group.
    """

    weights: Tensors
    common: dict[str, Any] = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    optimizer_state: dict[str, Tensors] = field(default_factory=dict)
    group_of: dict[str, dict[str, Any]] = field(default_factory=dict)
    model_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    torch_dist: dict[str, Any] = field(default_factory=dict)
    fsdp_dtensor: dict[str, tuple[tuple[Any, ...], bytes]] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        for name, states in self.optimizer_state.items():
            if name not in self.weights:
                raise ValueError(f"TrainingState: optimizer state of {name}, which the checkpoint has no weight of.")
            for kind, tensor in states.items():
                if tensor.shape != self.weights[name].shape:
                    raise ValueError(
                        f"TrainingState: expected {kind} of {name} to have the weight's shape "
                        f"{self.weights[name].shape}; got {tensor.shape}."
                    )
            if without_half(name) not in self.group_of:
                raise ValueError(f"TrainingState: {without_half(name)} has optimizer state but belongs to no group.")

    @property
    def args(self) -> argparse.Namespace:
        """The training arguments; an empty namespace if the checkpoint has none."""
        return self.common.get("args") or argparse.Namespace()

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that the model computes in, by the training arguments; float32 if they do not say."""
        return compute_dtype(self.args)

    def model_dtype(self, name: str) -> torch.dtype:
        """The dtype that the model computes one weight in; a tensor of integers, such as a buffer, keeps its own."""
        stored = self.weights[name].dtype
        return self.model_dtypes.get(name, self.compute_dtype) if stored.is_floating_point else stored


def compute_dtype(args: argparse.Namespace) -> torch.dtype:
    """The dtype of compute weights by the training arguments ``params_dtype``, ``bf16`` and ``fp16``; else float32."""
    dtype = getattr(args, "params_dtype", None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    if getattr(args, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(args, "fp16", False) else torch.float32
