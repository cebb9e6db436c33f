"""Compute weights that differ from main weights, or between ranks, are reported by name."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.runtime.agreement import hash_of
from megatron.fsdp.state.consistency import inconsistent_weights
from tests.ranks import DEVICE, RankPool


def _model(strategy: str, bf16: bool) -> nn.Module:
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(torch.bfloat16 if bf16 else torch.float32)
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    return fully_shard_model(
        model.to(DEVICE), fsdp_unit_modules=[nn.Linear], zero_dp_strategy=strategy, mixed_precision_policy=policy
    )


def _found(strategy: str, bf16: bool, spoiled: str) -> list[str]:
    model = _model(strategy, bf16)
    assert inconsistent_weights(model.engine) == [], "weights are consistent after sharding"
    if spoiled:
        for entry in model.engine.params():
            if entry.name == spoiled and dist.get_rank() == 1:
                entry.compute.data.view(-1)[-1] += 1
    return inconsistent_weights(model.engine)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_consistent_weights(ranks: RankPool, strategy: str, bf16: bool) -> None:
    assert ranks.run(2, _found, strategy, bf16, "") == [[], []]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_one_wrong_element_is_reported_on_all_ranks(ranks: RankPool, strategy: str, bf16: bool) -> None:
    assert ranks.run(2, _found, strategy, bf16, "1.weight") == [["1.weight"], ["1.weight"]]


def test_hash_depends_on_values_and_order() -> None:
    a = torch.tensor([1.0, 2.0, 3.0])
    swapped = torch.tensor([2.0, 1.0, 3.0])
    assert hash_of(a) == hash_of(a.clone()) != hash_of(swapped)
    assert len({int(hash_of(torch.zeros(n))) for n in range(1, 50)}) == 49
    assert hash_of(torch.tensor([0.0])) != hash_of(torch.tensor([-0.0]))
