"""Megatron's Muon updates sharded matrices as it updates full ones."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tests.megatron_models as mm
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from megatron.fsdp.api.index import FSDPDistributedIndex
from megatron.fsdp.api.megatron_fsdp import MegatronFSDP
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.dtensor.ragged_dtensor import make_like
from megatron.fsdp.mcore.muon import ShardedMuon
from megatron.fsdp.optim import matrix_exchange
from megatron.fsdp.state.loading import own_shard
from tests.models import whole
from tests.ranks import RankPool, on_ranks

# The fused QKV projection of two heads: the parts of each head are orthogonalized apart.
QKV = [6, 2, 2]
SHAPES = {"qkv": (20, 7), "tall": (33, 5), "wide": (4, 41), "row": (1, 9), "column": (3, 1)}
SETTINGS: dict[str, Any] = {
    "lr": 0.02,
    "momentum": 0.9,
    "weight_decay": 0.1,
    "split_qkv": True,
    "is_qkv_fn": lambda p: hasattr(p, "qkv_split_shapes"),
    "tp_mode": "blockwise",
    "fp32_matmul_prec": "highest",
}


class Matrices(torch.nn.Module):
    """Matrices of odd shapes, and others that leave some ranks without any element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        for name, shape in SHAPES.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape)))
        self.qkv.qkv_split_shapes = QKV
        self.bias = torch.nn.Parameter(torch.randn(11))


def _index(hybrid: bool) -> Any:
    if not hybrid:
        return None
    return FSDPDistributedIndex(init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")), "inner", "outer")


def _steps(nesterov: bool, steps: int, outer: str | None = None) -> None:
    """Compare a few steps bit for bit with those of Megatron's own class on full matrices, in one round or several."""
    reference = Matrices()
    config = FSDPConfig(outer_dp_sharding_strategy=outer or "no_shard")
    model = MegatronFSDP(Matrices(), _index(outer is not None), fsdp_unit_modules=[], config=config)
    matrices = {entry.name: entry for entry in model.engine.params() if entry.name in SHAPES}
    assert len(matrices) == len(SHAPES)
    ours = ShardedMuon([entry.main for entry in matrices.values()], nesterov=nesterov, **SETTINGS)
    theirs = TensorParallelMuon([getattr(reference, name) for name in matrices], nesterov=nesterov, **SETTINGS)
    generator = torch.Generator().manual_seed(5)
    matrix_exchange.ROUND = 1 if nesterov else 1 << 24
    for _ in range(steps):
        for name, entry in matrices.items():
            grad = torch.randn(SHAPES[name], generator=generator)
            getattr(reference, name).grad = grad
            entry.main.grad = make_like(own_shard(entry, grad), entry.main)
        ours.step()
        theirs.step()
    for name, entry in matrices.items():
        expected = getattr(reference, name)
        assert torch.equal(whole(entry, entry.main), expected), name
        momentum = theirs.state[expected]["momentum_buffer"]
        assert torch.equal(whole(entry, ours.state[entry.main]["momentum_buffer"]), momentum), name


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_are_bit_equal_to_those_on_full_matrices(ranks: RankPool, world_size: int, nesterov: bool) -> None:
    ranks.run(world_size, _steps, nesterov, 3)


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_steps_with_two_data_parallel_axes_are_bit_equal(ranks: RankPool, outer: str) -> None:
    ranks.run(4, _steps, True, 2, outer)


def _optimizer(model: Any, **changes: Any) -> Any:
    settings: dict[str, Any] = {"muon_fp32_matmul_prec": "highest", "muon_momentum": 0.9, "muon_nesterov": True}
    config = mm.OptimizerConfig(
        optimizer="muon",
        lr=1e-2,
        weight_decay=0.1,
        clip_grad=1.0,
        use_distributed_optimizer=model.ddp_config.use_megatron_fsdp,
        **{**settings, **changes},
    )
    return mm.get_megatron_optimizer(config, [model])


def _train(strategy: str | None, model: dict[str, Any], **changes: Any) -> Any:
    extra = {} if strategy is not None else {"use_distributed_optimizer": False}
    wrapper = mm.wrapped(strategy, **{"add_bias_linear": False, **model, **extra})
    optimizer = _optimizer(wrapper, **changes)

    def data(step: int, micro_batches: int) -> torch.Tensor:
        # Tensor-parallel ranks have the same tokens.
        found = mm.tokens(step, micro_batches)
        dist.broadcast(found, group=mm.parallel_state.get_tensor_model_parallel_group(), group_src=0)
        return found

    result = mm.run_steps(wrapper, optimizer, data=data)
    if not model:
        result.weights = mm.weights_of(wrapper)
    return result


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_trains_as_megatrons_ddp(strategy: str) -> None:
    with mm.megatron():
        mm.assert_same(_train(strategy, {}), _train(None, {}), atol=1e-6, norms=1e-5)


@on_ranks(4)
def test_trains_as_megatrons_ddp_with_tensor_parallelism() -> None:
    """Gradient norms tell the modes apart: each mode takes another first step."""
    model = {"tensor_model_parallel_size": 2}
    divisible = patch.object(mm, "VOCABULARY", 30)
    with mm.megatron(tensor_model_parallel_size=2), divisible:
        norms = {}
        for mode in ("blockwise", "duplicated", "distributed"):
            reference = _train(None, model, muon_tp_mode=mode).norms
            assert _train("optim_grads_params", model, muon_tp_mode=mode).norms == pytest.approx(reference, rel=1e-5)
            norms[mode] = reference
    assert norms["blockwise"] != pytest.approx(norms["duplicated"], rel=1e-4)
