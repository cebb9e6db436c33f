"""Methods other than forward that use parameters, and modules that are called several times in one forward."""

import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MegatronFSDP, fully_shard_model, register_forward_method
from tests.models import STRATEGIES, Block, Pair, batches, device, without_collector
from tests.ranks import DEVICE, on_ranks


class Projecting(Block):
    """A block with additional methods, one of which calls a module inside it."""

    class Gate(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width))

        def scale(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(self.weight)

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate = Projecting.Gate(width)

    def project(self, x: torch.Tensor, *, factor: float = 1.0) -> dict[str, torch.Tensor]:
        return {"up": self.up(x) * factor, "sum": self.norm(x).sum()}


class Encoder(nn.Module):
    """A model that is used through methods only: it encodes, decodes, and calls projections of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 13)
        self.blocks = nn.ModuleList(Projecting(13) for _ in range(3))
        self.head = nn.Linear(13, 31)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0].gate.scale(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        projected = self.blocks[1].project(x, factor=0.5)
        return x + projected["up"][..., :13] + 0.01 * projected["sum"]

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[2](x))


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model.decode(model.encode(tokens))
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _register(sharded: MegatronFSDP) -> None:
    for name in ("encode", "decode"):
        register_forward_method(sharded, name)
    for block in sharded.module.blocks:
        register_forward_method(block, "project")
        register_forward_method(block.gate, "scale")


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_registered_methods_train_as_unsharded(strategy: str) -> None:
    pair = Pair(Encoder(), step_loss=_loss, fsdp_unit_modules=[Projecting], zero_dp_strategy=strategy)
    _register(pair.sharded)
    for step in batches(3, dist.get_world_size()):
        with torch.no_grad():
            torch.testing.assert_close(*(_loss(each, step[0]) for each in (pair.sharded.module, pair.reference)))
        pair.backward(step)
        pair.update()
    assert all(unit.state.value == "sharded" for unit in pair.sharded.engine.units)
    pair.assert_same_weights()


class CallsOften(nn.Module):
    """Calls one block three times and a method of it twice, and reads another block's parameters in its forward."""

    class Both(Projecting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.project(x)["up"][..., :13]

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 13)
        self.shared = Projecting(13)
        self.both = CallsOften.Both(13)
        self.head = nn.Linear(13, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for factor in (0.3, 0.7):
            x = torch.tanh(self.shared(x)) + self.shared.project(self.both(x), factor=factor)["up"][..., :13]
        return self.head(torch.tanh(self.shared(x)))


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forward_and_methods_called_several_times(strategy: str) -> None:
    pair = Pair(CallsOften(), fsdp_unit_modules=[Projecting], zero_dp_strategy=strategy)
    data = batches(1, dist.get_world_size())[0]
    register_forward_method(pair.sharded.module.shared, "project")
    for _ in range(2):  # as guessed, and as recorded
        for each, _ in pair.sides:
            each.zero_grad()
        pair.backward(data)
    pair.assert_same_gradients()


@on_ranks(2)
@pytest.mark.skipif(DEVICE == "cuda", reason="CUDA cannot go on after an index that is out of range")
def test_method_can_be_called_again_after_an_error() -> None:
    model = Encoder().to(device())
    sharded = fully_shard_model(model, fsdp_unit_modules=[Projecting])
    _register(sharded)
    tokens = batches(1, 1)[0, 0]
    with pytest.raises(IndexError):
        sharded.encode(tokens + 31)
    assert all(unit.state.value == "sharded" for unit in sharded.engine.units)
    _loss(sharded, tokens).backward()
    without = {name for name, parameter in sharded.module.named_parameters() if parameter.grad is None}
    assert without == {"blocks.1.gate.weight", "blocks.2.gate.weight"}


@on_ranks(1)
def test_registered_methods_do_not_keep_the_model() -> None:
    with without_collector():
        model = Encoder()
        sharded = fully_shard_model(model, fsdp_unit_modules=[Projecting])
        _register(sharded)
        _loss(sharded, batches(1, 1)[0, 0]).backward()
        references = [weakref.ref(each) for each in (model, sharded, model.blocks[0], *sharded.engine.params())]
        del model, sharded
        assert all(reference() is None for reference in references)


class Kinds(nn.Linear):
    """A layer with methods of several kinds."""

    def one_by_one(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self(x)

    @staticmethod
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @classmethod
    def of(cls, x: torch.Tensor) -> torch.Tensor:
        return x * len(cls.__name__)


@on_ranks(1)
def test_kinds_of_methods() -> None:
    model = fully_shard_model(nn.Sequential(Kinds(3, 3)).to(device()), fsdp_unit_modules=[Kinds])
    layer, x = model.module[0], torch.ones(1, 3, device=device())
    with pytest.raises(ValueError, match="one_by_one computes after its call has returned"):
        register_forward_method(layer, "one_by_one")
    for name, factor in (("twice", 2), ("of", 5)):
        register_forward_method(layer, name)
        assert torch.equal(getattr(layer, name)(x), x * factor)
