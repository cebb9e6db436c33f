"""Which parameters belong to which unit, and the checks that a model can be sharded. Allocates nothing."""

import importlib
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron.fsdp.buffers.parameter import TENSOR_PARALLEL, GroupKey, ShardedParameter, check_class
from megatron.fsdp.comm.backends import is_on_host
from megatron.fsdp.helpers.spelling import did_you_mean
from megatron.fsdp.runtime.other_engines import check_no_other_engine
from megatron.fsdp.sharding.mesh import FSDPDistributedIndex
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy

# The one attribute that the engine sets on parameters: a weak reference to the engine.
OWNER = "_fsdp_owner"

# torch's wrapper for activation checkpointing leaves this part of a name out of parameters' names and state dicts.
_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."

UnitClasses = Sequence[type[nn.Module] | str]


@dataclass
class UnitPart:
    """A unit before it is built: its module, its own parameters, and the units inside it."""

    name: str
    module: nn.Module
    params: list[ShardedParameter] = field(default_factory=list)
    children: list["UnitPart"] = field(default_factory=list)

    @property
    def groups(self) -> list[list[ShardedParameter]]:
        """The unit's own parameters, those together that are gathered and reduced together."""
        groups: dict[GroupKey, list[ShardedParameter]] = {}
        for param in self.params:
            groups.setdefault(param.key, []).append(param)
        return list(groups.values())

    @property
    def params_inside(self) -> list[ShardedParameter]:
        """Parameters of the units inside this one, at any depth."""
        return [param for child in self.children for param in (*child.params, *child.params_inside)]


def resolve_unit_classes(module: nn.Module, unit_modules: UnitClasses | None) -> tuple[type[nn.Module], ...]:
    """The classes behind ``unit_modules``.

    Args:
        module: Model that must contain a module of each.
        unit_modules: Classes, import paths such as ``"torch.nn.TransformerEncoderLayer"``, or names of classes that
            are in the model.

    Raises:
        ValueError: A path cannot be imported, is no module class, or a class occurs nowhere in the model; the
            message names the nearest class that does occur. Or several classes have the name.
    """
    kinds = {type(m) for m in module.modules()}
    present = {kind.__name__: kind for kind in kinds}
    classes = []
    for entry in unit_modules or ():
        if isinstance(entry, str) and sum(kind.__name__ == entry for kind in kinds) > 1:
            raise ValueError(f"fsdp_unit_modules: the model has several classes called {entry}; give the class itself.")
        cls = _import_class(entry, present) if isinstance(entry, str) else entry
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ValueError(f"fsdp_unit_modules: expected module classes or import paths; got {entry!r}.")
        if not any(isinstance(m, cls) for m in module.modules()):
            raise ValueError(f"fsdp_unit_modules: the model has no {cls.__name__}.{_nearest(cls.__name__, present)}")
        classes.append(cls)
    return tuple(classes)


def _import_class(path: str, present: Mapping[str, type]) -> object:
    if path in present:
        return present[path]
    module_path, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_path), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"fsdp_unit_modules: cannot import {path!r} ({error}).{_nearest(name, present)}") from error


def _nearest(name: str, present: Iterable[str]) -> str:
    names = sorted(present)
    return did_you_mean(name, names) or f" It has: {', '.join(names)}."


def check_not_wrapped(module: nn.Module) -> None:
    """Raise if the model, or a part of it, is sharded already, or synchronized by another engine.

    Raises:
        ValueError: It is.
    """
    for name, parameter in module.named_parameters():
        owner = getattr(parameter, OWNER, None)
        if owner is not None:
            gone = "" if owner() is not None else " that is gone: keep what fully_shard returns"
            raise ValueError(f"The model is already wrapped: parameter {name} belongs to a MegatronFSDP{gone}.")
    check_no_other_engine(module)


def is_wrapped(module: nn.Module) -> bool:
    """Whether any parameter of a module belongs to a model that is sharded."""
    return any(owner_of(parameter) is not None for parameter in module.parameters())


def check_devices(module: nn.Module, device: torch.device, materialize: bool = False) -> None:
    """Raise unless all parameters are on ``device`` or on the CPU, from where they are moved.

    Args:
        module: The model.
        device: Where it will compute.
        materialize: Parameters may also be on the meta device.

    Raises:
        ValueError: One is elsewhere.
    """
    for name, parameter in module.named_parameters():
        if parameter.device.type == "meta":
            if materialize:
                continue
            raise ValueError(
                f"Parameter {name} is on the meta device and has no values. Materialize the model first, or give "
                "init_model_with_meta_device=True."
            )
        if not is_on_host(parameter.device) and parameter.device != device:
            raise ValueError(
                f"Parameter {name} is on another device: expected {device} or cpu; got {parameter.device}."
            )


def check_dtypes(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Raise if the policy does not fit a parameter, or what keeps its values is no plain tensor.

    Raises:
        ValueError: It does not.
        NotImplementedError: A parameter is of a class that is not known (:func:`check_class`).
    """
    for name, parameter in module.named_parameters():
        check_class(name, parameter)
        policy.resolve(parameter.dtype, name)


def tensor_parallel_mesh(module: nn.Module, index: FSDPDistributedIndex) -> DeviceMesh | None:
    """The tensor-parallel axis of dense parameters, if any parameter is a DTensor over one or marked as a part.

    Raises:
        ValueError: A parameter is a DTensor over another mesh, or an expert's whose mesh lacks axes.
    """
    found = None
    for name, parameter in module.named_parameters():
        if not getattr(parameter, "allreduce", True):
            index.check_expert(name)
        if isinstance(parameter.data, DTensor):
            found = parameter.data.device_mesh
            index.with_tensor_parallel(index.dense.mesh, found, name)
        elif hasattr(parameter, TENSOR_PARALLEL):
            found = index.tensor_parallel_mesh()
    return found


def mark_owner(parameter: nn.Parameter, owner: object) -> None:
    """Remember which engine a parameter belongs to, without keeping that engine alive."""
    setattr(parameter, OWNER, weakref.ref(owner))


def owner_of(parameter: nn.Parameter) -> Any:
    """The engine that a parameter belongs to; None if it belongs to none, or the engine is gone."""
    reference = getattr(parameter, OWNER, None)
    return None if reference is None else reference()


def partition(module: nn.Module, unit_classes: tuple[type[nn.Module], ...], every_module: bool = False) -> UnitPart:
    """Divide the model's parameters into units.

    Args:
        module: The model.
        unit_classes: A module of one of these is a unit.
        every_module: Inside a unit, every module that has parameters of its own is one, too.

    A parameter belongs to the innermost unit around it; one that is tied across units belongs to the innermost unit
    around all of its places, so that it is there for each of them. Units that hold nothing of their own and nothing
    in units inside them are left out.

    Returns:
        The root; all other units are below it, in the order of registration.
    """
    root = UnitPart("", module)
    path_of: dict[int, tuple[UnitPart, ...]] = {id(module): (root,)}
    _find_units(module, "", (root,), lambda m, path: _is_unit(m, path, unit_classes, every_module), path_of)
    params: dict[int, ShardedParameter] = {}
    homes: dict[int, tuple[UnitPart, ...]] = {}
    for name, owner in module.named_modules():
        path = path_of.get(id(owner))
        if path is None:
            continue
        for attribute, parameter in owner._parameters.items():
            if parameter is None:
                continue
            full_name = public_name(f"{name}.{attribute}" if name else attribute)
            param = params.get(id(parameter))
            if param is None:
                params[id(parameter)] = ShardedParameter(full_name, parameter, [(owner, attribute)], [full_name])
                homes[id(parameter)] = path
            else:
                param.sites.append((owner, attribute))
                param.names.append(full_name)
                homes[id(parameter)] = _common(homes[id(parameter)], path)
    for key, param in params.items():
        homes[key][-1].params.append(param)
    _drop_empty(root)
    return root


def public_name(name: str) -> str:
    """The name that a model's state dict has for a parameter or buffer."""
    return name.replace(_CHECKPOINT_PREFIX, "")


def _is_unit(
    module: nn.Module, path: tuple[UnitPart, ...], classes: tuple[type[nn.Module], ...], every_module: bool
) -> bool:
    if compiled_module(path[-1].module) is module:
        return False  # the unit is what torch.compile has put around it
    if isinstance(module, classes) or isinstance(compiled_module(module), classes):
        return True
    inside_unit = len(path) > 1
    return every_module and inside_unit and bool(module._parameters)


def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module that ``torch.compile(module)`` has wrapped; None if ``module`` is nothing of that kind."""
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes seconds, and nobody compiles without it
    return module._orig_mod if dynamo is not None and isinstance(module, dynamo.OptimizedModule) else None


def _find_units(
    module: nn.Module,
    name: str,
    path: tuple[UnitPart, ...],
    is_unit: Callable[[nn.Module, tuple[UnitPart, ...]], bool],
    path_of: dict[int, tuple[UnitPart, ...]],
) -> None:
    for child_name, child in module.named_children():
        if id(child) in path_of:
            # Registered twice: where the two places have different units, their common one holds it.
            path_of[id(child)] = (
                _common(path_of[id(child)], path) if path_of[id(child)][-1].module is not child else path_of[id(child)]
            )
            continue
        full_name = f"{name}.{child_name}" if name else child_name
        child_path = path
        if is_unit(child, path):
            part = UnitPart(full_name, child)
            path[-1].children.append(part)
            child_path = (*path, part)
        path_of[id(child)] = child_path
        _find_units(child, full_name, child_path, is_unit, path_of)


def _common(a: tuple[UnitPart, ...], b: tuple[UnitPart, ...]) -> tuple[UnitPart, ...]:
    shared = [x for x, y in zip(a, b, strict=False) if x is y]
    return tuple(shared)


def _drop_empty(part: UnitPart) -> bool:
    part.children = [child for child in part.children if _drop_empty(child)]
    return bool(part.params or part.children)


def root_modules(module: nn.Module) -> list[nn.Module]:
    """The modules that hold all of the model's parameters: wrappers of wrappers, any of which may be called."""
    chain = [module]
    total = len(list(module.parameters()))
    while True:
        inner = [m for m in chain[-1].children() if len(list(m.parameters())) == total]
        if len(inner) != 1 or not total:
            return chain
        chain.append(inner[0])
