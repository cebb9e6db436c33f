"""The functions of torch that are replaced while sharded models exist, each with its reason.

They are the places where torch offers no hook. Each replacement does what torch does for everything that is not ours.
``remove()`` restores them all.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import state_dict as checkpoint_state_dict

from megatron.fsdp.dtensor.placements import part_of
from megatron.fsdp.dtensor.ragged_dtensor import RaggedDTensor


class Patch(NamedTuple):
    """One name of torch that is replaced.

    Attributes:
        owner: Module or class that has the name.
        name: The name.
        why: What torch does with it that would be wrong.
        replacement: Makes the new value from the old one.
    """

    owner: Any
    name: str
    why: str
    replacement: Callable[[Callable[..., Any]], Callable[..., Any]]


def _distributing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def distribute(local_state_dict: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            value = local_state_dict.get(key)
            if isinstance(value, tuple) and isinstance(value[0], RaggedDTensor):
                local, whole = value
                local._local_tensor.copy_(part_of(local._spec).of(whole))
                local_state_dict[key] = local
        original(local_state_dict, keys, *args, **kwargs)

    return distribute


_preparers: list[Callable[[torch.optim.Optimizer], bool]] = []
_attachers: list[Callable[[torch.optim.Optimizer], Any]] = []


def prepare_with(preparer: Callable[[torch.optim.Optimizer], bool]) -> None:
    """Have ``preparer`` called with every optimizer that ``torch.distributed.checkpoint.state_dict`` needs state of.

    It returns True if it has given the optimizer what torch would otherwise make by taking a step.
    """
    if preparer not in _preparers:
        _preparers.append(preparer)


def _initializing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize(optimizer: torch.optim.Optimizer) -> None:
        for attach in _attachers:
            attach(optimizer)
        if not any([prepare(optimizer) for prepare in _preparers]):
            original(optimizer)

    return initialize


def _preparing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepared(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        for attach in _attachers:
            attach(optimizer)
        return original(optimizer, *args, **kwargs)

    return prepared


def attach_with(attacher: Callable[[torch.optim.Optimizer], Any]) -> None:
    """Have ``attacher`` called with every optimizer whose state is about to be saved or loaded."""
    if attacher not in _attachers:
        _attachers.append(attacher)


PATCHES = (
    Patch(
        _state_dict_utils,
        "_distribute_tensors",
        "cuts a whole tensor into the even chunks that `placements` stand for, with broadcast_from_rank0",
        _distributing,
    ),
    Patch(
        checkpoint_state_dict,
        "_init_optim_state",
        "makes state to load into by a step, after which training would begin with the second",
        _initializing,
    ),
    Patch(
        torch.optim.Optimizer,
        "state_dict",
        "an optimizer of a model that was sharded in place is attached at its first step, which may come later",
        _preparing,
    ),
    Patch(
        torch.optim.Optimizer,
        "load_state_dict",
        "the same: state may be loaded before the first step",
        _preparing,
    ),
)

_originals: dict[Patch, Any] = {}


def apply() -> None:
    """Replace what is in ``PATCHES``. Calling it again changes nothing.

    Raises:
        AttributeError: This version of torch has no such name; the message says which.
    """
    if _originals:
        return
    for patch in PATCHES:
        if not hasattr(patch.owner, patch.name):
            raise AttributeError(
                f"torch {torch.__version__} has no {patch.owner.__name__}.{patch.name} ({patch.why}). Use a version of "
                "torch that megatron.fsdp has been tested with."
            )
    for patch in PATCHES:
        _originals[patch] = getattr(patch.owner, patch.name)
        setattr(patch.owner, patch.name, patch.replacement(_originals[patch]))


def remove() -> None:
    """Put back what :func:`apply` replaced."""
    while _originals:
        patch, original = _originals.popitem()
        setattr(patch.owner, patch.name, original)
