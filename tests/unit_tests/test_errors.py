"""Invalid input raises a clear error before anything is allocated or changed."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import FSDPConfig, MegatronFSDP, MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from tests.models import Block, TinyModel, batches
from tests.ranks import RankPool


def _unchanged_after(error: type[Exception], match: str, shard: Callable[[nn.Module], object]) -> None:
    model = TinyModel()
    before = {name: (id(p), p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    with pytest.raises(error, match=match):
        shard(model)
    for name, parameter in model.named_parameters():
        identity, pointer, value = before[name]
        assert (id(parameter), parameter.data_ptr()) == (identity, pointer)
        assert torch.equal(parameter, value)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


class Blok(nn.Module):
    """Named almost like a module of the model."""


def _unit_class_that_matches_nothing() -> None:
    _unchanged_after(
        ValueError, "no Blok. Did you mean 'Block'", lambda m: fully_shard_model(m, fsdp_unit_modules=[Blok])
    )


def _unit_path_that_cannot_be_imported() -> None:
    path = "tests.models.Blocc"
    match = "cannot import 'tests.models.Blocc'.*Did you mean 'Block'"
    _unchanged_after(ValueError, match, lambda m: fully_shard_model(m, fsdp_unit_modules=[path]))


def _unit_that_is_no_class() -> None:
    _unchanged_after(TypeError, "expected classes of modules", lambda m: fully_shard_model(m, fsdp_unit_modules=[3]))


def _unknown_strategy() -> None:
    _unchanged_after(
        ValueError, "zero_dp_strategy: expected 0 or 'no_shard'", lambda m: fully_shard_model(m, zero_dp_strategy=7)
    )


def _axis_that_is_not_in_the_mesh() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
    match = r"no axis 'shard'; its axes are \['replicas', 'shards'\]. Did you mean 'shards'"
    _unchanged_after(ValueError, match, lambda m: fully_shard_model(m, device_mesh=mesh, dp_shard_dim="shard"))
    match = "Give the name of the one to shard over"
    _unchanged_after(ValueError, match, lambda m: fully_shard_model(m, device_mesh=mesh))


def _axis_without_a_mesh() -> None:
    _unchanged_after(ValueError, "device_mesh: got None", lambda m: fully_shard_model(m, dp_shard_dim="shards"))


def _parameter_on_another_device() -> None:
    model = TinyModel()
    model.head.to("meta")
    with pytest.raises(ValueError, match="head.weight is on the meta device"):
        fully_shard_model(model)


def _model_already_wrapped() -> None:
    model = TinyModel()
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block])
    for again in (model, sharded, model.blocks):
        with pytest.raises(ValueError, match="already wrapped: parameter .* belongs to a MegatronFSDP"):
            fully_shard_model(again)


def _mismatched_dtypes() -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=torch.bfloat16, compute_dtype=torch.float16)
    match = "Mismatched dtypes: main_params_dtype is torch.bfloat16 and parameter embedding.weight is torch.float16"
    _unchanged_after(ValueError, match, lambda m: fully_shard_model(m, mixed_precision_policy=policy))
    _unchanged_after(
        TypeError,
        "MixedPrecisionPolicy; got 'bf16'",
        lambda m: MegatronFSDP(m, config=FSDPConfig(mixed_precision_policy="bf16")),
    )  # type: ignore[arg-type]


def _settings_that_contradict() -> None:
    match = "average_in_collective divides"
    _unchanged_after(
        ValueError, match, lambda m: fully_shard_model(m, average_in_collective=True, calculate_per_token_loss=True)
    )
    _unchanged_after(
        ValueError, "max_unsharded_units", lambda m: MegatronFSDP(m, config=FSDPConfig(max_unsharded_units=0))
    )


def _optimizer_of_another_model() -> None:
    with pytest.raises(ValueError, match="none of the optimizer's parameters belongs to a sharded model"):
        fully_shard_optimizer(torch.optim.SGD(TinyModel().parameters(), lr=0.1))


def _optimizer_with_state_of_another_shape() -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.head.weight]["row_sums"] = torch.zeros(31)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block])
    with pytest.raises(ValueError, match=r"state 'row_sums' of head.weight: .*got \(31,\)"):
        fully_shard_optimizer(optimizer)
    assert sharded.module is model


def _step_without_gradients() -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block])
    fully_shard_optimizer(optimizer)
    with pytest.raises(RuntimeError, match="found no gradient on any of its parameters"):
        optimizer.step()
    assert sharded.module is model


CASES = [
    _unit_class_that_matches_nothing,
    _unit_path_that_cannot_be_imported,
    _unit_that_is_no_class,
    _unknown_strategy,
    _axis_without_a_mesh,
    _parameter_on_another_device,
    _model_already_wrapped,
    _mismatched_dtypes,
    _settings_that_contradict,
    _optimizer_of_another_model,
    _optimizer_with_state_of_another_shape,
    _step_without_gradients,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_error(ranks: RankPool, case: Callable[[], None]) -> None:
    ranks.run(1, case)


def test_axis_that_is_not_in_the_mesh(ranks: RankPool) -> None:
    ranks.run(2, _axis_that_is_not_in_the_mesh)


def test_sharding_before_init_process_group() -> None:
    with pytest.raises(RuntimeError, match="torch.distributed is not initialized. Call .*init_process_group"):
        fully_shard_model(TinyModel())


def _forward_after_the_process_group_is_gone() -> None:
    model = fully_shard_model(TinyModel(), fsdp_unit_modules=[Block])
    torch.distributed.destroy_process_group()
    with pytest.raises(RuntimeError, match="torch.distributed is not initialized"):
        model(batches(1, 1)[0, 0])


def test_forward_without_a_process_group(ranks: RankPool) -> None:
    ranks.run(1, _forward_after_the_process_group_is_gone)


def _by_name() -> None:
    assert fully_shard_model(TinyModel(), fsdp_unit_modules=["Block"]).engine.unit_names[1:]
    model = TinyModel()
    model.other = type("Block", (nn.Linear,), {})(2, 2)
    with pytest.raises(ValueError, match="several classes called Block"):
        fully_shard_model(model, fsdp_unit_modules=["Block"])


def test_units_by_name(ranks: RankPool) -> None:
    ranks.run(1, _by_name)
