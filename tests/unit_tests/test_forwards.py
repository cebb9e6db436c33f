"""Several forwards before their backwards, and a model that only evaluates, in inference mode from the start."""

import copy

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import fully_shard_model
from tests.models import STRATEGIES, Block, Pair, TinyModel, batches, device, loss_of
from tests.ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_several_forwards_before_backward(strategy: str, order: list[int]) -> None:
    """Three forwards, then their backwards in the given order."""
    pair = Pair(TinyModel(), zero_dp_strategy=strategy)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for step in batches(steps=3, per_step=3 * ranks):
        sum(loss_of(pair.reference, tokens) / ranks for tokens in step).backward()
        losses = [loss_of(pair.sharded, tokens) for tokens in step[rank::ranks]]
        for which in order:
            losses[which].backward()
        pair.update()
    pair.assert_same_weights()


@on_ranks(2)
def test_model_that_is_sharded_in_inference_mode() -> None:
    """A model that is loaded and evaluated in inference mode and never trained."""
    torch.manual_seed(3)
    model = TinyModel().to(device())
    reference = copy.deepcopy(model)
    tokens = batches(1, 1)[0, 0]
    with torch.inference_mode():
        sharded = fully_shard_model(model, fsdp_unit_modules=[Block])
        sharded.load_state_dict({f"module.{name}": value for name, value in reference.state_dict().items()})
        torch.testing.assert_close(sharded(tokens), reference(tokens))
    with torch.no_grad():
        torch.testing.assert_close(sharded(tokens), reference(tokens))
