"""Replacements of methods of PyTorch and of functions of Megatron-Core that need a GPU.

Each takes the original function first, then the caller's arguments. The tables that use them are in ``changes``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from megatron.fsdp.mcore.cpu.torch_view import called_from

PACKAGES = ("megatron.core", "megatron.training", "megatron.bridge")
# A training script moves its batches to the GPU.
SCRIPT = "__main__"


# Methods of PyTorch, for calls from Megatron's modules --------------------------------------------------------------


def stay(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the object itself instead of moving it to a GPU or to pinned memory."""
    return self if called_from((*PACKAGES, SCRIPT)) else original(self, *args, **kwargs)


def record_no_stream(original: Callable[..., Any], self: torch.Tensor, stream: Any) -> None:
    """Do nothing: work on the CPU is finished when the call returns."""
    if not called_from(PACKAGES):
        original(self, stream)


def cuda_type(original: Callable[..., Any], self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Name the type that the tensor would have on a GPU. Conversions to other types are the original's."""
    if args or kwargs or not called_from(PACKAGES):
        return original(self, *args, **kwargs)
    return original(self).replace("torch.", "torch.cuda.", 1)


# Functions of Megatron ----------------------------------------------------------------------------------------------


def recompute_unquantized(original: Callable[..., None], self: Any, fp8: Any = None) -> None:
    """Recompute without Transformer Engine's FP8 state. Megatron takes its own default, False, for a format."""
    original(self, None)


def storage_copier() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return the function that gives an output, whose memory was freed, its recomputed values."""

    def copy_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
        source = recomputed.untyped_storage()
        # On a storage, no version is counted: autograd has saved the output and its views.
        output.untyped_storage().resize_(source.nbytes())
        output.untyped_storage().copy_(source)

    return copy_storage


def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert a tensor to NumPy if asked to; it is on the CPU already."""
    return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """An RMS norm that multiplies by 1 + weight."""

    def reset_parameters(self) -> None:
        """Set the weight to 0."""
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize over the last dimension."""
        return functional.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


class ZeroCenteredLayerNorm(torch.nn.LayerNorm):
    """A layer norm that multiplies by 1 + weight."""

    def reset_parameters(self) -> None:
        """Set the weight and the bias to 0."""
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize over the last dimension."""
        return functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


ZERO_CENTERED = {torch.nn.RMSNorm: ZeroCenteredRMSNorm, torch.nn.LayerNorm: ZeroCenteredLayerNorm}


def reduce_over_several(original: Callable[..., Any], input_: torch.Tensor, group: Any = None) -> Any:
    """Sum a tensor over tensor-parallel ranks, or return the tensor itself if there is one rank."""
    from megatron.core.utils import get_tensor_model_parallel_group_if_none

    group = get_tensor_model_parallel_group_if_none(group)
    return input_ if group.size() == 1 else original(input_, group)


def new_norm(original: Callable[..., torch.nn.Module], cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Build a norm, and mark its parameters: tensor-parallel ranks have to sum their gradients."""
    accepted = copy.copy(config)
    accepted.sequence_parallel = accepted.layernorm_zero_centered_gamma = False
    norm: Any = original(cls, accepted, *args, **kwargs)
    if config.layernorm_zero_centered_gamma:
        norm.__class__ = ZERO_CENTERED[type(norm)]
        norm.reset_parameters()
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


# State of Megatron's distributed optimizer --------------------------------------------------------------------------


def state_dict_at_any_step(original: Callable[[Any], Any], self: Any) -> Any:
    """Return the optimizer's state dict, also before the first step, when PyTorch's Adam has no state."""
    if self.optimizer.state:
        return original(self)
    _complete_state(self.optimizer)
    try:
        return original(self)
    finally:
        # Loading allocates the state itself, but only if it finds none.
        self.optimizer.state.clear()


def load_separate_steps(original: Callable[[Any, Any], None], self: Any, state_dict: Any) -> None:
    """Load optimizer state, and give every parameter its own step count, which PyTorch's Adam increments in place."""
    original(self, state_dict)
    for state in self.optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()


@torch.no_grad()
def set_states_without_step(
    original: Callable[..., None], self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]
) -> None:
    """Set a parameter's optimizer state, and keep the step count that ``load_state_dict`` has set."""
    original(self, model_param, {**tensors, "step": None})  # a value that is not a tensor is skipped


def complete_sharded_state(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return sharded optimizer state that has the same parameters on all ranks."""
    _complete_state(self.optimizer)
    return original(self, *args, **kwargs)


def _complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters without Adam state the state that they have before their first gradient."""
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return
    step = next((state["step"] for state in optimizer.state.values()), torch.zeros(()))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter):
                zeros = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": step.clone(), **zeros}
