"""Invalid input raises an error before anything is allocated or changed. The messages are those of test_mistakes.py."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from tests.models import Block, TinyModel
from tests.ranks import on_ranks


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


@on_ranks(1)
def test_a_model_that_cannot_be_sharded_is_unchanged() -> None:
    _unchanged_after(TypeError, "expected classes of modules", lambda m: fully_shard_model(m, fsdp_unit_modules=[3]))
    policy = MixedPrecisionPolicy(main_params_dtype=torch.bfloat16, compute_dtype=torch.float16)
    match = "Mismatched dtypes: main_params_dtype is torch.bfloat16 and parameter embedding.weight is torch.float16"
    _unchanged_after(ValueError, match, lambda m: fully_shard_model(m, mixed_precision_policy=policy))


@on_ranks(1)
def test_optimizer_with_state_of_another_shape() -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.head.weight]["row_sums"] = torch.zeros(31)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block])
    with pytest.raises(ValueError, match=r"state 'row_sums' of head.weight: .*got \(31,\)"):
        fully_shard_optimizer(optimizer)
    assert sharded.module is model


@on_ranks(1)
def test_units_by_name() -> None:
    assert fully_shard_model(TinyModel(), fsdp_unit_modules=["Block"]).engine.unit_names[1:]
    model = TinyModel()
    model.other = type("Block", (nn.Linear,), {})(2, 2)
    with pytest.raises(ValueError, match="several classes called Block"):
        fully_shard_model(model, fsdp_unit_modules=["Block"])
