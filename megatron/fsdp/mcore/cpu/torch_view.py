"""PyTorch as Megatron's modules see it on a CPU: the real modules, except for the names in a table."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch

from megatron.fsdp.mcore.cpu.fake_cuda import CPU
from megatron.fsdp.mcore.views import View


def on_cpu(device: Any) -> Any:
    """Return the CPU for anything that names a CUDA device. Return other devices and None unchanged."""
    if isinstance(device, int) or str(device).partition(":")[0] == "cuda":
        return CPU
    return device


def creates_on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory: CUDA devices mean the CPU, and memory is not pinned."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def takes_cpu_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that takes a device type, first or by the name ``device_type``: "cuda" means "cpu"."""

    @functools.wraps(function)
    def with_cpu_type(*args: Any, **kwargs: Any) -> Any:
        if args and args[0] == "cuda":
            args = ("cpu", *args[1:])
        if kwargs.get("device_type") == "cuda":
            kwargs["device_type"] = "cpu"
        return function(*args, **kwargs)

    return with_cpu_type


# Attribute of functions that would be compiled.
COMPILED = "_fsdp_compiled"


def unchanged(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Replace a compiling decorator, used with or without arguments: return the function unchanged, but marked."""
    if function is None:
        return unchanged
    if isinstance(function, FunctionType):
        setattr(function, COMPILED, True)
    return function


class FakeClass(type):
    """Metaclass of a fake for a class. Calling the fake makes real instances, which count as its instances.

    A function would not do: the fake has to work in ``isinstance``, in annotations and as a namespace.
    """

    real: type
    create: Callable[..., Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the real class."""
        return cls.create(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.real, name)


def device_class(real: type) -> type:
    """Return a fake for ``torch.device`` that makes the CPU device for anything that names a CUDA device."""

    def create(device: Any, index: int | None = None) -> torch.device:
        if on_cpu(device) is CPU:
            return CPU
        return real(device) if index is None else real(device, index)

    return FakeClass("device", (), {"real": real, "create": staticmethod(create)})


def mesh_class(real: Any) -> type:
    """Return a fake for ``DeviceMesh`` that makes meshes of CPUs for "cuda"."""

    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        return real.from_group(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    members = {"real": real, "create": staticmethod(takes_cpu_type(real)), "from_group": staticmethod(from_group)}
    return FakeClass("DeviceMesh", (), members)


def loader_class(real: Any) -> type:
    """Return a fake for ``DataLoader`` whose loaders draw seeds from their own random numbers."""

    def create(*args: Any, **kwargs: Any) -> Any:
        kwargs["pin_memory"] = False
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator().manual_seed(torch.initial_seed())
        return real(*args, **kwargs)

    return FakeClass("DataLoader", (), {"real": real, "create": staticmethod(create)})


def build_views(replaced: Mapping[str, Mapping[str, Any]]) -> dict[str, View]:
    """Build a view of each module and of the packages that contain it.

    Args:
        replaced: The values that Megatron sees, by full module name and by name in the module.

    Returns:
        The views by full module name. The view of a package has the views of its submodules as attributes.
    """
    views: dict[str, View] = {}
    for module in sorted(replaced):
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in views:
                views[name] = View(importlib.import_module(name), replaced.get(name, {}))
                if depth > 1:
                    setattr(views[".".join(parts[: depth - 1])], parts[depth - 1], views[name])
    return views


def called_from(packages: tuple[str, ...], depth: int = 3) -> bool:
    """Whether a module of one of these packages has called the function that is being replaced.

    Args:
        packages: The packages.
        depth: How many frames up the caller is: above it are this function, the replacement, and the function that
            ``helpers.patches`` puts around it.
    """
    return is_within(sys._getframe(depth).f_globals.get("__name__", ""), packages)


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    """Whether a module is one of these packages or inside one."""
    return any(module == package or module.startswith(package + ".") for package in packages)
