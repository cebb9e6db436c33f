"""The plugin: what it replaces is a table, each name is there, and everything can be put back."""

import dataclasses
import importlib
import operator
import sys
import types

import pytest

from megatron.fsdp.mcore import install, is_installed, patches, uninstall


def value_of(patch: patches.Patch) -> object:
    return operator.attrgetter(patch.name)(importlib.import_module(patch.module))


@pytest.fixture(autouse=True)
def nothing_is_left() -> object:
    before = {patch: value_of(patch) for patch in patches.PATCHES}
    yield
    uninstall()
    for patch, value in before.items():
        assert value_of(patch) is value


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: f"{patch.module}.{patch.name}")
def test_every_name_is_replaced_and_put_back(patch: patches.Patch) -> None:
    original = value_of(patch)
    assert patch.why
    install()
    assert is_installed()
    assert value_of(patch) is not original
    uninstall()
    assert not is_installed()
    assert value_of(patch) is original


def test_wrappers_are_ours() -> None:
    install()
    from megatron.core.distributed import FullyShardedDataParallel
    from megatron.fsdp.mcore import FullyShardedDataParallel as ours
    from megatron.training.models import dist_utils
    from megatron.training.training import megatron_FSDP

    assert FullyShardedDataParallel is ours and megatron_FSDP is ours and dist_utils.FullyShardedDataParallel is ours


def test_installing_twice_keeps_the_originals() -> None:
    from megatron.core.distributed import FullyShardedDataParallel as original

    install()
    install()
    uninstall()
    from megatron.core.distributed import FullyShardedDataParallel

    assert FullyShardedDataParallel is original


def test_a_megatron_that_lacks_a_name_is_refused_and_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import distributed

    original = distributed.FullyShardedDataParallel
    gone = dataclasses.replace(patches.PATCHES[-1], name="no_such_function")
    monkeypatch.setattr(patches, "PATCHES", (*patches.PATCHES, gone))
    with pytest.raises(
        ImportError, match=r"has no no_such_function .*Supported versions.*0\.19\.2; installed: 0\.19\.2"
    ):
        install()
    assert not is_installed() and distributed.FullyShardedDataParallel is original
    monkeypatch.undo()


def test_a_module_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = dataclasses.replace(patches.PATCHES[0], module="megatron.no_such_module")
    monkeypatch.setattr(patches, "PATCHES", (gone,))
    with pytest.raises(
        ImportError, match=r"cannot import megatron.no_such_module .*megatron-core\[training\].*0\.19\.2"
    ):
        install()
    monkeypatch.undo()


def test_the_table_names_no_place_twice() -> None:
    places = [(patch.module, patch.name) for patch in patches.PATCHES]
    assert len(set(places)) == len(places)


def test_megatron_bridge_is_patched_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    assert not any(patch.module.startswith("megatron.bridge") for patch in patches._originals)
    uninstall()
    modules: dict[str, types.ModuleType] = {}
    for patch in patches.BRIDGE_PATCHES:
        module = modules.setdefault(patch.module, types.ModuleType(patch.module))
        setattr(module, patch.name, importlib.import_module("torch") if patch.name == "torch" else object())
        monkeypatch.setitem(sys.modules, patch.module, module)
    before = {patch: value_of(patch) for patch in patches.BRIDGE_PATCHES}
    install()
    assert all(value_of(patch) is not value for patch, value in before.items())
    uninstall()
    assert all(value_of(patch) is value for patch, value in before.items())
