"""Megatron with the fused Adams of Transformer Engine and Apex, by mocks with their interfaces."""

import contextlib
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tests.megatron_models as mm
from megatron.core import optimizer as optimizers
from megatron.fsdp.checkpoint.backend import save
from megatron.fsdp.dtensor.ragged_dtensor import local_shard, make_like, same_layout
from megatron.fsdp.mcore import adapter
from megatron.fsdp.mcore.checkpoint_state import CheckpointState
from megatron.fsdp.mcore.load import load_state_dict
from megatron.fsdp.mcore.save import preprocess
from tests.fused_adam import ApexAdam, FusedAdam
from tests.models import STRATEGIES
from tests.ranks import RankPool, on_ranks
from tests.simulated.pairs import parametrize_pairs

ADAMS = ("exp_avg", "exp_avg_sq")
DTYPES = tuple(f"{name}_dtype" for name in ADAMS)
FORMAT = {"distrib_optim_sharding_type": "fsdp_dtensor"}


@contextmanager
def transformer_engine(adam: type = FusedAdam) -> Iterator[None]:
    """Megatron-Core as if Transformer Engine were there, or Apex, with this optimizer."""

    def settings(config: Any) -> None:
        # As Megatron-Core does, but without inspecting Transformer Engine.
        config.store_param_remainders = False
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = config.use_precision_aware_optimizer

    with (
        mock.patch.object(optimizers.OptimizerConfig, "__post_init__", settings),
        mock.patch.object(optimizers, "Adam", adam),
        mock.patch.object(optimizers, "USING_PYTORCH_OPTIMIZER", False),
        mock.patch.object(adapter, "USING_PYTORCH_OPTIMIZER", False),
    ):
        yield


def _trained(strategy: str, options: dict[str, Any], **changes: Any) -> tuple[Any, Any, mm.Trained]:
    model = mm.wrapped(strategy, megatron_fsdp_use_decoupled_grad=True, **changes)
    optimizer = mm.optimizer_of(model, use_precision_aware_optimizer=True, **options)
    return model, optimizer, mm.run_steps(model, optimizer)


@on_ranks(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_as_ddp_with_torchs_adam(strategy: str) -> None:
    with mm.megatron():
        expected = mm.train_ddp()
        with transformer_engine():
            model, optimizer, found = _trained(strategy, {})
        found.weights = mm.weights_of(model)
        mm.assert_same(found, expected, rtol=1e-5, atol=1e-4, norms=1e-5)
        assert optimizer.optimizer.seen == {torch.float32}
        # As a checkpoint has it: Transformer Engine makes it by DTensor.from_local with the placements of parameters.
        state = {main: value for main, values in optimizer.optimizer.state.items() for value in values.values()}
        assert state and all(same_layout(value, main) for main, value in state.items())


@on_ranks(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp16_unscales_beside_empty_shards_with_a_fused_optimizer(strategy: str) -> None:
    def norms(fused: bool) -> list[float]:
        with transformer_engine() if fused else contextlib.nullcontext():
            model = mm.wrapped(strategy, fp16=True)
            optimizer = mm.optimizer_of(model, fp16=True, loss_scale=64.0)
            return mm.run_steps(model, optimizer).norms

    with mm.megatron():
        torch.testing.assert_close(norms(True), norms(False), rtol=2e-2, atol=0)


@on_ranks(2)
def test_narrow_gradients_and_moments() -> None:
    with mm.megatron():
        expected = mm.train_ddp()
        moments = dict.fromkeys(DTYPES, torch.bfloat16)
        with transformer_engine():
            _, optimizer, found = _trained("optim_grads_params", moments, megatron_fsdp_main_grads_dtype=torch.bfloat16)
        fused = optimizer.optimizer
        assert fused.seen == {torch.bfloat16}, "gradients are not cast to the weights' dtype"
        kept = [state for state in fused.state.values() if state]
        assert kept and all(state["exp_avg"].dtype == torch.bfloat16 for state in kept)
        torch.testing.assert_close(found.norms, expected.norms, rtol=2e-2, atol=0)


@on_ranks(2)
def test_state_to_load_into_is_created_without_a_step() -> None:
    with mm.megatron(), transformer_engine():
        model = mm.wrapped("optim_grads_params", megatron_fsdp_use_decoupled_grad=True)
        before = mm.weights_of(model)
        optimizer = mm.optimizer_of(model, use_precision_aware_optimizer=True)
        optimizer.sharded_state_dict({}, is_loading=True, metadata=FORMAT)
        fused = optimizer.optimizer
        here = [e.main for e in model.module.engine.params() if local_shard(e.main).numel()]
        assert here and all(fused.state[main].keys() == {"exp_avg", "exp_avg_sq"} for main in here)
        assert all(group["step"] == 0 and group["lr"] == 1e-2 for group in fused.param_groups)
        assert all(main.decoupled_grad is None for main in here)
        after = mm.weights_of(model)
        assert all(torch.equal(after[name], weight) for name, weight in before.items())


# The optimizer and its moments' dtype, in Megatron with and without --use-precision-aware-optimizer.
FUSED: dict[str, tuple[type, torch.dtype | None]] = {
    "Apex": (ApexAdam, None),
    "Transformer Engine": (FusedAdam, None),
    "bf16": (FusedAdam, torch.bfloat16),
    "fp16": (FusedAdam, torch.float16),
    "FP8": (FusedAdam, torch.uint8),
}
MLPS: dict[str, dict[str, Any]] = {"plain": {}, "gated": {"gated_linear_unit": True, "add_bias_linear": False}}
# Ranks that save and that load, sizes of Megatron's groups on both, and replicas of those that save.
TOPOLOGIES: dict[str, tuple[int, int, dict[str, int], int]] = {
    "ranks": (3, 2, {}, 1),
    "HSDP": (4, 2, {}, 2),
    "TP": (4, 2, {"tensor_model_parallel_size": 2}, 1),
}


class Case(NamedTuple):
    strategy: str
    kind: str
    mlp: str
    topology: str

    @contextmanager
    def model(self, saves: bool, fused: bool = True) -> Iterator[tuple[Any, Any]]:
        """A model and Megatron's optimizer for it, which is torch's unless ``fused``."""
        of, dtype = FUSED[self.kind]
        sizes, replicas = TOPOLOGIES[self.topology][2:]
        groups = {"num_distributed_optimizer_instances": replicas} if saves else {}
        narrow = fused and dtype is not None
        options = {"use_precision_aware_optimizer": True, **dict.fromkeys(DTYPES, dtype)} if narrow else {}
        changes = {"megatron_fsdp_use_decoupled_grad": narrow, **MLPS[self.mlp], **sizes, **groups}
        with mm.megatron(**sizes, **groups), transformer_engine(of) if fused else contextlib.nullcontext():
            model = mm.wrapped(self.strategy, functools.partial(mm.gpt, vocabulary=32), **changes)
            yield model, mm.optimizer_of(model, **options)

    @property
    def digits(self) -> float:
        """Precision of moments, relative to the largest one: a rank scales by that of its own shard."""
        return {"bf16": 2**-8, "fp16": 2**-11, "FP8": 2**-4}.get(self.kind, 1e-6)


def _moments(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Full moments, as the optimizer computes with them."""
    inner = optimizer.optimizer

    def wide(main: torch.Tensor, name: str) -> torch.Tensor:
        if type(inner) is FusedAdam:
            return make_like(inner.get_unscaled_state(main, name), main).full_tensor().clone()
        # A rank without elements may have no state.
        assert name in inner.state[main] or not local_shard(main).numel()
        return make_like(local_shard(inner.state[main].get(name, main)).detach(), main).full_tensor().clone()

    return {f"{e.name} {name}": wide(e.main, name) for e in model.module.engine.params() for name in ADAMS}


def _save_fused(folder: str, case: Case) -> dict[str, torch.Tensor]:
    with case.model(saves=True, fused=False) as (model, optimizer):
        mm.run_steps(model, optimizer, steps=2)
        expected = _moments(model, optimizer)
    with case.model(saves=True) as (model, optimizer):
        assert len(optimizer.optimizer.param_groups) > 1
        mm.run_steps(model, optimizer, steps=2)
        state = mm.checkpoint_state(model, optimizer)
        save(state, folder)
        for moments in state["optimizer"]["state"].values():
            moments |= {name: make_like(local_shard(value).half(), value) for name, value in moments.items()}
        save(state, f"{folder}/others")
        found = _moments(model, optimizer)
        _assert_near(found, expected, 8 * case.digits)  # of two steps, and gradients are those of other weights
        return found


def _load_fused(folder: str, case: Case) -> dict[str, torch.Tensor]:
    with case.model(saves=False) as (model, optimizer):
        raw = optimizer.sharded_state_dict({}, is_loading=True, metadata=FORMAT)
        state = {"model": model.module.state_dict_for_save_checkpoint(), "optimizer": raw}
        prepared = CheckpointState(state, [model.module], loading=True)
        prepared = preprocess(None, SimpleNamespace(), prepared, model.module)
        if case.kind in ("fp16", "FP8"):
            with pytest.raises(RuntimeError, match=r"exp_avg of .* is in float16; its scale is not in the checkpoint"):
                load_state_dict(prepared, dcp.FileSystemReader(f"{folder}/others"))
        load_state_dict(prepared, dcp.FileSystemReader(folder))
        optimizer.load_state_dict(prepared["optimizer"])
        found = _moments(model, optimizer)
        mm.run_steps(model, optimizer, steps=1)
        return found


def _assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], digits: float) -> None:
    assert found.keys() == expected.keys()
    for name, moment in expected.items():
        largest = float(moment.abs().max())
        assert largest > 0
        atol = largest * digits
        torch.testing.assert_close(found[name], moment, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@parametrize_pairs(strategy=STRATEGIES[::-1], kind=[*FUSED], mlp=[*MLPS], topology=[*TOPOLOGIES])
def test_moments_are_saved_as_what_they_mean_and_resharded(
    ranks: RankPool, tmp_path: Path, strategy: str, kind: str, mlp: str, topology: str
) -> None:
    """In fp16 and FP8 they would be read without their scales, which a checkpoint has not."""
    case = Case(strategy, kind, mlp, topology)
    saving, loading, sizes, _ = TOPOLOGIES[topology]
    saved = ranks.run(saving, _save_fused, str(tmp_path), case)
    loaded = ranks.run(loading, _load_fused, str(tmp_path), case)
    for rank in range(len(sizes) + 1):  # of tensor parallelism
        _assert_near(loaded[rank], saved[rank], 0.0 if FUSED[kind][1] is None else case.digits)
