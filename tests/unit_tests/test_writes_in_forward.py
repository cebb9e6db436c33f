"""A write to a weight inside of a forward would be lost, and raises; one between forwards counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron.fsdp import fsdp2
from megatron_fsdp import fully_shard_model
from tests.models import TinyModel, device
from tests.ranks import RankFailure, RankPool, on_ranks


def _write_in_a_hook() -> None:
    model = TinyModel().to(device())
    for block in model.blocks:
        fsdp2.fully_shard(block, reshard_after_forward=False)
    fsdp2.fully_shard(model)

    def write(block: Any, *unused: Any) -> None:
        with torch.no_grad():
            block.up.weight.mul_(0.5)

    model.blocks[0].register_forward_hook(write)
    model(torch.zeros(2, 3, dtype=torch.long, device=device()))


def test_a_write_behind_the_forward_of_an_unsharded_unit_raises(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"blocks\.0 has changed its parameter blocks\.0\.up\.weight in place"):
        ranks.run(2, _write_in_a_hook)


def _rows_are_renormalized() -> None:
    fully_shard_model(nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)).to(device()))


def test_an_embedding_that_writes_its_weight_raises(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"0: Embedding\(max_norm"):
        ranks.run(2, _rows_are_renormalized)


@on_ranks(2)
def test_a_unit_that_writes_its_input_is_told_what_to_write_instead() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))).to(device())
    model = fully_shard_model(model, fsdp_unit_modules=[nn.Sequential])
    with pytest.raises(RuntimeError, match="modified inplace") as raised:
        model(torch.ones(2, 4, device=device()))
    message = "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert message.count("FSDP unit") == 1, message
    assert "FSDP unit 1: its forward changes an input" in message
    with torch.no_grad():
        model(torch.ones(2, 4, device=device()))  # it is usable afterwards


VIEWS: dict[str, Callable[[nn.Parameter], Any]] = {
    "item": lambda weight: weight.__setitem__(0, 7.0),
    "data": lambda weight: weight.data.__setitem__(0, 7.0),
    "view": lambda weight: weight.view(-1)[2:].zero_(),
    "transposed": lambda weight: weight.T.fill_(2.0),
}


@on_ranks(2)
def test_writes_through_views_of_full_weights() -> None:
    for view in VIEWS.values():
        layer = nn.Linear(4, 4, bias=False).to(device(), torch.bfloat16)
        model = fully_shard_model(nn.Sequential(layer), zero_dp_strategy=0, fsdp_unit_modules=[nn.Linear])
        x = torch.ones(1, 4, dtype=torch.bfloat16, device=device())
        with torch.no_grad():
            model(x)
            (weight,) = model.module.parameters()
            view(weight)
            torch.testing.assert_close(model(x)[0], weight.full_tensor().bfloat16().sum(1), rtol=0.05, atol=0.05)
