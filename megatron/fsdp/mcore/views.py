"""Modules seen with some of their names replaced."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any


class View(ModuleType):
    """A module that has its own values for some names and the real module's values for all others.

    Args:
        real: The module, or another view of it.
        own: The names that differ, and their values.
    """

    def __init__(self, real: ModuleType, own: Mapping[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        self.__dict__.update(own)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)
