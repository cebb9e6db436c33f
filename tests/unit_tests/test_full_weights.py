"""Full weights in buckets: equal to gathered ones, bounded in size, on all ranks or one, in any layout of ranks."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron.fsdp.comm.collectives import collectives_of
from megatron.fsdp.dtensor.gathering import gather_full
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model
from tests.exchanges import both_exchanges
from tests.models import DEVICE, STRATEGIES, Block, TinyModel, device
from tests.ranks import RankPool, on_ranks
from tests.tensor_bytes import TensorBytes, build, call_counted

FP32_MAIN = MixedPrecisionPolicy(main_params_dtype=torch.float32)


def _model(**options: Any) -> MegatronFSDP:
    torch.manual_seed(5)
    model = TinyModel(tied=True).to(device(), torch.bfloat16)
    model.register_buffer("steps", torch.tensor(3.0, device=device()))
    policy = options.pop("policy", FP32_MAIN)
    return fully_shard_model(model, fsdp_unit_modules=[Block], mixed_precision_policy=policy, **options)


def _collected(buckets: Iterator[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [{name: tensor.clone() for name, tensor in bucket.items()} for bucket in buckets]


def _expected(model: MegatronFSDP, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = {param.name: gather_full(param.main).to(dtype) for param in model.engine.params()}  # type: ignore[arg-type]
    return {**found, "steps": torch.tensor(3.0, device=device())}


def _agree(bucket_bytes: int, options: dict[str, Any]) -> list[int]:
    model = _model(**options)
    for param in model.engine.params():
        param.main.data.mul_(1.0009765625)  # values that bfloat16 rounds
    sizes = []
    for dtype in (torch.bfloat16, torch.float32):
        expected = _expected(model, dtype)
        for to_rank in (None, dist.get_world_size() - 1):
            buckets = _collected(model.full_weights(bucket_bytes, dtype, to_rank))
            found = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
            if to_rank not in (None, dist.get_rank()):
                assert not found and len(buckets) > 1
                continue
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            sizes += [sum(t.nbytes for t in bucket.values()) for bucket in buckets if len(bucket) > 1]
    return sizes


@both_exchanges("strategy", STRATEGIES)
@pytest.mark.parametrize("bucket_bytes", [700, 12_000])
def test_equal_to_gathered_weights(ranks: RankPool, strategy: str, bucket_bytes: int) -> None:
    sizes = ranks.run(3, _agree, bucket_bytes, {"zero_dp_strategy": strategy})[0]
    assert max(sizes, default=0) <= bucket_bytes


@on_ranks(4)
@pytest.mark.parametrize("outer", ["no_shard", "optim"])
@pytest.mark.parametrize("bucket_bytes", [700, 1 << 20])
def test_two_data_parallel_axes(outer: str, bucket_bytes: int) -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("outer", "inner"))
    axes = {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer", "outer_dp_sharding_strategy": outer}
    _agree(bucket_bytes, axes)


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 10), nn.Linear(10, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


@on_ranks(4)
@pytest.mark.parametrize("bucket_bytes", [700, 1 << 20])
def test_tensor_parallel(bucket_bytes: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(_Mlp(), _Mlp()).to(device())
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    sharded = fully_shard_model(model, mesh, "dp", tp_dim="tp", fsdp_unit_modules=[_Mlp])
    for to_rank in (None, 2):
        buckets = _collected(sharded.full_weights(bucket_bytes, None, to_rank))
        found = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
        if to_rank in (None, dist.get_rank()):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        else:
            assert not found


@on_ranks(2)
def test_refuses_what_would_give_wrong_weights() -> None:
    model = _model()
    with pytest.raises(ValueError, match=r"expected bucket_bytes of at least 1; got 0"):
        model.full_weights(0)
    for wrong in ({"bucket_bytes": "1"}, {"dtype": "bf16"}, {"dtype": torch.int8}, {"to_rank": "0"}, {"convert": "hf"}):
        name, value = next(iter(wrong.items()))
        with pytest.raises(TypeError, match=rf"expected {name} to be a .*; got {value!r}\."):
            model.full_weights(**wrong)
    with pytest.raises(ValueError, match=r"expected to_rank among .*\[0, 1\]; got 7"):
        model.full_weights(to_rank=7)
    with pytest.raises(ValueError, match=r"the same bucket_bytes, dtype and to_rank on all ranks"):
        model.full_weights(1000 + dist.get_rank())
    with pytest.raises(RuntimeError, match=r"an earlier bucket are still in use.*: norm.weight. Keep copies.*clone"):
        list(model.full_weights(700))
    with pytest.raises(ValueError, match=r"expected another name for each tensor; got weight twice"):
        list(model.full_weights(convert=lambda name, tensor: [("weight", tensor)]))
    with pytest.raises(RuntimeError, match=r"weights have changed since the first bucket"):
        for _ in model.full_weights(700):
            next(model.parameters()).data.add_(1)
    for _ in model.full_weights(700):
        break  # leaves nothing in flight
    renamed = model.full_weights(convert=lambda name, tensor: [(f"hf.{name}", tensor[:1] if tensor.ndim else tensor)])
    assert all(name.startswith("hf.") for bucket in renamed for name in bucket)
    model(torch.zeros(1, 3, dtype=torch.int64, device=device())).sum().backward()


def measure_memory(bucket_bytes: int) -> dict[str, int]:
    """Bytes of rank 0 of 8: the most that iterating adds, and the largest bucket."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    counter = TensorBytes()
    torch.manual_seed(0)
    model = TinyModel(width=160, depth=6, vocabulary=16)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block], mixed_precision_policy=FP32_MAIN)
    before = counter.live()
    counter.reset()
    largest = 0
    for bucket in sharded.full_weights(bucket_bytes, torch.bfloat16):
        largest = max(largest, sum(tensor.nbytes for tensor in bucket.values()))
    del bucket
    return {"added": counter.peak() - before, "largest": largest, "left": counter.live() - before}


@pytest.mark.skipif(DEVICE == "cuda", reason="counts CPU tensors")
@pytest.mark.parametrize("bucket_bytes", [200_000, 700_000])
def test_memory_is_two_buckets(tmp_path_factory: pytest.TempPathFactory, bucket_bytes: int) -> None:
    library = build(tmp_path_factory.mktemp("counter"))
    found = call_counted(library, "tests.unit_tests.test_full_weights:measure_memory", bucket_bytes)
    print(found)
    assert bucket_bytes // 2 < found["largest"] <= bucket_bytes
    assert found["added"] <= 2 * bucket_bytes + 4096
    assert found["left"] <= 4096


def _seconds(work: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _rates(width: int, depth: int, bucket_bytes: int) -> tuple[float, float]:
    """The best rates, in MB/s: of full weights, and of a cast and an all-gather of each unit, in two new buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth))).to(device(), torch.bfloat16)
    sharded = fully_shard_model(model, fsdp_unit_modules=[nn.Linear], mixed_precision_policy=FP32_MAIN)
    total, group = 2 * width * width * depth, sharded.index.dense.inner
    gather = collectives_of(group, device()).all_gather
    numel = width * width
    shards = [torch.ones(numel // group.size(), device=device()) for _ in range(depth)]

    def plainly() -> None:
        flats = [torch.empty(numel, dtype=torch.bfloat16, device=device()) for _ in range(2)]
        for i, shard in enumerate(shards):
            own = flats[i % 2].tensor_split(group.size())[group.rank()]
            gather(flats[i % 2], own.copy_(shard), group)

    ours, plain = [], []
    for _ in range(8):  # in turn, because the speed of a shared machine changes
        plain.append(_seconds(plainly))
        ours.append(_seconds(lambda: [None for _ in sharded.full_weights(bucket_bytes)]))
    return total / 1e6 / min(ours), total / 1e6 / min(plain)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="measures gloo")
@pytest.mark.parametrize("bucket_bytes", [16 << 20, 1 << 20], ids=["units in a bucket", "units larger than a bucket"])
def test_rate_of_a_plain_all_gather(ranks: RankPool, bucket_bytes: int) -> None:
    ours, plain = ranks.run(2, _rates, 1024, 64, bucket_bytes)[0]
    print(f"{ours:.0f} MB/s, plain {plain:.0f} MB/s")
    assert ours > 0.8 * plain
