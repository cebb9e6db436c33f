"""Helpers around torch's process groups."""

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import HOST, backend_of


def new_group(ranks: list[int], like: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """Make a process group. Only its ranks call this, all of them.

    Args:
        ranks: The ranks.
        like: A group whose timeout the new one gets. torch would give it the default.
        name: Description for torch's own messages.
    """
    return dist.new_group(ranks, timeout=timeout_of(like), use_local_synchronization=True, group_desc=name)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a collective of the group may take; None if its backend has none, as the fake one."""
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
