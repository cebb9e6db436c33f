"""Models with quantized weights that cannot be sharded raise an error; models can be copied before they are sharded."""

import copy
import io
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.quantized.reference.float8 import Float8Storage, Float8Tensor
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from tests.models import Block, batches, loss_of
from tests.quantized_models import FORMATS, quantized_model, sharded_model
from tests.ranks import on_ranks


class Derived(Float8Tensor):
    """A subclass of a registered class."""


@on_ranks(1)
def test_unsupported_settings_raise() -> None:
    model = quantized_model()
    before = [id(p) for p in model.parameters()]
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    expected = r"Parameter \S+weight is a quantized Float8Tensor of .*compute_dtype=torch.bfloat16 is a different"
    with patch.object(Float8Storage, "takes_dtype", False):
        with pytest.raises(NotImplementedError, match=expected):
            fully_shard_model(model, fsdp_unit_modules=[Block], mixed_precision_policy=policy)
    with patch.object(Float8Storage, "problem", lambda *unused: "its rows are odd"):
        with pytest.raises(NotImplementedError, match=r"Parameter \S+ is .* cannot be sharded: its rows are odd"):
            fully_shard_model(model, fsdp_unit_modules=[Block])
    assert before == [id(p) for p in model.parameters()]


@on_ranks(1)
def test_quantized_copies_of_parameters_raise() -> None:
    model = quantized_model()
    made = Float8Tensor.quantize(model.embedding.weight, keep_initial=True)
    model.head.weight = nn.Parameter(made)
    with pytest.raises(ValueError, match="head.weight is a quantized Float8Tensor of the memory of embedding.weight"):
        fully_shard_model(model, fsdp_unit_modules=[Block])


@pytest.mark.parametrize("format", FORMATS)
def test_copies_before_sharding(format: str) -> None:
    model = quantized_model(format)
    model.head.weight.mark = 1
    reloaded = io.BytesIO()
    torch.save(model, reloaded)
    reloaded.seek(0)
    for other in (copy.deepcopy(model), torch.load(reloaded, weights_only=False)):
        assert other.head.weight.mark == 1 and type(other.head.weight) is type(model.head.weight)
        tokens = batches(1, 1, vocabulary=31)[0, 0]
        assert torch.equal(loss_of(other, tokens), loss_of(model, tokens))
        for mine, theirs in zip(model.head.weight.planes, other.head.weight.planes, strict=True):
            assert mine.data_ptr() != theirs.data_ptr() and torch.equal(mine, theirs)
        assert other.head.weight.requires_grad and torch.equal(other.head.weight.initial, model.head.weight.initial)


@on_ranks(1)
def test_unknown_formats_raise() -> None:
    model = quantized_model()
    raw = model.head.weight
    model.head.weight = nn.Parameter(Derived.quantize(raw.dequantize()))
    with pytest.raises(NotImplementedError, match="Parameter head.weight is a .*Derived, a tensor subclass that keeps"):
        fully_shard_model(model, fsdp_unit_modules=[Block])
    with pytest.raises(NotImplementedError, match="changes a Float8Tensor in place"), torch.no_grad():
        raw.zero_()


@on_ranks(2)
def test_ranks_with_different_formats_raise() -> None:
    format = "128x128" if dist.get_rank() else "tensor"
    with pytest.raises(ValueError, match=r"parameter \S+weight.*stored as"):
        model, _ = sharded_model("optim_grads_params", quantized_model(format))
        model.engine.agree()
