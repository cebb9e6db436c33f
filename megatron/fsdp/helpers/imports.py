"""Calls a function after a module has been imported."""

import sys
from collections.abc import Callable, Container, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def find_after(finder: MetaPathFinder, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module with the finders that come after one in ``sys.meta_path``.

    Those before it have found nothing. Asking them again would not end if two finders ask each other.
    """
    later = sys.meta_path[sys.meta_path.index(finder) + 1 :]
    return next((spec for other in later if (spec := other.find_spec(name, path)) is not None), None)


class AfterImport(MetaPathFinder):
    """Finds modules as the finders after it do, and calls a function when one of them has been imported.

    It must be in ``sys.meta_path``. Of two of these, the one that was inserted at the front later is called later.

    Args:
        modules: Names of the modules.
        then: Called with a module's name after the module's code has run, before the import statement returns. What
            it raises is raised by the import statement.
    """

    def __init__(self, modules: Container[str], then: Callable[[str], None]) -> None:
        self._modules = modules
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find one of the modules; return None for all others."""
        spec = find_after(self, fullname, path) if fullname in self._modules else None
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            run(module)
            self._then(fullname)

        # The loader keeps its class: others test for it, and inspect and linecache read sources through it.
        spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec
