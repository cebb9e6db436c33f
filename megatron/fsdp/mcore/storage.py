"""Gives Megatron's checkpointing module our storage in place of that of ``torch.distributed.checkpoint``."""

from types import ModuleType

from megatron.fsdp.checkpoint.backend import Planner, Writer
from megatron.fsdp.mcore.load import load_objects, load_state_dict
from megatron.fsdp.mcore.save import save, saves_objects
from megatron.fsdp.mcore.torch_dist import Reader
from megatron.fsdp.mcore.views import View


def torch_view(torch: ModuleType) -> View:
    """PyTorch as the checkpointing module sees it: only ``torch.distributed.checkpoint`` differs."""
    checkpoint = View(
        torch.distributed.checkpoint,
        {
            "save": save,
            "load": load_objects,
            "load_state_dict": load_state_dict,
            "FileSystemWriter": Writer,
            "FileSystemReader": Reader,
            "DefaultSavePlanner": lambda: Planner(saves_objects(), copies=True),
        },
    )
    return View(torch, {"distributed": View(torch.distributed, {"checkpoint": checkpoint})})
