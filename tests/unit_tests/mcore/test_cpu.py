"""Megatron on the CPU: all changes are listed in the table, and only Megatron sees them."""

import argparse
import functools
import importlib
import logging
import pkgutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fsdp.mcore import cpu
from megatron.fsdp.mcore.cpu import arguments, fake_cuda, imports, torch_view
from scripts import limit_table

pytestmark = pytest.mark.skipif(not cpu.is_enabled(), reason="Megatron runs on CUDA here")


def state_of_process() -> list[Any]:
    """Return everything enable() could change."""
    return [list(sys.meta_path), *(getattr(row.owner, row.attribute) for row in cpu.METHODS.rows)]


def without_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the process look as if enable() had not been called."""
    others = [finder for finder in sys.meta_path if not isinstance(finder, imports.MegatronFinder)]
    monkeypatch.setattr(sys, "meta_path", others)


def as_megatron(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as if one of Megatron's modules had defined it."""
    return type(function)(function.__code__, {"__name__": "megatron.core.optimizer"})


# enable() --------------------------------------------------------------------------------------------------------


def test_enabling_twice_changes_nothing_more() -> None:
    before = state_of_process()
    assert cpu.enable()
    assert cpu.is_enabled()
    assert state_of_process() == before


def test_nothing_changes_where_cuda_is_present(monkeypatch: pytest.MonkeyPatch) -> None:
    without_finder(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = state_of_process()
    assert not cpu.enable()
    assert not cpu.is_enabled()
    assert state_of_process() == before


def test_enabling_too_late_names_what_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("megatron.core")
    without_finder(monkeypatch)
    before = state_of_process()
    with pytest.raises(RuntimeError, match="expected to be called before .* megatron.core"):
        cpu.enable()
    assert state_of_process() == before


# The tables ------------------------------------------------------------------------------------------------------


@functools.cache
def sources_of_core() -> tuple[str, ...]:
    """Return the text of every file of megatron.core."""
    folder = Path(importlib.import_module("megatron.core").__file__ or "").parent
    return tuple(path.read_text() for path in folder.rglob("*.py"))


@pytest.mark.parametrize("change", cpu.CHANGES, ids=lambda change: f"{change.where}.{change.name}")
def test_what_the_table_changes_exists(change: cpu.Change) -> None:
    assert change.what and change.reason
    if change.scope is cpu.Scope.HIDDEN:
        assert any(change.name in text for text in sources_of_core())
    else:
        assert hasattr(pkgutil.resolve_name(change.where), change.name)


def test_no_name_is_changed_twice() -> None:
    names = [(change.where, change.name) for change in cpu.CHANGES]
    assert len(names) == len(set(names))


def test_megatron_has_every_adjusted_argument() -> None:
    megatron_arguments = importlib.import_module("megatron.training.arguments")
    parser = megatron_arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    names = {action.dest for action in parser._actions}
    assert names >= {row.argument for row in cpu.ADJUSTMENTS}


@pytest.mark.parametrize("rank", [0, 1])
def test_adjusted_arguments_are_logged_once_by_rank_0(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    values = {row.argument: row.value for row in cpu.ADJUSTMENTS}
    args = argparse.Namespace(**{**values, "distributed_backend": "nccl"}, rank=rank)
    with caplog.at_level(logging.INFO, logger=arguments.__name__):
        changed = arguments.adjust(args)
        arguments.adjust(args)
    assert [row.argument for row in changed] == ["distributed_backend"]
    assert args.distributed_backend == "gloo"
    assert len(caplog.messages) == (2 if rank == 0 else 0)
    if rank == 0:
        assert "gloo instead of nccl: NCCL connects GPUs only" in caplog.messages[0]
        warning = caplog.records[1]
        assert warning.levelno == logging.WARNING
        assert "runs on the CPU" in warning.message and "distributed_backend." in warning.message


@pytest.mark.parametrize("given", ["allgather", "alltoall", "flex"])
def test_only_the_flex_dispatcher_is_replaced(given: str) -> None:
    args = argparse.Namespace(**{row.argument: row.value for row in cpu.ADJUSTMENTS}, rank=1)
    args.moe_token_dispatcher_type = given
    arguments.adjust(args)
    assert args.moe_token_dispatcher_type == ("alltoall" if given == "flex" else given)


# Visibility of the changes ---------------------------------------------------------------------------------------


def test_torch_is_untouched_for_everyone_else() -> None:
    assert not torch.cuda.is_available()
    assert not hasattr(torch.zeros, "__wrapped__")
    assert torch.ones(1).type() == "torch.FloatTensor"
    for call in (
        lambda: torch.zeros(1, device="cuda"),
        lambda: torch.ones(1).cuda(),
        lambda: torch.nn.Linear(1, 1).cuda(),
    ):
        with pytest.raises((RuntimeError, AssertionError)):
            call()


def test_the_engine_and_the_adapter_see_torch_as_it_is() -> None:
    for name in (
        "megatron.fsdp",
        "megatron.fsdp.sharding.layout",
        "megatron.fsdp.mcore.patches",
        "megatron.fsdp.mcore.cpu",
    ):
        module = importlib.import_module(name)
        assert not isinstance(module.__loader__, imports.MegatronLoader)
    assert fake_cuda.torch is torch


def test_megatron_creates_tensors_on_the_cpu() -> None:
    megatron_utils = importlib.import_module("megatron.core.transformer.utils")
    assert megatron_utils.torch is not torch
    assert megatron_utils.get_default_causal_mask(2).tolist() == [[False, True], [False, False]]
    assert megatron_utils.torch.empty(2, device=megatron_utils.torch.device("cuda", 0), pin_memory=True).is_cpu


def test_methods_change_only_for_calls_from_megatron() -> None:
    tensor, module = torch.ones(1), torch.nn.Linear(1, 1)
    assert as_megatron(lambda x: x.type())(tensor) == "torch.cuda.FloatTensor"
    assert as_megatron(lambda x: x.type())(tensor.bfloat16()) == "torch.cuda.BFloat16Tensor"
    assert as_megatron(lambda x: x.cuda(non_blocking=True))(tensor) is tensor
    assert as_megatron(lambda x: x.pin_memory())(tensor) is tensor
    assert as_megatron(lambda x: x.record_stream(None))(tensor) is None
    assert as_megatron(lambda x: x.cuda())(module) is module
    assert (lambda x: x.type())(tensor) == "torch.FloatTensor"


def test_a_script_moves_its_batches_to_the_cpu() -> None:
    tensor = torch.ones(1)
    move = type(importing_as)((lambda x: x.cuda(non_blocking=True)).__code__, {"__name__": "__main__"})
    assert move(tensor) is tensor


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_zero_centered_norms_start_as_the_others(kind: str) -> None:
    build = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    config = argparse.Namespace(
        normalization=kind, sequence_parallel=False, persist_layer_norm=False, memory_efficient_layer_norm=False
    )
    x = torch.randn(3, 8)
    config.layernorm_zero_centered_gamma = False
    plain = build(config, 8)
    config.layernorm_zero_centered_gamma = True
    centered = build(config, 8)
    assert not centered.weight.any() and torch.equal(centered(x), plain(x))
    torch.nn.init.constant_(plain.weight, 1.5)
    torch.nn.init.constant_(centered.weight, 0.5)
    assert torch.equal(centered(x), plain(x))


def test_selective_recomputation_has_the_same_gradients_without_transformer_engine() -> None:
    recomputing = importlib.import_module("megatron.core.tensor_parallel").CheckpointWithoutOutput()
    x, weight = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad((torch.tanh(x).view(2, 8).view(4, 4) @ weight).sum(), [x, weight])
    kept = recomputing.checkpoint(torch.tanh, x)
    out = kept.view(2, 8).view(4, 4) @ weight
    recomputing.discard_output_and_register_recompute(out)
    assert kept.untyped_storage().nbytes() == 0
    out.sum().backward()
    for tensor, grad in zip((x, weight), expected, strict=True):
        assert tensor.grad is not None and torch.equal(tensor.grad, grad)


def importing_as(module: str) -> Callable[[str], Any]:
    """Return the import function of one of Megatron's modules."""
    namespace = vars(importlib.import_module(module))
    return lambda name: namespace["__builtins__"]["__import__"](name, namespace)


def test_packages_of_cuda_kernels_look_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", type(sys)("apex"))
    with pytest.raises(ModuleNotFoundError, match="apex needs CUDA, and megatron.core.utils runs on the CPU"):
        importing_as("megatron.core.utils")("apex")


def test_triton_may_be_absent_where_megatron_insists_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    triton = importing_as("megatron.core.transformer.moe.ops.paged_stash")("triton")
    assert triton.jit(len) is len
    with pytest.raises(ModuleNotFoundError):
        importing_as("megatron.core.utils")("triton")


# Megatron's view -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda"), torch.device("cuda", 3)])
def test_a_cuda_device_means_the_cpu(device: Any) -> None:
    assert torch_view.on_cpu(device) == torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", "meta", None, torch.device("meta")])
def test_other_devices_are_kept(device: Any) -> None:
    assert torch_view.on_cpu(device) is device


def test_the_fake_class_passes_for_the_real_one() -> None:
    device = torch_view.device_class(torch.device)
    assert device("cuda", 1) == device("cuda:0") == device(0) == torch.device("cpu")
    assert device("meta") == torch.device("meta")
    assert isinstance(torch.device("cpu"), device)
    assert not isinstance("cpu", device)


def test_memory_is_the_process_own() -> None:
    before = fake_cuda.resident_bytes()
    block = torch.ones(64 * 2**20 // 4)
    assert fake_cuda.resident_bytes() - before > 0.9 * block.nbytes
    assert fake_cuda.peak_resident_bytes() >= fake_cuda.resident_bytes()


def test_events_measure_time() -> None:
    start = fake_cuda.Event(enable_timing=True)
    start.record()
    time.sleep(0.02)
    end = fake_cuda.Stream().record_event()
    assert start.elapsed_time(end) >= 20


def test_random_state_is_forked_and_restored() -> None:
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    tracker = random.CudaRNGStatesTracker()
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    tracker.add("other", 2)
    with tracker.fork("other"):
        drawn = torch.rand(1)
    assert torch.equal(torch.rand(1), expected)
    torch.manual_seed(2)
    assert torch.equal(torch.rand(1), drawn)


def test_data_loaders_leave_the_random_state_alone() -> None:
    loaders = importlib.import_module("megatron.training.datasets.data_samplers")
    before = torch.get_rng_state()
    assert list(loaders.torch.utils.data.DataLoader([1, 2], pin_memory=True)) == [torch.tensor([1]), torch.tensor([2])]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_tables_are_printed() -> None:
    printed = limit_table.of_cpu()
    for change in cpu.CHANGES:
        assert f"`{change.name}`" in printed
