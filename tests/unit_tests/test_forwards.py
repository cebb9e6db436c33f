"""Several forwards before a backward, evaluation alone, in inference mode from the start, and containers as inputs."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard_model
from tests.models import STRATEGIES, Block, Pair, TinyModel, batches, device, loss_of
from tests.ranks import on_ranks
from tests.unit_tests import test_same_answer


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


class Collector(test_same_answer.Block):
    """A block that adds to a list and a dictionary that it is given."""

    def forward(self, seen: list[torch.Tensor], cache: dict[str, Any]) -> None:  # type: ignore[override]
        seen.append(super().forward(seen[-1]))
        cache["latest"], cache["count"] = seen[-1].detach(), cache.get("count", 0) + 1


class Collecting(test_same_answer.Model):
    """A model that collects activations in a list, whose first one needs a gradient the second time only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Collector() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache: dict[str, Any]
        for start in (x.tile(1, 2)[:, :8], self.first(x)):
            seen, cache = [start], {}
            for block in self.blocks:
                block(seen, cache=cache)
            assert seen[0] is start and cache["count"] == len(self.blocks)
        return self.head(seen[1] + seen[3] - 0.1 * cache["latest"])


def _step(side: test_same_answer.Side) -> torch.Tensor:
    loss = side.model(test_same_answer.batch()).pow(2).mean()
    loss.backward()
    side.step()
    return loss


@on_ranks(2)
def test_a_unit_adds_to_containers_that_it_is_given() -> None:
    test_same_answer.same(_step, Collecting, ["optim_grads_params", "optim"])
