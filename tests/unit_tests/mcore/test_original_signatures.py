"""Calls written for the original reach the same parameters here: signatures compared with megatron-core's copy."""

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest

import megatron_fsdp
from megatron_fsdp import MixedPrecisionPolicy


def _original(name: str) -> Any:
    module = pytest.importorskip("megatron.core.distributed.fsdp.src.megatron_fsdp")
    return getattr(module, name)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def _comparable(default: object) -> object:
    """Defaults of different types that mean the same are equal."""
    if isinstance(default, Enum):
        return default.value
    if type(default).__name__ == "MixedPrecisionPolicy":
        return (default.main_params_dtype, default.main_grads_dtype, default.grad_comm_dtype)
    return default


def _same_default(ours: inspect.Parameter, theirs: inspect.Parameter) -> bool:
    if ours.default is None and theirs.name == "mixed_precision_policy":
        return _comparable(theirs.default) == _comparable(MixedPrecisionPolicy())
    return _comparable(ours.default) == _comparable(theirs.default)


@pytest.mark.parametrize("name", ["fully_shard", "fully_shard_model", "fully_shard_optimizer"])
def test_signature_is_the_originals(name: str) -> None:
    theirs, ours = _parameters(_original(name)), _parameters(getattr(megatron_fsdp, name))
    # Parameters that the original does not have come last, and by keyword only.
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])
    for parameter, expected in zip(ours.values(), theirs.values(), strict=False):
        assert parameter.kind is expected.kind
        assert _same_default(parameter, expected), parameter.name
