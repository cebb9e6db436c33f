"""Subclasses of Parameter and Tensor: they raise by name if they may store values in another way."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

from megatron.fsdp import fsdp2
from megatron_fsdp import fully_shard
from tests.models import DEVICE, STRATEGIES, Block, TinyModel, adamw, assert_same_training, batches, sgd
from tests.ranks import on_ranks


class Quantized(torch.Tensor):
    """8-bit values and a scale that appear as a different dtype. Values assigned to ``.data`` are quantized."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> "Quantized":
        made: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def of(cls, value: torch.Tensor) -> "Quantized":
        scale = value.float().abs().max().clamp(min=1e-12) / 127
        return cls((value.float() / scale).round().to(torch.int8), scale, value.dtype)

    def _get(self) -> torch.Tensor:
        return super().data

    def _set(self, value: torch.Tensor) -> None:
        made = value if isinstance(value, Quantized) else Quantized.of(value)
        self.codes, self.scale = made.codes, made.scale

    data = property(_get, _set)  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].dtype)

        def plain(value: Any) -> Any:
            return (value.codes * value.scale).to(value.dtype) if isinstance(value, Quantized) else value

        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


class Counting(nn.Parameter):
    """A subclass of Parameter that sees every operation."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


class Packed(nn.Parameter):
    """A subclass that converts its values when the model is moved, as 4-bit weights do."""

    def to(self, *args: Any, **kwargs: Any) -> "Packed":
        raise AssertionError("not called")


class Named(nn.Parameter):
    """A subclass that only adds attributes."""

    def __new__(cls, data: torch.Tensor, label: str = "") -> "Named":
        made = super().__new__(cls, data)
        made.label = label
        return made

    def loud(self) -> str:
        return self.label.upper()


class Marked(torch.Tensor):
    """A subclass of Tensor that changes nothing."""


def _quantized(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(Quantized.of(weight))


def _in_a_dtensor(weight: torch.Tensor) -> nn.Parameter:
    mesh = init_device_mesh(DEVICE, (1, 1), mesh_dim_names=("dp", "tp"))["tp"]
    parameter = nn.Parameter(DTensor.from_local(weight, mesh, [Shard(0)], run_check=False))
    parameter._local_tensor = Quantized.of(weight)
    return parameter


REFUSED = {
    "quantized": (_quantized, "Quantized"),
    "counting": (Counting, "Counting"),
    "packed": (Packed, "Packed"),
    "in a DTensor": (_in_a_dtensor, "Quantized"),
}


@on_ranks(1)
@pytest.mark.parametrize("kind", REFUSED)
def test_classes_that_store_values_differently_raise(kind: str) -> None:
    make, cls = REFUSED[kind]
    for shard in ("engine", "compat"):
        model = TinyModel()
        weight = model.blocks[1].up.weight = make(model.blocks[1].up.weight.detach())
        before = [id(p) for p in model.parameters()]
        match = rf"test_parameter_classes.{cls}, a tensor subclass that keeps"
        with pytest.raises(NotImplementedError, match=match):
            if shard == "engine":
                fully_shard(model, sgd(model.parameters()), fsdp_unit_modules=[Block])
            else:
                mesh = weight.device_mesh._get_root_mesh()["dp"] if isinstance(weight, DTensor) else None
                fsdp2.fully_shard(model, mesh=mesh)
                model.state_dict()
        assert model.blocks[1].up.weight is weight
        assert shard == "compat" or before == [id(p) for p in model.parameters()]


class Labelled(TinyModel):
    """A model with parameters of classes that only add attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = Named(self.head.weight.detach(), "head")
        self.blocks[0].down.weight = Named(self.blocks[0].down.weight.detach(), "down")
        self.norm.weight = nn.Parameter(self.norm.weight.detach().as_subclass(Marked))

    def __deepcopy__(self, memo: dict) -> TinyModel:
        copied = Labelled()
        copied.load_state_dict({name: value.detach().clone() for name, value in self.state_dict().items()})
        return copied


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_classes_that_only_add_attributes_are_trained(strategy: str) -> None:
    model = Labelled()
    assert isinstance(model.norm.weight, Marked)
    seen = []
    model.head.register_forward_pre_hook(lambda module, args: seen.append(module.weight.loud()))
    assert_same_training(model, batches(3, 2), adamw, zero_dp_strategy=strategy)
    assert "HEAD" in seen and set(seen) == {"HEAD"}
