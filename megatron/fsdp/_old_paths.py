"""Import paths that modules had before they were grouped into packages: they are the same modules under both names.

A finder answers for them, so that an old name costs nothing until it is used: ``import megatron.fsdp.compat``,
``python -m megatron.fsdp.doctor``, and a pickle that names a class by its old path.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

PACKAGE = "megatron.fsdp."
MOVED = {
    "compat": "fsdp2",
    "trace": "tools.trace",
    "doctor": "tools.doctor",
    "verify": "tools.verify",
    "launch": "tools.launch",
    "uneven_dtensor": "dtensor.uneven",
    "export": "state.export",
    "device": "comm.streams",
    "mesh": "sharding.mesh",
    "precision": "sharding.precision",
    "deferred": "init.deferred",
    "optimizer": "optim.hooks",
    "optimizer_classes": "optim.classes",
    "ragged": "dtensor.placements",
    "ragged_dtensor": "dtensor.ragged_dtensor",
    "fully_shard": "api",
    "mcore.arguments": "mcore.limits",
}


def current(name: str) -> str | None:
    """The path that the module has now; None if ``name`` is no old path."""
    if not name.startswith(PACKAGE):
        return None
    old, inside = name.removeprefix(PACKAGE), ""
    while old and old not in MOVED:
        old, dot, last = old.rpartition(".")
        inside = f".{last}{inside}"
    return f"{PACKAGE}{MOVED[old]}{inside}" if old else None


class OldPaths(MetaPathFinder, Loader):
    """Finds the module of today for an old path. ``sys.modules`` then has it under both names."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        name = current(fullname)
        spec = None if name is None else importlib.util.find_spec(name)
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=spec.origin, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of today, imported under its own name."""
        module = importlib.import_module(str(current(spec.name)))
        # The import system is about to write the old path's spec into it.
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has been executed under its own name: give it its own spec back."""
        old = next(name for name in self._specs if current(name) == module.__name__)
        module.__spec__ = self._specs.pop(old)

    def get_code(self, fullname: str) -> CodeType | None:
        """What ``python -m`` runs."""
        spec = importlib.util.find_spec(str(current(fullname)))
        code: CodeType | None = spec.loader.get_code(spec.name) if spec is not None else None  # type: ignore[union-attr]
        return code


def install() -> None:
    """Let old paths be found."""
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        # First: a moved package's own path would otherwise load its modules a second time, under old names.
        sys.meta_path.insert(0, OldPaths())
    # The package has functions of these names, which an import of a module of that name would replace.
    for name in ("fully_shard",):
        sys.modules[PACKAGE + name] = sys.modules[PACKAGE + MOVED[name]]
