"""torchao's float8 training: sharded as bytes, it equals unsharded training with the same model, bit by bit."""

import copy
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

from megatron.fsdp.buffers.flat_buffer import storage_id
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model
from tests.models import TinyModel, batches, device, load_from, loss_of, save_to
from tests.quantized_models import Reference, arguments, float8, quantized_model, sharded_model, train

pytest.importorskip("torchao")

from torchao.float8 import CastConfig, Float8LinearConfig, ScalingGranularity, convert_to_float8_training  # noqa: E402
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic  # noqa: E402
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole  # noqa: E402
from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig  # noqa: E402
from torchao.quantization import quantize_  # noqa: E402

from tests.ranks import on_ranks

# Quantizing -------------------------------------------------------------------------------------------------------

SHAPES = [(333, 97), (1, 5), (129, 130), (5, 1), (1, 1), (2, 2), (3, 300), (16, 16)]


def _values() -> list[torch.Tensor]:
    torch.manual_seed(7)
    values = [torch.randn(shape) for shape in SHAPES]
    values[0][5].mul_(100)  # the largest value is on one rank only
    values[2].mul_(1e-14)  # its scale would be larger than torchao allows
    values[-1].zero_()
    return values


@on_ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_are_quantized_like_the_whole(dtype: torch.dtype) -> None:
    model = nn.Module()
    for i, value in enumerate(_values()):
        layer = nn.Linear(value.shape[1], value.shape[0], bias=False)
        layer.weight = nn.Parameter(value.to(dtype))
        model.add_module(f"layer{i}", layer)
    expected = [
        hp_tensor_to_float8_dynamic(value.to(dtype), torch.float8_e4m3fn, None, gemm_input_role=GemmInputRole.WEIGHT)
        for value in _values()
    ]
    float8(model)
    model.forward = lambda: [p.detach().clone() for p in model.parameters()]
    found = fully_shard_model(model, fsdp_unit_modules=[], **arguments("optim_grads_params"))()
    for whole, sharded in zip(expected, found, strict=True):
        assert torch.equal(whole._scale, sharded._scale) and whole._scale.shape == sharded._scale.shape
        assert torch.equal(whole._data.view(torch.uint8), sharded._data.view(torch.uint8)), whole.shape
        assert whole.dtype == sharded.dtype == dtype


# Training ---------------------------------------------------------------------------------------------------------


def _expected(model: nn.Module, data: torch.Tensor) -> list[float]:
    reference = Reference(model)
    return [reference.step(step)[dist.get_rank()] for step in data]


@on_ranks(2)
@pytest.mark.parametrize("gather", [True, False], ids=["bytes", "high precision"])
def test_what_is_gathered(gather: bool) -> None:
    """With and without gathering bytes, the layers compute in float8 as unsharded ones do."""
    data = batches(6, dist.get_world_size())
    models = [float8(TinyModel().to(device(), torch.bfloat16), gather) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    expected = _expected(models[0], data)
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    model, optimizer = sharded_model("optim_grads_params", models[1], mixed_precision_policy=policy)
    classes = set()
    up = model.module.blocks[0].up
    up.register_forward_pre_hook(lambda module, args: classes.add(type(module.weight)))
    assert train(model, optimizer, data) == expected
    (found,) = classes
    assert found is Float8TrainingTensor if gather else issubclass(found, nn.Parameter)


@on_ranks(2)
def test_a_unit_that_returns_its_weight_returns_a_copy() -> None:
    """A unit that returns its weight returns a copy, whose bytes outlive the unit's."""
    model = quantized_model("torchao")
    model.blocks[0].forward = lambda x, block=model.blocks[0], run=model.blocks[0].forward: (run(x), block.up.weight)
    model.forward = lambda tokens: model.blocks[0](model.embedding(tokens))
    sharded, _ = sharded_model("optim_grads_params", model)
    _, returned = sharded(batches(1, 1)[0, 0])
    owned = [plane.buffer.flat for group in sharded.engine.groups for plane in group.weights.planes]
    assert storage_id(returned._data) not in {storage_id(flat) for flat in owned}


@on_ranks(2)
def test_copies_of_a_model() -> None:
    """Copies of a model that is not sharded yet train like it."""
    data = batches(4, 2)
    expected = _expected(quantized_model("torchao"), data)
    for copied in (copy.deepcopy(quantized_model("torchao")), pickle.loads(pickle.dumps(quantized_model("torchao")))):
        assert train(*sharded_model("optim_grads_params", copied), data) == expected


# Checkpoints ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_releases_what_it_was_made_of() -> None:
    """The values that torchao kept in high precision are freed, although an optimizer knew their parameter."""
    model = quantized_model("torchao")
    before = model.head.weight
    sharded, optimizer = sharded_model("optim_grads_params", model)
    assert before._tensor.device.type == "meta"
    train(sharded, optimizer, batches(2, dist.get_world_size()))
    for group in sharded.engine.groups:
        assert all(type(p.compute) is Float8TrainingTensor for p in group.params) == (group.storage is not None)


def _whole(model: MegatronFSDP) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@on_ranks(2)
def test_checkpoints_of_plain_models(tmp_path: Path) -> None:
    """A checkpoint of a model in bf16 loads into one with float8 weights and back; float32 values stay the same."""
    torch.manual_seed(3)
    plain = sharded_model("optim_grads_params", TinyModel().bfloat16())
    train(*plain, batches(2, dist.get_world_size()))
    expected = _whole(plain[0])
    save_to(f"{tmp_path}/plain", *plain)
    converted = sharded_model("optim_grads_params", quantized_model("torchao", torch.bfloat16))
    load_from(f"{tmp_path}/plain", *converted)
    loss_of(converted[0], batches(1, 1)[0, 0])
    save_to(f"{tmp_path}/float8", *converted)
    torch.manual_seed(4)
    again = sharded_model("optim_grads_params", TinyModel().bfloat16())
    load_from(f"{tmp_path}/float8", *again)
    for found in (_whole(converted[0]), _whole(again[0])):
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, found[name]) and value.dtype == torch.float32 for name, value in expected.items())


# Other input ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_mixed_configurations() -> None:
    """Layers with other configurations share units and batches; each is cast as its own configuration says."""
    data = batches(4, 2)

    def model() -> nn.Module:
        torch.manual_seed(5)
        made = TinyModel().to(device())
        other = Float8LinearConfig(
            enable_fsdp_float8_all_gather=True,
            emulate=True,
            pad_inner_dim=True,
            cast_config_weight=CastConfig(target_dtype=torch.float8_e5m2),
        )
        made.blocks[0].up = convert_to_float8_training(nn.Sequential(made.blocks[0].up), config=other)[0]
        rowwise = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
        made.blocks[1] = convert_to_float8_training(made.blocks[1], config=rowwise)
        return float8(made)

    assert train(*sharded_model("optim_grads_params", model()), data) == _expected(model(), data)


@on_ranks(1)
def test_scales_of_rows_raise() -> None:
    """Unsupported weights raise an error before anything changes."""
    layer = nn.Linear(8, 4, bias=False)
    cast = hp_tensor_to_float8_dynamic(
        layer.weight.detach(),
        torch.float8_e4m3fn,
        None,
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=-1,
    )
    layer.weight = nn.Parameter(cast)
    with pytest.raises(NotImplementedError, match=r"Parameter weight .*Float8TrainingTensor of .*: it has 4 scales"):
        fully_shard_model(layer, fsdp_unit_modules=[])
    layer = nn.Linear(8, 4, bias=False)
    quantize_(layer, Int8MixedPrecisionTrainingConfig())
    with pytest.raises(NotImplementedError, match=r"Parameter weight is a torchao\..*, a tensor subclass that keeps"):
        fully_shard_model(layer, fsdp_unit_modules=[])


def test_plain_models_do_not_import_torchao() -> None:
    code = "import sys, megatron_fsdp; from megatron.fsdp.quantized.storage import storage_of; import torch; "
    code += (
        "storage_of(torch.nn.Parameter(torch.ones(2))); assert not any(m.startswith('torchao') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
