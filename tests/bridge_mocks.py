"""Mocks for the packages that Megatron-Bridge imports and that have no build for a CPU or are not needed here.

Only Megatron-Bridge's modules see them: for those of Megatron-Core the packages are not installed.
"""

import sys
from types import ModuleType
from typing import Any

from megatron.fsdp.helpers.imports import AfterImport
from megatron.fsdp.mcore import cpu
from megatron.fsdp.mcore.cpu.imports import MegatronFinder

PACKAGES = (
    "datasets",
    "diffusers",
    "hydra",
    "megatron.energon",
    "modelopt",
    "nvidia_resiliency_ext",
    "tensorboard",
    "torchvision",
    "transformer_engine",
    "webdataset",
)


class _AnyName(type):
    """A class of such classes: every attribute is another one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> None:
        """Do nothing, as Megatron-Bridge expects of what is not used."""


class _AnyModule(ModuleType):
    __getattr__ = _AnyName.__getattr__


class _Absent(dict[tuple[str, str | None], Any]):
    """Mocks by the importing module and the package that it imports."""

    def __contains__(self, key: Any) -> bool:
        importer, package = key
        return super().__contains__(key) or (importer.startswith("megatron.bridge") and package in PACKAGES)

    def __missing__(self, key: tuple[str, str | None]) -> ModuleType:
        return _AnyModule(str(key[1]))


def enable() -> None:
    """Make Megatron-Core and Megatron-Bridge run on the CPU. Call it before one of them is imported."""
    cpu.enable()
    finder = next(finder for finder in sys.meta_path if isinstance(finder, MegatronFinder))
    finder.absent = _Absent(finder.absent)
    # Megatron-Core has names of its Transformer Engine layers without it, and they are no classes.
    without = AfterImport({"megatron.bridge.peft.utils"}, lambda name: setattr(sys.modules[name], "HAVE_TE", False))
    sys.meta_path.insert(0, without)
