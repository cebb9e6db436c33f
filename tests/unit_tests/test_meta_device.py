"""Models on the meta device are initialized unit by unit, and only one unit is unsharded at any time."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.quantized.reference.float8 import Float8Tensor
from megatron_fsdp import fully_shard, fully_shard_model
from tests.models import (
    STRATEGIES,
    Block,
    TinyModel,
    adamw,
    assert_same_weights,
    batches,
    device,
    loss_of,
    main_weights,
    train_step,
)
from tests.ranks import DEVICE, on_ranks
from tests.tensor_bytes import TensorBytes, build, call_counted


def _reset_like_the_engine(model: nn.Module) -> None:
    """The order of initialization: the root's own modules, then unit by unit, inner modules before outer ones."""
    model.to_empty(device=device())
    units = [m for m in model.modules() if isinstance(m, Block)]
    inside = {id(m) for unit in units for m in unit.modules()}
    root = [m for m in model.modules() if id(m) not in inside]
    for group in (root, *(list(unit.modules()) for unit in units)):
        for module in group:
            if module._parameters:
                module.reset_parameters()


@on_ranks("world_size")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("meta_optimizer", [True, False], ids=["optimizer_before", "optimizer_after"])
def test_values_are_those_of_the_modules_own_initialization(
    strategy: str, world_size: int, meta_optimizer: bool
) -> None:
    with torch.device("meta"):
        model = TinyModel()
    assert all(p.is_meta for p in model.parameters())
    reference = copy.deepcopy(model)
    torch.manual_seed(11)
    _reset_like_the_engine(reference)
    reference_optimizer = adamw(reference.parameters())
    torch.manual_seed(11)
    arguments = {
        "fsdp_unit_modules": [Block],
        "zero_dp_strategy": strategy,
        "init_model_with_meta_device": True,
        "device": device(),
    }
    if meta_optimizer:
        sharded, optimizer = fully_shard(model, adamw(model.parameters()), **arguments)
    else:
        sharded = fully_shard_model(model, **arguments)
        optimizer = adamw(sharded.parameters())
    assert_same_weights(sharded, reference, tolerance=0)
    if not meta_optimizer:
        return
    for step in batches(steps=2, per_step=dist.get_world_size()):
        for tokens in step:
            (loss_of(reference, tokens) / len(step)).backward()
        reference_optimizer.step()
        reference_optimizer.zero_grad()
        train_step(sharded, optimizer, step[dist.get_rank()])
    assert_same_weights(sharded, reference)


class Big(nn.Module):
    """A model with ten units of equal size and few other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def measure_building() -> dict[str, int]:
    """Peak bytes of one of eight ranks while the model is sharded, and bytes afterwards."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    nn.Linear(64, 64)  # its kernels keep scratch memory from their first call on
    with torch.device("meta"):
        model = Big()
    counter = TensorBytes()
    counter.reset()
    sharded = fully_shard_model(
        model, fsdp_unit_modules=[nn.Sequential], init_model_with_meta_device=True, device="cpu"
    )
    unit = max(group.layout.numel for group in sharded.engine.groups)
    return {"peak": counter.peak(), "built": counter.live(), "unit": 4 * unit}


@pytest.mark.skipif(DEVICE == "cuda", reason="counts CPU tensors")
def test_no_more_than_one_unit_is_whole(tmp_path: Path) -> None:
    found = call_counted(build(tmp_path), "tests.unit_tests.test_meta_device:measure_building")
    assert found["built"] == pytest.approx(10 * found["unit"] / 8, rel=0.02)
    assert found["unit"] < found["peak"] <= found["built"] + 1.02 * found["unit"]


class Tied(nn.Module):
    """A model with a weight that is tied across units, and with buffers on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 31)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens).flatten(0, 1)))


@on_ranks(2)
def test_tied_parameters_stay_tied_and_buffers_are_initialized() -> None:
    with torch.device("meta"):
        model = Tied()
    torch.manual_seed(5)
    sharded = fully_shard_model(
        model, fsdp_unit_modules=[nn.Sequential, nn.Linear], init_model_with_meta_device=True, device=device()
    )
    assert {name for name in main_weights(sharded)} == {
        "embedding.weight",
        "body.0.weight",
        "body.0.bias",
        "body.1.weight",
        "body.1.bias",
        "head.bias",
    }
    assert torch.equal(model.body[1].running_var, torch.ones(8, device=device()))
    for value in main_weights(sharded).values():
        assert value.isfinite().all()
    sharded(torch.zeros(2, 3, dtype=torch.int64, device=device())).sum().backward()


class _QuantizesLate(nn.Linear):
    """As Transformer Engine's layers on the meta device."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.weight.is_meta:
            self.weight = nn.Parameter(Float8Tensor.quantize(self.weight))


@on_ranks(1)
def test_layers_that_quantize_when_they_are_initialized_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(_QuantizesLate(4, 4))
    with pytest.raises(NotImplementedError, match="_QuantizesLate made a quantized Float8Tensor of 0.weight"):
        fully_shard_model(model, init_model_with_meta_device=True)
