"""What each class of optimizers looks at to update an element, and so what must not be divided between ranks.

Ranks hold parts of parameters, and an optimizer on each rank updates the parts there. That is the unsharded update only
if nothing that the update depends on is elsewhere. A class says nothing about that, so the classes that are known are
listed here, and whoever knows of another registers it (:func:`register_optimizer`).
"""

import inspect
from collections.abc import Iterable

import torch
from torch import nn

from megatron.fsdp.buffers.parameter_group import ParameterGroup

# From the left to the right: more has to be whole.
LOOKS_AT = ("element", "matrix", "parameter")


def _torch_optimizers(names: str) -> set[type]:
    return {getattr(torch.optim, name) for name in names.split() if hasattr(torch.optim, name)}


# Optimizers that are known to update each element by its own gradient and state, and what a parameter's elements share.
ELEMENTWISE = _torch_optimizers("ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD")
# Those that are known to update each parameter by its own, so that a step may be taken part by part.
BY_PARAMETER = ELEMENTWISE | _torch_optimizers("Muon")

_known: dict[type, str] = {
    **dict.fromkeys(ELEMENTWISE, "element"),
    **dict.fromkeys(_torch_optimizers("Muon"), "matrix"),
    **dict.fromkeys(_torch_optimizers("Adafactor"), "parameter"),
}

# By full name, since nothing of other packages is imported here. A package's name stands for all that is in it.
_FUSED = {
    "apex.optimizers.fused_adam.FusedAdam",
    "apex.optimizers.fused_adagrad.FusedAdagrad",
    "apex.optimizers.fused_sgd.FusedSGD",
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
    "transformer_engine.pytorch.optimizers.fused_sgd.FusedSGD",
}
_OTHERS: dict[str, str] = {
    **dict.fromkeys(_FUSED, "element"),
    "lion_pytorch.lion_pytorch.Lion": "element",
    "transformers.optimization.Adafactor": "parameter",
    # State of 8 bits has a scale for each block of a parameter's elements.
    "bitsandbytes.optim": "parameter",
}
_REFUSED: dict[str, str] = {
    "torch.optim.lbfgs.LBFGS": "it needs inner products over all parameters, of which a rank has parts. Use AdamW or "
    "Muon",
    "torch.optim.sparse_adam.SparseAdam": "reduced gradients are dense. Use Adam, and embeddings with sparse=False",
    "apex.optimizers.fused_lamb.FusedLAMB": "it needs the norm of all gradients together, of which a rank has parts. "
    "Use FusedAdam",
    "megatron.core.optimizer.cpu_offloading": "it updates copies of its own of the parameters it was built with. Use "
    "torch.optim.AdamW, and fully_shard_model(offload_optimizer=True)",
}


def register_optimizer(optimizer_class: type[torch.optim.Optimizer], looks_at: str) -> None:
    """Say what a class of optimizers looks at to update an element of a parameter, so that it may be used here.

    It holds for the class itself, and for those of its subclasses that take over its ``step``.

    Args:
        optimizer_class: The class.
        looks_at: ``"element"``: at the element's own gradient and state, and at numbers that all elements share. Fits
            every sharding. ``"matrix"``: at the whole parameter, if that has two dimensions or more; fits
            ``shard_granularity="tensor"``. ``"parameter"``: at the whole parameter, whatever its shape; fits
            ``shard_granularity="parameter"``. What looks at several parameters at once does not fit.

    Raises:
        ValueError: ``looks_at`` is something else, or this is no class of optimizers.
    """
    if looks_at not in LOOKS_AT:
        raise ValueError(f"register_optimizer: expected looks_at to be one of {LOOKS_AT}; got {looks_at!r}.")
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise ValueError(f"register_optimizer: expected a subclass of torch.optim.Optimizer; got {optimizer_class!r}.")
    _known[optimizer_class] = looks_at


def skips_empty(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer must not be shown parts without elements.

    Fused kernels end at the first one, and what looks at a whole parameter may divide by its size.
    """
    return _full_name(type(optimizer)) in _FUSED or looks_at(optimizer) == "parameter"


def looks_at(optimizer: torch.optim.Optimizer) -> str | None:
    """What the optimizer looks at, out of ``LOOKS_AT``; None if that is not known."""
    cls = type(optimizer)
    for base in cls.__mro__:
        kind = _known.get(base) or _by_name(_OTHERS, base)
        if kind is not None:
            return kind if _updates_like(cls, base) else None
    return None


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _by_name(table: dict[str, str], cls: type) -> str | None:
    name = _full_name(cls)
    while name:
        if name in table:
            return table[name]
        name = name.rpartition(".")[0]
    return None


# What a subclass may do in its own way without updating parameters in another.
_HARMLESS = {"add_param_group", "load_state_dict", "state_dict", "zero_grad"}


def _updates_like(cls: type, base: type) -> bool:
    """True if ``cls`` changes nothing of how ``base``, a class that it inherits from, updates parameters."""
    for between in cls.__mro__[: cls.__mro__.index(base)]:
        for name in vars(between).keys() & set(dir(base)) - _HARMLESS:
            if name.startswith("__") and name.endswith("__"):
                continue
            # torch gives every class whose first object is made a step of its own, around the one that it has.
            if inspect.unwrap(getattr(between, name)) is not inspect.unwrap(getattr(base, name)):
                return False
    return True


def check_optimizer(optimizer: torch.optim.Optimizer, groups: Iterable[ParameterGroup]) -> None:
    """Raise unless the optimizer, on parts of parameters, does what it would do on whole ones.

    Args:
        optimizer: It has whole parameters of the model, or main weights.
        groups: Of the models whose parameters it may have.

    Raises:
        NotImplementedError: See :func:`require_known`.
        ValueError: It looks at whole matrices or parameters, and one is divided between ranks.
    """
    kind = require_known(optimizer)
    if kind != "element":
        _check_whole(optimizer, kind, groups)


def require_known(optimizer: torch.optim.Optimizer) -> str:
    """What the optimizer looks at, out of ``LOOKS_AT``.

    Raises:
        NotImplementedError: That does not fit sharded parameters, or is not known.
    """
    cls = type(optimizer)
    why = _by_name(_REFUSED, cls)
    if why is not None:
        raise NotImplementedError(f"{cls.__name__} ({cls.__module__}) does not work with sharded parameters: {why}.")
    kind = looks_at(optimizer)
    if kind is None:
        raise NotImplementedError(
            f"{cls.__name__} ({cls.__module__}) is not known to update parameters correctly of which a rank holds a "
            f"part. If it updates each element by that element's gradient and state, call "
            f"megatron_fsdp.register_optimizer({cls.__name__}, 'element') before. If it looks at whole matrices, or "
            "at whole parameters, register it as 'matrix' or 'parameter', and shard the model with "
            "shard_granularity='tensor' or 'parameter'."
        )
    return kind


def _check_whole(optimizer: torch.optim.Optimizer, kind: str, groups: Iterable[ParameterGroup]) -> None:
    held: set[nn.Parameter] = {p for options in optimizer.param_groups for p in options["params"]}
    divided = [
        param.name
        for group in groups
        for i, param in enumerate(group.params)
        if not held.isdisjoint({param.original, param.compute, param.main})
        and (kind == "parameter" or len(param.local_shape) > 1)
        and group.is_divided(i)
    ]
    if divided:
        what = {"matrix": "matrices", "parameter": "parameters"}[kind]
        granularity = {"matrix": "tensor", "parameter": "parameter"}[kind]
        raise ValueError(
            f"{type(optimizer).__name__} looks at whole {what}, and {len(divided)} of its parameters are divided "
            f"between ranks: {', '.join(divided[:3])}{', ...' if len(divided) > 3 else ''}. Shard the model with "
            f"shard_granularity={granularity!r} (and without tensor parallelism, which divides parameters as well)."
        )
