"""Process groups of several ranks in one process: collectives are kernels like others, and exchange nothing."""

import contextlib
import os
from collections.abc import Iterator
from unittest.mock import patch

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Context in which this process is one rank of so many. It ends the process group that it finds."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # There is nobody to wait for, and this store cannot wait.
    with patch.dict(os.environ, TORCH_DIST_INIT_BARRIER="0"):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()
