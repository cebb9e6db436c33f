"""Units that return their own parameters, as Megatron-Core's linear layers return their bias."""

import dataclasses

import pytest
import torch
from torch import nn

from megatron_fsdp import FSDPConfig, MegatronFSDP
from tests.models import device
from tests.ranks import on_ranks
from tests.training_models import SkipsBias


class Whole(SkipsBias):
    """A model that is one unit."""


@on_ranks(2)
def test_what_the_root_returns_without_gradients_stays() -> None:
    layer = Whole(16, 16).to(device())
    ones = torch.ones(2, 16, device=device())
    expected = {name: value.clone() for name, value in layer(ones).items()}
    sharded = MegatronFSDP(layer, config=FSDPConfig(), fsdp_unit_modules=[])
    with torch.no_grad():
        found = sharded(ones)
    assert not any(unit.weights.compute.flat.untyped_storage().nbytes() for unit in sharded.engine.groups)
    torch.testing.assert_close(found, expected)


@dataclasses.dataclass
class Output:
    """A container that is not registered with torch's pytree."""

    bias: torch.Tensor


class Hides(nn.Linear):
    """Returns its bias in such a container."""

    def forward(self, x: torch.Tensor) -> Output:  # type: ignore[override]
        """Only the bias."""
        return Output(self.bias)


@on_ranks(2)
def test_an_unknown_container_is_an_error() -> None:
    sharded = MegatronFSDP(nn.Sequential(Hides(16, 16)), config=FSDPConfig(), fsdp_unit_modules=[Hides])
    with pytest.raises(NotImplementedError, match=r"unit 0 returns one of its own parameters, in a Output"):
        sharded(torch.ones(2, 16, device=device()))
    with pytest.raises(NotImplementedError, match=r"\.clone\(\)"):
        sharded(torch.ones(2, 16, device=device()))
