"""Process groups, detection of tensor-parallel parameters by class and attribute, and checks of their replicas."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tests.megatron_models as mm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.mcore import replicas, save, topology
from megatron.fsdp.mcore.checkpoint_state import CheckpointState
from megatron.fsdp.mcore.topology import divided_dim
from tests.models import logged, sgd, train_reference
from tests.ranks import RankFailure, RankPool

OFFSETS = "layers.{}.self_attention.core_attention.softmax_offset"


def _module(name: str, base: type[nn.Module] = nn.Module, **marks: dict[str, Any]) -> nn.Module:
    """A module whose class has this name, and its parameters these attributes."""
    module: nn.Module = type(name, (base,), {})()
    for parameter, attributes in marks.items():
        value = nn.Parameter(torch.zeros(2, 2))
        vars(value).update(attributes)
        module.register_parameter(parameter, value)
    return module


@pytest.mark.parametrize(
    ("module", "parameter", "dim"),
    [
        (_module("DotProductAttention", softmax_offset={}), "softmax_offset", 0),
        (_module("TEDotProductAttention", softmax_offset={}), "softmax_offset", 0),
        (_module("TERowParallelGroupedLinear", weight11={"tensor_model_parallel": False}), "weight11", 1),
        (_module("TEColumnParallelGroupedLinear", bias3={}), "bias3", 0),
        (_module("RowParallelLinear", bias={}), "bias", None),
        (_module("TELayerNormColumnParallelLinear", layer_norm_weight={}), "layer_norm_weight", None),
        (_module("Derived", type(_module("RowParallelLinear")), weight={}), "weight", 1),
        # Mamba-2 marks the weight of a norm over this rank's slice.
        (_module("RMSNorm", weight={"tensor_model_parallel": True, "partition_dim": 0}), "weight", 0),
        (_module("LayerNorm", weight={}), "weight", None),
        (_module("Unknown", weight={"tensor_model_parallel": True, "partition_dim": 1}), "weight", 1),
        (_module("Unknown", weight={}), "weight", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_tensor_parallel_parameters_are_found_by_class_and_then_by_attribute(
    module: nn.Module, parameter: str, dim: int | None
) -> None:
    assert divided_dim(module, parameter) == dim


def _layers(config: Any) -> nn.Module:
    return TransformerBlock(config, get_gpt_layer_local_spec())


def _replicas(change: str, forget: bool) -> list[str]:
    """Warnings of a save of layers on two tensor-parallel ranks, and an offset's shape, after a change on one rank."""
    mm.parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    mm.model_parallel_cuda_manual_seed(1234)

    with patch.dict(topology.DIVIDED), logged(by=replicas.logger.name) as warnings:
        if forget:
            del topology.DIVIDED["DotProductAttention"]
        model = mm.wrapped("optim_grads_params", _layers, softmax_type="learnable", tensor_model_parallel_size=2)
        params = {entry.name.removeprefix("module."): entry for entry in model.module.engine.params()}
        if change and mm.parallel_state.get_tensor_model_parallel_rank() == 1:
            name, factor = change.split("*")
            with torch.no_grad():
                local_shard(params[name].main).mul_(float(factor))
        state = CheckpointState({"model": model.module.state_dict()}, [model.module])
        save.preprocess(None, SimpleNamespace(), state, model.module)
    mm.parallel_state.destroy_model_parallel()
    return [*warnings, str(params[OFFSETS.format(0)].shape)]


def test_softmax_offsets_are_sharded_like_heads(ranks: RankPool) -> None:
    found = ranks.run(2, _replicas, f"{OFFSETS.format(1)}*2", False)
    assert found == [["(2,)"]] * 2


@pytest.mark.parametrize("world_size", [2, 4])
def test_unmarked_parameters_that_differ_raise_when_saving(ranks: RankPool, world_size: int) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks.run(world_size, _replicas, f"{OFFSETS.format(1)}*2", True)
    message = str(caught.value)
    assert message.count("RuntimeError: before a checkpoint is saved") == world_size
    assert OFFSETS.format(1) in message and OFFSETS.format(0) not in message
    assert "parameter.partition_dim" in message


def test_copies_that_drift_by_rounding_are_saved_and_named(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = "layers.0.input_layernorm.weight"
    assert ranks.run(2, _replicas, "", False) == [["(2,)"]] * 2
    for warning, _ in ranks.run(2, _replicas, f"{norm}*1.00001", False):
        assert norm in warning and "1e-05" in warning
    with pytest.raises(RankFailure, match=norm):
        ranks.run(2, _replicas, f"{norm}*1.001", False)


def _train_with_groups(names: tuple[str, ...]) -> tuple[list[float], list[str], bool]:
    """Losses of a layer in the wrapper, axes of a weight, and the all-gather group, for given process groups."""
    groups = mm.ProcessGroupCollection()
    for name in names:
        setattr(groups, name, dist.new_group() if name.endswith("_ag") else dist.group.WORLD)
    torch.manual_seed(3)
    model = mm.FullyShardedDataParallel(
        config=mm.transformer_config(),
        ddp_config=mm.ddp_config("optim_grads_params", check_for_nan_in_grad=False),
        module=nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)),
        fsdp_unit_modules=[nn.Linear],
        pg_collection=groups,
    )
    optimizer = sgd(model.parameters())
    data = torch.randn(4, dist.get_world_size(), 3, 5, generator=torch.Generator().manual_seed(1))
    losses = []
    for batch in data:
        model.zero_grad_buffer()
        loss = model(batch[dist.get_rank()]).square().mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        model.module.install_optimized_model_weights()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    index = model.module.index
    return losses, [str(index.get_fsdp_group().size())], index.dense.gather is not index.dense.inner


def _expected_losses(world_size: int) -> list[float]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    data = torch.randn(4, world_size, 3, 5, generator=torch.Generator().manual_seed(1))
    return train_reference(model, data, sgd, lambda model, batch: model(batch).square().mean())


@pytest.mark.parametrize("more", [(), ("expt_dp",), ("dp_cp_ag",)], ids=" ".join)
def test_groups_without_tensor_parallelism(ranks: RankPool, more: tuple[str, ...]) -> None:
    for losses, sizes, apart in ranks.run(3, _train_with_groups, ("dp", "dp_cp", *more)):
        assert losses == pytest.approx(_expected_losses(3), rel=1e-5)
        assert sizes == ["3"]
        assert apart == ("dp_cp_ag" in more)


def test_missing_data_parallel_group_raises(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="ValueError: pg_collection: expected dp_cp"):
        ranks.run(2, _train_with_groups, ("dp",))


def _instances_without_groups() -> None:
    with mm.megatron():
        mm.wrapped("optim_grads_params", num_distributed_optimizer_instances=2)


def test_missing_group_of_optimizer_instances_raises(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="num_distributed_optimizer_instances is 2: expected a group inter_dist_opt"):
        ranks.run(2, _instances_without_groups)
