"""Modules can be imported, run and unpickled by their old paths, from before they were grouped into packages."""

import importlib
import pickle
import subprocess
import sys

import pytest

import megatron.fsdp
from megatron.fsdp._old_paths import MOVED, PACKAGE
from tests.slow import all_but_slow

NEED_MEGATRON = ("doctor", "verify", "launch", "mcore")


def test_old_paths_are_the_current_modules() -> None:
    for old, new in MOVED.items():
        if not old.startswith(NEED_MEGATRON):
            module = importlib.import_module(PACKAGE + old)
            assert module is importlib.import_module(PACKAGE + new)
            assert module.__name__ == PACKAGE + new
            assert module.__spec__ is not None
            assert module.__spec__.name == PACKAGE + new


def test_a_module_of_a_moved_package_is_loaded_once() -> None:
    old = importlib.import_module("megatron.fsdp.trace.clock")
    assert old is importlib.import_module("megatron.fsdp.tools.trace.clock")


def test_names_of_functions_stay_functions() -> None:
    module = importlib.import_module("megatron.fsdp.fully_shard")
    assert callable(megatron.fsdp.fully_shard)
    assert module.fully_shard is megatron.fsdp.fully_shard


def test_pickles_that_name_an_old_path_can_be_read() -> None:
    old = b"cmegatron.fsdp.precision\nMixedPrecisionPolicy\n."
    assert pickle.loads(old) is megatron.fsdp.MixedPrecisionPolicy


def test_unknown_paths_raise() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("megatron.fsdp.trace.nothing")


@pytest.mark.parametrize("command", all_but_slow(["doctor", "verify", "launch", "trace"], "trace"))
def test_old_commands_start(command: str) -> None:
    arguments = [sys.executable, "-m", f"megatron.fsdp.{command}", "--help"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert f"megatron.fsdp.{command}" in result.stdout
