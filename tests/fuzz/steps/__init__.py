"""All kinds of steps. Each is one function that does the same on both sides, and returns what has to agree."""

from . import methods, optimizing, passes, state, weights
from .kinds import KINDS, Kind

__all__ = ["KINDS", "Kind", "methods", "optimizing", "passes", "state", "weights"]
