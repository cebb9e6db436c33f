"""Process groups of torch."""

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import HOST, backend_of


def new_group(ranks: list[int], like: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """A group of these ranks, all of which must call it, with the timeout of another, which torch does not pass on."""
    return dist.new_group(ranks, timeout=timeout_of(like), use_local_synchronization=True, group_desc=name)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a collective of the group may take; None if its backend has no timeout."""
    cuda = torch.device("cuda")
    device = cuda if backend_of(group, cuda).ends_process else HOST
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):  # the fake backend has none
        return None
    return timeout


def require_process_group() -> None:
    """Raise a clear error if torch.distributed is not initialized.

    Raises:
        RuntimeError: There is no default process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialized. Call torch.distributed.init_process_group() (under torchrun, or "
            "with world_size=1 for one process) before the model is sharded or run."
        )
