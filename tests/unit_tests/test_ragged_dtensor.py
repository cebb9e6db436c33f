"""DTensors with shards of any size: derived tensors keep the layout and equal the unsharded result."""

import copy
import io
import itertools
import tempfile
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from megatron.fsdp.dtensor.gathering import gather_full
from megatron.fsdp.dtensor.placements import RaggedShard, SectionedShard
from megatron.fsdp.dtensor.ragged_dtensor import RaggedDTensor, make_dtensor, replicated
from megatron.fsdp.sharding.layout import ELEMENT, ROW, Layout, Slot
from megatron.fsdp.sharding.packing import plan_layout
from megatron_fsdp import uneven_dtensor
from tests.models import device
from tests.ranks import RankPool, on_ranks

# Shapes and cuts: whole rows, a cut row, ranks without anything, a single owner.
CASES = {
    "rows": ((8, 3), (0, 9, 9, 24)),
    "cut rows": ((8, 3), (0, 7, 11, 24)),
    "empty first": ((4, 2), (0, 0, 6, 8)),
    "one owner": ((5, 2), (0, 0, 10, 10)),
    "vector": ((7,), (0, 3, 3, 7)),
    "three dimensions": ((3, 2, 2), (0, 5, 8, 12)),
}


def _ragged(case: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, DTensor]:
    shape, cuts = CASES[case]
    mesh = init_device_mesh(device().type, (3,))
    whole = torch.linspace(-2, 3, cuts[-1], device=device()).to(dtype).view(shape)
    placement = RaggedShard(3, 0, cuts)
    start, stop = placement.bounds(dist.get_rank())
    row = whole[0].numel() if whole.dim() > 1 else 1
    local = torch.cat([torch.zeros(5, device=device(), dtype=dtype), whole.flatten()])[5 + start : 5 + stop]
    local = local.view(-1, *shape[1:]) if start % row == 0 and stop % row == 0 else local
    return whole, make_dtensor(local, mesh, shape, [placement])


def _same(found: Any, expected: Any) -> None:
    assert isinstance(found, DTensor)
    found = found.full_tensor().to(expected.device)  # the full tensor is on the mesh's device
    assert found.dtype == expected.dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda t: t.clone(),
    "detach": lambda t: t.detach(),
    "to double": lambda t: t.to(torch.float64),
    "bfloat16": lambda t: t.bfloat16(),
    "cpu": lambda t: t.cpu(),
    "deepcopy": copy.deepcopy,
    "zeros_like": torch.zeros_like,
    "full_like": lambda t: torch.full_like(t, 3.0),
    "scaled": lambda t: t * 0.9 + 1,
    "by a tensor": lambda t: t / torch.tensor(3.0, device=t.device),
    "product": lambda t: t * t.exp(),
    "lerp_": lambda t: t.clone().lerp_(t * 2, 0.25),
    "addcmul_": lambda t: t.clone().addcmul_(t, t, value=0.5),
    "compare": lambda t: t > 0,
    "compare in place": lambda t: t.clone().ge_(0.5).floor_divide_(2).abs_(),
    "where": lambda t: torch.where(t > 0, t, -t),
    "clamp": lambda t: t.clamp(-1, 1),
    "isfinite": lambda t: torch.isfinite(t),
    "own norm": lambda t: t / t.norm(),
    "foreach": lambda t: torch._foreach_add([t, t], [t, t], alpha=2)[1],
    "foreach scalar": lambda t: torch._foreach_mul([t], 3.0)[0],
    "parameter": lambda t: nn.Parameter(t).detach(),
    "fill": lambda t: t.clone().fill_(2.5),
    "copy full": lambda t: t.clone().copy_(torch.ones(t.shape, device=t.device)),
}
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda t: t.sum(),
    "mean": lambda t: t.mean(),
    "max": lambda t: t.max(),
    "min": lambda t: t.min(),
    "amax of all": lambda t: t.amax(tuple(range(t.dim()))),
    "norm": lambda t: t.norm(),
    "1-norm": lambda t: torch.linalg.vector_norm(t, 1),
    "3-norm": lambda t: torch.linalg.vector_norm(t, 3),
    "infinity norm": lambda t: torch.linalg.vector_norm(t, float("inf")),
    "lowest norm": lambda t: torch.linalg.vector_norm(t, -float("inf")),
    "0-norm": lambda t: torch.linalg.vector_norm(t, 0),
    "norm of order -2": lambda t: t.norm(-2),
    "var": lambda t: t.var(),
    "std uncorrected": lambda t: t.std(correction=0),
    "all": lambda t: (t > -10).all(),
    "not all": lambda t: (t > 0).all(),
    "any": lambda t: (t > 2.9).any(),
    "count": lambda t: (t > 0).count_nonzero(),
    "product of all": lambda t: (t / 2).prod(),
    "foreach norm": lambda t: torch._foreach_norm([t, t])[1],
    "norm of norms": lambda t: torch.linalg.vector_norm(torch.stack(torch._foreach_norm([t, 2 * t]))),
}
# Along one dimension.
ALONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norms of rows": lambda t: t.norm(dim=-1),
    "means of columns": lambda t: t.mean(0),
    "sums of rows, kept": lambda t: t.sum(-1, keepdim=True),
    "indices of the largest": lambda t: t.max(0)[1],
    "any": lambda t: (t > 2.9).any(0),
}


@on_ranks(3)
def test_norms_of_many_shards_take_one_kernel() -> None:
    tensors = [_ragged(case)[1] for case in ("rows", "vector", "cut rows", "empty first")]
    with (
        patch.object(torch, "_foreach_norm", wraps=torch._foreach_norm) as many,
        patch.object(torch.linalg, "vector_norm", wraps=torch.linalg.vector_norm) as one,
    ):
        torch._foreach_norm(tensors)
    assert many.call_count == 2 and not one.called


@on_ranks(3)
@pytest.mark.parametrize("case", CASES)
def test_operations(case: str) -> None:
    whole, ragged = _ragged(case)
    for name, operation in ELEMENTWISE.items():
        found = operation(ragged)
        assert isinstance(found, RaggedDTensor), name
        _same(found, operation(whole))
    for name, operation in REDUCTIONS.items():
        expected, found = operation(whole), operation(ragged)
        _same(found, expected)
        # item() returns the reduced number, not this rank's summand.
        assert operation(ragged).item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6), name
    for operation in ALONG.values():
        _same(operation(ragged), operation(whole))
    assert torch.equal(ragged, ragged.clone()) and not torch.equal(ragged, ragged + (ragged > 2.9))
    assert torch.allclose(ragged, ragged * (1 + 1e-9))
    # A mask or weights of the full shape, also without memory of their own.
    _same(ragged * whole, whole * whole)
    _same(ragged + torch.ones((), device=device()).expand(whole.shape), whole + 1)
    # Results into given tensors: all elements into a plain one, and shards into one with the same layout.
    along_all = tuple(range(whole.dim()))
    for function in (torch.exp, torch.amax, lambda t, out: torch.sum(t, along_all, out=out)):
        expected = function(whole, out=whole.new_empty(0))
        assert torch.equal(function(ragged, out=whole.new_empty(0)), expected)
    target = torch.zeros_like(ragged)
    assert torch.add(ragged, 1, out=target) is target
    _same(target, whole + 1)
    torch.mul(whole, 2, out=target)
    _same(target, whole * 2)
    # Sharded differently, as by a model that was sharded while other weights were frozen.
    whole, ragged = _ragged("rows")
    other_whole, other = _ragged("cut rows")
    _same(ragged.lerp_(other, 0.5), whole.lerp_(other_whole, 0.5))
    with CommDebugMode():  # it looks into operands for fake tensors
        _same(ragged * 2, whole * 2)
    # Sums that the dtype cannot hold, and scalars.
    assert torch.full_like(ragged, 3e4, dtype=torch.float16).mean().item() == pytest.approx(3e4)
    assert ragged.sum().sum(0).item() == pytest.approx(whole.sum().item())
    # Into tensors that are not ragged: full ones, as a teacher's that is not sharded, and torch's.
    for placement in (Replicate(), Shard(0)):
        target = distribute_tensor(2 * whole, ragged.device_mesh, [placement])
        _same(target.lerp_(ragged, 0.5), 1.5 * whole)
    full = replicated(2 * whole, ragged.device_mesh)
    _same(full.lerp_(ragged, 0.5), 1.5 * whole)
    assert torch.equal(full._local_tensor, 1.5 * whole)


@on_ranks(3)
def test_other_operations_raise() -> None:
    whole, ragged = _ragged("rows")
    mesh = ragged.device_mesh
    fused: dict[str, Any] = {"weight_decay": 0, "momentum": 0.9, "lr": 0.1, "dampening": 0, "nesterov": False}
    fused |= {"maximize": False, "is_first_step": False}
    for operation in (
        lambda: ragged @ ragged.t(),
        lambda: ragged.view(-1),
        lambda: ragged[0],
        lambda: ragged.sort(),
        lambda: torch.cat([ragged, ragged]),
        lambda: ragged * whole[0],
        lambda: torch.amax(ragged, (0, 1), out=ragged.sum()),
        lambda: torch.add(ragged, 1, out=_ragged("cut rows")[1]),
        lambda: torch.add(replicated(whole, mesh), 1, out=distribute_tensor(whole, mesh, [Shard(0)])),
        lambda: replicated(whole[:1], mesh).squeeze_(),
        lambda: torch._fused_sgd_([ragged], [ragged], [whole.clone()], **fused),
        lambda: torch.zeros_like(ragged).copy_(replicated(whole, mesh).requires_grad_()),
        lambda: torch._foreach_mul_([whole.clone().requires_grad_() * 1, ragged.clone()], [ragged, ragged]),
        lambda: replicated(whole, mesh).index_add_(0, torch.tensor([0]), whole[:1].clone().requires_grad_()),
    ):
        with pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):
            operation()
    with pytest.raises(ValueError, match="expected a tensor of shape"):
        ragged.clone().copy_(whole[:4])
    for crash in (ragged.share_memory_, lambda: ragged.apply_(abs), lambda: torch.from_dlpack(ragged)):
        with pytest.raises(RuntimeError, match="need the memory of a full tensor"):
            crash()


@on_ranks(3)
def test_copies_between_layouts() -> None:
    whole, ragged = _ragged("rows")
    _, cut = _ragged("cut rows")
    even = distribute_tensor(whole * 3, ragged.device_mesh, [Shard(0)])
    for source, expected in ((cut, whole), (even, whole * 3), (whole * 2, whole * 2)):
        target = torch.zeros_like(ragged)
        target.copy_(source)
        _same(target, expected)
    for placements in ([Replicate()], [Shard(0)], [Shard(1)]):
        moved = ragged.redistribute(placements=placements)
        assert torch.equal(moved.full_tensor(), whole)
    assert ragged.placements == (Shard(0),) and ragged.redistribute(placements=[Shard(0)]) is ragged


@on_ranks(3)
def test_pickled_and_loaded() -> None:
    for case in CASES:
        whole, ragged = _ragged(case)
        for given_tensor in (ragged, nn.Parameter(ragged), ragged.bfloat16()):
            stored = io.BytesIO()
            torch.save({"value": given_tensor}, stored)
            for weights_only in (True, False):
                stored.seek(0)
                loaded = torch.load(stored, weights_only=weights_only)["value"]
                assert isinstance(loaded, RaggedDTensor)
                assert isinstance(loaded, nn.Parameter) == isinstance(given_tensor, nn.Parameter)
                _same(loaded.detach().float(), given_tensor.detach().float().full_tensor())
                assert loaded.is_contiguous() and torch.equal(loaded * 2, given_tensor * 2)


def _checkpoints(folder: str, asynchronous: bool) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for case in CASES:
        whole, ragged = _ragged(case)
        state |= {case: ragged, f"{case} doubled": ragged.clone() * 2, f"{case} bf16": ragged.to(torch.bfloat16)}
        expected |= {case: whole, f"{case} doubled": whole * 2, f"{case} bf16": whole.bfloat16()}
    if asynchronous:
        future = dcp.async_save(state, checkpoint_id=folder)
        for value in state.values():
            value.zero_()  # the file must contain the staged value
        future.result()  # type: ignore[union-attr]
    else:
        dcp.save(state, checkpoint_id=folder)
    targets = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(targets, checkpoint_id=folder)
    for key, value in targets.items():
        assert isinstance(value, RaggedDTensor)
        _same(value, expected[key])
    return {key: value.cpu() for key, value in expected.items()}


def _load_elsewhere(folder: str, expected: dict[str, torch.Tensor]) -> None:
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    even = {k: distribute_tensor(torch.zeros_like(v, device=device()), mesh, [Shard(0)]) for k, v in expected.items()}
    dcp.load(even, checkpoint_id=folder)
    for key, value in even.items():
        assert torch.equal(value.full_tensor().cpu(), expected[key])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_checkpoints(ranks: RankPool, asynchronous: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = ranks.run(3, _checkpoints, folder, asynchronous)[0]
        ranks.run(2, _load_elsewhere, folder, expected)


@on_ranks(3)
def test_random_initialization_equals_that_of_the_full_tensor() -> None:
    whole, ragged = _ragged("cut rows")
    for initialize in (nn.init.xavier_uniform_, nn.init.normal_, nn.init.trunc_normal_, nn.init.zeros_):
        torch.manual_seed(5)
        initialize(whole)
        torch.manual_seed(5)
        initialize(ragged)
        _same(ragged, whole)
    for draw in (torch.randn_like, torch.rand_like):
        torch.manual_seed(5)
        expected = draw(whole, dtype=torch.float64)
        torch.manual_seed(5)
        _same(draw(nn.Parameter(ragged), dtype=torch.float64), expected)


@on_ranks(4)
def test_two_axes_and_tensor_parallelism() -> None:
    """Over (outer, inner, tensor-parallel): ranks hold a range of a range of their tensor-parallel columns or rows."""
    mesh = init_device_mesh(device().type, (2, 1, 2), mesh_dim_names=("outer", "inner", "tp"))
    outer, _, tp = mesh.get_coordinate()
    whole = torch.arange(48.0, device=device()).view(8, 6)
    for tensor_parallel, own in (
        (Shard(1), whole.chunk(2, 1)[tp]),
        (Shard(0), whole.chunk(2, 0)[tp]),
        # Two sections of 2 and 6 rows, of which each rank has half.
        (SectionedShard((1, 3)), torch.cat([whole[:2].chunk(2)[tp], whole[2:].chunk(2)[tp]])),
    ):
        cuts = (0, 10, own.numel())
        placements = [RaggedShard(2, 0, cuts, 1), RaggedShard(2, 0, cuts, 2), tensor_parallel]
        local = own.flatten()[cuts[outer] : cuts[outer + 1]]
        row = own[0].numel()
        local = local.view(-1, row) if cuts[1] % row == 0 else local
        ragged = make_dtensor(local.clone(), mesh, (8, 6), placements)
        _same(ragged, whole)
        _same(ragged * 2, whole * 2)
        _same(torch.zeros_like(ragged).copy_(whole), whole)
        assert ragged.mean().item() == whole.mean().item()
        with tempfile.TemporaryDirectory() as mine:
            folder = [mine]
            dist.broadcast_object_list(folder)
            dcp.save({"t": ragged}, checkpoint_id=folder[0])
            target = {"t": torch.zeros(8, 6)}
            dcp.load(target, checkpoint_id=folder[0])
            assert torch.equal(target["t"], whole.cpu())
            dist.barrier()


@on_ranks(3)
def test_functions_of_the_original() -> None:
    for case in CASES:
        whole, ragged = _ragged(case)
        assert torch.equal(uneven_dtensor.uneven_dtensor_to_full_tensor(ragged), whole)
        uneven_dtensor.validate_uneven_dtensor(ragged)
        uneven_dtensor.preprocess_state_dict_for_uneven_dtensor({"a": {"b": ragged}})
        pieces = list(uneven_dtensor.split_dtensor(ragged, 2))
        for found, expected in zip(pieces, whole.split(2), strict=True):
            _same(found, expected)
        if case == "rows":
            assert all(
                torch.equal(a.full_tensor(), b)
                for a, b in zip(
                    uneven_dtensor.split_dtensor(ragged, [1, 2], dim=1), whole.split([1, 2], 1), strict=True
                )
            )
    # A plain DTensor with uneven local tensors, as NVIDIA's functions create them.
    rows = [2, 0, 3]
    mesh, whole = init_device_mesh(device().type, (3,)), torch.arange(10.0, device=device()).view(5, 2)
    local = whole.split(rows)[dist.get_rank()].clone()
    foreign = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(2, 1))
    chunk = uneven_dtensor.gather_and_compute_chunk_metadata(foreign)
    assert tuple(chunk.offsets) == (sum(rows[: dist.get_rank()]), 0) and tuple(chunk.sizes) == tuple(local.shape)
    assert torch.equal(uneven_dtensor.uneven_dtensor_to_full_tensor(foreign), whole)
    uneven_dtensor.validate_uneven_dtensor(foreign)
    short = DTensor.from_local(local[:1], mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(2, 1))
    with pytest.raises(ValueError, match="of 10 elements"):
        uneven_dtensor.validate_uneven_dtensor(short)
    assert torch.equal(uneven_dtensor.redistribute_uneven_dtensor_to_replicated(foreign).to_local(), whole)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=5), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_placements_agree_with_the_layout(shapes: list[tuple[int, int]], num_shards: int) -> None:
    layout = plan_layout(shapes, num_shards, ROW)
    for index in range(len(shapes)):
        placement = RaggedShard.of(layout, index, stride=1)
        for shard, after in itertools.pairwise([*range(num_shards), num_shards]):
            shard_slice = layout.shard_slice(index, shard)
            start, stop = placement.bounds(shard)
            assert stop - start == shard_slice.stop - shard_slice.start
            assert (start, stop) == (shard_slice.start, shard_slice.stop) or start == stop
            assert after == num_shards or placement.bounds(after)[0] == stop


def test_the_size_of_a_placement_depends_on_the_shards_of_its_parameter() -> None:
    layout = Layout((Slot(100, (30,), ELEMENT),), 4096, 50)
    assert RaggedShard.of(layout, 0) == RaggedShard(4096, 2, (0, 30))
    assert RaggedShard.of(Layout((Slot(90, (30,), ELEMENT),), 4096, 50), 0).cuts == (0, 10, 30)


@on_ranks(3)
def test_gathering_a_plain_dtensor_needs_no_reduction() -> None:
    mesh = init_device_mesh(device().type, (3, 1), mesh_dim_names=("data", "other"))
    whole = torch.arange(14.0, device=device()).view(7, 2)
    with patch.object(dist, "all_reduce", None):
        for lengths in ((3, 3, 1), (0, 5, 2)):
            local = whole.split(lengths)[dist.get_rank()]
            foreign = DTensor.from_local(local, mesh, [Shard(0), Replicate()], shape=whole.shape, stride=whole.stride())
            assert torch.equal(gather_full(foreign), whole)
