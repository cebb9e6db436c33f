"""Sharding a model that another engine wraps raises an error that names it. Wrapping a sharded model fails, too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from megatron.fsdp import fsdp2
from megatron_fsdp import fully_shard_model
from tests.models import device
from tests.ranks import on_ranks

_KEPT: list[object] = []


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _sharded() -> tuple[nn.Sequential, nn.Module]:
    model = _model()
    wrapped = fully_shard_model(model, fsdp_unit_modules=[nn.Linear], device="cpu")
    _KEPT.append(wrapped)
    return model, wrapped


def _torch_inside() -> nn.Module:
    model = _model()
    torch_fully_shard(model[1])
    return model


def _marked() -> nn.Module:
    model = _torch_inside()
    fsdp2.fully_shard(model)
    model(torch.ones(2, 4))
    return model


def _shard(model: Callable[[], nn.Module]) -> Callable[[], Any]:
    return lambda: fully_shard_model(model(), device="cpu")


def _share(shard_both: bool) -> None:
    first, second = _model(), _model()
    second[1].weight = first[1].weight
    for model in (first, second) if shard_both else (first,):
        fsdp2.fully_shard(model)
    _KEPT.append(first)
    if shard_both:
        second(torch.ones(2, 4))
    first(torch.ones(2, 4))
    fully_shard_model(second, device="cpu")


# A way to wrap the model, and a pattern for the error.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "ddp before": (
        _shard(lambda: DistributedDataParallel(_model())),
        r"it is already synchronized by .*DistributedDataParallel. Give fully_shard the model that it wraps",
    ),
    "ddp inside": (_shard(lambda: nn.Sequential(DistributedDataParallel(_model()))), "its module 0 is already"),
    "data parallel before": (_shard(lambda: DataParallel(_model())), "DataParallel"),
    "replicate before": (_shard(lambda: replicate(_model())), "torch's replicate"),
    "fsdp2 inside": (_shard(_torch_inside), r"its module 1 .*Leave out torch's fully_shard"),
    "fsdp2 inside of marked": (_marked, r"its module 1 .*Leave out torch's fully_shard"),
    "sharded before": (_shard(lambda: _sharded()[1]), "already wrapped: parameter .* belongs to a MegatronFSDP"),
    "parameter of a sharded model": (lambda: _share(shard_both=False), "parameter 1.weight belongs to a"),
    "parameter of two models": (lambda: _share(shard_both=True), "share a parameter, 1.weight"),
}
# Ways to wrap a sharded model.
AROUND: dict[str, Callable[[], Any]] = {
    "ddp": lambda: DistributedDataParallel(_sharded()[1]),
    "ddp around the model": lambda: DistributedDataParallel(_sharded()[0]),
    "ddp far around": lambda: DistributedDataParallel(nn.Sequential(_sharded()[1])),
    "fsdp1": lambda: FullyShardedDataParallel(_sharded()[1], device_id=torch.device("cpu")),
    "fsdp2": lambda: torch_fully_shard(_sharded()[1]),
    "fsdp2 of a part": lambda: torch_fully_shard(_sharded()[0][1]),
}


@on_ranks(2)
def test_other_engines_raise_with_their_name() -> None:
    for case, (act, expected) in REFUSED.items():
        with pytest.raises(ValueError, match=expected):
            act()
            pytest.fail(f"{case} was accepted")
    for case, act in AROUND.items():
        # Where another engine first reads a parameter. torch's fully_shard finds a DTensor without its own mesh.
        with pytest.raises((NotImplementedError, TypeError, ValueError)):
            act()
            pytest.fail(f"{case} was accepted")
    # Other models can still be wrapped afterwards.
    ones = torch.ones(2, 4, device=device())
    DistributedDataParallel(_model().to(device()))(ones).sum().backward()
    torch_fully_shard(_model().to(device()))(ones).sum().backward()
