"""How one model communicates: its devices, streams and process group, and the record of what was issued."""

import functools
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import is_on_host, moves_data, pins_memory, runs_ahead
from megatron.fsdp.comm.collectives import all_reduce, collectives_of
from megatron.fsdp.comm.journal import Channel, report_on_failure
from megatron.fsdp.comm.streams import Stream, communication_stream

# Of models whose main weights are in host memory.
_offloading: "weakref.WeakSet[CommContext]" = weakref.WeakSet()


def finish_host_reads() -> None:
    """Make the host wait for the copies of main weights that were issued, before it writes tensors in its memory."""
    for context in list(_offloading):
        context.join_unshards()
        context.finish_offload()


@dataclass(frozen=True, eq=False)
class CommContext:
    """How one model communicates.

    Attributes:
        device: Where the model computes, and where collectives run.
        main_device: Where main weights are: ``device``, or the host if they are offloaded.
        stream: Runs reductions and everything else that is communicated, except unshards.
        outer_stream: Runs what is communicated over the outer axis, often a slower link. On CUDA it is another stream:
            what other units communicate over the inner axis goes on meanwhile.
        unshard_stream: Runs unshards. On CUDA it is another stream: casts and copies of a reduction do not delay the
            next unshard. On a CPU it is another one only if unshards have process groups that nothing else uses.
        dp_group: All data-parallel ranks, as a group that tasks of ``stream`` may use.
        channel: Records what is issued, for reports.
    """

    device: torch.device
    main_device: torch.device
    stream: Stream
    unshard_stream: Stream
    outer_stream: Stream
    dp_group: dist.ProcessGroup
    channel: Channel

    @classmethod
    def of(
        cls,
        device: torch.device,
        main_device: torch.device,
        dp_group: dist.ProcessGroup,
        channel: Channel,
        separate_unshards: bool,
        has_outer: bool = False,
    ) -> "CommContext":
        """The context of a model. May make a process group, so all ranks of ``dp_group`` must call it.

        Args:
            device: Where the model computes.
            main_device: Where main weights are.
            dp_group: All data-parallel ranks.
            channel: Records what is issued.
            separate_unshards: Unshards have process groups that nothing else uses.
            has_outer: There is an outer axis.
        """
        stream = communication_stream(device, dp_group)
        second = "second" if separate_unshards or runs_ahead(device) else ""
        third = "outer" if has_outer and runs_ahead(device) else ""
        unshards, outer = (communication_stream(device, dp_group, name) for name in (second, third))
        context = cls(device, main_device, stream, unshards, outer, stream.group(dp_group), channel)
        if context.offloads:
            _offloading.add(context)
        return context

    @property
    def streams(self) -> list[Stream]:
        """All streams, each once."""
        return list(dict.fromkeys([self.stream, self.unshard_stream, self.outer_stream]))

    @property
    def offloads(self) -> bool:
        """True if main weights and gradients are in host memory, and compute is not."""
        return self.main_device != self.device

    def main_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new flat tensor on the main weights' device. Copies to it and from it do not block the host."""
        pinned = is_on_host(self.main_device) and pins_memory(self.device)
        return torch.empty(numel, dtype=dtype, device=self.main_device, pin_memory=pinned)

    def finish_offload(self) -> None:
        """Make the host wait for gradients that are copied to it. Does nothing without offload."""
        if self.offloads and pins_memory(self.device):
            torch.cuda.current_stream(self.device).synchronize()

    def join(self) -> None:
        """Make compute wait for all tasks that were issued. Their memory may be freed afterwards."""
        for stream in self.streams:
            stream.join()
        self.follow()

    def follow(self) -> None:
        """Before tensors that tasks have allocated are dropped: see :meth:`Stream.follow`."""
        for stream in self.streams:
            stream.follow()

    def join_unshards(self) -> None:
        """Make compute wait for all unshards that were issued, used or not."""
        # What they have gathered over the outer axis ends before.
        self.unshard_stream.join()

    def any_rank(self, flags: list[bool], *groups: dist.ProcessGroup) -> "SetFlags":
        """Start to find out which flags are set on any rank of the groups, one after the other.

        A collective: all ranks pass the same number of flags.

        Args:
            flags: Those of this rank.
            groups: Groups that tasks of ``stream`` may use. None: the data-parallel ranks.
        """
        result = SetFlags(flags, self, groups or (self.dp_group,))
        self.channel.note(f"compare {len(flags)} flags", [result.handle])
        return result

    def exchange(self, numbers: list[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
        """Every rank's list of integers, in rank order. A collective; lists may differ in length.

        Args:
            numbers: The list of this rank.
            group: A group that tasks of ``stream`` may use. None: the data-parallel ranks.
        """
        group = group or self.dp_group
        if not moves_data(group):
            return [numbers]
        # The compute waits for each task before it drops the tensors that the task uses, so they need no ``keep``.
        size = torch.tensor(len(numbers), dtype=torch.int64, device=self.device)
        self.stream.run(functools.partial(all_reduce, size, dist.ReduceOp.MAX, group)).wait()
        # The first element is the length: rows are padded to the longest.
        row = torch.zeros(int(size) + 1, dtype=torch.int64, device=self.device)
        row[: len(numbers) + 1] = torch.tensor([len(numbers), *numbers], dtype=torch.int64, device=self.device)
        rows = torch.empty(group.size() * row.numel(), dtype=torch.int64, device=self.device)
        gather = collectives_of(group, self.device).all_gather
        self.stream.run(functools.partial(gather, rows, row, group)).wait()
        return [r[1 : r[0] + 1] for r in rows.view(group.size(), -1).tolist()]


class SetFlags:
    """The flags that are set on any rank of some groups. They may be dropped without reading them.

    Args:
        flags: Those of this rank.
        context: How the model communicates.
        groups: The groups.

    Attributes:
        handle: Of the reductions.
    """

    def __init__(self, flags: list[bool], context: CommContext, groups: Sequence[dist.ProcessGroup]) -> None:
        # From pageable memory, or to it, a copy would make the host wait for the device.
        self._flags = torch.tensor(flags, dtype=torch.uint8, pin_memory=pins_memory(context.device))
        self.handle = context.stream.run(functools.partial(_reduce, self._flags, context.device, groups))

    def read(self) -> list[bool]:
        """Wait for the reductions, and return the flags. The host waits until the device has them."""
        with report_on_failure():
            self.handle.wait()
        while not self.handle.ended:
            time.sleep(0.0005)
        return [bool(flag) for flag in self._flags.tolist()]


def _reduce(flags: torch.Tensor, device: torch.device, groups: Sequence[dist.ProcessGroup]) -> None:
    # Allocated by the task, so that the memory follows the stream's order.
    result = flags.to(device, non_blocking=True)
    for group in groups:
        all_reduce(result, dist.ReduceOp.MAX, group)
    flags.copy_(result, non_blocking=True)
