"""Optimizer classes that work on sharded parameters, and the granularity of sharding that each of them needs.

Each rank updates its shards of the parameters. This equals the unsharded update only if the rank holds everything that
the update of an element depends on. A class does not declare its dependencies, so this module lists the known classes,
and :func:`register_optimizer` adds others.
"""

import inspect
from collections.abc import Collection, Iterable

import torch

from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.helpers.arguments import full_name
from megatron.fsdp.optim.block_state import check_blocks
from megatron.fsdp.optim.trial import looks_at_more

# What the update of one element depends on, from least to most.
LOOKS_AT = ("element", "matrix", "parameter")
# The granularity that keeps together what is looked at.
_GRANULARITY = {"matrix": "tensor", "parameter": "parameter"}


# Optimizers that update each element from its own gradient and state, and from scalars of its parameter.
_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"
ELEMENTWISE: set[type] = {getattr(torch.optim, name) for name in _NAMES.split()}
# Optimizers that update each parameter independently of the others, so that a step may be split between parameters.
BY_PARAMETER = ELEMENTWISE | {torch.optim.Muon}

_known: dict[type, str] = {
    **dict.fromkeys(ELEMENTWISE, "element"),
    torch.optim.Muon: "matrix",
    torch.optim.Adafactor: "parameter",
}

# Classes that users have registered.
_registered: set[type] = set()

# Classes of other packages are listed by full name, so that they need not be imported. The name of a package or module
# stands for all of its classes.
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
    # 8-bit state has one scale per block of a parameter's elements.
    "bitsandbytes.optim": "parameter",
    "torchao.optim.adam": "block",
}
_REFUSED: dict[str, str] = {
    "torch.optim.lbfgs.LBFGS": "it needs inner products over full parameters, but a rank has shards. Use AdamW or Muon",
    "torch.optim.sparse_adam.SparseAdam": "reduced gradients are dense. Use Adam, and embeddings with sparse=False",
    "apex.optimizers.fused_lamb.FusedLAMB": "it needs the norm of all gradients, and a rank only has shards of them. "
    "Use FusedAdam",
    **dict.fromkeys(
        ("megatron.core.optimizer.cpu_offloading", "torchao.optim.cpu_offload"),
        "it updates its own copies of the parameters. Use torch.optim.AdamW with "
        "fully_shard_model(offload_optimizer=True)",
    ),
}


def register_optimizer(optimizer_class: type[torch.optim.Optimizer], looks_at: str) -> None:
    """Declare what an optimizer class looks at to update an element, so that it can be used with sharded parameters.

    The declaration also holds for subclasses that do not change how parameters are updated. An optimizer that looks at
    several parameters at once cannot be used.

    Args:
        optimizer_class: The class.
        looks_at: ``"element"``: the element's gradient and state, and scalars. Works with every sharding.
            ``"matrix"``: the full parameter if it has two or more dimensions. Needs ``shard_granularity="tensor"``.
            ``"parameter"``: the full parameter, whatever its shape. Needs ``shard_granularity="parameter"``.

    Raises:
        ValueError: ``looks_at`` is none of these, or ``optimizer_class`` is not an optimizer class.
    """
    if looks_at not in LOOKS_AT:
        raise ValueError(f"register_optimizer: expected looks_at to be one of {LOOKS_AT}; got {looks_at!r}.")
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise ValueError(f"register_optimizer: expected a subclass of torch.optim.Optimizer; got {optimizer_class!r}.")
    _known[optimizer_class] = looks_at
    _registered.add(optimizer_class)


def skips_empty(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer must not see empty shards.

    Fused multi-tensor kernels stop at the first empty tensor, and an optimizer that looks at full parameters may
    divide by the number of elements.
    """
    return full_name(type(optimizer)) in _FUSED or looks_at(optimizer) == "parameter"


def looks_at(optimizer: torch.optim.Optimizer) -> str | None:
    """The dependency of the optimizer's updates, out of ``LOOKS_AT``, or "block"; None if it is unknown."""
    base, kind = _listed(type(optimizer))
    return kind if _updates_like(type(optimizer), base) else None


def updates_like(optimizer: torch.optim.Optimizer, classes: Collection[type]) -> bool:
    """Whether the optimizer is of one of the classes, or of a subclass that updates parameters in the same way."""
    base, _ = _listed(type(optimizer))
    return base in classes and _updates_like(type(optimizer), base)


def _listed(cls: type) -> tuple[type, str | None]:
    """The first class that is listed, of an optimizer's class and its bases, and its kind; ``object`` without any."""
    kinds = ((base, _known.get(base) or _by_name(_OTHERS, base)) for base in cls.__mro__)
    return next((found for found in kinds if found[1] is not None), (object, None))


def _by_name(table: dict[str, str], cls: type) -> str | None:
    name = full_name(cls)
    while name:
        if name in table:
            return table[name]
        name = name.rpartition(".")[0]
    return None


# Methods that a subclass may override without changing how it updates parameters.
_HARMLESS = {"add_param_group", "load_state_dict", "state_dict", "zero_grad"}


def _updates_like(cls: type, base: type) -> bool:
    """True if ``cls``, a subclass of ``base``, overrides nothing that affects how parameters are updated."""
    for between in cls.__mro__[: cls.__mro__.index(base)]:
        for name in vars(between).keys() & set(dir(base)) - _HARMLESS:
            if name.startswith("__") and name.endswith("__"):
                continue
            # torch wraps the step of every class when its first object is created, so compare the wrapped functions.
            if inspect.unwrap(getattr(between, name)) is not inspect.unwrap(getattr(base, name)):
                return False
    return True


def check_optimizer(optimizer: torch.optim.Optimizer, groups: Iterable[ParameterGroup]) -> None:
    """Check that the optimizer updates shards in the same way as full parameters.

    Args:
        optimizer: The optimizer, with full parameters of a model or with main weights.
        groups: The parameter groups of the models whose parameters it may have.

    Raises:
        NotImplementedError: See :func:`require_known`.
        ValueError: It looks at full matrices, parameters or blocks of them, and one is split between ranks.
    """
    kind = require_known(optimizer)
    held = {id(p) for options in optimizer.param_groups for p in options["params"]}
    if not _registered.isdisjoint(type(optimizer).__mro__):
        _require_no_copies(optimizer)
        _require_as_declared(optimizer, kind)
    of_optimizer = [
        (param, group.is_divided(i))
        for group in groups
        for i, param in enumerate(group.params)
        if held & {id(param.original), id(param.compute), id(param.main)}
    ]
    if kind == "block":
        check_blocks(optimizer, [param for param, _ in of_optimizer])
    elif kind != "element":
        whole = [param for param, divided in of_optimizer if divided]
        _check_full(optimizer, kind, [p.name for p in whole if kind == "parameter" or len(p.local_shape) > 1])


def require_known(optimizer: torch.optim.Optimizer) -> str:
    """The dependency of the optimizer's updates, out of ``LOOKS_AT``, or "block".

    Raises:
        NotImplementedError: It is unknown, or the optimizer cannot work with sharded parameters.
    """
    cls = type(optimizer)
    why = _by_name(_REFUSED, cls)
    if why is not None:
        raise NotImplementedError(f"{cls.__name__} ({cls.__module__}) does not work with sharded parameters: {why}.")
    kind = looks_at(optimizer)
    if kind is None:
        raise NotImplementedError(
            f"{cls.__name__} ({cls.__module__}) is not known to update sharded parameters correctly. If it updates "
            f"each element from that element's gradient and state only, call "
            f"megatron_fsdp.register_optimizer({cls.__name__}, 'element') first. If it looks at full matrices or "
            "full parameters, register it as 'matrix' or 'parameter', and shard the model with "
            "shard_granularity='tensor' or 'parameter'. One that looks at several parameters at once cannot be used."
        )
    return kind


def _require_no_copies(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a registered optimizer keeps parameters, their identities, or tensors like them, in its attributes."""
    params = [p for options in optimizer.param_groups for p in options["params"]]
    ids, shapes = {id(p) for p in params}, {p.shape for p in params if p.dim()}
    for name, value in vars(optimizer).items():
        items = [*value, *value.values()] if isinstance(value, dict) else value
        if name in ("param_groups", "state") or not isinstance(items, (list, tuple, set)):
            continue
        for each in items:
            if id(each) in ids or (isinstance(each, int) and each in ids) or _is_like(each, shapes):
                raise NotImplementedError(
                    f"{type(optimizer).__name__}.{name} has parameters, their id(), or tensors of their shapes. "
                    "Expected them in self.state[p], and settings in param_groups or as attributes of p: in step(), a "
                    "parameter is this rank's shard, and another object."
                )


def _require_as_declared(optimizer: torch.optim.Optimizer, kind: str) -> None:
    """Raise if a trial shows that a registered optimizer looks at more than was declared."""
    if not looks_at_more(optimizer, kind):
        return
    name = type(optimizer).__name__
    others = LOOKS_AT[LOOKS_AT.index(kind) + 1 :]
    fitting = next((other for other in others if not looks_at_more(optimizer, other)), None)
    raise ValueError(
        f"{name} is registered as {kind!r}, but in trial steps, parameters that were split between two ranks in that "
        "way got other updates than full ones. "
        + (
            f"Expected register_optimizer({name}, {fitting!r}), with shard_granularity={_GRANULARITY[fitting]!r}."
            if fitting
            else "It looks at several parameters at once, such as a norm of all gradients, which is not supported. Use "
            "an optimizer, or settings, for which each parameter's update depends on that parameter only."
        )
    )


def _is_like(value: object, shapes: set[torch.Size]) -> bool:
    return isinstance(value, torch.Tensor) and value.shape in shapes


def _check_full(optimizer: torch.optim.Optimizer, kind: str, divided: list[str]) -> None:
    if divided:
        what = {"matrix": "matrices", "parameter": "parameters"}[kind]
        raise ValueError(
            f"{type(optimizer).__name__} looks at full {what}, and {len(divided)} of its parameters are split "
            f"between ranks: {', '.join(divided[:3])}{', ...' if len(divided) > 3 else ''}. Shard the model with "
            f"shard_granularity={_GRANULARITY[kind]!r} "
            "(and without tensor parallelism, which splits parameters as well)."
        )
