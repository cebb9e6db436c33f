"""How one model communicates: its devices, streams and process group, and the record of what was issued."""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import is_on_host, moves_data, runs_ahead
from megatron.fsdp.comm.collectives import all_gather, all_reduce
from megatron.fsdp.comm.journal import Channel, report_on_failure
from megatron.fsdp.comm.streams import Stream, communication_stream


@dataclass(frozen=True)
class CommContext:
    """How one model communicates.

    Attributes:
        device: Where the model computes, and where collectives run.
        main_device: Where main weights are: ``device``, or the host if they are offloaded.
        stream: Runs reductions and everything else that is communicated, except unshards.
        unshard_stream: Runs unshards. On CUDA it is another stream: casts and copies of a reduction do not delay the
            next unshard. On a CPU it is another one only if unshards have process groups that nothing else uses.
        dp_group: All data-parallel ranks, as a group that tasks of ``stream`` may use.
        channel: Records what is issued, for reports.
    """

    device: torch.device
    main_device: torch.device
    stream: Stream
    unshard_stream: Stream
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
    ) -> "CommContext":
        """The context of a model. May make a process group, so all ranks of ``dp_group`` must call it.

        Args:
            device: Where the model computes.
            main_device: Where main weights are.
            dp_group: All data-parallel ranks.
            channel: Records what is issued.
            separate_unshards: Unshards have process groups that nothing else uses.
        """
        stream = communication_stream(device, dp_group)
        unshard_stream = communication_stream(device, dp_group, second=separate_unshards or runs_ahead(device))
        return cls(device, main_device, stream, unshard_stream, stream.group(dp_group), channel)

    @property
    def offloads(self) -> bool:
        """True if main weights and gradients are in host memory, and compute is not."""
        return self.main_device != self.device

    def main_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new flat tensor on the main weights' device. Copies to it and from it do not block the host."""
        pinned = is_on_host(self.main_device) and runs_ahead(self.device)
        return torch.empty(numel, dtype=dtype, device=self.main_device, pin_memory=pinned)

    def finish_offload(self) -> None:
        """Make the host wait for gradients that are copied to it. Does nothing without offload."""
        if self.offloads and runs_ahead(self.device):
            torch.cuda.current_stream(self.device).synchronize()

    def join(self) -> None:
        """Make compute wait for all tasks that were issued."""
        for stream in dict.fromkeys([self.stream, self.unshard_stream]):
            stream.join()

    def join_unshards(self) -> None:
        """Make compute wait for all unshards that were issued, used or not."""
        self.unshard_stream.join()

    def any_rank(self, flags: list[bool]) -> "SetFlags":
        """Start to find out which flags are set on any data-parallel rank.

        A collective: all ranks pass the same number of flags.
        """
        result = SetFlags(flags, self)
        self.channel.note(f"compare {len(flags)} flags", [result.handle])
        return result

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        """Every data-parallel rank's list of integers, in rank order. A collective; lists may differ in length."""
        if not moves_data(self.dp_group):
            return [numbers]
        # The compute waits for each task before it drops the tensors that the task uses, so they need no ``keep``.
        size = torch.tensor(len(numbers), dtype=torch.int64, device=self.device)
        self.stream.run(functools.partial(all_reduce, size, dist.ReduceOp.MAX, self.dp_group)).wait()
        # The first element is the length: rows are padded to the longest.
        row = torch.zeros(int(size) + 1, dtype=torch.int64, device=self.device)
        row[: len(numbers) + 1] = torch.tensor([len(numbers), *numbers], dtype=torch.int64, device=self.device)
        rows = torch.empty(self.dp_group.size() * row.numel(), dtype=torch.int64, device=self.device)
        self.stream.run(functools.partial(all_gather, rows, row, self.dp_group)).wait()
        return [r[1 : r[0] + 1] for r in rows.view(self.dp_group.size(), -1).tolist()]


class SetFlags:
    """The flags that are set on any data-parallel rank.

    Args:
        flags: Those of this rank.
        context: How the model communicates.

    Attributes:
        handle: Of the reduction.
    """

    def __init__(self, flags: list[bool], context: CommContext) -> None:
        self._context = context
        self._flags = flags
        self._result: torch.Tensor | None = None
        self.handle = context.stream.run(self._reduce)

    def _reduce(self) -> None:
        # Allocated by the task: the memory follows the stream's order, so the result may be dropped without a wait.
        device = self._context.device
        # From pageable memory, the copy would make the host wait for the device.
        flags = torch.tensor(self._flags, dtype=torch.uint8, pin_memory=runs_ahead(device))
        self._result = flags.to(device, non_blocking=True)
        all_reduce(self._result, dist.ReduceOp.MAX, self._context.dp_group)

    def read(self) -> list[bool]:
        """Wait for the reduction, and return the flags. The host waits for the device."""
        with report_on_failure():
            self.handle.wait()
        assert self._result is not None, "the task has ended without an exception"
        return [bool(flag) for flag in self._result.tolist()]
