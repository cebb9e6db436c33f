"""Tensors and quantizers of :mod:`tests.te_mocks`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

# Transposes made in forward, which modules only make if the weight's quantizer asks for it.
made_in_forward: list[str] = []
# All transposes that were made.
made: list[str] = []


def allocated(data: torch.Tensor | None) -> torch.Tensor:
    """The tensor, which has to have memory."""
    assert data is not None, "the tensor lacks these data"
    assert data.untyped_storage().nbytes() >= data.storage_offset() + data.numel(), "the data have no memory"
    return data


def _pad(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class QuantizedTensor(torch.Tensor):
    """Appears as a tensor of a high precision. Fields of subclasses have the data."""

    _quantizer: Any
    _dtype: torch.dtype

    @classmethod
    def make(cls, shape: Sequence[int], dtype: torch.dtype, device: Any, quantizer: Any, **fields: Any) -> Any:
        """A tensor with these fields."""
        made: Any = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        made._dtype, made._quantizer, made._requires_grad = dtype, quantizer.copy(), False
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    def detach(self) -> Any:
        """A tensor with the same data."""
        fields = {name: value for name, value in vars(self).items() if name in type(self).own}
        return type(self).make(torch.Tensor.size(self), self._dtype, self.device, self._quantizer, **fields)

    own: tuple[str, ...] = ()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.detach.default:
            return args[0].detach()

        def plain(value: Any) -> Any:
            return value.dequantize() if isinstance(value, QuantizedTensor) else value

        assert not (function._schema.is_mutable and isinstance(args[0], QuantizedTensor)), f"{function} of a weight"
        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def _set_data(self, tensor: torch.Tensor) -> None:
        self._quantizer.update_quantized(tensor, self)

    # Assigning quantizes into the tensor's own memory.
    data = property(lambda self: super().data, _set_data)  # type: ignore[assignment]

    def untyped_storage(self) -> torch.UntypedStorage:
        """A new and empty one every time."""
        return torch.UntypedStorage(0, device=self.device)

    def _get_quantizer(self) -> Any:
        return self._quantizer


class Float8Tensor(QuantizedTensor):
    """One scale; the transpose is a cache that may be invalid."""

    own = ("_data", "_transpose", "_transpose_invalid", "_scale_inv", "_fp8_dtype")

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """That of the data."""
        return self._data.shape

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        """In high precision."""
        return self._decode(allocated(self._data))

    def _decode(self, data: torch.Tensor) -> torch.Tensor:
        return (data.view(torch.float8_e4m3fn).float() * self._scale_inv).to(self._dtype)

    def columnwise(self) -> torch.Tensor:
        """The operand of backward's matmul."""
        assert self._transpose is not None and not self._transpose_invalid, "there is no valid transpose"
        assert torch.equal(self._transpose, allocated(self._data).t()), "the transpose is stale"
        return self._decode(self._transpose).t()

    def _reset_caches(self) -> None:
        self._transpose_invalid = True

    def create_columnwise(self) -> None:
        """Transpose."""
        made.append("Float8Tensor")
        self._transpose, self._transpose_invalid = allocated(self._data).t().contiguous(), False

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Make or drop data."""
        assert rowwise_usage is not False
        if columnwise_usage and (self._transpose is None or self._transpose_invalid):
            self.create_columnwise()
        if columnwise_usage is False:
            self._transpose, self._transpose_invalid = None, True


class _Columnwise(QuantizedTensor):
    """Tensors that have their data by rows and by columns."""

    _columnwise_data: Any
    _columnwise_scale_inv: Any

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Make or drop data."""
        assert rowwise_usage is not False
        if columnwise_usage and self._columnwise_data is None:
            self.create_columnwise()
        if columnwise_usage is False:
            self._columnwise_data = self._columnwise_scale_inv = None


class Float8BlockwiseQTensor(_Columnwise):
    """A scale per 128 x 128 block; columnwise data are the transpose."""

    own = "_rowwise_data _rowwise_scale_inv _columnwise_data _columnwise_scale_inv _fp8_dtype _is_2D_scaled".split()  # type: ignore[assignment]

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """That of the data."""
        return self._rowwise_data.shape

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        """In high precision."""
        rows, columns = self.shape
        blocks = _tiles(rows, columns, 128, 0, rows * columns).view(rows, columns)
        scales = self._rowwise_scale_inv[:, : _pad(columns, 128) // 128].flatten()[blocks]
        return (allocated(self._rowwise_data).view(torch.float8_e4m3fn).float() * scales).to(self._dtype)

    def columnwise(self) -> torch.Tensor:
        """The operand of backward's matmul."""
        assert self._columnwise_data is not None, "there is no transpose"
        assert torch.equal(self._columnwise_data, allocated(self._rowwise_data).t()), "the transpose is stale"
        height, width = self._rowwise_scale_inv.shape
        scales = self._columnwise_scale_inv[:width, :height]
        assert torch.equal(scales, self._rowwise_scale_inv.t()[: len(scales)]), "the scales are stale"
        return self.dequantize()

    def create_columnwise(self) -> None:
        """Transpose."""
        made.append("Float8BlockwiseQTensor")
        self._columnwise_data = allocated(self._rowwise_data).t().contiguous()
        shape = _pad(self.shape[1], 128) // 128, _pad(_pad(self.shape[0], 128) // 128, 4)
        self._columnwise_scale_inv = torch.zeros(shape, device=self.device)
        part = self._rowwise_scale_inv.t()[: shape[0]]
        self._columnwise_scale_inv[:, : part.shape[1]] = part


class MXFP8Tensor(_Columnwise):
    """A scale per 32 values of a row, and other bytes with a scale per 32 values of a column."""

    own = (
        "_rowwise_data _rowwise_scale_inv _columnwise_data _columnwise_scale_inv _fp8_dtype _with_gemm_swizzled_scales"
    ).split()  # type: ignore[assignment]

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """That of the data."""
        return self._rowwise_data.shape

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        """In high precision."""
        assert not self._with_gemm_swizzled_scales
        rows, columns = self.shape
        scales = self._rowwise_scale_inv[:rows, : columns // 32].repeat_interleave(32, 1)
        return self._decode(self._rowwise_data, scales)

    def _decode(self, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (allocated(data).view(torch.float8_e4m3fn).float() * torch.exp2(scales.float() - 127)).to(self._dtype)

    def columnwise(self) -> torch.Tensor:
        """The operand of backward's matmul."""
        rows, columns = self.shape
        scales = self._columnwise_scale_inv[: rows // 32, :columns].repeat_interleave(32, 0)
        return self._decode(self._columnwise_data, scales)

    def create_columnwise(self) -> None:
        """It cannot be made from rows."""
        raise RuntimeError("Requested column-wise usage, but MXFP8Tensor is missing column-scaled FP8 data")


class NVFP4Tensor(_Columnwise):
    """Two values per byte, a scale per 16 x 16 block and one per tensor; columnwise data are the transpose."""

    own = (
        "_rowwise_data _rowwise_scale_inv _columnwise_data _columnwise_scale_inv _amax_rowwise _amax_columnwise "
        "_fp4_dtype _with_gemm_swizzled_scales _row_scaled_nvfp4 _nvfp4_use_4over6 _nvfp4_e4m3_max"
    ).split()  # type: ignore[assignment]

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """That of the values."""
        return torch.Size((self._rowwise_data.shape[0], 2 * self._rowwise_data.shape[1]))

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        """In high precision."""
        return self._decode(self._rowwise_data, self._rowwise_scale_inv, self._amax_rowwise)

    def _decode(self, data: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        codes = torch.stack((allocated(data) & 15, data >> 4), -1).flatten(-2).long()
        values = E2M1.to(data.device)[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        rows, columns = values.shape
        each = scales.view(torch.float8_e4m3fn)[:rows, : columns // 16].float().repeat_interleave(16, 1)
        return (values * (each * (amax / (6.0 * 448.0)))).to(self._dtype)

    def columnwise(self) -> torch.Tensor:
        """The operand of backward's matmul."""
        assert self._columnwise_data is not None, "there is no transpose"
        values = self._decode(self._columnwise_data, self._columnwise_scale_inv, self._amax_columnwise).t()
        assert torch.equal(values, self.dequantize()), "the transpose is stale"
        return values

    def create_columnwise(self) -> None:
        """Transpose and pack again."""
        made.append("NVFP4Tensor")
        codes = torch.stack((allocated(self._rowwise_data) & 15, self._rowwise_data >> 4), -1).flatten(-2).t()
        self._columnwise_data = codes[:, ::2] | codes[:, 1::2] << 4
        rows, columns = self.shape
        tiles = self._rowwise_scale_inv[:rows:16, : columns // 16].t()
        self._columnwise_scale_inv = tiles.repeat_interleave(16, 0).contiguous()
        self._amax_columnwise = self._amax_rowwise.clone()


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


# Quantizers -------------------------------------------------------------------------------------------------------


def _tiles(rows: int, columns: int, size: int, start: int, stop: int) -> torch.Tensor:
    """The tile of each element from ``start`` to ``stop``."""
    at = torch.arange(start, stop)
    return at // columns // size * (_pad(columns, size) // size) + at % columns // size


def _maxima(values: torch.Tensor, where: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros(count).scatter_reduce_(0, where, values.float().abs(), "amax")


class Quantizer:
    """Makes tensors of a format, and quantizes shards of them in three steps: maxima, scales, bytes."""

    dtype = "kFloat8E4M3"
    options: tuple[str, ...] = ()
    values_per_byte = 1
    internal = False

    def __init__(self, device: Any = "cpu", columnwise: bool = True) -> None:
        self.device = torch.device(device)
        self.rowwise_usage, self.columnwise_usage = True, columnwise

    def __call__(self, tensor: torch.Tensor) -> Any:
        made = self.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return self.update_quantized(tensor, made)

    def copy(self) -> Any:
        """A copy that shares tensors."""
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Say which data new tensors get."""
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def update_quantized(self, source: torch.Tensor, target: Any) -> Any:
        """Quantize a full tensor."""
        flat = source.detach().reshape(-1).to(target._dtype)
        maxima = self.maxima(flat, target.shape, 0)
        self.set_scales(target, maxima)
        self.encode(flat, target, maxima, 0, self.fragment(target))
        if not isinstance(target, MXFP8Tensor):
            target.update_usage(columnwise_usage=False)
            target.update_usage(columnwise_usage=self.columnwise_usage)
        return target

    def fragment(self, target: Any) -> Any:
        """All bytes."""
        return allocated(target._rowwise_data).view(-1)

    def make_empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: Any) -> Any:
        """A tensor without values."""
        raise NotImplementedError

    def maxima(self, values: torch.Tensor, shape: Sequence[int], start: int) -> torch.Tensor:
        """Largest magnitudes of blocks."""
        raise NotImplementedError

    def set_scales(self, target: Any, maxima: torch.Tensor) -> None:
        """Write the tensor's scales."""
        raise NotImplementedError

    def encode(self, values: torch.Tensor, target: Any, maxima: torch.Tensor, start: int, fragment: Any) -> None:
        """Write bytes."""
        raise NotImplementedError


def _scales(maxima: torch.Tensor, power_of_2: bool) -> torch.Tensor:
    scale = torch.where(maxima > 0, 448.0 / maxima, 1.0)
    return torch.exp2(torch.log2(scale).floor()) if power_of_2 else scale


class _PerTensor(Quantizer):
    def make_empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: Any) -> Any:
        fields = {
            "_data": torch.zeros(*shape, dtype=torch.uint8, device=device),
            "_scale_inv": torch.ones(1, device=device),
        }
        more = {"_transpose": None, "_transpose_invalid": True, "_fp8_dtype": self.dtype}
        return Float8Tensor.make(shape, dtype, device, self, **fields, **more)

    def fragment(self, target: Any) -> Any:
        return allocated(target._data).view(-1)

    def maxima(self, values: torch.Tensor, shape: Sequence[int], start: int) -> torch.Tensor:
        return _maxima(values, torch.zeros(len(values), dtype=torch.int64), 1)

    def encode(self, values: torch.Tensor, target: Any, maxima: torch.Tensor, start: int, fragment: Any) -> None:
        fragment.copy_(
            (values.float() * self.scale_for(maxima)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        )

    def scale_for(self, maxima: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Float8CurrentScalingQuantizer(_PerTensor):
    """The scale follows the present values."""

    options = ("dtype", "force_pow_2_scales", "amax_epsilon")

    def __init__(self, device: Any = "cpu", columnwise: bool = True, force_pow_2_scales: bool = False) -> None:
        super().__init__(device, columnwise)
        self.force_pow_2_scales, self.amax_epsilon = force_pow_2_scales, 0.0

    def scale_for(self, maxima: torch.Tensor) -> torch.Tensor:
        """448 divided by the maximum."""
        return _scales(maxima, self.force_pow_2_scales)

    def set_scales(self, target: Any, maxima: torch.Tensor) -> None:
        """See the base class."""
        target._scale_inv.copy_(self.scale_for(maxima).reciprocal())


class Float8Quantizer(_PerTensor):
    """The scale follows earlier maxima; a cast leaves the present one in ``amax``."""

    def __init__(self, device: Any = "cpu", columnwise: bool = True) -> None:
        super().__init__(device, columnwise)
        self.scale, self.amax = torch.ones(1, device=device), torch.zeros(1, device=device)

    def scale_for(self, maxima: torch.Tensor) -> torch.Tensor:
        """That of the quantizer."""
        return self.scale

    def set_scales(self, target: Any, maxima: torch.Tensor) -> None:
        """See the base class."""
        self.amax.copy_(torch.maximum(self.amax, maxima))
        target._scale_inv.copy_(self.scale.reciprocal())

    def end_of_forward(self) -> None:
        """The update at the end of ``autocast``: the next scale comes from the maximum."""
        self.scale.copy_(torch.where(self.amax > 0, 448.0 / self.amax, self.scale))
        self.amax.zero_()


class Float8BlockQuantizer(Quantizer):
    """128 x 128 blocks."""

    options = ("dtype", "block_len", "force_pow_2_scales", "amax_epsilon")
    block_len = 128
    amax_epsilon = 0.0
    force_pow_2_scales = True

    def make_empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: Any) -> Any:
        """See the base class."""
        rows, columns = shape
        scales = torch.zeros(_pad(rows, 128) // 128, _pad(_pad(columns, 128) // 128, 4), device=device)
        fields = {"_rowwise_data": torch.zeros(shape, dtype=torch.uint8, device=device), "_rowwise_scale_inv": scales}
        none = {"_columnwise_data": None, "_columnwise_scale_inv": None}
        more = {"_fp8_dtype": self.dtype, "_is_2D_scaled": True}
        return Float8BlockwiseQTensor.make(shape, dtype, device, self, **fields, **none, **more)

    def maxima(self, values: torch.Tensor, shape: Sequence[int], start: int) -> torch.Tensor:
        """See the base class."""
        rows, columns = shape
        count = _pad(rows, 128) // 128 * (_pad(columns, 128) // 128)
        return _maxima(values, _tiles(rows, columns, 128, start, start + len(values)), count)

    def set_scales(self, target: Any, maxima: torch.Tensor) -> None:
        """See the base class."""
        rows = len(target._rowwise_scale_inv)
        inverse = _scales(maxima, True).reciprocal().view(rows, -1)
        target._rowwise_scale_inv[:, : inverse.shape[1]] = inverse

    def encode(self, values: torch.Tensor, target: Any, maxima: torch.Tensor, start: int, fragment: Any) -> None:
        """See the base class. Every warp stores 16 rows of a block, whether they are in the shard or not."""
        rows, columns = target.shape
        stop, strip = start + len(values), 16 * columns
        whole = start % strip == 0 and (stop % strip == 0 or stop == rows * columns)
        assert whole, "the cast writes outside of the shard"
        assert columns % 128 or (fragment.data_ptr() - start) % 4 == 0, "misaligned address"
        scale = _scales(maxima, True)[_tiles(rows, columns, 128, start, stop)]
        fragment.copy_((values.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


class MXFP8Quantizer(Quantizer):
    """32 values of a row, and 32 of a column."""

    def make_empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: Any) -> Any:
        """See the base class."""
        rows, columns = shape
        assert rows % 32 == columns % 32 == 0

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.uint8, device=device)

        fields: dict[str, Any] = {
            "_rowwise_data": zeros(rows, columns),
            "_rowwise_scale_inv": zeros(_pad(rows, 128), _pad(columns // 32, 4)),
            "_columnwise_data": zeros(rows, columns),
            "_columnwise_scale_inv": zeros(_pad(rows // 32, 4), _pad(columns, 128)),
        }
        if not self.columnwise_usage:
            fields |= {"_columnwise_data": None, "_columnwise_scale_inv": None}
        more = {"_fp8_dtype": self.dtype, "_with_gemm_swizzled_scales": False}
        return MXFP8Tensor.make(shape, dtype, device, self, **fields, **more)

    def fragment(self, target: Any) -> Any:
        """See the base class."""
        kinds = (target._rowwise_data, target._columnwise_data)
        return tuple(None if data is None else allocated(data).view(-1) for data in kinds)

    @staticmethod
    def _blocks(shape: Sequence[int], start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        at, columns = torch.arange(start, stop), shape[1]
        return at // 32, at // columns // 32 * columns + at % columns

    def maxima(self, values: torch.Tensor, shape: Sequence[int], start: int) -> torch.Tensor:
        """See the base class."""
        count = math.prod(shape) // 32
        by_row, by_column = self._blocks(shape, start, start + len(values))
        return torch.cat([_maxima(values, by_row, count), _maxima(values, by_column, count)])

    @staticmethod
    def _exponents(maxima: torch.Tensor) -> torch.Tensor:
        return torch.where(maxima > 0, torch.log2(maxima / 448.0).ceil() + 127, 0.0).clamp(0, 254)

    def set_scales(self, target: Any, maxima: torch.Tensor) -> None:
        """See the base class."""
        rows, columns = target.shape
        by_row, by_column = self._exponents(maxima).to(torch.uint8).chunk(2)
        target._rowwise_scale_inv[:rows, : columns // 32] = by_row.view(rows, -1)
        if target._columnwise_scale_inv is not None:
            target._columnwise_scale_inv[: rows // 32, :columns] = by_column.view(-1, columns)

    def encode(self, values: torch.Tensor, target: Any, maxima: torch.Tensor, start: int, fragment: Any) -> None:
        """See the base class."""
        assert len(fragment) == 2, "MXFP8 needs fragments by rows and by columns"
        blocks = self._blocks(target.shape, start, start + len(values))
        for data, where, largest in zip(fragment, blocks, self._exponents(maxima).chunk(2), strict=True):
            if data is None:
                continue
            data.copy_((values.float() * torch.exp2(127 - largest)[where]).to(torch.float8_e4m3fn).view(torch.uint8))


class NVFP4Quantizer(Quantizer):
    """16 x 16 blocks."""

    dtype = "kFloat4E2M1"
    values_per_byte = 2
    with_2d_quantization = True

    def make_empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: Any) -> Any:
        """See the base class."""
        rows, columns = shape
        assert rows % 16 == columns % 16 == 0
        fields = {
            "_rowwise_data": torch.zeros(rows, columns // 2, dtype=torch.uint8, device=device),
            "_rowwise_scale_inv": torch.zeros(
                _pad(rows, 128), _pad(columns // 16, 4), dtype=torch.uint8, device=device
            ),
            "_amax_rowwise": torch.zeros(1, device=device),
        }
        none = dict.fromkeys(("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise"))
        more = {"_fp4_dtype": self.dtype, "_with_gemm_swizzled_scales": False}
        more |= {"_row_scaled_nvfp4": False, "_nvfp4_use_4over6": False, "_nvfp4_e4m3_max": 448}
        return NVFP4Tensor.make(shape, dtype, device, self, **fields, **none, **more)

    def maxima(self, values: torch.Tensor, shape: Sequence[int], start: int) -> torch.Tensor:
        """See the base class."""
        rows, columns = shape
        return _maxima(values, _tiles(rows, columns, 16, start, start + len(values)), rows * columns // 256)

    @staticmethod
    def _decode_scales(maxima: torch.Tensor) -> torch.Tensor:
        most = maxima.max()
        return torch.where(most > 0, maxima / 6.0 * (6.0 * 448.0 / most), 0.0).to(torch.float8_e4m3fn)

    def set_scales(self, target: Any, maxima: torch.Tensor) -> None:
        """See the base class."""
        rows, columns = target.shape
        tiles = self._decode_scales(maxima).view(torch.uint8).view(rows // 16, -1)
        target._rowwise_scale_inv[:rows, : columns // 16] = tiles.repeat_interleave(16, 0)
        target._amax_rowwise.copy_(maxima.max())

    def encode(self, values: torch.Tensor, target: Any, maxima: torch.Tensor, start: int, fragment: Any) -> None:
        """See the base class."""
        assert start % 2 == len(values) % 2 == 0, "ranks share a byte"
        rows, columns = target.shape
        decode = self._decode_scales(maxima).float() * (maxima.max() / (6.0 * 448.0))
        each = decode[_tiles(rows, columns, 16, start, start + len(values))]
        scaled = torch.where(each > 0, values.float() / each, 0.0)
        codes = (scaled.abs()[:, None] - E2M1).abs().argmin(1) + torch.where(scaled < 0, 8, 0)
        fragment.copy_(codes[::2] | codes[1::2] << 4)
