"""Frozen codes of quantized weights, integers or floating-point numbers of 8 bits, are sharded as they are."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp import fsdp2
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.state.export import save_safetensors
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from tests.models import STRATEGIES, device, sgd
from tests.ranks import DEVICE, on_ranks

SHORT = (torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
# Bits of a NaN that a cast to a different dtype and back would change.
_SIGNALS = {torch.bfloat16: 0x7F81, torch.float16: 0x7C01}
WIDE = (torch.int16, torch.uint16, torch.int32, torch.int64)


class Params4bit(nn.Parameter):
    """As bitsandbytes' class, it holds codes in memory of any dtype, and converts them when it is moved."""

    bnb_quantized = True

    def to(self, *args: Any, **kwargs: Any) -> "Params4bit":
        raise AssertionError("not called")


Params4bit.__module__ = "bitsandbytes.nn.modules"


class Quantized(nn.Module):
    """Frozen codes of a matrix, and trained vectors that scale its rows and are added to them."""

    support_avx512bf16_for_cpu = True

    def __init__(self, dtype: torch.dtype, packed: bool = False) -> None:
        super().__init__()
        codes = torch.randint(0, 100, (7, 6))
        codes[0, 0] = _SIGNALS.get(dtype, 1)
        codes = codes.to(torch.int16).view(dtype) if packed else codes.to(dtype)
        self.codes = Params4bit(codes, requires_grad=False) if packed else nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(7))
        self.shift = nn.Parameter(torch.rand(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.codes.detach()
        values = own.view(torch.int16).remainder(11) if isinstance(self.codes, Params4bit) else own.float().clamp(-9, 9)
        return torch.tanh(x @ (values.to(x.dtype) * self.scale[:, None].to(x.dtype)).sum(1, keepdim=True) + self.shift)


def _model(dtypes: Any = SHORT + WIDE, packed: bool = False, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    with device():
        return nn.Sequential(*(Quantized(dtype, packed) for dtype in dtypes))


def _losses(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer, losses = sgd(model.parameters()), []
    for step in range(steps):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step)).to(device())
        loss = model(x).float().pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _bits(model: nn.Module) -> list[bytes]:
    found = []
    for parameter in (p for n, p in model.named_parameters() if n.endswith("codes")):
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found.append(full.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    **{strategy: {"zero_dp_strategy": strategy} for strategy in STRATEGIES},
    "offload": {"offload_optimizer": True},
    "double buffer": {"fsdp_double_buffer": True},
    "two ranks": {"reshard_after_forward": 2},
    "replicas": {"dp_outer_dim": "outer"},
    "outer shards": {"dp_outer_dim": "outer", "outer_dp_sharding_strategy": "optim"},
    "half": {"mixed_precision_policy": MixedPrecisionPolicy(compute_dtype=torch.float16)},
}


@on_ranks(4)
@pytest.mark.parametrize("name", SETTINGS)
def test_codes_are_sharded_and_stay(name: str, tmp_path: Path) -> None:
    settings = SETTINGS[name]
    if "dp_outer_dim" in settings:
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("outer", "inner"))
        settings = settings | {"device_mesh": mesh, "dp_shard_dim": "inner"}
    plain = _model()
    before = _bits(plain)
    model = fully_shard_model(copy.deepcopy(plain), fsdp_unit_modules=[Quantized], **settings)
    tolerance = 1e-2 if name == "half" else 1e-5
    assert _losses(model) == pytest.approx(_losses(plain), rel=tolerance)
    assert _bits(model) == _bits(plain) == before
    held = sum(local_shard(p).nbytes for n, p in model.named_parameters() if n.endswith("codes"))
    full = sum(p.nbytes for n, p in plain.named_parameters() if n.endswith("codes"))
    total = torch.tensor(held)
    dist.all_reduce(total)
    copies = {"no_shard": 4, "replicas": 2}.get(name, 1)
    assert total == copies * full
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    other = fully_shard_model(_model(seed=1), fsdp_unit_modules=[Quantized])
    assert _bits(other) != before
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state)
    assert _bits(other) == before


@on_ranks(2)
@pytest.mark.parametrize("sync", [None, True])
def test_the_first_rank_gives_its_codes(sync: bool | None) -> None:
    model = fully_shard_model(_model(seed=dist.get_rank()), fsdp_unit_modules=[Quantized], sync_module_states=sync)
    assert _bits(model) == _bits(_model())


@on_ranks(2)
@pytest.mark.parametrize("interface", ["own", "fsdp2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_in_memory_of_floating_point_numbers_are_not_cast(interface: str, dtype: torch.dtype) -> None:
    plain = _model([dtype] * 3, packed=True)
    expected, before = _losses(copy.deepcopy(plain)), _bits(plain)
    assert any(p.isnan().any() for p in plain.parameters())
    if interface == "own":
        model: nn.Module = fully_shard_model(plain, fsdp_unit_modules=[Quantized])
    else:
        for layer in plain:
            fsdp2.fully_shard(layer)
        model = fsdp2.fully_shard(plain, mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.float32))
    assert _losses(model) == pytest.approx(expected, rel=1e-5)
    assert _bits(model) == before
    # bitsandbytes would put codes in a different order, and in memory of its own.
    assert not any(layer.support_avx512bf16_for_cpu for layer in plain)


@on_ranks(1)
def test_codes_that_are_trained_or_not_there_yet_raise() -> None:
    with pytest.raises(ValueError, match="got torch.float8_e4m3fn. If it is not trained, freeze it"):
        fully_shard_model(nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.float8_e4m3fn))]))
    values = Params4bit(torch.ones(3), requires_grad=False)
    values.bnb_quantized = False
    with pytest.raises(NotImplementedError, match="a tensor subclass that keeps its values differently"):
        fully_shard_model(nn.ParameterList([values]))
    model = fully_shard_model(_model([torch.int8]), fsdp_unit_modules=[Quantized])
    with pytest.raises(TypeError, match="keeps its dtype: expected values of torch.int8; got torch.float32"):
        model.module[0].codes.data = model.module[0].codes.data * 0.5


@on_ranks(2)
def test_exports_in_another_dtype_leave_codes_as_they_are(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    plain = _model((torch.int8, torch.float8_e4m3fn, torch.int64))
    model = fully_shard_model(copy.deepcopy(plain), fsdp_unit_modules=[Quantized])
    found = {
        name: tensor.clone() for bucket in model.full_weights(dtype=torch.bfloat16) for name, tensor in bucket.items()
    }
    save_safetensors(model, tmp_path, dtype=torch.bfloat16)
    dist.barrier()
    saved = {name: each for file in tmp_path.glob("*.safetensors") for name, each in load_file(file).items()}
    for state in (found, saved):
        assert state.keys() == plain.state_dict().keys()
        for name, expected in plain.state_dict().items():
            wanted = expected if name.endswith("codes") else expected.bfloat16()
            assert state[name].dtype == wanted.dtype
            assert torch.equal(state[name].view(torch.uint8).cpu(), wanted.view(torch.uint8).cpu())
