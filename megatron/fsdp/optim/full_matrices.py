"""Applies a function to full matrices among an optimizer's main weights, however these are sharded."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.optim.matrix_exchange import Matrix, MatrixExchange
from megatron.fsdp.runtime.engine import Engine, engines_of
from megatron.fsdp.sharding.ownership import sharing_ranks

T = TypeVar("T")
Read = Callable[[nn.Parameter, torch.Tensor], None]
Compute = Callable[[nn.Parameter, torch.Tensor], torch.Tensor]


class FullMatrices:
    """Applies a function to tensors with the layout of main weights. All ranks of the model need one.

    A matrix that is also tensor-parallel is full if it is the tensor-parallel rank's. Its owners on all of these ranks
    have the same data-parallel rank, and compute it at the same time, so they may communicate with each other.

    Args:
        mains: Main weights of sharded models.
        work: The work of computing a main weight, in any unit. Matrices with equal shapes have equal work.
    """

    def __init__(self, mains: Sequence[nn.Parameter], work: Callable[[nn.Parameter], float]) -> None:
        wanted = {id(main) for main in mains}
        # Matrices that each rank has, and which it computes itself.
        self._whole: list[tuple[nn.Parameter, torch.Size, torch.device]] = []
        shared: dict[dist.ProcessGroup, list[tuple[Engine, ParameterGroup, int]]] = {}
        for engine in engines_of(mains):
            for group in engine.groups:
                for i in (i for i, param in enumerate(group.params) if id(param.main) in wanted):
                    if group.layout.num_shards == 1:
                        shape = torch.Size(group.params[i].local_shape)
                        self._whole.append((group.params[i].main, shape, group.device))
                    else:
                        ranks, _ = sharing_ranks(group.sharding, group.axes)
                        shared.setdefault(ranks, []).append((engine, group, i))
        self._shared = [_exchange(matrices, work) for matrices in shared.values()]

    @torch.no_grad()
    def map(self, read: Read, compute: Compute, write: Read) -> None:
        """Compute every matrix. A collective of all ranks.

        Args:
            read: Called with a main weight and a flat fp32 tensor: copies this rank's shard into it.
            compute: Called on one rank with the main weight and the full matrix: returns the result.
            write: Called with the main weight and a flat fp32 tensor, which is this rank's shard of the result.
        """
        for main, shape, device in self._whole:
            matrix = torch.empty(shape, dtype=torch.float32, device=device)
            read(main, matrix.view(-1))
            write(main, compute(main, matrix).reshape(-1))
        for mains, exchange in self._shared:
            exchange.map(_by_number(read, mains), _by_number(compute, mains), _by_number(write, mains))


def _by_number(
    function: Callable[[nn.Parameter, torch.Tensor], T], mains: list[nn.Parameter]
) -> Callable[[int, torch.Tensor], T]:
    return lambda i, tensor: function(mains[i], tensor)


def _exchange(
    matrices: list[tuple[Engine, ParameterGroup, int]], work: Callable[[nn.Parameter], float]
) -> tuple[list[nn.Parameter], MatrixExchange]:
    """The exchange of matrices that the same ranks share, and their main weights."""
    engine, first, _ = matrices[0]
    ranks, shards = sharing_ranks(first.sharding, first.axes)
    mains = [group.params[i].main for _, group, i in matrices]
    described = [Matrix.of(group.layout, i) for _, group, i in matrices]
    works = [work(main) for main in mains]
    return mains, MatrixExchange(described, works, ranks, shards, engine.context.stream, engine.context.device)
