"""Units that return their own parameters, as Megatron-Core's linear layers return their bias."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import FSDPConfig, MegatronFSDP
from tests.models import STRATEGIES, adamw, assert_same_training, batches, device
from tests.ranks import RankPool


class SkipsBias(nn.Linear):
    """Leaves adding the bias to the caller."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Returns the product, the bias, and a view of the weight."""
        return {"product": nn.functional.linear(x, self.weight), "bias": self.bias, "gain": self.weight[0]}


class Model(nn.Module):
    """Uses the parameters that its layers have returned, including in a multiplication."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(SkipsBias(16, 16) for _ in range(3))
        self.recompute = recompute

    def _layer(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = layer(x)
        return x + torch.tanh(out["product"] * out["gain"] + out["bias"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of shape (batch, length, 32) of tokens of shape (batch, length)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(self._layer, layer, x, use_reentrant=False) if self.recompute else self._layer(layer, x)
        return x @ self.embedding.weight.t()


def _train(strategy: str, recompute: bool) -> None:
    data = batches(4, 2 * dist.get_world_size())
    assert_same_training(Model(recompute), data, adamw, fsdp_unit_modules=[SkipsBias], zero_dp_strategy=strategy)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_as_unsharded(ranks: RankPool, strategy: str, recompute: bool) -> None:
    ranks.run(2, _train, strategy, recompute)


class Whole(SkipsBias):
    """A model that is one unit."""


def _evaluate() -> None:
    layer = Whole(16, 16).to(device())
    ones = torch.ones(2, 16, device=device())
    expected = {name: value.clone() for name, value in layer(ones).items()}
    sharded = MegatronFSDP(layer, config=FSDPConfig(), fsdp_unit_modules=[])
    with torch.no_grad():
        found = sharded(ones)
    assert not any(unit.weights.compute.flat.untyped_storage().nbytes() for unit in sharded.engine.groups)
    torch.testing.assert_close(found, expected)


def test_what_the_root_returns_without_gradients_stays(ranks: RankPool) -> None:
    ranks.run(2, _evaluate)


@dataclasses.dataclass
class Output:
    """A container that is not registered with torch's pytree."""

    bias: torch.Tensor


class Hides(nn.Linear):
    """Returns its bias in such a container."""

    def forward(self, x: torch.Tensor) -> Output:  # type: ignore[override]
        """Only the bias."""
        return Output(self.bias)


def _hidden() -> None:
    sharded = MegatronFSDP(nn.Sequential(Hides(16, 16)), FSDPConfig(), fsdp_unit_modules=[Hides])
    with pytest.raises(NotImplementedError, match=r"unit 0 returns one of its own parameters, in a Output"):
        sharded(torch.ones(2, 16, device=device()))
    with pytest.raises(NotImplementedError, match=r"\.clone\(\)"):
        sharded(torch.ones(2, 16, device=device()))


def test_an_unknown_container_is_an_error(ranks: RankPool) -> None:
    ranks.run(2, _hidden)
