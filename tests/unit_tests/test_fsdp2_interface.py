"""megatron.fsdp.fsdp2 has every name and argument of torch's interface, and docs/reference/fsdp2.md describes them."""

import dataclasses
import inspect
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp

from megatron.fsdp import fsdp2
from tests.models import TinyModel, batches, device, loss_of
from tests.ranks import ROOT, on_ranks

# What some supported versions of torch lack.
LATER_ARGUMENTS, LATER_CLASSES = {"dp_mesh_dims"}, {"DataParallelMeshDims"}


def _public(owner: type) -> set[str]:
    return {name for name, value in vars(owner).items() if callable(value) and not name.startswith("_")}


def test_everything_of_torchs_interface_is_there_and_documented() -> None:
    page = (ROOT / "docs" / "reference" / "fsdp2.md").read_text()
    cells = re.findall(r"^\| (`\w+`[^|]*)\|", page, flags=re.MULTILINE)
    rows = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    names = _public(torch_fsdp.FSDPModule)
    assert names <= _public(fsdp2.FSDPModule)
    parameters = inspect.signature(torch_fsdp.fully_shard).parameters
    ours = inspect.signature(fsdp2.fully_shard).parameters
    assert set(parameters) | {"shard_granularity", "replicated_params"} | LATER_ARGUMENTS == set(ours)
    assert names | set(ours) <= rows, f"docs/reference/fsdp2.md lacks {sorted((names | set(ours)) - rows)}"
    for name in names - {"set_requires_gradient_sync"}:
        theirs, mine = getattr(torch_fsdp.FSDPModule, name), getattr(fsdp2.FSDPModule, name)
        wanted = list(inspect.signature(theirs).parameters)
        got = inspect.signature(mine).parameters
        assert wanted == list(got) or "kwargs" in got, name
    for name in fsdp2.__all__:
        assert name in LATER_CLASSES or hasattr(torch_fsdp, name)
        assert name in page


def test_every_field_of_torchs_policy_is_known() -> None:
    """An unknown one would be ignored, because torch's class is accepted in place of ours."""
    known = {field.name for field in dataclasses.fields(fsdp2.MixedPrecisionPolicy)} | {"param_dtype_override_fn"}
    assert {field.name for field in dataclasses.fields(torch_fsdp.MixedPrecisionPolicy)} <= known


@on_ranks(1)
def test_dtypes_per_parameter_are_refused() -> None:
    ours = dataclasses.asdict(fsdp2.MixedPrecisionPolicy())
    fsdp2.fully_shard(TinyModel(), mp_policy=SimpleNamespace(**ours, param_dtype_override_fn=None))
    with pytest.raises(NotImplementedError, match="^param_dtype_override_fn: "):
        fsdp2.fully_shard(TinyModel(), mp_policy=SimpleNamespace(**ours, param_dtype_override_fn=lambda p: p.dtype))


@on_ranks(2)
def test_reads_of_shards_before_the_first_forward() -> None:
    """Names of DTensors shard the model of a parameter that was reached as an attribute."""
    torch.manual_seed(0)
    model = TinyModel().to(device())
    right = model.head.weight.detach().clone()
    fsdp2.fully_shard(model.head)
    fsdp2.fully_shard(model)
    kept = model.head.weight
    assert not hasattr(kept, "missing") and type(kept.data) is torch.Tensor
    assert torch.equal(kept.full_tensor(), right)  # type: ignore[operator]
    assert model.head.weight.placements == kept.placements
    assert torch.equal(kept.to_local(), model.head.weight.to_local())


@on_ranks(1)
def test_a_first_forward_inside_of_torch_func_raises_and_changes_nothing() -> None:
    model = TinyModel().to(device())
    fsdp2.fully_shard(model.blocks[0])
    fsdp2.fully_shard(model)
    tokens = batches(1, 1)[0, 0]
    with pytest.raises(NotImplementedError, match=r"torch\.func .* does not work"):
        torch.vmap(model)(tokens[None])
    loss_of(model, tokens).backward()


@on_ranks(1)
def test_a_first_forward_inside_of_jvp() -> None:
    layer = torch.nn.Linear(4, 4, device=device())
    right, x = layer.weight.detach().clone(), torch.randn(2, 4, device=device())
    fsdp2.fully_shard(layer)
    assert torch.equal(torch.func.jvp(layer, (x,), (x,))[1], x @ right.t())
