"""--optimizer-cpu-offload: equal training, placement, and errors. The simulated device shows what is where."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tests.megatron_models as mm
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.fsdp import FSDPConfig
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.mcore import FullyShardedDataParallel
from megatron.fsdp.mcore.adapter import fsdp_config
from megatron.fsdp.mcore.offload import build_optimizer
from megatron.fsdp.mcore.options import get_megatron_ddp_config
from megatron.fsdp.runtime.partition import offloaded_units, parameters_of, partition
from tests.models import STRATEGIES, Block, TinyModel
from tests.ranks import RankPool, on_ranks


def _trained(strategy: str, offload: dict[str, Any], changes: dict[str, Any]) -> tuple[list[float], dict, Any]:
    """Gradient norms, shards of weights and the optimizer after a few steps."""
    transformer = mm.transformer_config(finalize_model_grads_func=mm.finalize, **changes)
    settings = mm.ddp_config(strategy, grad_reduce_in_fp32=True, megatron_fsdp_use_decoupled_grad=bool(offload))
    vars(settings).update(offload)
    model = FullyShardedDataParallel(config=transformer, ddp_config=settings, module=mm.gpt(transformer, vocabulary=30))
    precise = {"use_precision_aware_optimizer": True} if offload else {}
    optimizer = mm.optimizer_of(model, **precise, **offload)
    norms = mm.run_steps(model, optimizer).norms
    return norms, {param.name: local_shard(param.main).clone() for param in model.module.engine.params()}, optimizer


def _equal(strategy: str, changes: dict[str, Any], **sizes: int) -> None:
    with mm.megatron(**sizes):
        norms, weights, _ = _trained(strategy, {}, changes)
        for fraction in (1.0, 0.4):
            offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
            offloaded_norms, offloaded_weights, optimizer = _trained(strategy, offload, changes)
            assert type(optimizer.optimizer) is torch.optim.AdamW
            assert norms == offloaded_norms
            for name, weight in weights.items():
                assert torch.equal(weight, offloaded_weights[name]), name
            for group in optimizer.param_groups:
                assert all(parameter.grad is None for parameter in group["params"]), "copies are freed after the step"
            states = [state for state in optimizer.optimizer.state.values() if state]
            assert states and all(state["exp_avg"].dtype == torch.float32 for state in states)


@pytest.mark.parametrize("bf16", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_as_without_it_to_the_bit(ranks: RankPool, strategy: str, bf16: bool) -> None:
    ranks.run(2, _equal, strategy, {"bf16": bf16})


@on_ranks(4)
def test_gradients_of_tensor_parallel_replicas_are_reduced() -> None:
    sizes = {"tensor_model_parallel_size": 2}
    _equal("optim_grads_params", {**sizes, "sequence_parallel": True, "bf16": True}, **sizes)


@on_ranks(1)
def test_the_wrapper_has_to_know() -> None:
    with mm.megatron():
        model = mm.wrapped("optim_grads_params")
        with pytest.raises(ValueError, match="Set optimizer_cpu_offload .* on the wrapper's ddp_config"):
            mm.optimizer_of(model, optimizer_cpu_offload=True, use_precision_aware_optimizer=True)
        groups = [{"params": [torch.nn.Parameter(torch.zeros(2))]}]
        found = build_optimizer(lambda params, **settings: (params, settings), groups, lr=0.1)
        assert found == (groups, {"lr": 0.1}), "DDP keeps Megatron-Core's"


@on_ranks(1)
def test_the_command_line_reaches_the_engine() -> None:
    args = SimpleNamespace(optimizer_cpu_offload=True, optimizer_offload_fraction=0.25)
    found = fsdp_config(
        mm.transformer_config(), get_megatron_ddp_config(lambda _: DistributedDataParallelConfig(), args)
    )
    assert (found.offload_optimizer, found.offload_fraction) == (True, 0.25)
    assert found.use_decoupled_grad and not found.offloads_gradients
    assert not fsdp_config(mm.transformer_config(), DistributedDataParallelConfig()).offload_optimizer


def test_units_up_to_the_fraction_are_offloaded() -> None:
    root = partition(model := TinyModel(), parameters_of(model, FSDPConfig()), (Block,), False)
    sizes = [sum(math.prod(param.local_shape) for param in part.params) for part in root.walk()]
    total = sum(sizes)
    assert offloaded_units(root, 1.0) == set(range(len(sizes)))
    assert offloaded_units(root, 0.0) == set()
    for tenths in range(11):
        chosen = offloaded_units(root, tenths / 10)
        taken = sum(sizes[place] for place in chosen)
        assert taken <= tenths / 10 * total
        # No other unit would have fitted too.
        assert all(taken + size > tenths / 10 * total for place, size in enumerate(sizes) if place not in chosen)
    # The first units come first, and the next one does not fit.
    assert sizes[0] < sizes[1] and offloaded_units(root, sizes[1] / total) == {0}
