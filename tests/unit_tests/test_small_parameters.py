"""Parameters that cannot be divided: scalars, single elements, empty ones, and fewer rows than ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import MegatronFSDP
from tests.models import STRATEGIES, adamw, assert_same_training, batches, device
from tests.ranks import RankPool

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "one": (1,),
    "one_of_many_dimensions": (1, 1, 1),
    "two_rows": (2, 7),
    "one_row": (1, 13),
    "empty": (0,),
    "empty_rows": (0, 5),
    "rows_of_nothing": (3, 0),
}


class Odd(nn.Module):
    """Adds a function of every parameter, whatever its shape, to its input."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(SHAPES[name])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            x = x + torch.sin(parameter.sum() + 0.1 * (parameter * parameter).sum()) * torch.tanh(x)
        return x


class WithOdd(nn.Module):
    """A unit for each group of shapes, one that holds all of them, and all of them in the root."""

    def __init__(self) -> None:
        super().__init__()
        names = list(SHAPES)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.zeros(0))
        self.embedding = nn.Embedding(31, 5)
        self.blocks = nn.ModuleList([Odd([name]) for name in names] + [Odd(names)])
        self.head = nn.Linear(5, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) / self.temperature + self.nothing.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _train(strategy: str) -> dict[str, int]:
    """How many elements of each parameter this rank holds, after training."""
    torch.manual_seed(3)
    data = batches(steps=3, per_step=dist.get_world_size())
    sharded = assert_same_training(WithOdd(), data, adamw, fsdp_unit_modules=[Odd], zero_dp_strategy=strategy)
    sizes = {}
    for entry in sharded.engine.params():
        assert isinstance(entry.main, DTensor) and entry.main.grad is None
        assert tuple(entry.main.shape) == SHAPES.get(entry.name.rsplit(".", 1)[-1], tuple(entry.main.shape))
        sizes[entry.name] = local_shard(entry.main).numel()
        assert sizes[entry.name] == entry.shard_slice.stop - entry.shard_slice.start
    _load_elsewhere(sharded)
    return sizes


def _load_elsewhere(sharded: MegatronFSDP) -> None:
    """A state dict of such parameters is loaded into another model."""
    other = MegatronFSDP(WithOdd().to(device()), config=sharded.fsdp_config, fsdp_unit_modules=[Odd])
    other.load_state_dict(sharded.state_dict())
    for mine, theirs in zip(sharded.engine.params(), other.engine.params(), strict=True):
        assert torch.equal(local_shard(mine.main), local_shard(theirs.main))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_equals_unsharded_training(ranks: RankPool, strategy: str, world_size: int) -> None:
    held = ranks.run(world_size, _train, strategy)
    whole = {name: parameter.numel() for name, parameter in WithOdd().named_parameters()}
    for name, numel in whole.items():
        everywhere = strategy == "no_shard" or name.endswith(("scalar", "temperature"))
        assert sum(sizes[name] for sizes in held) == (numel * world_size if everywhere else numel)
