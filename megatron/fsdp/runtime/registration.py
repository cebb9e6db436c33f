"""Registers the fixed buffers of a model with NCCL, alike on all ranks."""

import functools
import logging

import torch.distributed as dist

from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.buffers.pool import Buffer, FixedPool, sufficient
from megatron.fsdp.comm.context import CommContext, SetFlags
from megatron.fsdp.comm.registered_memory import NcclMemory
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.sharding.mesh import DataParallelAxes, MeshIndex

logger = logging.getLogger(__name__)


def groups_of(axes: list[DataParallelAxes]) -> list[dist.ProcessGroup]:
    """The process groups over which weights and gradients are communicated, each once."""
    return list(dict.fromkeys(group for each in axes for group in (*each.groups, each.gather)))


class BufferRegistration:
    """Moves the buffers of a pool to memory that is registered with NCCL, once they all exist.

    Buffers are made during the first step, in ordinary memory. At its end, ranks agree on their number and sizes, and
    allocate and register them in one order. Buffers that are made later are ordinary memory again until the next
    registration, which all ranks make together as soon as one of them has such a buffer.

    With symmetric windows, each collective needs its buffers at the same offsets on all ranks. They are, because the
    pool makes all of them from one allocation, hands them out in the order of the plan, which all ranks share, and the
    sizes are equal. Ranks compare the offsets, too. Where these or the sizes of parameter groups differ between ranks,
    as experts may, or a device has no multicast, or NCCL cannot register symmetric windows, all ranks register buffers
    without them.

    Args:
        pool: The buffers.
        params: All parameter groups of the model; at least one.
        index: Mesh and process groups.
        context: How the model communicates.
        config: Settings.
    """

    def __init__(
        self,
        pool: FixedPool,
        params: list[ParameterGroup],
        index: MeshIndex,
        context: CommContext,
        config: FSDPConfig,
    ) -> None:
        self._pool = pool
        self._sizes = [group.layout.numel for group in params]
        self._config = config
        self._symmetric = not config.disable_symmetric_registration
        self._failed = False  # to register even local memory: then the model trains without
        self._context = context
        # Asked at the end of one step and read at the end of the next. By then the device has long answered, so that
        # the host does not wait for the computation of the step.
        self._added: SetFlags | None = None
        both = [index.dense] if index.experts is index.dense else [index.dense, index.experts]
        # A group of experts has no communicator if the model has no experts.
        axes = [each for each in both if any(group.axes is each for group in params)]
        groups = groups_of(axes)
        self._memory = NcclMemory(groups, context.device)
        self._groups = [context.stream.group(group) for group in groups]
        # Dense parameters and experts may be sharded by different ranks. After the ranks of the first have agreed, and
        # those of the second, the first hear what their ranks have learned from the second.
        parties = [context.stream.group(each.dp_group) for each in axes]
        self._parties = [*parties, *parties[:-1]]

    def end_step(self) -> None:
        """Register the buffers after the first step, and after steps in which any rank has added one. A collective."""
        if self._config.fsdp_manual_registration or self._failed:
            return
        if not self._memory.registered:
            self.register()
            return
        if self._config.cuda_graph_mode:
            return  # a graph could not compare whether a rank has added a buffer
        added, self._added = self._added, self._context.any_rank([self._pool.grown], *self._parties)
        if added is not None and any(added.read()):
            self.register()

    def register(self) -> None:
        """Register all buffers that exist now. A collective; no unit may be unsharded, and no reduction in flight.

        Raises:
            RuntimeError: A rank has too little memory. All ranks raise.
        """
        self._added = None
        buffers, alike = self._agree()
        if self._symmetric and not alike:
            why = "ranks have parameter groups of other sizes" if self._memory.has_multicast else "there is no NVSwitch"
            logger.warning("FSDP: %s: no symmetric memory is registered.", why)
        self._allocate(buffers)
        for symmetric in (True, False) if self._symmetric and alike and self._placed_alike() else (False,):
            try:
                return self._memory.register(symmetric, self._on_any_rank)
            except RuntimeError as error:
                self._symmetric, self._failed = False, not symmetric
                if self._context.dp_group.rank() == 0:
                    instead = "all ranks register local memory" if symmetric else "no rank registers memory"
                    logger.warning("FSDP: %s, because registering failed: %s", instead, error)
                self._allocate(buffers)
        return None

    def _allocate(self, buffers: list[Buffer]) -> None:
        """Move the buffers to memory that is not registered yet. A collective."""
        failure: Exception | None = None
        try:
            release = functools.partial(self._pool.release, self._context.device)
            self._memory.allocate(release, functools.partial(self._pool.renew, buffers, self._context.device))
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of any
            failure = error
        # The first collective of a group makes its communicator, to which nothing can be registered before. And
        # a rank that cannot go on must say so here, because the others would wait for it in a registration.
        if self._on_any_rank(failure is not None):
            raise failure or RuntimeError("nccl_ub: another rank could not allocate memory to register with NCCL.")

    def _on_any_rank(self, flag: bool) -> bool:
        return any(self._context.any_rank([flag], *self._groups, *self._parties).read())

    def _placed_alike(self) -> bool:
        """Whether all ranks have their buffers at the same offsets of equal segments. A collective."""
        alike, places = True, self._memory.places(self._pool.addresses())
        for party in self._parties:
            numbers = [int(alike), *places]
            alike = all(each == numbers for each in self._context.exchange(numbers, party))
        if not alike:
            logger.warning("FSDP: ranks have buffers at different offsets: no symmetric memory is registered.")
        return alike

    def _agree(self) -> tuple[list[Buffer], bool]:
        """Buffers that suffice for all ranks, and whether all have multicast and parameter groups of the same sizes."""
        buffers, alike = self._pool.buffers(), self._memory.has_multicast
        for party in self._parties:
            numbers = [int(alike), len(self._sizes), *self._sizes, *(number for each in buffers for number in each)]
            found = self._context.exchange(numbers, party)
            end = 2 + len(self._sizes)
            alike = all(each[0] and each[1:end] == numbers[1:end] for each in found)
            buffers = sufficient([_as_buffers(each[2 + each[1] :]) for each in found])
        return buffers, alike


def _as_buffers(numbers: list[int]) -> list[Buffer]:
    rows = zip(*[iter(numbers)] * 4, strict=True)
    return [(is_scratch, which, writer, size) for is_scratch, which, writer, size in rows]
