"""Calls written for NVIDIA's engine reach the same parameters here: signatures compared with megatron-core's copy."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import megatron_fsdp
import megatron_fsdp.package_info
from megatron_fsdp import MixedPrecisionPolicy

# Internals of NVIDIA's engine, which scripts cannot use without its buffers and streams.
INTERNAL = {
    "RegisterFSDPBackwardFunction",
    "TrainingState",
    "experimental_api",
    "is_te_min_version",
    "local_multi_tensor_applier",
    "local_multi_tensor_scale",
    "multi_tensor_applier",
    "multi_tensor_scale_impl",
    "setup_delayed_wgrad_acc_hook",
}


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
def test_signature_matches_the_original(name: str) -> None:
    theirs, ours = _parameters(_original(name)), _parameters(getattr(megatron_fsdp, name))
    # Parameters that NVIDIA's does not have come last, and by keyword only.
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])
    for parameter, expected in zip(ours.values(), theirs.values(), strict=False):
        assert parameter.kind is expected.kind
        assert _same_default(parameter, expected), parameter.name


def test_constructor_matches_the_original() -> None:
    theirs, ours = _parameters(_original("MegatronFSDP")), _parameters(megatron_fsdp.MegatronFSDP)
    assert list(ours) == [*theirs, "config"]
    assert ours["config"].kind is inspect.Parameter.KEYWORD_ONLY
    for name, expected in theirs.items():
        assert ours[name].kind is expected.kind
        # A model without an index is sharded over all ranks.
        assert _same_default(ours[name], expected) or (name, ours[name].default) == ("dist_index", None)


def _check_takes_the_same(function: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    expected, parameters = _parameters(theirs), _parameters(function)
    named = [n for n, p in expected.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and n != "self"]
    takes_any = {p.kind for p in parameters.values()} & {inspect.Parameter.VAR_KEYWORD}
    assert [n for n in parameters if n in named] == named or takes_any, function
    required = {n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    assert required <= expected.keys(), function


def test_names_match_the_original() -> None:
    published = {f"__{name}__" for name in ("contact_emails", "download_url", "homepage", "repository_url")}
    package = importlib.import_module("megatron.core.distributed.fsdp.src.megatron_fsdp")
    assert set(package.__all__) - published <= set(megatron_fsdp.__all__)


@pytest.mark.parametrize("name", ["MegatronFSDP", "FSDPDistributedIndex"])
def test_methods_match_the_original(name: str) -> None:
    theirs, ours = _original(name), getattr(megatron_fsdp, name)
    for method, function in vars(theirs).items():
        if method.startswith("_") or not inspect.isfunction(function):
            continue
        _check_takes_the_same(getattr(ours, method), function)


def test_index_constructor_matches_the_original() -> None:
    theirs, ours = _parameters(_original("FSDPDistributedIndex")), _parameters(megatron_fsdp.FSDPDistributedIndex)
    assert [(n, p.default, p.kind) for n, p in ours.items()] == [(n, p.default, p.kind) for n, p in theirs.items()]


def test_ddp_settings_match_the_original() -> None:
    theirs = dataclasses.fields(_original("DistributedDataParallelConfig"))
    ours = dataclasses.fields(megatron_fsdp.DistributedDataParallelConfig)
    assert [(field.name, field.default) for field in ours] == [(field.name, field.default) for field in theirs]


def test_submodules_match_the_original_or_have_a_reason() -> None:
    _original("fully_shard")
    prefix = "megatron.core.distributed.fsdp.src.megatron_fsdp"
    for submodule in ("fully_shard", "megatron_fsdp", "mixed_precision", "package_info", "uneven_dtensor", "utils"):
        theirs = importlib.import_module(f"{prefix}.{submodule}")
        ours = importlib.import_module(f"megatron_fsdp.{submodule}")
        for name, value in vars(theirs).items():
            if name.startswith("_") or getattr(value, "__module__", None) != theirs.__name__ or name in INTERNAL:
                continue
            try:
                found = getattr(ours, name)
            except ImportError as error:
                assert f"megatron_fsdp.{submodule}.{name}" in str(error)
                continue
            assert callable(found), name
            if inspect.isfunction(value):
                _check_takes_the_same(found, value)


def test_package_describes_itself() -> None:
    assert megatron_fsdp.package_info.__version__ == megatron_fsdp.__version__
    project = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    assert f'\nname = "{megatron_fsdp.__package_name__}"\n' in project
    assert callable(megatron_fsdp.fully_shard)  # not the submodule of this name
