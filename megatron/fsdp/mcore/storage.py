"""Gives Megatron's checkpointing module our storage in place of that of ``torch.distributed.checkpoint``.

It looks at, reads and writes its own files through three modules, which here take addresses on object storage as well.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron.fsdp.checkpoint.backend import Planner, Writer
from megatron.fsdp.checkpoint.storage import as_path, is_remote
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


def _or_remote(function: Callable[..., Any], method: str) -> Callable[..., Any]:
    """A function of a path that calls a method of the path instead if that is on object storage."""

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        place = as_path(path)
        return getattr(place, method)(*args, **kwargs) if is_remote(place) else function(path, *args, **kwargs)

    return call


class FileView:
    """Megatron's ``maybe_msc``: the functions of the file system or, with ``--enable-msc``, of NVIDIA's client.

    Args:
        original: Megatron's. It is asked at each use, because the option is parsed later.
    """

    Path = staticmethod(as_path)

    def __init__(self, original: Any) -> None:
        self._original = original

    @property
    def os(self) -> View:
        """Its ``os``."""
        os = self._original.os
        names = {"isfile": "is_file", "exists": "exists"}
        path = View(os.path, {name: _or_remote(getattr(os.path, name), ours) for name, ours in names.items()})
        return View(os, {"path": path, "makedirs": _or_remote(os.makedirs, "mkdir")})

    def open(self, path: Any, mode: str = "r") -> Any:
        """Open a file."""
        return _or_remote(self._original.open, "open")(path, mode)


def shutil_view(shutil: ModuleType) -> View:
    """The module with which Megatron removes checkpoints (``--save-retain-interval``)."""
    return View(shutil, {"rmtree": _or_remote(shutil.rmtree, "rmtree")})
