"""Makes imports in Megatron's modules return views of PyTorch's modules."""

from __future__ import annotations

import builtins
import importlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any

from megatron.fsdp.helpers.imports import find_after
from megatron.fsdp.mcore.cpu.changes import Change, Scope
from megatron.fsdp.mcore.cpu.torch_view import build_views, is_within


class MegatronLoader(SourceFileLoader):
    """Loads a Megatron module with its own import statement.

    An import statement calls the ``__import__`` of its module's ``__builtins__``. Another one in Megatron's modules
    reaches imports inside functions, and code that runs while the module is imported (decorators, default arguments).
    Replacing the global name ``torch`` afterwards would miss these. Other modules keep the usual import statement.

    Args:
        name: The module's name.
        path: Its file.
        namespace: Its ``__builtins__``.
    """

    def __init__(self, name: str, path: str, namespace: Mapping[str, Any]) -> None:
        super().__init__(name, path)
        self.namespace = namespace

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        module.__dict__["__builtins__"] = self.namespace
        super().exec_module(module)


class MegatronFinder(MetaPathFinder):
    """Finds modules of some packages as the other finders do, and has them loaded by :class:`MegatronLoader`.

    Args:
        packages: The packages.
        changes: What their modules see with other values.
    """

    def __init__(self, packages: tuple[str, ...], changes: Iterable[Change]) -> None:
        self.packages = packages
        self.hidden: set[str] = set()
        self.absent: dict[tuple[str, str | None], Any] = {}
        viewed: dict[str, dict[str, Any]] = defaultdict(dict)
        for change in changes:
            if change.scope is Scope.VIEW:
                original = getattr(importlib.import_module(change.where), change.name, None)
                viewed[change.where][change.name] = change.make(original)
            elif change.scope is Scope.HIDDEN:
                self.hidden.add(change.name)
            else:
                self.absent[change.where, change.name] = change.make(None)
        self.views = build_views(viewed)
        self.namespace = {**vars(builtins), "__import__": self.import_view}

    def import_view(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """Import as usual; return the view of the module, or the fake for an absent one, if one exists."""
        importer = (globals or {}).get("__name__", "")
        package = name.partition(".")[0]
        try:
            if level == 0 and package in self.hidden:
                raise ModuleNotFoundError(f"{name} needs CUDA, and {importer} runs on the CPU", name=package)
            module = builtins.__import__(name, globals, locals, fromlist or (), level)
        except ModuleNotFoundError as error:
            if (importer, error.name) not in self.absent:
                raise
            return self.absent[importer, error.name]
        return self.views.get(module.__name__, module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a Megatron module; return None for all other modules."""
        if not is_within(fullname, self.packages):
            return None
        spec = find_after(self, fullname, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = MegatronLoader(spec.loader.name, spec.loader.path, self.namespace)
        return spec
