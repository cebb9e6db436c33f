"""All-gather and reduce-scatter built from sends and receives equal gloo's collectives."""

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.comm import gloo
from megatron.fsdp.comm.collectives import send_ranges
from megatron.fsdp.comm.streams import CpuStream
from megatron_fsdp import fully_shard_model
from tests.ranks import RankPool, on_ranks

SUM = dist.ReduceOp.SUM
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for tensors in host memory")


def _numbers(numel: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _compare(numel: int, dtype: torch.dtype) -> None:
    group = dist.new_group(list(range(dist.get_world_size())))
    assert group is not None
    rank, size = group.rank(), group.size()
    everything = [_numbers(numel * size, r, dtype) for r in range(size)]
    own = slice(rank * numel, (rank + 1) * numel)

    expected = torch.cat([one[:numel] for one in everything])
    gathered = torch.empty_like(expected)
    gloo.all_gather(gathered, everything[rank][:numel], group)
    assert torch.equal(gathered, expected)
    in_place = torch.zeros_like(expected)
    in_place[own] = everything[rank][:numel]
    gloo.all_gather(in_place, in_place[own], group)
    assert torch.equal(in_place, expected)

    # In the order in which they arrive, each sum rounded to the dtype.
    total = everything[rank][own].clone()
    for step in range(1, size):
        total += everything[(rank - step) % size][own]
    flat, shard = everything[rank].clone(), torch.empty(numel, dtype=dtype)
    gloo.reduce_scatter(shard, flat, SUM, group)
    assert torch.equal(shard, total)
    gloo.reduce_scatter(flat[own], flat, SUM, group)
    assert torch.equal(flat[own], total)
    exact = torch.empty(numel, dtype=torch.float64)
    gloo.reduce_scatter(exact, everything[rank], SUM, group)
    torch.testing.assert_close(exact, sum(one[own].double() for one in everything), rtol=1e-14, atol=1e-14)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_gather_and_reduce_scatter(ranks: RankPool, size: int, dtype: torch.dtype) -> None:
    for numel in (64, 0):
        ranks.run(size, _compare, numel, dtype)


@on_ranks(2)
def test_receives_come_before_sends() -> None:
    """Else a rank learns only behind what the other sends that it may send: twice the time on a slow network."""
    issued = []

    def noting(name: str) -> Callable[..., Any]:
        real = getattr(dist, name)
        return lambda *args, **named: (issued.append(name), real(*args, **named))[1]

    with patch.object(dist, "isend", noting("isend")), patch.object(dist, "irecv", noting("irecv")):
        gloo.reduce_scatter(torch.ones(4), torch.ones(8), SUM, dist.group.WORLD)
        gloo.all_gather(torch.ones(8), torch.ones(4), dist.group.WORLD)
    assert issued == ["irecv", "isend"] * 2
    operations: list[dist.P2POp] = []
    with patch.object(dist, "batch_isend_irecv", operations.extend):
        send_ranges([torch.ones(4), torch.ones(2)], dist.group.WORLD)
    assert [each.op for each in operations] == [dist.irecv, dist.isend]


def _groups_of_a_stream() -> list[int]:
    stream, counts = CpuStream(), []
    for _ in range(3):
        group = dist.new_group([0, 1])
        own = stream.group(group)
        total = torch.ones(1)
        stream.run(lambda own=own, total=total: dist.all_reduce(total, group=own)).wait()
        assert total.item() == 2
        dist.destroy_process_group(group)
        counts.append(len(dist.distributed_c10d._world.pg_map))
    stream.close()
    return counts


def test_a_streams_own_groups_do_not_pile_up(ranks: RankPool) -> None:
    for counts in ranks.run(2, _groups_of_a_stream):
        assert len(set(counts)) == 1


@on_ranks(4)
def test_gathering_what_one_rank_holds_does_not_wait_for_the_caller() -> None:
    """Biases that one of four ranks holds: it sends them, and gathering one takes no time to speak of."""
    model = fully_shard_model(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), shard_granularity="parameter")
    began = time.monotonic()
    for _ in range(25):
        for bias in (model.module[0].bias, model.module[1].bias):
            bias.full_tensor()
    assert time.monotonic() - began < 5
