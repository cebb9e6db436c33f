"""torchao's low-bit Adam on sharded parameters: updates and quantized state equal those of unsharded training."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from megatron_fsdp import MegatronFSDP, fully_shard
from tests.models import device, load_from, save_to
from tests.quantized_models import KINDS, arguments, mean
from tests.ranks import RankPool

pytest.importorskip("torchao")

import torchao.optim  # noqa: E402

from tests.ranks import on_ranks

CLASSES = ("AdamW8bit", "Adam8bit", "Adam4bit", "AdamWFp8")
# Blocks of 256 elements are whole in every parameter.
GRANULARITY = "block(8)"


class Layers(nn.Sequential):
    """Matrices with blocks of 4 and 8 rows, and one that is not a number of whole blocks, although shards are."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 96), nn.Linear(96, 128), nn.Linear(128, 161), nn.Linear(161, 16, bias=False))


def layers() -> Layers:
    """A model with the same values at every call."""
    torch.manual_seed(5)
    return Layers().to(device())


def batches(steps: int, ranks: int) -> torch.Tensor:
    """Random inputs, [steps, ranks, 3, 64]."""
    return torch.randn(steps, ranks, 3, 64, generator=torch.Generator().manual_seed(1)).to(device())


def optimizer_of(name: str, model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    """The optimizer; torchao compiles its update, which takes long and is not what is tested."""
    made = getattr(torchao.optim, name)(model.parameters(), lr=1e-2, **more)
    step = made.step

    def eager(*args: Any) -> Any:
        with patch.object(torch, "compile", lambda function, **options: function):
            return step(*args)

    made.step = eager
    return made


def sharded(kind: str, name: str) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """The sharded model and its optimizer."""
    model = layers()
    more = {**arguments(kind), "shard_granularity": GRANULARITY}
    return fully_shard(model, optimizer_of(name, model), fsdp_unit_modules=[nn.Linear], **more)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    """Train on this rank's inputs."""
    for step in data:
        model(step[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def unsharded(name: str, data: torch.Tensor) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train on all ranks' inputs."""
    model = layers()
    optimizer = optimizer_of(name, model)
    for step in data:
        grads = [torch.autograd.grad(model(x).square().mean(), list(model.parameters())) for x in step]
        for parameter, *each in zip(model.parameters(), *grads, strict=True):
            parameter.grad = mean(each)
        optimizer.step()
    return model, optimizer


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _equals(kind: str, name: str) -> None:
    data = batches(5, dist.get_world_size())
    expected, reference = unsharded(name, data)
    model, optimizer = sharded(kind, name)
    train(model, optimizer, data)
    found = optimizer.state_dict()["state"]
    quantized = 0
    for number, (main, parameter) in enumerate(zip(model.parameters(), expected.parameters(), strict=True)):
        assert torch.equal(_full(main), parameter), number
        state = {key: _full(value) for key, value in found[number].items()}
        for key, value in reference.state[parameter].items():
            if hasattr(value, "codes"):
                quantized += 1
                assert torch.equal(state[f"{key}.codes"], value.codes.view(torch.uint8).flatten()), (number, key)
                assert torch.equal(state[f"{key}.scales"], value.scale), (number, key)
            else:
                assert torch.equal(state[key], value), (number, key)
    assert quantized == (6 if name.endswith("4bit") else 4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_strategy_equals_unsharded(ranks: RankPool, kind: str) -> None:
    ranks.run(4 if kind in ("hsdp", "hybrid") else 2, _equals, kind, "AdamW8bit")


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_equals_unsharded(ranks: RankPool, name: str) -> None:
    ranks.run(2, _equals, "optim_grads_params", name)


# Checkpoints ------------------------------------------------------------------------------------------------------


def _same_data(steps: int) -> torch.Tensor:
    return batches(steps, 1).expand(-1, dist.get_world_size(), -1, -1)


def _weights(model: MegatronFSDP) -> list[torch.Tensor]:
    return [_full(value).detach().clone() for value in model.state_dict().values()]


def _save(folder: str, name: str) -> list[torch.Tensor]:
    model, optimizer = sharded("optim_grads_params", name)
    train(model, optimizer, _same_data(6)[:3])
    save_to(folder, model, optimizer)
    train(model, optimizer, _same_data(6)[3:])
    return _weights(model)


def _resume(folder: str, name: str, kind: str, has_state: bool, expected: list[torch.Tensor]) -> None:
    model, optimizer = sharded(kind, name)
    if has_state:
        train(model, optimizer, _same_data(6)[4:5])
    load_from(folder, model, optimizer)
    train(model, optimizer, _same_data(6)[3:])
    assert all(torch.equal(a, b) for a, b in zip(_weights(model), expected, strict=True))


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_resumes_exactly_on_other_numbers_of_ranks(ranks: RankPool, tmp_path: Path, name: str) -> None:
    expected = ranks.run(2, _save, str(tmp_path), name)[0]
    for size, kind in ((1, "optim_grads_params"), (4, "optim_grads_params"), (4, "hsdp"), (2, "no_shard")):
        for has_state in (False, True):
            ranks.run(size, _resume, str(tmp_path), name, kind, has_state, expected)


@on_ranks(2)
@pytest.mark.parametrize("whole", [False, True])
def test_functions_of_torch(whole: bool) -> None:
    """The functions of torch.distributed.checkpoint.state_dict, into an optimizer without state."""
    options = StateDictOptions(full_state_dict=whole)
    data = _same_data(6)
    model, optimizer = sharded("optim_grads_params", "AdamW8bit")
    train(model, optimizer, data[:3])
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    saved = tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, saved)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, data[3:])
    other, resumed = sharded("optim_grads_params", "AdamW8bit")
    other.load_state_dict(weights)
    set_optimizer_state_dict(other, resumed, saved, options=options)
    train(other, resumed, data[3:])
    assert all(torch.equal(a, b) for a, b in zip(_weights(other), _weights(model), strict=True))


@on_ranks(2)
def test_other_state_raises() -> None:
    model, optimizer = sharded("optim_grads_params", "AdamW8bit")
    reference, whole = unsharded("AdamW8bit", _same_data(1))
    with pytest.raises(ValueError, match=r"expected exp_avg\.codes with \d+ elements for parameter 0"):
        optimizer.load_state_dict(whole.state_dict())
    _, other = sharded("optim_grads_params", "AdamW4bit")
    with pytest.raises(ValueError, match=r"expected exp_avg\.codes with 6144 elements.*got 3072 elements"):
        optimizer.load_state_dict(other.state_dict())


# Errors -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_divided_blocks_raise() -> None:
    model = layers()
    with pytest.raises(ValueError, match=r"AdamW8bit.*blocks of \d+ parameters.*shard_granularity='block\(8\)'"):
        fully_shard(model, optimizer_of("AdamW8bit", model), fsdp_unit_modules=[nn.Linear], shard_granularity="element")
    model = layers()
    with pytest.raises(NotImplementedError, match="CPUOffloadOptimizer.*offload_optimizer=True"):
        fully_shard(model, torchao.optim.CPUOffloadOptimizer.__new__(torchao.optim.CPUOffloadOptimizer))
