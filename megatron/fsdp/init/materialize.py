"""Initializes a model that was built on the meta device, one unit at a time.

A module's tensors are initialized from the recording of :func:`megatron.fsdp.init.deferred.deferred_init` if there is
one, and otherwise by the module's ``reset_parameters`` method.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.init.deferred import Recipe, recipes, recorded_resets

# Names of the method that initializes a module's direct parameters and buffers.
RESET_METHODS = ("reset_parameters", "_reset_parameters")


def reset_method(module: nn.Module) -> Callable[[], object] | None:
    """The method that initializes the module's direct parameters; None if it has none."""
    for name in RESET_METHODS:
        method = getattr(module, name, None)
        if callable(method):
            return method
    return None


def _recorded(module: nn.Module) -> dict[str, Recipe]:
    """The recipes for the module's tensors; empty if the module's method initializes them.

    A method initializes all tensors of a module, so recipes are used only if there is one for each of them.
    """
    found = recipes(module)
    complete = all(recipe is not None and recipe.gives_values for recipe in found.values())
    if not complete and reset_method(module) is not None:
        return {}
    return {name: recipe for name, recipe in found.items() if recipe is not None and recipe.gives_values}


def check_can_materialize(module: nn.Module) -> None:
    """Check that every module with parameters or buffers on the meta device can be initialized.

    Raises:
        ValueError: A module cannot. The message names it.
    """
    for name, part in module.named_modules():
        missing = _missing(part)
        if reset_method(part) is None and missing:
            where = name or "the model itself"
            raise ValueError(
                f"init_model_with_meta_device: {where} ({type(part).__name__}) has {', '.join(missing)} on the meta "
                f"device and no method {' or '.join(RESET_METHODS)} to initialize it. Add one to its class, or build "
                "the model with megatron.fsdp.deferred_init."
            )


def _missing(part: nn.Module) -> list[str]:
    """Names of a module's own tensors on the meta device, unless a recording has values for all of them."""
    own = [*part._parameters.items(), *part._buffers.items()]
    missing = [key for key, tensor in own if tensor is not None and tensor.device.type == "meta"]
    return [] if set(missing) <= set(_recorded(part)) else missing


NO_VALUES = (
    "The model is on the meta device and has no values: {}. Call model.to_empty(device=...) and initialize it or load "
    "a state dict, or build it with megatron.fsdp.deferred_init."
)


def check_has_values(module: nn.Module) -> None:
    """Raise RuntimeError if tensors are on the meta device, and there is no recording of their values."""
    for name, part in module.named_modules():
        if missing := _missing(part):
            raise RuntimeError(NO_VALUES.format(f"{name}.{missing[0]}".strip(".")))


@contextmanager
def initialized_by_caller(module: nn.Module) -> Iterator[list[str]]:
    """Context in which modules that have no method to initialize them get NaN, for the caller to replace.

    It gives the names of what gets NaN.
    """
    lacking = {n: part for n, part in module.named_modules() if reset_method(part) is None and _missing(part)}
    for part in lacking.values():
        part.__dict__[RESET_METHODS[0]] = functools.partial(_fill_with_nan, part)
    try:
        yield [f"{name}.{key}".strip(".") for name, part in lacking.items() for key in _missing(part)]
    finally:
        for part in lacking.values():
            del part.__dict__[RESET_METHODS[0]]


def _fill_with_nan(module: nn.Module) -> None:
    for parameter in module._parameters.values():
        if parameter is not None and parameter.is_floating_point():
            parameter.fill_(float("nan"))


def materialize_buffers(module: nn.Module, device: torch.device) -> list[nn.Module]:
    """Allocate all buffers on the meta device, and initialize those with a recording.

    Returns:
        Modules with other buffers and without parameters. The initialization of a unit does not reach them.
    """
    found = []
    for part in module.modules():
        recorded = _recorded(part)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                part._buffers[name] = given = torch.empty_like(buffer, device=device)
                if name in recorded:
                    given.copy_(recorded[name].run(device))
                elif not part._parameters and part not in found:
                    found.append(part)
    return found


def comes_last(own: Iterable[ShardedParameter], inside: Iterable[ShardedParameter]) -> bool:
    """Whether a unit's last parameter was created after those of the units inside it. False without a recording."""
    own_steps, steps_inside = _first_steps(own), _first_steps(inside)
    return bool(own_steps and steps_inside) and max(own_steps) > max(steps_inside)


def _first_steps(params: Iterable[ShardedParameter]) -> list[int]:
    known = (_recorded(module).get(name) for param in params for module, name in param.sites)
    return [recipe.first for recipe in known if recipe is not None]


def initialize(params: Sequence[ShardedParameter], device: torch.device, others: Iterable[nn.Module] = ()) -> None:
    """Initialize parameters that have been allocated.

    Args:
        params: Parameters of one unit. Modules that hold them are reset, inner modules first, in the order in which
            building a model initializes them.
        device: Device of the parameters.
        others: Further modules to reset.
    """
    mine = {id(param.compute) for param in params}
    modules: dict[int, nn.Module] = {id(m): m for m in others}
    filled: list[tuple[ShardedParameter, Recipe]] = []
    for param in params:
        found = [recorded[name] for module, name in param.sites if name in (recorded := _recorded(module))]
        if found:
            filled.append((param, found[0]))
        else:
            modules |= {id(module): module for module, _ in param.sites}
    with torch.no_grad():
        for i, value in Recipe.run_all([recipe for _, recipe in filled], device):
            filled[i][0].compute.copy_(value)
    for module in sorted(modules.values(), key=_depth):
        reset = reset_method(module)
        if reset is not None:
            with torch.no_grad(), _other_units_on_meta(module, mine):
                reset()
    for param in params:
        param.reclaim()


def draw_shards(
    params: Sequence[ShardedParameter], shards: Sequence[tuple[torch.Tensor, int]], number: int, device: torch.device
) -> None:
    """Initialize this rank's shards of parameters that have no memory.

    Args:
        params: Parameters of one unit.
        shards: The shard of each, flat, and its first element in the flat parameter.
        number: Of the shards: ranks with equal ones have the same.
        device: Where to compute.

    Raises:
        NotImplementedError: A module initializes a parameter in a way that cannot be recorded.
    """
    known = [_recorded(module).get(name) for param in params for module, name in param.sites[:1]]
    unknown = [param for param, recipe in zip(params, known, strict=True) if recipe is None]
    sites = {site: param.compute for param in unknown for site in param.sites}
    with recorded_resets(sites) as recipe_of:
        mine = {id(module._parameters[name]) for module, name in sites}
        for module in sorted({id(module): module for module, _ in sites}.values(), key=_depth):
            if (reset := reset_method(module)) is not None:
                with torch.no_grad(), _other_units_on_meta(module, mine):
                    reset()
        made = {id(param): recipe_of(*param.sites[0]) for param in unknown}
    for param, recipe, (shard, begin) in zip(params, known, shards, strict=True):
        recipe = recipe or made[id(param)]
        if recipe is None:
            raise NotImplementedError(
                f"init_per_shard: expected a method that initializes {param.name} by operations on it; got one of "
                f"{type(param.sites[0][0]).__name__} that does otherwise. Leave init_per_shard out."
            )
        recipe.draw(shard, begin, number, device)


def _depth(module: nn.Module) -> int:
    """Height of the module tree below and including this module."""
    return 1 + max((_depth(child) for child in module.children()), default=0)


@contextmanager
def _other_units_on_meta(module: nn.Module, mine: set[int]) -> Iterator[None]:
    """Replace parameters of other units, which have no storage here, by placeholders while a module is reset."""
    hidden = []
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in mine:
                hidden.append((part, name, parameter))
                part._parameters[name] = nn.Parameter(
                    torch.empty_like(parameter, device="meta"), parameter.requires_grad
                )
    try:
        yield
    finally:
        for part, name, parameter in hidden:
            part._parameters[name] = parameter
