"""Old import paths, from before modules were grouped into packages. Old and new paths name the same module object.

They work for ``import megatron.fsdp.compat``, for ``python -m megatron.fsdp.doctor``, and for pickles that name a class
by its old path. An import finder was chosen over stub modules, because it imports nothing until an old path is used.
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
    "memory": "tools.memory",  # not an old path: the command has the same form as its neighbors
    "verify": "tools.verify",
    "launch": "tools.launch",
    "pretrain_gpt": "tools.pretrain_gpt",
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
    "megatron_fsdp": "module",
    "mcore.arguments": "mcore.limits",
}


def current(name: str) -> str | None:
    """Return the current path of a module; None if ``name`` is not an old path."""
    if not name.startswith(PACKAGE):
        return None
    old, inside = name.removeprefix(PACKAGE), ""
    while old and old not in MOVED:
        old, dot, last = old.rpartition(".")
        inside = f".{last}{inside}"
    return f"{PACKAGE}{MOVED[old]}{inside}" if old else None


class OldPaths(MetaPathFinder, Loader):
    """Finder and loader that resolves old paths. ``sys.modules`` then has the module under both names."""

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
        """Import the module under its current path."""
        module = importlib.import_module(str(current(spec.name)))
        # The import system will overwrite the module's __spec__ with the old path's; exec_module() restores it.
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's spec. The module has already been executed under its current path."""
        old = next(name for name in self._specs if current(name) == module.__name__)
        module.__spec__ = self._specs.pop(old)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code that ``python -m`` runs."""
        spec = importlib.util.find_spec(str(current(fullname)))
        code: CodeType | None = spec.loader.get_code(spec.name) if spec is not None else None  # type: ignore[union-attr]
        return code


def install() -> None:
    """Add the finder for old paths to ``sys.meta_path``."""
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        # First in the list: the __path__ of a moved package would otherwise load its modules again under old names.
        sys.meta_path.insert(0, OldPaths())
    # The package has a function of this name. Importing a submodule of the same name would set the package's attribute
    # to the module, so the module is entered in sys.modules right away.
    for name in ("fully_shard",):
        sys.modules[PACKAGE + name] = sys.modules[PACKAGE + MOVED[name]]
