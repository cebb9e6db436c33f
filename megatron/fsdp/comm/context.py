"""How one model communicates: its devices, streams and process group, and the record of what was issued."""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import moves_data
from megatron.fsdp.comm.collectives import all_gather, all_reduce
from megatron.fsdp.comm.journal import Channel
from megatron.fsdp.comm.streams import Handle, Stream, communication_stream


@dataclass(frozen=True)
class CommContext:
    """How one model communicates.

    Attributes:
        device: Where the model computes, and where collectives run.
        main_device: Where main weights are: ``device``, or the host if they are offloaded.
        stream: Runs reductions and everything else that is communicated, except unshards.
        unshard_stream: Runs unshards. The same stream, unless unshards have process groups that nothing else uses.
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
        unshard_stream = communication_stream(device, dp_group, second=separate_unshards)
        return cls(device, main_device, stream, unshard_stream, stream.group(dp_group), channel)

    def any_rank(self, flags: list[bool]) -> tuple[torch.Tensor, Handle]:
        """Start to find out which flags are set on any data-parallel rank. A collective, with as many flags everywhere.

        Returns:
            The result, of dtype uint8, and a handle to wait for before it is read.
        """
        result = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        handle = self.stream.run(functools.partial(self._reduce_max, result))
        self.channel.note(f"compare {len(flags)} flags", [handle])
        return result, handle

    def _reduce_max(self, values: torch.Tensor) -> None:
        # The compute allocated this memory, and the caller of any_rank may drop it without a wait.
        self.stream.keep([values])
        all_reduce(values, dist.ReduceOp.MAX, self.dp_group)

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        """Every data-parallel rank's list of integers, in rank order. A collective; lists may differ in length."""
        if not moves_data(self.dp_group):
            return [numbers]
        # The compute waits for each task before it drops the tensors that the task uses, so they need no ``keep``.
        size = torch.tensor(len(numbers), dtype=torch.int64, device=self.device)
        self.stream.run(functools.partial(self._reduce_max, size)).wait()
        # The first element is the length: rows are padded to the longest.
        row = torch.zeros(int(size) + 1, dtype=torch.int64, device=self.device)
        row[: len(numbers) + 1] = torch.tensor([len(numbers), *numbers], dtype=torch.int64, device=self.device)
        rows = torch.empty(self.dp_group.size() * row.numel(), dtype=torch.int64, device=self.device)
        self.stream.run(functools.partial(all_gather, rows, row, self.dp_group)).wait()
        return [r[1 : r[0] + 1] for r in rows.view(self.dp_group.size(), -1).tolist()]
