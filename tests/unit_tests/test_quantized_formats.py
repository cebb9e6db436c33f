"""The formats in plain torch: bytes, cuts between ranks, products. Ranks are threads here."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.fsdp.quantized.reference.base import ReferenceTensor
from megatron.fsdp.quantized.reference.float8 import Float8Tensor
from megatron.fsdp.quantized.reference.mx import MXTensor
from megatron.fsdp.quantized.reference.nvfp4 import NVFP4Tensor
from megatron.fsdp.quantized.storage import Direction, WeightShard, storage_of
from tests.quantized_models import FORMATS, IN_BLOCKS

BOTH = tuple(Direction)
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "anywhere": [(33, 17), (7, 5, 3), (1,), (0, 4), (129, 130), (2, 2)],
    "in blocks": [(64, 96), (32, 32), (160, 32), (96, 64), (32, 160)],
}


def _shapes(name: str) -> list[tuple[int, ...]]:
    return SHAPES["in blocks" if name in IN_BLOCKS else "anywhere"]


def _values(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Values of very different sizes, some of which are 0 or denormal."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(2).exp()
    flat = value.view(-1)
    flat[::7] = 0
    flat[1::11] = -1e-41
    return value


# What the bytes are -----------------------------------------------------------------------------------------------
# Written from the definitions of the formats, block by block. Returns planes and what they decode to in each direction.

Bytes = tuple[list[torch.Tensor], list[torch.Tensor]]
FLOAT_MAX = torch.finfo(torch.float32).max


def _float8_blocks(value: torch.Tensor, block: tuple[int, int] | None) -> Bytes:
    matrix = value.flatten(1) if value.dim() > 1 else value.reshape(1, -1)
    rows, columns = matrix.shape
    height, width = block or (max(rows, 1), max(columns, 1))
    codes, decoded, scales = torch.zeros(rows, columns, dtype=torch.uint8), torch.zeros(rows, columns), []
    for i in range(0, rows, height):
        for j in range(0, columns, width):
            part = matrix[i : i + height, j : j + width]
            largest = part.abs().max()
            scale = torch.tensor(1.0)
            if largest > 0:
                scale = torch.minimum(torch.tensor(448.0) / largest, torch.tensor(FLOAT_MAX))
            code = (part * scale).to(torch.float8_e4m3fn)
            codes[i : i + height, j : j + width] = code.view(torch.uint8)
            decoded[i : i + height, j : j + width] = code.float() * (torch.tensor(1.0) / scale)
            scales.append(torch.tensor(1.0) / scale)
    whole = block is not None and value.dim() == 2 and rows % height == columns % width == 0
    planes = [codes.view(-1), *([torch.stack(scales).view(torch.uint8)] if whole else [])]
    return planes, [decoded.view(value.shape)] * 2


def _mx(value: torch.Tensor) -> Bytes:
    planes, decoded = [], []
    for matrix in (value, value.t()):
        codes, values = torch.zeros(matrix.shape, dtype=torch.uint8), torch.zeros(matrix.shape)
        scales = torch.zeros(matrix.shape[0], matrix.shape[1] // 32, dtype=torch.uint8)
        for i in range(matrix.shape[0]):
            for j in range(0, matrix.shape[1], 32):
                part = matrix[i, j : j + 32]
                exponent = -127
                while 448 * 2.0**exponent < part.abs().max().item():
                    exponent += 1
                scaled = part * 2.0**-exponent if exponent > -127 else part
                code = scaled.to(torch.float8_e4m3fn)
                scales[i, j // 32] = exponent + 127
                codes[i, j : j + 32] = code.view(torch.uint8)
                values[i, j : j + 32] = code.float() * 2.0**exponent
        if matrix is not value:
            codes, scales, values = codes.t(), scales.t(), values.t()
        planes += [codes.reshape(-1), scales.reshape(-1)]
        decoded.append(values)
    return planes, decoded


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def _nearest(values: torch.Tensor) -> torch.Tensor:
    """The code of the nearest 4-bit value; of two that are equally near, the even code."""
    distances = (E2M1 - values.double().abs().unsqueeze(-1)).abs()
    # Less than any difference of distances of float32 values that are not equal.
    code = (distances + torch.arange(8) % 2 * 1e-12).argmin(-1)
    return code + 8 * (values < 0)


def _nvfp4(value: torch.Tensor, height: int) -> Bytes:
    largest = value.abs().max()
    one, finite = torch.tensor(1.0), torch.tensor(FLOAT_MAX)
    of_weight = torch.minimum(torch.tensor(2688.0) / largest, finite)
    rows, columns = value.shape
    codes, scales = torch.zeros(rows, columns, dtype=torch.uint8), torch.zeros(rows, columns // 16, dtype=torch.uint8)
    decoded = torch.zeros(rows, columns)
    for i in range(0, rows, height):
        for j in range(0, columns, 16):
            part = value[i : i + height, j : j + 16]
            scale = (part.abs().max() * (of_weight * (one / 6))).clamp(max=448).to(torch.float8_e4m3fn)
            factor = torch.minimum(one / (scale.float() * (one / of_weight)), finite)
            code = _nearest(part * factor)
            codes[i : i + height, j : j + 16] = code
            scales[i : i + height, j // 16] = scale.view(torch.uint8)
            signed = E2M1[code % 8].float() * torch.where(code < 8, 1.0, -1.0)
            decoded[i : i + height, j : j + 16] = signed * (scale.float() * (largest / 2688))
    return [(codes[:, ::2] + 16 * codes[:, 1::2]).reshape(-1), scales.view(-1)], [decoded] * 2


DEFINITIONS: dict[str, Callable[[torch.Tensor], Bytes]] = {
    "tensor": lambda value: _float8_blocks(value, None),
    "delayed": lambda value: _float8_blocks(value, None),
    "128x128": lambda value: _float8_blocks(value, (128, 128)),
    "1x128": lambda value: _float8_blocks(value, (1, 128)),
    "5x7": lambda value: _float8_blocks(value, (5, 7)),
    "32x32": lambda value: _float8_blocks(value, (32, 32)),
    "1x32": lambda value: _float8_blocks(value, (1, 32)),
    "mx": _mx,
    "nvfp4": lambda value: _nvfp4(value, 16),
    "nvfp4 1x16": lambda value: _nvfp4(value, 1),
}


def _check(name: str, value: torch.Tensor) -> None:
    made: Any = FORMATS[name](value)
    planes, decoded = DEFINITIONS[name](value)
    assert [plane.shape for plane in made.planes] == [plane.shape for plane in planes]
    for plane, expected in zip(made.planes, planes, strict=True):
        assert torch.equal(plane, expected)
    for direction, expected in zip(BOTH, decoded, strict=True):
        assert torch.equal(made.dequantize(direction), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_the_definition(name: str) -> None:
    for shape in _shapes(name)[: 1 if name in IN_BLOCKS else None]:
        for factor in (1.0, 1e-42, 1e-37, 1e30, 0.0):
            _check(name, _values(shape).mul(factor).clamp(-3e38, 3e38))
    value = _values(_shapes(name)[0]).view(-1)
    value[: value.numel() // 2] = 0
    _check(name, value.view(_shapes(name)[0]))


def test_powers_of_2_are_exact_in_mx() -> None:
    """A largest value of 448 x 2^n needs the scale 2^n, and the next number above it the scale 2^(n + 1)."""
    for exponent in (-100, -3, 0, 5):
        largest = torch.tensor(448.0 * 2.0**exponent)
        for value, expected in ((largest, exponent), (largest.nextafter(torch.tensor(1e38)), exponent + 1)):
            made = MXTensor.quantize(value.expand(32, 32))
            assert made.planes[1].tolist() == [expected + 127] * 32
            assert made.planes[3].tolist() == [expected + 127] * 32
            assert made.planes[0][0] == torch.tensor(448.0 * 2.0 ** (exponent - expected)).to(torch.float8_e4m3fn).view(
                torch.uint8
            )


def test_half_way_values_go_to_even_codes_in_nvfp4() -> None:
    value = torch.zeros(16, 32)
    # The scales of the weight and of the first block are 1.
    value[0, 16], value[1, 0] = 2688.0, 6.0
    value[0, :16] = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -5.0, -0.0, 1.2, 4.9, 0.3, 0]
    )
    made: Any = NVFP4Tensor.quantize(value)
    pairs = made.planes[0][:8]
    codes = torch.stack([pairs % 16, pairs // 16], dim=1).flatten().tolist()
    assert codes == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 14, 0, 2, 6, 1, 0]
    assert made.planes[1][:2].view(torch.float8_e4m3fn).tolist() == [1.0, 448.0]


# Shards -----------------------------------------------------------------------------------------------------------


class Ranks:
    """Runs a function in one thread per rank, with a collective maximum."""

    def __init__(self, size: int) -> None:
        self.size, self.reductions = size, 0
        self._barrier = threading.Barrier(size, timeout=60)
        self._values: list[torch.Tensor] = [torch.empty(0)] * size

    def reduce_max(self, rank: int) -> Callable[[torch.Tensor], None]:
        """The arguments that a rank passes to ``quantize``."""

        def reduce(values: torch.Tensor) -> None:
            self._values[rank] = values.clone()
            self._barrier.wait()
            values.copy_(torch.stack(self._values).amax(0))
            self.reductions += rank == 0
            self._barrier.wait()

        return reduce

    def run(self, function: Callable[[int], None]) -> None:
        """Run it on all ranks; raise the first error."""
        errors: list[BaseException] = []

        def on(rank: int) -> None:
            try:
                function(rank)
            except BaseException as error:
                self._barrier.abort()
                errors.append(error)

        threads = [threading.Thread(target=on, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class Sharded:
    """Weights of one format on ranks that hold shards of their main weights, cut at random allowed places."""

    def __init__(self, name: str, shapes: Sequence[Sequence[int]], size: int, seed: int = 0) -> None:
        self.ranks = Ranks(size)
        meta = [nn.Parameter(FORMATS[name](torch.empty(shape, device="meta")), False) for shape in shapes]
        self.storages: list[Any] = [storage_of(parameter) for parameter in meta]
        generator = torch.Generator().manual_seed(seed)
        self.cuts = [self._cuts(*pair, size, generator) for pair in zip(shapes, self.storages, strict=True)]
        self.parameters: list[list[Any]] = [
            [s.bind(p, _empty_planes(s, p), p.dtype) for p, s in zip(meta, self.storages, strict=True)]
            for _ in range(size)
        ]

    @staticmethod
    def _cuts(shape: Sequence[int], storage: Any, size: int, generator: torch.Generator) -> list[int]:
        numel = torch.Size(shape).numel()
        step = 1 if storage.block_rows is None else storage.block_rows * torch.Size(shape[1:]).numel()
        inner = torch.randint(0, numel // step + 1, (size - 1,), generator=generator).sort().values * step
        return [0, *inner.tolist(), numel]

    def shards(self, rank: int, values: Sequence[torch.Tensor]) -> list[WeightShard]:
        """The shards of a rank."""
        made = []
        for i, (value, storage) in enumerate(zip(values, self.storages, strict=True)):
            start, stop = self.cuts[i][rank : rank + 2]
            parameter = self.parameters[rank][i]
            planes = [
                (plane, spec.values_per_byte) for plane, spec in zip(parameter.planes, storage.planes, strict=True)
            ]
            pieces = tuple(plane[start // per_byte : stop // per_byte] for plane, per_byte in planes)
            made.append(WeightShard(parameter, value.flatten()[start:stop].clone(), start, pieces))
        return made

    def quantize(self, values: Sequence[torch.Tensor]) -> None:
        """Quantize on all ranks, and gather each rank's bytes on rank 0."""
        shards = [self.shards(rank, values) for rank in range(self.ranks.size)]
        for storage in dict.fromkeys(self.storages):
            mine = [i for i, each in enumerate(self.storages) if each.key == storage.key]

            def quantize(rank: int, storage: Any = storage, mine: list[int] = mine) -> None:
                storage.quantize([shards[rank][i] for i in mine], self.ranks.reduce_max(rank))

            self.ranks.run(quantize)
        for i, parameter in enumerate(self.parameters[0]):
            for j, plane in enumerate(parameter.planes):
                plane.copy_(torch.cat([of_rank[i].planes[j] for of_rank in shards]))

    def check(self, whole: Sequence[Any]) -> None:
        """Check that the gathered weights, and the tensors that are not sharded, are those of full weights."""
        for i, expected in enumerate(whole):
            for of_rank in self.parameters:
                assert of_rank[i].state.keys() == expected.state.keys()
                for name, value in expected.state.items():
                    assert name == "history" or torch.equal(of_rank[i].state[name], value), (expected.shape, name)
            gathered = self.parameters[0][i]
            for plane, of_whole in zip(gathered.planes, expected.planes, strict=True):
                assert torch.equal(plane, of_whole), expected.shape
            for direction in BOTH:
                assert torch.equal(gathered.dequantize(direction), expected.dequantize(direction)), expected.shape


def _empty_planes(storage: Any, parameter: torch.Tensor) -> list[torch.Tensor]:
    sizes = [parameter.numel() // plane.values_per_byte for plane in storage.planes]
    # At odd addresses, as in a flat buffer.
    return [torch.full((size + 1,), 77, dtype=torch.uint8)[1:] for size in sizes]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_shards_are_quantized_like_the_whole(name: str, size: int) -> None:
    shapes = _shapes(name)
    for seed in range(3):
        sharded = Sharded(name, shapes, size, seed)
        values = [_values(shape, seed + 10 * i) for i, shape in enumerate(shapes)]
        if name != "delayed":
            # Nothing of earlier, larger values is left.
            sharded.quantize([value * 8 for value in values])
            sharded.ranks.reductions = 0
        sharded.quantize(values)
        sharded.check([FORMATS[name](value) for value in values])
        # All in one call per key, and none where blocks are whole.
        assert sharded.ranks.reductions == (0 if name in ("32x32", "1x32", "mx") else 1)


def test_whole_blocks_have_a_plane_of_scales() -> None:
    quantize = FORMATS["128x128"]
    kinds = [storage_of(quantize(torch.ones(shape))) for shape in ((256, 128), (256, 129), (128,), (2, 128, 128))]
    assert [len(storage.planes) for storage in kinds if storage] == [2, 1, 1, 1]
    assert len({storage.key for storage in kinds if storage}) == 2


class Counted(WeightShard):
    """Knows how many shards' values are in memory when another one's are made."""

    alive: list[Any] = []
    most = 0

    def values(self) -> torch.Tensor:
        """See the base."""
        Counted.most = max(Counted.most, sum(reference() is not None for reference in Counted.alive))
        value = self.main.clone()
        Counted.alive.append(weakref.ref(value))
        return value


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_few_shards_are_in_memory(name: str) -> None:
    Counted.alive, Counted.most = [], 0
    sharded = Sharded(name, [_shapes(name)[0]] * 6, 1)
    shards = [Counted(*vars(s).values()) for s in sharded.shards(0, [_values(_shapes(name)[0])] * 6)]
    sharded.storages[0].quantize(shards, lambda values: None)
    assert len(Counted.alive) >= 6 and Counted.most <= 1


# Delayed scaling --------------------------------------------------------------------------------------------------


def _expected_with(scale_of: float, value: torch.Tensor) -> torch.Tensor:
    scale = torch.tensor(448.0) / torch.tensor(scale_of)
    return (value * scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).view(-1)


@pytest.mark.parametrize("size", [1, 3])
def test_delayed_scaling_uses_earlier_magnitudes(size: int) -> None:
    sharded = Sharded("delayed", [(9, 4)], size)
    torch.manual_seed(3)
    base = torch.rand(9, 4) * 2 - 1
    base[4, 2] = 1.0
    magnitudes = [2.0, 8.0, 1.0, 1.5, 1.0, 1.5, 1.5, 0.5]
    # The first takes its own; the 8 leaves the history of three after three more. A repetition changes nothing.
    scaled_for = [2.0, 2.0, 8.0, 8.0, 8.0, 1.5, 1.5, 1.5]
    for magnitude, of in zip(magnitudes, scaled_for, strict=True):
        sharded.quantize([base * magnitude])
        for rank in sharded.parameters:
            assert rank[0].state["inverse_scale"].item() == (1 / (torch.tensor(448.0) / of)).item()
        assert torch.equal(sharded.parameters[0][0].planes[0], _expected_with(of, base * magnitude))
    histories = [rank[0].state["history"].tolist() for rank in sharded.parameters]
    assert histories == [[0.5, 1.5, 1.0, 1.5]] * size


def test_history_starts_anew_when_bound() -> None:
    made: Any = Float8Tensor.quantize(torch.full((4, 4), 8.0), history=2)
    assert made.state["history"].tolist() == [8.0, 0.0, 0.0]
    storage: Any = storage_of(made)
    made = storage.bind(made, _empty_planes(storage, made), made.dtype)
    storage.quantize([WeightShard(made, torch.ones(16), 0, made.planes)], lambda values: None)
    assert torch.equal(made.dequantize(), torch.ones(4, 4))
    assert made.state["history"].tolist() == [1.0, 0.0, 0.0]


# Products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_use", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_gradients_of_a_linear_layer(name: str, in_use: bool) -> None:
    """Forward reads the rows, the input's gradient the columns, the weight's gradient no weight."""
    shape = (64, 96) if name in IN_BLOCKS else (33, 17)
    value = _values(shape)
    weight = nn.Parameter(FORMATS[name](value))
    _, (forward, backward) = DEFINITIONS[name](value)
    assert torch.equal(forward, backward) == (name != "mx")
    storage: Any = storage_of(weight)
    made: Any = weight
    bias = nn.Parameter(torch.randn(shape[0]))
    input = torch.randn(2, 3, shape[1], requires_grad=True)
    if in_use:
        storage.before_use([weight], Direction.FORWARD)
    output = F.linear(input, weight, bias)
    storage.after_use([weight])
    assert torch.equal(output, F.linear(input, forward) + bias)
    grad = torch.randn_like(output)
    if in_use:
        storage.before_use([weight], Direction.BACKWARD)
        used = made.dequantize(Direction.BACKWARD)
        assert used is made.dequantize(Direction.BACKWARD)
        assert used is made.detach().dequantize()  # aliases share it
    output.backward(grad)
    # Products of equal values have equal bits only if their memory is laid out alike; ``backward`` may be a transpose.
    decoded = made.dequantize(Direction.BACKWARD)
    assert torch.equal(decoded, backward)
    assert input.grad is not None and torch.equal(input.grad, grad @ decoded)
    assert weight.grad is not None and torch.equal(weight.grad, grad.flatten(0, 1).t() @ input.detach().flatten(0, 1))
    assert bias.grad is not None
    storage.after_use([weight])
    assert not made.dequantized


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_survive_torch_compile(name: str) -> None:
    """A traced product would have no gradient for the weight, and nothing would say so."""
    torch.compiler.reset()
    compiled, eager = (nn.Linear(64, 32) for _ in range(2))
    compiled.load_state_dict(eager.state_dict())
    for layer in (compiled, eager):
        layer.weight = nn.Parameter(FORMATS[name](layer.weight))
    input = torch.randn(4, 64)
    torch.compile(compiled, backend="aot_eager")(input).sin().sum().backward()
    eager(input).sin().sum().backward()
    torch.compiler.reset()
    assert compiled.weight.grad is not None and eager.weight.grad is not None
    assert torch.equal(compiled.weight.grad, eager.weight.grad)


def test_products_under_autocast_are_like_those_of_plain_weights() -> None:
    plain = nn.Linear(64, 32)
    quantized = nn.Linear(64, 32)
    quantized.weight = nn.Parameter(FORMATS["mx"](torch.ones(32, 64)))
    with torch.no_grad():
        plain.weight.fill_(1)
        quantized.bias.copy_(plain.bias)
    value = torch.randn(4, 64)
    inputs = [value.clone().requires_grad_() for _ in range(2)]
    outputs = []
    for layer, input in zip((plain, quantized), inputs, strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(layer(input))
        outputs[-1].float().pow(2).sum().backward()
    assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16
    assert inputs[1].grad is not None and inputs[1].grad.dtype == torch.float32
    assert quantized.weight.grad is not None and quantized.weight.grad.dtype == torch.float32
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=0.05, atol=0.5)
    torch.testing.assert_close(quantized.weight.grad, plain.weight.grad, rtol=0.05, atol=0.5)


def test_a_vector_as_input() -> None:
    weight = nn.Parameter(FORMATS["mx"](torch.ones(32, 64)))
    input = torch.randn(64)
    F.linear(input, weight).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, input.expand(32, 64))


def test_second_derivatives_raise() -> None:
    """They would leave out what goes through the weight."""
    weight = nn.Parameter(FORMATS["mx"](torch.ones(32, 64)))
    input = torch.randn(4, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(F.linear(input, weight).sin().sum(), input, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.pow(2).sum().backward()


def test_values_are_dequantized_again_for_the_next_use() -> None:
    for name in FORMATS:
        weight: Any = FORMATS[name](torch.ones(32, 32))
        storage: Any = storage_of(weight)
        storage.before_use([weight], Direction.FORWARD)
        storage.quantize([WeightShard(weight, torch.full((1024,), 2.0), 0, weight.planes)], lambda values: None)
        storage.before_use([weight], Direction.FORWARD)
        # Delayed scaling saturates at the magnitude of the first use.
        assert torch.equal(weight.dequantize(), torch.full((32, 32), 1.0 if name == "delayed" else 2.0))


@pytest.mark.parametrize("name", FORMATS)
def test_appears_as_its_dtype(name: str) -> None:
    value = _values((32, 64))
    made = FORMATS[name](value, dtype=torch.bfloat16)
    assert (made.dtype, made.shape, made.device) == (torch.bfloat16, value.shape, value.device)
    assert made.dequantize().dtype == torch.bfloat16
    assert torch.equal(made.t() + 0, made.dequantize().t()) and type(made + 0) is torch.Tensor
    assert torch.equal(made.dequantize(), FORMATS[name](value).dequantize().bfloat16())
    with pytest.raises(NotImplementedError, match=f"changes a {type(made).__name__} in place"):
        made.zero_()


# Bytes and devices ------------------------------------------------------------------------------------------------


# Errors -----------------------------------------------------------------------------------------------------------


def test_shapes_and_arguments_are_checked() -> None:
    for shape in ((33, 32), (32, 48), (32,), (2, 32, 32)):
        with pytest.raises(ValueError, match="MXFP8 needs matrices whose rows and columns are divisible by 32"):
            MXTensor.quantize(torch.ones(shape))
    for shape in ((17, 16), (16, 8), (16,)):
        with pytest.raises(ValueError, match="NVFP4 needs matrices whose rows are divisible by 16 and"):
            NVFP4Tensor.quantize(torch.ones(shape))
    assert NVFP4Tensor.quantize(torch.ones(17, 16), rows=1).shape == (17, 16)
    with pytest.raises(ValueError, match="Expected rows=16 or rows=1"):
        NVFP4Tensor.quantize(torch.ones(32, 32), rows=2)
    with pytest.raises(ValueError, match="one scale per weight with delayed scaling"):
        Float8Tensor.quantize(torch.ones(32, 32), (1, 32), history=2)


def test_formats_have_different_keys() -> None:
    keys = [storage_of(quantize(torch.ones(32, 32))) for quantize in FORMATS.values()]
    assert len({storage.key for storage in keys if storage}) == len(FORMATS)
    assert all(isinstance(quantize(torch.ones(32, 32)), ReferenceTensor) for quantize in FORMATS.values())
