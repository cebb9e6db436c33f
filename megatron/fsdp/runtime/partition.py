"""Splits a model's parameters into units, and checks that the model can be sharded. Allocates no memory."""

import functools
import importlib
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from megatron.fsdp.buffers.flat_buffer import storage_id
from megatron.fsdp.buffers.parameter import TENSOR_PARALLEL, GroupKey, ShardedParameter, check_class, refuse_early_read
from megatron.fsdp.comm.backends import is_on_host
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.dtensor.unsupported import OWNER
from megatron.fsdp.helpers.arguments import described
from megatron.fsdp.helpers.spelling import did_you_mean
from megatron.fsdp.quantized.storage import storage_of
from megatron.fsdp.sharding.mesh import MeshIndex
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy

logger = logging.getLogger(__name__)

# torch's wrapper for activation checkpointing removes this prefix from the names of parameters and in state dicts.
_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."

_UNWRAP = "Give fully_shard the model that it wraps (its .module)."
_COMPOSED = "Leave out torch's {0}; megatron.fsdp.fsdp2.fully_shard takes the same arguments."
# Wrapper classes by module and name, because importing them takes time, and the remedy for each.
_WRAPPERS = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): _UNWRAP,
    ("torch.nn.parallel.data_parallel", "DataParallel"): _UNWRAP,
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): _UNWRAP,
    ("torch.distributed.fsdp", "FSDPModule"): _COMPOSED.format("fully_shard"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): _UNWRAP,
    ("megatron.core.distributed.data_parallel_base", "_BaseDataParallel"): _UNWRAP,
}
_FUNCTIONS = ("fully_shard", "replicate")

UnitClasses = Sequence[type[nn.Module] | nn.Module | str] | type[nn.Module] | nn.Module | str
# Classes whose modules are units, and modules that are.
UnitChoice = tuple[type[nn.Module] | nn.Module, ...]


class Outermost(tuple[Any, ...]):
    """Classes and modules, as ``fsdp_unit_modules``, whose units do not nest: the outermost one owns all inside.

    Megatron-Core's own FSDP divides a model so. In a plain list, a parameter belongs to the innermost unit.

        fully_shard(model, optimizer, fsdp_unit_modules=Outermost([Block, Attention]))
    """

    def __new__(cls, unit_modules: Any) -> "Outermost":
        """A single class, name or module needs no list."""
        return super().__new__(cls, entries_of(unit_modules))


@dataclass
class UnitPart:
    """The plan of a unit: its module, its own parameters, and the units inside it.

    Attributes:
        name: Name of the module; empty for the root.
        module: The module, or the first of several that are one unit.
        depth: Number of units around it.
        index: Its place in :meth:`walk` of the root.
        params: Its own parameters.
        children: The units inside it.
        modules: All modules that are the unit.
        behind: The unit that is registered last before the last of several modules.
    """

    name: str
    module: nn.Module
    depth: int = 0
    index: int = 0
    params: list[ShardedParameter] = field(default_factory=list)
    children: list["UnitPart"] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    behind: "UnitPart | None" = None

    @property
    def groups(self) -> list[list[ShardedParameter]]:
        """The unit's own parameters, grouped as they are unsharded and reduced."""
        groups: dict[GroupKey, list[ShardedParameter]] = {}
        for param in self.params:
            groups.setdefault(param.key, []).append(param)
        return list(groups.values())

    def walk(self) -> Iterator["UnitPart"]:
        """This unit and all units inside it, outer units before inner ones."""
        yield self
        for child in self.children:
            yield from child.walk()


def offloaded_units(root: UnitPart, fraction: float) -> set[int]:
    """Which units, by their places in :meth:`UnitPart.walk`, keep main weights in host memory.

    In that order, every unit with which the offloaded ones have at most ``fraction`` of the parameters.
    """
    sizes = [sum(math.prod(param.local_shape) for param in part.params) for part in root.walk()]
    left = fraction * sum(sizes)
    chosen = set()
    for place, size in enumerate(sizes):
        if size <= left:
            chosen.add(place)
            left -= size
    return chosen


def entries_of(unit_modules: UnitClasses | None) -> tuple[Any, ...]:
    """The entries of ``unit_modules``, of which a single one needs no list. An ``nn.ModuleList`` is a list."""
    if unit_modules is None:
        return ()
    single = isinstance(unit_modules, str | nn.Module) and not isinstance(unit_modules, nn.ModuleList)
    return tuple(unit_modules) if isinstance(unit_modules, Iterable) and not single else (unit_modules,)


def resolve_unit_classes(module: nn.Module, unit_modules: UnitClasses | None) -> UnitChoice:
    """Resolve ``unit_modules`` to classes and modules.

    Args:
        module: The model, which must contain a module of every class.
        unit_modules: Classes, import paths such as ``"torch.nn.TransformerEncoderLayer"``, names of classes that occur
            in the model, or modules of the model, such as an ``nn.ModuleList`` of layers. A single one needs no list.

    Raises:
        TypeError: An entry is neither a module, a class of modules nor a string.
        ValueError: A path cannot be imported or is no class of modules, a class does not occur in the model (the
            message suggests the closest one that does), several classes of the model have the given name, or a module
            is not one of the model's.
    """
    inside = list(module.modules())
    kinds = {type(m) for m in inside}
    entries = entries_of(unit_modules)
    for entry in entries:
        if isinstance(entry, nn.Module) and not any(entry is m for m in inside):
            raise ValueError(
                f"fsdp_unit_modules: a {type(entry).__name__} is not in the model. Give modules that its modules() "
                "yields, not copies, or their class."
            )
    kind = Outermost if isinstance(unit_modules, Outermost) else tuple
    return kind(entry if isinstance(entry, nn.Module) else _resolve(entry, kinds) for entry in entries)


def is_chosen(module: nn.Module, units: UnitChoice) -> bool:
    """Whether a module becomes a unit."""
    return any(isinstance(module, one) if isinstance(one, type) else module is one for one in units)


def _resolve(entry: Any, kinds: set[type]) -> type[nn.Module]:
    """The class that one entry of ``unit_modules`` means, in a model with modules of these kinds."""
    names = sorted({kind.__name__ for kind in kinds})

    def error(problem: str, name: str) -> ValueError:
        hint = did_you_mean(name, names) or f" It has: {', '.join(names)}."
        return ValueError(f"fsdp_unit_modules: {problem}.{hint}")

    cls = entry
    if isinstance(entry, str):
        path, _, name = entry.rpartition(".")
        named = [kind for kind in kinds if kind.__name__ == entry]
        if len(named) > 1:
            raise ValueError(f"fsdp_unit_modules: the model has several classes called {entry}; give the class itself.")
        if not named and not path:
            raise error(f"the model has no {name}", name)
        try:
            cls = named[0] if named else getattr(importlib.import_module(path), name)
        except (ImportError, AttributeError, ValueError) as failure:
            raise error(f"cannot import {entry!r} ({failure})", name) from failure
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(
            f"fsdp_unit_modules: expected classes of modules, their names, or modules; got {described(entry)}."
        )
    if not any(issubclass(kind, cls) for kind in kinds):
        raise error(f"the model has no {cls.__name__}", cls.__name__)
    return cls


def parameters_of(module: nn.Module, config: FSDPConfig) -> list[ShardedParameter]:
    """The parameters of a model that are not ignored, each once, with all places where it is registered."""
    found: dict[int, ShardedParameter] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for attribute, parameter in owner._parameters.items():
            if parameter is not None and parameter not in config.ignored_params:
                name = public_name(f"{path}.{attribute}" if path else attribute)
                replicated = parameter in config.replicated_params
                param = found.setdefault(
                    id(parameter), ShardedParameter(name, parameter, [], [], replicated=replicated)
                )
                if (owner, attribute) not in param.sites:
                    param.sites.append((owner, attribute))
                param.names.append(name)
    _check_memory(list(found.values()))
    return list(found.values())


def _check_memory(params: list[ShardedParameter]) -> None:
    """Check that no two parameters share memory. Parts of one tensor that do not overlap are left in peace.

    Raises:
        ValueError: Two do, as after ``a.data = b.data``.
    """
    ranges = []
    for param in params:
        tensor = param.original
        has_memory = not (is_lazy(tensor) or tensor.is_meta) and tensor.layout is torch.strided
        if has_memory and type(tensor.data) is torch.Tensor and tensor.numel() and tensor.is_contiguous():
            start = tensor.storage_offset() * tensor.itemsize
            ranges.append((tensor.untyped_storage()._cdata, start, start + tensor.nbytes, param.name))
    ranges.sort()
    for (storage, _, end, name), (other, start, _, name_of_other) in itertools.pairwise(ranges):
        if storage == other and start < end:
            raise ValueError(
                f"The parameters {name} and {name_of_other} share memory, so a step would change both with each one's "
                "update. Make them one parameter before the model is sharded, as in head.weight = embedding.weight, or "
                "give one of them a .clone()."
            )


def _check_exceptions(module: nn.Module, config: FSDPConfig) -> None:
    """Check the parameters that are not to be sharded.

    Raises:
        ValueError: One is not in the model, or is to be both ignored and replicated.
    """
    known = set(module.parameters())
    for name in ("ignored_params", "replicated_params"):
        given = frozenset(getattr(config, name))
        if strangers := given - known:
            raise ValueError(
                f"{name}: {len(strangers)} of {len(given)} are not parameters of the model, one of shape "
                f"{tuple(next(iter(strangers)).shape)}. Give objects that its parameters() yields before it is sharded."
            )
    if both := frozenset(config.ignored_params) & frozenset(config.replicated_params):
        raise ValueError(f"{len(both)} parameters are in ignored_params and in replicated_params: choose one.")


def check_not_wrapped(module: nn.Module, params: list[ShardedParameter]) -> None:
    """Check that neither this engine nor another one has wrapped the model or one of its modules.

    Raises:
        ValueError: One has.
    """
    for param in params:
        # A parameter that another model has taken was replaced there, and not here.
        owner = getattr(param.compute, OWNER, None) or vars(param.original).get("_fsdp_stands_for", (None,))[0]
        if owner is not None:
            gone = "" if owner() is not None else " that is gone"
            raise ValueError(
                f"The model is already wrapped: parameter {param.name} belongs to a MegatronFSDP{gone}. Call "
                "fully_shard once, use what it returns, and let no two sharded models share a parameter."
            )
    check_no_other_engine(module)


def _wrapper(cls: type) -> tuple[str, str] | None:
    """The full name of a class if it is or inherits from a known wrapper, and the remedy; else None."""
    if cls.__module__.startswith("megatron.fsdp."):
        return None
    for base in cls.__mro__:
        if (remedy := _WRAPPERS.get((base.__module__, base.__name__))) is not None:
            return f"{cls.__module__}.{cls.__name__}", remedy
    return None


def check_no_other_engine(module: nn.Module) -> None:
    """Check that no other engine has wrapped the model or one of its modules.

    Raises:
        ValueError: One has. The message names the engine and the module, and suggests a remedy.
    """
    for name, part in module.named_modules():
        found = _wrapper(type(part))
        for function in _FUNCTIONS:
            if found is None and function in (part.__dict__.get(REGISTRY_KEY) or ()):
                found = f"torch's {function}", _COMPOSED.format(function)
        if found is not None:
            where = f"its module {name}" if name else "it"
            raise ValueError(f"The model cannot be sharded: {where} is already synchronized by {found[0]}. {found[1]}")


def is_wrapped(module: nn.Module) -> bool:
    """Whether any parameter of a module belongs to a sharded model."""
    return any(owner_of(parameter) is not None for parameter in module.parameters())


def _check_parameters(params: list[ShardedParameter], device: torch.device, materialize: bool) -> None:
    """Check that parameters can be sharded.

    Args:
        params: All parameters of a model.
        device: The device that it will compute on. Parameters may be there or on the CPU, from where they are moved.
        materialize: Whether they may be on the meta device.

    Raises:
        ValueError: A parameter is on another device, or it is quantized and tied to a plain one.
        NotImplementedError: A parameter has an unknown tensor class (see :func:`check_class`), or its module writes it.
        RuntimeError: A parameter has a gradient.
    """
    for param in params:
        name, parameter = param.name, param.compute
        if param.is_meta and not materialize:
            raise ValueError(
                f"Parameter {name} is on the meta device and has no values. Materialize the model first, or give "
                "init_model_with_meta_device=True, or sync_module_states=True if the first rank has the values."
            )
        if not param.is_meta and not is_on_host(parameter.device) and parameter.device != device:
            raise ValueError(
                f"Parameter {name} is on another device: expected {device} or cpu; got {parameter.device}."
            )
        for part, _ in param.sites:
            if getattr(part, "max_norm", None) is not None and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                kind = type(part).__name__
                raise NotImplementedError(
                    f"{name.rpartition('.')[0] or kind}: {kind}(max_norm=...) changes rows in its forward, on each "
                    "rank those of its own batch, so that the ranks' weights would differ. Leave max_norm out, and "
                    "renormalize the main weights after the optimizer's step."
                )
        check_class(name, parameter)
        if parameter.grad is not None:
            refuse_early_read(name, parameter.grad)
    plain = {storage_id(p.compute.data): p.name for p in params if storage_of(p.compute) is None}
    for param in params:
        storage = storage_of(param.compute)
        kept = [getattr(param.compute, field, None) for field in storage.fields] if storage is not None else []
        for other in [plain.get(storage_id(value)) for value in kept if isinstance(value, torch.Tensor)]:
            if other is not None:
                raise ValueError(
                    f"Parameter {param.name} is a quantized {type(param.compute).__name__} of the memory of {other}: "
                    "sharding would untie them, since each gets main weights. Quantize a clone, or leave tied weights "
                    "plain."
                )


def _check_dtypes(part: UnitPart, device: torch.device, policy: MixedPrecisionPolicy) -> None:
    """Check that a policy supports a unit's parameters, and that quantized ones can be sharded.

    Raises:
        ValueError: The policy does not support the dtype of a parameter.
        NotImplementedError: A quantized one cannot. The message names the parameter, its class and the reason.
    """
    for param in part.params:
        storage, parameter = storage_of(param.compute), param.compute
        policy.resolve(parameter.dtype, param.name, param.key.codes)
        if storage is None:
            continue
        reason = storage.problem(parameter, device)
        if policy.compute_dtype not in (None, parameter.dtype) and not storage.takes_dtype:
            reason = f"compute_dtype={policy.compute_dtype} is a different dtype than the one that it appears to have"
        if reason is not None:
            raise NotImplementedError(
                f"Parameter {param.name} is a quantized {type(parameter).__name__} of {parameter.dtype}, which cannot "
                f"be sharded: {reason}."
            )


def _mark_experts(params: list[ShardedParameter], index: MeshIndex) -> None:
    """Mark the parameters that the mesh of experts serves, if there is one, and log them.

    Parameters without Megatron-Core's mark ``allreduce`` are experts if their names say so, as in its own FSDP.

    Raises:
        ValueError: The mesh serves no parameter.
    """
    if index.expt_device_mesh is None and index.expert_mesh_error is None:
        return
    for param in params:
        if not hasattr(param.compute, "allreduce") and any(".experts." in f".{name}" for name in param.names):
            param.compute.allreduce = False  # type: ignore[attr-defined]
    found = [param.name for param in params if param.key.expert]
    is_first = index.dense.dp_group.rank() == 0
    if found and is_first:
        names = ", ".join([*found[:4], *(["..."] if len(found) > 4 else [])])
        logger.info("FSDP: expt_device_mesh serves %d of %d parameters: %s", len(found), len(params), names)
    if found or not index.expects_experts:
        return
    problem = (
        "expt_device_mesh serves no parameter: different experts would be trained as one. Before sharding, set "
        "parameter.allreduce = False for experts, or have '.experts.' in their names. Without experts, leave the mesh "
        "out."
    )
    if index.divides_experts:
        raise ValueError(problem)
    if index.expert_mesh_error is not None and is_first:
        logger.warning("FSDP: %s", problem)


def _tensor_parallel_mesh(params: list[ShardedParameter], index: MeshIndex) -> DeviceMesh | None:
    """The tensor-parallel mesh, if any parameter is a DTensor over one or is marked as tensor-parallel.

    Raises:
        ValueError: A parameter is a DTensor over another mesh, or is an expert and the expert mesh lacks axes.
    """
    found = None
    for param in params:
        if param.key.expert:
            index.check_expert(param.name)
        if isinstance(param.compute.data, DTensor):
            found = param.compute.data.device_mesh
            index.with_tensor_parallel(index.dense.mesh, found, param.name)
        elif hasattr(param.compute, TENSOR_PARALLEL):
            found = index.tensor_parallel_mesh()
    return found


def owner_of(parameter: nn.Parameter) -> Any:
    """The engine that a parameter belongs to; None if it belongs to none, or the engine is gone."""
    reference = getattr(parameter, OWNER, None)
    return None if reference is None else reference()


def check_and_partition(
    module: nn.Module,
    params: list[ShardedParameter],
    config: FSDPConfig,
    index: MeshIndex,
    unit_modules: UnitClasses | None,
    device: torch.device,
    policy_of: Callable[[UnitPart], MixedPrecisionPolicy],
    unit_key: Callable[[nn.Module], object],
) -> tuple[UnitPart, DeviceMesh | None]:
    """Check a model's parameters, and split them into units.

    Args:
        module: The model.
        params: Its parameters.
        config: Settings.
        index: Mesh and process groups.
        unit_modules: See :func:`resolve_unit_classes`.
        device: Device of the computation.
        policy_of: Dtypes of one unit.
        unit_key: See :func:`partition`.

    Returns:
        The root unit, and the tensor-parallel mesh if the model has one.
    """
    _check_exceptions(module, config)
    receives = config.sync_module_states and all(axes.dp_group.rank() for axes in (index.dense, index.experts))
    materialize = config.init_model_with_meta_device or bool(receives)
    _check_parameters(params, device, materialize)
    classes = resolve_unit_classes(module, unit_modules)
    _mark_experts(params, index)
    tp_mesh = _tensor_parallel_mesh(params, index)
    root = partition(module, params, classes, config.enable_fine_grained_param_gather, unit_key)
    for part in root.walk():
        _check_dtypes(part, device, policy_of(part))
    return root, tp_mesh


def partition(
    module: nn.Module,
    params: list[ShardedParameter],
    units: UnitChoice,
    every_module: bool = False,
    unit_key: Callable[[nn.Module], object] = id,
) -> UnitPart:
    """Split the model's parameters into units.

    Args:
        module: The model.
        params: Its parameters.
        units: What becomes a unit.
        every_module: Whether every module with direct parameters inside a unit becomes a unit as well.
        unit_key: Modules that become units are one unit if this is equal for them.

    A parameter belongs to the innermost unit that contains it. A parameter that is tied across units belongs to the
    innermost unit that contains all of its uses, so that it is unsharded during each of them. Units without parameters
    are left out.

    Returns:
        The root unit, with all other units below it in the order of registration.
    """
    root = UnitPart("", module, modules=[module])
    path_of: dict[int, tuple[UnitPart, ...]] = {id(module): (root,)}
    found: dict[object, tuple[UnitPart, ...]] = {}

    def path_to(child: nn.Module, name: str, path: tuple[UnitPart, ...]) -> tuple[UnitPart, ...]:
        if not _is_unit(child, path, units, every_module) or path == found.get(key := unit_key(child)):
            return path
        if key not in found:
            path[-1].children.append(UnitPart(name, child, len(path)))
            found[key] = (*path, path[-1].children[-1])
        elif found[key][:-1] != path:
            raise NotImplementedError(f"{found[key][-1].name} and {name} cannot be one unit: they are in other units.")
        part, last = found[key][-1], path[-1].children[-1]
        part.modules.append(child)
        part.behind = None if last is part else last
        return found[key]

    _find_units(module, "", (root,), path_to, path_of)
    for param in params:
        param.expect_quantization()
        path = functools.reduce(_common_path, [path_of[id(owner)] for owner, _ in param.sites])
        path[-1].params.append(param)
    _drop_empty(root)
    for index, part in enumerate(root.walk()):
        part.index = index
        if part.params and part is not root and not _has_forward(part.module):
            kind = type(part.module).__name__
            raise ValueError(
                f"fsdp_unit_modules: {kind} has no forward. Give the class whose forward reads {part.name}."
            )
    return root


def log_nested_units(root: UnitPart) -> None:
    """Log that units nest, if they do: with the same classes, Megatron-Core's own FSDP divides the model otherwise."""
    nested = [(outer, inner) for outer in root.walk() if outer is not root for inner in outer.children]
    if nested:
        outer, inner = nested[0]
        logger.info(
            "FSDP: %d units are inside other units, such as %s in %s. A parameter belongs to the innermost one; with "
            "Megatron-Core's own FSDP, to the outermost. For that, fsdp_unit_modules=megatron.fsdp.Outermost([...]).",
            len(nested),
            inner.name,
            outer.name,
        )


def public_name(name: str) -> str:
    """The name of a parameter or buffer in the model's state dict."""
    return name.replace(_CHECKPOINT_PREFIX, "")


def _is_unit(module: nn.Module, path: tuple[UnitPart, ...], units: UnitChoice, every_module: bool) -> bool:
    compiled = compiled_module(module)
    if compiled_module(path[-1].module) is module:
        return False  # torch.compile's wrapper around it is the unit already
    # torch's attention does not call its output layer, but reads the weights.
    inside_unit, is_read = len(path) > 1, isinstance(module, NonDynamicallyQuantizableLinear)
    chosen = is_chosen(module, units) or (compiled is not None and is_chosen(compiled, units))
    if chosen and not (inside_unit and isinstance(units, Outermost)):
        return True
    return every_module and inside_unit and not is_read and bool(module._parameters) and _has_forward(module)


def _has_forward(module: nn.Module) -> bool:
    """False for a ParameterList and the like: they are never called, so as a unit they would never be unsharded."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module inside the wrapper that ``torch.compile(module)`` returns; None for other modules."""
    # Importing dynamo takes seconds, and a compiled module exists only if it has been imported.
    dynamo = sys.modules.get("torch._dynamo")
    return module._orig_mod if dynamo is not None and isinstance(module, dynamo.OptimizedModule) else None


def _find_units(
    module: nn.Module,
    name: str,
    path: tuple[UnitPart, ...],
    path_to: Callable[[nn.Module, str, tuple[UnitPart, ...]], tuple[UnitPart, ...]],
    path_of: dict[int, tuple[UnitPart, ...]],
) -> None:
    for child_name, child in module.named_children():
        if (known := path_of.get(id(child))) is not None:
            # The module is registered in two places. If these belong to different units, the innermost unit around
            # both owns it, so that its parameters are unsharded during both.
            if child not in known[-1].modules:
                path_of[id(child)] = _common_path(known, path)
            continue
        full_name = f"{name}.{child_name}" if name else child_name
        path_of[id(child)] = child_path = path_to(child, full_name, path)
        _find_units(child, full_name, child_path, path_to, path_of)


def _common_path(a: tuple[UnitPart, ...], b: tuple[UnitPart, ...]) -> tuple[UnitPart, ...]:
    return tuple(x for x, y in zip(a, b, strict=False) if x is y)


def _drop_empty(part: UnitPart) -> bool:
    part.children = [child for child in part.children if _drop_empty(child)]
    return bool(part.params or part.children)


def root_modules(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that each contain all parameters: nested wrappers, any of which the user may run."""
    chain = [module]
    total = len(list(module.parameters()))
    while True:
        inner = [m for m in chain[-1].children() if len(list(m.parameters())) == total]
        if len(inner) != 1 or not total:
            return chain
        chain.append(inner[0])
