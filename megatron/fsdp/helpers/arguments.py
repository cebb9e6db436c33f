"""Errors about arguments: unknown ones, and wrong types."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from megatron.fsdp.helpers.spelling import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:  # noqa: UP047 - for Python 3.10
    """Decorate a function: missing and unknown arguments are a TypeError that names the function."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            name = function.__qualname__.removesuffix(".__init__")
            raise TypeError(f"{name}: {_explained(error, signature)}") from None
        return function(*args, **kwargs)

    return call


def check_fields(cls: C) -> C:  # noqa: UP047 - for Python 3.10
    """Decorate a dataclass: like :func:`check_arguments`, for its fields."""
    cls.__init__ = check_arguments(cls.__init__)  # type: ignore[misc]
    return cls


def _explained(error: TypeError, signature: inspect.Signature) -> str:
    found = re.search(r"'(\w+)'", str(error))
    name = found[1] if found else ""
    known = [each for each in signature.parameters if each != "self"]
    # Only a misspelled name: an argument of another engine may be similar to one with another meaning.
    return f"{error}.{did_you_mean(name, known, cutoff=0.8) if name not in known else ''}"


def check_type(name: str, value: object, kind: type, remedy: str = "") -> None:
    """Check the type of an argument.

    Raises:
        TypeError: ``value`` is not of the class ``kind``. The message ends with ``remedy``, a sentence.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {full_name(kind)}; got {described(value)}.{remedy and ' ' + remedy}")


def full_name(cls: type) -> str:
    """The name of a class, with the package that it is imported from."""
    package = {"torch.nn.modules.module": "torch.nn", "torch.optim.optimizer": "torch.optim"}
    return f"{package.get(cls.__module__, cls.__module__)}.{cls.__qualname__}".removeprefix("builtins.")


def described(value: Any) -> str:
    """A value in an error message: itself if its text is short, else its class."""
    text = value.__qualname__ if isinstance(value, type) else repr(value)
    return text if len(text) <= 80 and "\n" not in text and " at 0x" not in text else f"a {full_name(type(value))}"
