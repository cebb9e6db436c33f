"""Transformer Engine's tensors as weights, with mocks for its classes: sharded training equals unsharded."""

import importlib
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.fsdp.quantized.storage import KEEP_TRANSPOSE, drop_copies_after_forward, storage_of
from megatron_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model
from tests import te_mocks as te
from tests.models import batches, loss_of
from tests.quantized_models import KINDS, arguments, exact, mean, ranks_of, train
from tests.ranks import DEVICE, RankPool, on_ranks
from tests.slow import all_but_slow

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the mocks compute on a CPU")

FORMATS: dict[str, Callable[[], te.Quantizer]] = {
    "delayed": te.Float8Quantizer,
    "current": te.Float8CurrentScalingQuantizer,
    "powers of 2": lambda: te.Float8CurrentScalingQuantizer(force_pow_2_scales=True),
    "blockwise": te.Float8BlockQuantizer,
    "MXFP8": te.MXFP8Quantizer,
    "NVFP4": te.NVFP4Quantizer,
}
WIDTH, HIDDEN = 32, 288
FP32 = MixedPrecisionPolicy(main_grads_dtype=torch.float32)


def plug_in() -> Any:
    """The module under test, after it has registered the classes that are installed now."""
    return importlib.reload(importlib.import_module("megatron.fsdp.quantized.transformer_engine"))


def with_mocks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function in a rank where Transformer Engine seems to be installed."""

    @wraps(function)
    def run(*args: Any) -> Any:
        with te.installed():
            plug_in()
            return function(*args)

    return run


class Block(nn.Module):
    """A residual MLP whose matrices are quantized."""

    def __init__(self, name: str, dtype: torch.dtype, preserve: bool, device: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype, device=device)
        self.up = te.Linear(WIDTH, HIDDEN, FORMATS[name](), dtype, preserve, device)
        self.down = te.Linear(HIDDEN, WIDTH, FORMATS[name](), dtype, preserve, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the MLP's output."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class MixedBlock(nn.Module):
    """A residual MLP of layers with a weight that is not quantized, and with several that are."""

    def __init__(self, name: str, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.up = te.LayerNormLinear(WIDTH, HIDDEN, FORMATS[name](), dtype, device)
        self.down = te.GroupedLinear(HIDDEN, WIDTH, [FORMATS[name]() for _ in range(2)], dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the MLP's output."""
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """Embedding, blocks and a head that is not quantized, initialized in the order of sharded models on "meta"."""

    def __init__(
        self,
        name: str,
        dtype: torch.dtype = torch.float32,
        preserve: bool = True,
        mixed: bool = False,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(31, WIDTH, dtype=dtype, device=device)
        self.head = nn.Linear(WIDTH, 31, bias=False, dtype=dtype, device=device)
        make = partial(MixedBlock, name, dtype, device) if mixed else partial(Block, name, dtype, preserve, device)
        self.blocks = nn.ModuleList(make() for _ in range(3))
        layers = [layer for layer in self.modules() if isinstance(layer, te.TransformerEngineBaseModule)]
        self.quantizers = [quantizer for layer in layers for quantizer in layer.quantizers["scaling_fwd"]]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits. Ends with what leaving ``autocast`` does."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        for quantizer in self.quantizers:
            if isinstance(quantizer, te.Float8Quantizer):
                quantizer.end_of_forward()
        return self.head(x)


class Reference:
    """Unsharded training: float32 main weights, from which all weights are quantized before every step."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.params = list(model.parameters())
        self.main = [nn.Parameter(self._initial(p).float().clone()) for p in self.params]
        self.optimizer = exact(self.main)

    @staticmethod
    def _initial(parameter: Any) -> torch.Tensor:
        if not isinstance(parameter, te.QuantizedTensor):
            return parameter.detach()
        if hasattr(parameter, "get_high_precision_init_val"):
            return parameter.get_high_precision_init_val()
        return parameter.detach().dequantize()

    def step(self, micro_batches: torch.Tensor) -> list[list[float]]:
        """Train one step of a micro-batch per rank; return the loss of each of them."""
        return self.accumulate(micro_batches[:, None], "")

    def accumulate(self, micro_batches: torch.Tensor, kind: str) -> list[list[float]]:
        """As :meth:`step` for several micro-batches, [ranks, micro-batches, ...], with a strategy's order of sums."""
        with torch.no_grad():
            for parameter, main in zip(self.params, self.main, strict=True):
                if isinstance(parameter, te.QuantizedTensor):
                    parameter._quantizer.set_usage(columnwise=True)
                    parameter._quantizer.update_quantized(main, parameter)
                else:
                    parameter.copy_(main)
        losses: list[list[float]] = [[] for _ in micro_batches]
        grads: list[list[Any]] = [[] for _ in micro_batches]
        # Delayed scaling changes after each forward, as on a rank. Ranks forward the same micro-batch of theirs.
        for number in range(micro_batches.shape[1]):
            for rank, tokens in enumerate(micro_batches[:, number]):
                loss = loss_of(self.model, tokens)
                grads[rank].append([grad.float() for grad in torch.autograd.grad(loss, self.params)])
                losses[rank].append(loss.item())
        for i, main in enumerate(self.main):
            of_ranks = [[grad[i] for grad in of_rank] for of_rank in grads]
            if kind == "optim":
                main.grad = mean([sum(of_rank) for of_rank in of_ranks])
            else:
                main.grad = sum(mean(list(of_micro_batch)) for of_micro_batch in zip(*of_ranks, strict=True))
        self.optimizer.step()
        return losses


def _expected(model: Model, data: torch.Tensor) -> list[float]:
    reference = Reference(model)
    return [reference.step(step)[dist.get_rank()][0] for step in data]


def _sharded(kind: str, model: nn.Module, **more: Any) -> Any:
    return fully_shard(
        model, exact(model.parameters()), fsdp_unit_modules=[type(model.blocks[0])], **arguments(kind), **more
    )


# Training ---------------------------------------------------------------------------------------------------------


@with_mocks
def _trains(kind: str, name: str, dtype: torch.dtype, preserve: bool, more: dict) -> None:
    data = batches(8, dist.get_world_size())
    expected = _expected(Model(name, dtype, preserve), data)
    te.made_in_forward.clear()
    sharded, optimizer = _sharded(kind, Model(name, dtype, preserve), **more)
    quantized = [p.compute for p in sharded.engine.params() if isinstance(p.compute, te.QuantizedTensor)]
    assert len(quantized) == 6 and not any(hasattr(weight, "_high_precision_init_val") for weight in quantized)
    assert train(sharded, optimizer, data) == expected
    assert expected[-1] < expected[0] - 0.1
    assert te.made_in_forward == []
    for weight in quantized:
        assert getattr(weight, "_transpose", None) is None
        assert isinstance(weight, te.MXFP8Tensor) or getattr(weight, "_columnwise_data", None) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", all_but_slow(FORMATS, "delayed", "MXFP8"))
def test_trains_as_unsharded(ranks: RankPool, name: str, kind: str) -> None:
    ranks.run(ranks_of(kind), _trains, kind, name, torch.float32, True, {})


VARIANTS: dict[str, tuple[torch.dtype, bool, dict]] = {
    "bf16": (torch.bfloat16, True, {"mixed_precision_policy": FP32}),
    "from dequantized values": (torch.float32, False, {}),
    "double buffer": (torch.float32, True, {"fsdp_double_buffer": True}),
    "elements": (torch.float32, True, {"shard_granularity": "element"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", all_but_slow(FORMATS, "delayed", "MXFP8"))
def test_variants_train_as_unsharded(ranks: RankPool, name: str, variant: str) -> None:
    ranks.run(2, _trains, "optim_grads_params", name, *VARIANTS[variant])


@with_mocks
@on_ranks(2)
@pytest.mark.parametrize("name", all_but_slow(FORMATS, "delayed", "MXFP8"))
def test_older_versions(name: str) -> None:
    data = batches(3, 2)
    expected = _expected(Model(name), data)
    utils = sys.modules[f"{te.TENSORS}.utils"]
    for newer in ("quantize_master_weights", "post_all_gather_processing"):
        delattr(utils, newer)
    if name == "NVFP4":
        with pytest.raises(NotImplementedError, match="this version of Transformer Engine cannot quantize"):
            _sharded("optim_grads_params", Model(name))
    else:
        model, optimizer = _sharded("optim_grads_params", Model(name))
        assert train(model, optimizer, data) == expected


@with_mocks
@on_ranks(2)
@pytest.mark.parametrize("name", all_but_slow(FORMATS, "delayed", "MXFP8"))
def test_recomputes(name: str) -> None:
    data = batches(4, 2)
    expected = _expected(Model(name), data)
    model = Model(name)
    for block in model.blocks:
        block.forward = lambda x, run=block.forward: checkpoint(run, x, use_reentrant=False)
    sharded, optimizer = _sharded("optim_grads_params", model)
    assert train(sharded, optimizer, data) == expected


@with_mocks
@on_ranks(2)
@pytest.mark.parametrize("keep", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("kind", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("name", all_but_slow(FORMATS, "delayed", "MXFP8"))
def test_accumulates(name: str, kind: str, keep: bool) -> None:
    """Two micro-batches and an evaluation per step; transposes are made once per backward, or once per step if kept."""
    data = batches(3, 4).unflatten(1, (2, 2))
    reference = Reference(Model(name))
    expected = [reference.accumulate(step, kind)[dist.get_rank()] for step in data]
    model = Model(name)
    sharded, optimizer = _sharded(kind, model, keep_fp8_transpose_cache=keep)
    # With delayed scaling, leaving ``autocast`` would change the scales.
    quantizers = model.quantizers
    te.made_in_forward.clear()
    for step, losses in zip(data[:, dist.get_rank()], expected, strict=True):
        te.made.clear()
        with sharded.no_sync():
            (first := loss_of(sharded, step[0])).backward()
        with torch.no_grad():
            model.quantizers = []
            loss_of(sharded, step[0])
            model.quantizers = quantizers
        (second := loss_of(sharded, step[1])).backward()
        assert [first.item(), second.item()] == losses
        optimizer.step()
        optimizer.zero_grad()
        assert len(te.made) == (0 if name == "MXFP8" else 6 if keep else 12)
    assert te.made_in_forward == []


# The meta device --------------------------------------------------------------------------------------------------


@with_mocks
def _trains_from_meta(name: str, kind: str, dtype: torch.dtype, mixed: bool, keep: bool) -> None:
    """Layers whose plain weights on the meta device get quantized when they are initialized."""
    data = batches(6, dist.get_world_size())
    options = {"mixed_precision_policy": FP32, "keep_fp8_transpose_cache": keep}
    expected = _expected(Model(name, dtype, mixed=mixed), data)
    built, _ = _sharded(kind, Model(name, dtype, mixed=mixed), **options)
    model = Model(name, dtype, mixed=mixed, device="meta")
    for parameter in model.parameters():
        parameter.of_user = True
    torch.manual_seed(5)
    sharded, optimizer = _sharded(kind, model, init_model_with_meta_device=True, **options)
    pairs = list(zip(sharded.engine.params(), built.engine.params(), strict=True))
    assert sum(isinstance(found.compute, te.QuantizedTensor) for found, _ in pairs) == (9 if mixed else 6)
    for found, other in pairs:
        assert torch.equal(found.main.full_tensor(), other.main.full_tensor()), found.name
        assert type(found.compute) is type(other.compute) and found.compute.device == other.compute.device
        assert found.main.of_user and found.compute.of_user
        # Layers mark the parameters that they make when they are initialized.
        for mark in ("tensor_model_parallel", "sequence_parallel"):
            assert getattr(found.main, mark, False) == getattr(other.compute, mark, False)
        assert getattr(found.compute, KEEP_TRANSPOSE, None) is getattr(other.compute, KEEP_TRANSPOSE, None)
        assert not hasattr(found.compute, "get_high_precision_init_val")
    assert train(sharded, optimizer, data) == expected


@pytest.mark.parametrize("mixed", [False, True], ids=["linear", "mixed"])
@pytest.mark.parametrize("kind", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("name", all_but_slow(FORMATS, "delayed", "MXFP8"))
def test_trains_from_the_meta_device(ranks: RankPool, name: str, kind: str, mixed: bool) -> None:
    ranks.run(2, _trains_from_meta, name, kind, torch.bfloat16 if mixed else torch.float32, mixed, mixed)


@with_mocks
@on_ranks(1)
@pytest.mark.parametrize("name", ["delayed", "MXFP8"])
def test_what_cannot_be_initialized_is_refused(name: str) -> None:
    def sharded(model: nn.Module) -> Any:
        return fully_shard_model(model, init_model_with_meta_device=True)

    late = Model(name, device="meta")
    for quantizer in late.quantizers:
        quantizer.scale = torch.ones(1, device="meta")
    with pytest.raises(NotImplementedError, match="its quantizer is on the meta device"):
        sharded(late)
    tied = Model(name, device="meta")
    tied.extra = nn.Linear(WIDTH, HIDDEN, bias=False, device="meta")
    tied.extra.weight = tied.blocks[0].up.weight
    with pytest.raises(NotImplementedError, match="Linear made a quantized .* of blocks.0.up.weight"):
        sharded(tied)
    grouped: Any = Model(name, mixed=True, device="meta")
    layer = grouped.blocks[0].down

    def packs(reset: Any = layer.reset_parameters) -> None:
        reset()
        layer.weight0 = None

    layer.reset_parameters = packs
    with pytest.raises(NotImplementedError, match="GroupedLinear removed blocks.0.down.weight0"):
        sharded(grouped)


# Quantizing -------------------------------------------------------------------------------------------------------

SHAPES = [(384, 128), (288, 160), (32, 32), (160, 416), (64, 256)]


def _fields(tensor: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in vars(tensor).items() if isinstance(value, torch.Tensor)}


@with_mocks
def _quantizes(name: str, kind: str) -> None:
    model = nn.Module()
    torch.manual_seed(3)
    expected = []
    for i, (rows, columns) in enumerate(SHAPES):
        layer = te.Linear(columns, rows, quantizer := FORMATS[name]())
        model.add_module(f"layer{i}", layer)
        value: Any = layer.weight
        value._high_precision_init_val[5].mul_(100)  # the largest value is on one rank only
        expected.append(quantizer(value._high_precision_init_val))
    model.forward = lambda: [_fields(layer.weight) for layer in model.children()]
    sharded = fully_shard_model(model, fsdp_unit_modules=[], **arguments(kind))
    for found, whole in zip(sharded(), expected, strict=True):
        for field, value in _fields(whole).items():
            # In forward, transposes are not there, and bytes by columns of MXFP8 are not gathered.
            if "columnwise" not in field and field != "_transpose":
                assert torch.equal(found[field], value), field


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", all_but_slow(FORMATS, "delayed", "MXFP8"))
def test_shards_are_quantized_like_the_whole(ranks: RankPool, name: str, size: int) -> None:
    ranks.run(size, _quantizes, name, "optim_grads_params")


# Errors -----------------------------------------------------------------------------------------------------------


def _set(field: str, value: Any) -> Callable[[Any], None]:
    return lambda layer: setattr(layer.weight, field, value)


def _set_option(option: str, value: Any) -> Callable[[Any], None]:
    return lambda layer: setattr(layer.weight._quantizer, option, value)


REFUSED: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "columns only": ("MXFP8", _set("_rowwise_data", None), "it has no _rowwise_data"),
    "rows only": ("MXFP8", _set("_columnwise_data", None), "it has no _columnwise_data"),
    "no quantizer": ("current", _set("_quantizer", None), "it has no quantizer"),
    "1 x 128": ("blockwise", _set("_is_2D_scaled", False), "only matrices in blocks of 128 x 128"),
    "1 x 16": ("NVFP4", _set_option("with_2d_quantization", False), "only matrices in blocks of 16 x 16"),
    "4over6": ("NVFP4", _set("_nvfp4_use_4over6", True), "cannot be quantized with nvfp4_use_4over6"),
    "row-scaled": ("NVFP4", _set("_row_scaled_nvfp4", True), "cannot be quantized with row_scaled_nvfp4"),
}


def _with_columns(weight: Any) -> Any:
    weight._columnwise_data = weight._rowwise_data
    return weight


@with_mocks
@on_ranks(1)
def test_what_cannot_be_trained_is_named() -> None:
    module = plug_in()
    for name, change, message in REFUSED.values():
        layer: Any = te.Linear(32, 64, FORMATS[name]())
        storage = storage_of(layer.weight)
        assert storage is not None
        assert storage.problem(layer.weight, torch.device("cpu")) is None
        shape = layer.weight.shape
        change(layer)
        with patch.object(type(layer.weight), "shape", shape):
            assert message in str(storage.problem(layer.weight, torch.device("cpu")))
    for name, capability in {"delayed": (8, 9), "blockwise": (9, 0), "MXFP8": (10, 0), "NVFP4": (10, 0)}.items():
        weight = te.Linear(32, 64, FORMATS[name]()).weight
        found: Any = storage_of(weight)
        older = (capability[0], capability[1] - 1) if capability[1] else (capability[0] - 1, 9)
        for device, text in ((older, "compute capability"), (capability, "it is on cpu; move the model to cuda")):
            with patch.object(torch.cuda, "get_device_capability", return_value=device):
                assert text in found.problem(weight, torch.device("cuda"))
    odd = te.Linear(48, 64, te.NVFP4Quantizer()).weight
    assert "multiples of 32" in str(module.MXFP8(key=None).problem(_with_columns(odd), torch.device("cpu")))


@with_mocks
@on_ranks(1)
def test_keys() -> None:
    """Tensors that may not be in one batch have different keys."""
    made = [te.Linear(32, 64, quantizer()).weight for quantizer in FORMATS.values()]
    made.append(te.Linear(32, 64, te.Float8CurrentScalingQuantizer(), torch.bfloat16).weight)
    for option, value in (("dtype", "kFloat8E5M2"), ("amax_epsilon", 1e-4)):
        quantizer = te.Float8CurrentScalingQuantizer()
        setattr(quantizer, option, value)
        made.append(te.Linear(32, 64, quantizer).weight)
    assert len({storage_of(weight).key for weight in made}) == len(made)  # type: ignore[union-attr]
    same = [te.Linear(32, 64, te.Float8CurrentScalingQuantizer()).weight for _ in range(2)]
    assert storage_of(same[0]) == storage_of(same[1])


# Copies of plain weights ---------------------------------------------------------------------------------------------


class _Casting(nn.Module):
    """Blocks whose layers quantize their plain weights in forward."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), kind(16, 16)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _kept_copies(strategy: str, kind: Any) -> int:
    """How many quantized weights autograd keeps. The gradients are those of an unsharded model."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    plain = _Casting(kind)
    plain(x).sum().backward()
    te.workspaces.clear()
    model = fully_shard_model(_Casting(kind), fsdp_unit_modules=[nn.Sequential], zero_dp_strategy=strategy)
    loss = model(x).sum()
    kept = len(te.workspaces)
    loss.backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad)  # type: ignore[union-attr]
    return kept


@pytest.mark.parametrize(
    "strategy, kind, expected",
    [
        ("optim_grads_params", te.CastingLinear, 0),
        ("optim_grads", te.CastingLinear, 3),
        ("optim_grads_params", te.OlderCastingLinear, 3),
    ],
)
def test_copies_of_weights_are_made_again_in_backward(ranks: RankPool, strategy: str, kind: Any, expected: int) -> None:
    assert ranks.run(2, _kept_copies, strategy, kind) == [expected] * 2


@with_mocks
@on_ranks(1)
def test_layers_that_keep_copies_are_named() -> None:
    layers = [
        te.CastingLinear(4, 4),
        te.OlderCastingLinear(4, 4),
        te.Linear(32, 32, FORMATS["MXFP8"]()),
        nn.Linear(4, 4),
    ]
    assert drop_copies_after_forward(layers) == layers[1:2]
