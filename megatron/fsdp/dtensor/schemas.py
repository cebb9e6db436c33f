"""The arguments that an operation of torch writes, by its schema."""

import functools
from typing import Any


@functools.cache
def written(func: Any) -> list[tuple[int, str]]:
    """Position and name of the arguments that an operation writes."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def written_values(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    """The values of the arguments that an operation writes: tensors, or lists of them."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in written(func)]
