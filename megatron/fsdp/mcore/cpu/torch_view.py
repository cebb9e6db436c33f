"""torch as Megatron's modules see it: the real modules, except for the names a table replaces."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron.fsdp.helpers.views import View
from megatron.fsdp.mcore.cpu.cuda_stand_in import CPU


def on_cpu(device: Any) -> Any:
    """Return the CPU for anything that names a CUDA device; return other devices and None unchanged."""
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
    """Wrap a function whose first argument is a device type: "cuda" means "cpu"."""

    @functools.wraps(function)
    def with_cpu_type(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return function("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return with_cpu_type


def takes_cpu_type_by_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function whose keyword `device_type` may be "cuda", which then means "cpu"."""

    @functools.wraps(function)
    def with_cpu_type(*args: Any, device_type: str, **kwargs: Any) -> Any:
        return function(*args, device_type="cpu" if device_type == "cuda" else device_type, **kwargs)

    return with_cpu_type


def unchanged(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Stand in for a compiling decorator, with or without arguments: return the function as it is."""
    return function if function is not None else lambda decorated: decorated


class StandInClass(type):
    """Metaclass of a stand-in for a class: it makes real instances, and real instances are its instances.

    A stand-in must pass for the class in `isinstance`, in annotations and as a namespace, so a function will not do.
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
    """Return a stand-in for torch.device that makes the CPU device of anything that names a CUDA device."""

    def create(device: Any, index: int | None = None) -> torch.device:
        if on_cpu(device) is CPU:
            return CPU
        return real(device) if index is None else real(device, index)

    return StandInClass("device", (), {"real": real, "create": staticmethod(create)})


def mesh_class(real: Any) -> type:
    """Return a stand-in for DeviceMesh whose meshes of "cuda" devices are meshes of CPUs."""

    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        return takes_cpu_type(lambda kind: real.from_group(group, kind, *args, **kwargs))(device_type)

    members = {"real": real, "create": staticmethod(takes_cpu_type(real)), "from_group": staticmethod(from_group)}
    return StandInClass("DeviceMesh", (), members)


def loader_class(real: Any) -> type:
    """Return a stand-in for DataLoader whose loaders draw their seeds from random numbers of their own."""

    def create(*args: Any, **kwargs: Any) -> Any:
        kwargs["pin_memory"] = False
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator().manual_seed(torch.initial_seed())
        return real(*args, **kwargs)

    return StandInClass("DataLoader", (), {"real": real, "create": staticmethod(create)})


def build_views(replaced: Mapping[str, Mapping[str, Any]]) -> dict[str, View]:
    """Build a view of each module, and of the packages it is in.

    Args:
        replaced: full module name -> name in it -> value Megatron shall see.

    Returns:
        Full module name -> view. The view of a package has the views of its submodules as attributes.
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
    """Tell whether a module is one of these packages or inside one."""
    return any(module == package or module.startswith(package + ".") for package in packages)
