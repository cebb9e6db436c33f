"""Makes a torch optimizer update main weights: replaces its parameters by DTensors, and surrounds its step.

:class:`Attachment` holds what happens around the step, the state dicts and the loads of one optimizer, in order. An
optimizer is attached by ``fully_shard_optimizer``, or before its first step or state dict: see
:func:`attach_at_first_use`.
"""

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.comm.backends import is_on_host
from megatron.fsdp.dtensor.ragged_dtensor import local_shard, make_like, same_layout
from megatron.fsdp.optim.block_state import join_state, make_state, split_state
from megatron.fsdp.optim.classes import BY_PARAMETER, check_optimizer, looks_at
from megatron.fsdp.optim.fresh_state import FreshState, join_text_keys, require_all_state
from megatron.fsdp.optim.local_step import LocalStep, closure_of
from megatron.fsdp.runtime.engine import Engine, engines_of
from megatron.fsdp.runtime.unit import Unit
from megatron.fsdp.state.loading import own_shard

# A call of the optimizer's step updates units with about this many elements. On a GPU: 256 MiB of temporary memory in
# fp32, and about a millisecond of kernels, which the host needs to launch the next. On a CPU: what fits into its cache.
ELEMENTS_AT_ONCE, ELEMENTS_ON_HOST = 2**26, 2**18
# Number of times that a model has been sharded.
_generation = 0
# For each optimizer that has taken a step: the generation at that time, and its number of parameters. Comparing these
# two numbers makes the hook cheap, which torch runs before every step of every optimizer in the process.
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


def attach_at_first_use(engine: Engine, attach: Callable[[torch.optim.Optimizer], None] | None = None) -> None:
    """Attach every optimizer that has parameters of ``engine`` before its first step or state dict.

    It is attached again if it has received parameters, or another model has been sharded, since then.

    Args:
        engine: The engine.
        attach: Called with the optimizer. None: :func:`attach_optimizer`. Hooks that it registers already run in the
            same step.
    """
    global _generation
    _generation += 1
    engine.attach_optimizer = attach or _attach_implicitly
    watch_steps()


def _attach_implicitly(optimizer: torch.optim.Optimizer) -> None:
    attach_optimizer(optimizer, needs_gradient=False)


@functools.cache
def watch_steps() -> None:
    """Attach optimizers before their steps from now on, if they have parameters of an engine."""
    register_optimizer_step_pre_hook(attach_if_needed)


def attach_if_needed(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    """Attach an optimizer that has parameters of engines and is not attached, or has got parameters since."""
    if (inner := wrapped_by(optimizer)) is not None:
        attach_if_needed(inner)
        if _seen.get(optimizer) != _seen[inner]:
            _shard_state_of(optimizer, inner)
            _seen[optimizer] = _seen[inner]
        return
    _restore(optimizer)
    now = _generation, sum(len(options["params"]) for options in optimizer.param_groups)
    if _seen.get(optimizer) != now:
        for attach in dict.fromkeys(engine.attach_optimizer for engine in engines_of(_parameters(optimizer))):
            if attach is not None:
                attach(optimizer)
        _seen[optimizer] = now
    if (attachment := attachment_of(optimizer)) is not None:
        attachment.surround_update()


def wrapped_by(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """The optimizer that a wrapper, such as Lookahead or SAM, keeps and shares its parameter groups with."""
    kept = (value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer))
    return next((k for k in kept if k is not optimizer and k.param_groups is optimizer.param_groups), None)


def _shard_state_of(wrapper: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Shard the state of a wrapper of an attached optimizer. The wrapper's own updates see DTensors."""
    params = {id(param.original): param for engine in engines_of(_parameters(inner)) for param in engine.params()}
    for parameter in [key for key in wrapper.state if isinstance(key, nn.Parameter)]:
        _main_weight(wrapper, parameter, params.get(id(parameter)))
    if (attachment := attachment_of(inner)) is not None:
        attachment.shard_state(wrapper)


def _restore(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer its DTensors back after a step that raised, for which torch calls no hook."""
    if (attachment := attachment_of(optimizer)) is not None:
        attachment.local.restore(optimizer)


def attach_before(original: Callable[..., Any], optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Attach the optimizer to the sharded models it updates, then save or load its state."""
    attach_if_needed(optimizer)
    return original(optimizer, *args, **kwargs)


def initialize_state(original: Callable[..., None], optimizer: torch.optim.Optimizer) -> None:
    """Create optimizer state without a step where the optimizer updates a sharded model."""
    attach_if_needed(optimizer)
    attachment = attachment_of(optimizer)
    if attachment is None:
        original(optimizer)
    elif not any(optimizer.state.values()):
        attachment.fresh.initialize(optimizer)


def attach_optimizer(optimizer: torch.optim.Optimizer, needs_gradient: bool = True) -> None:
    """Replace the optimizer's parameters by main weights, and surround its step.

    Parameter groups and their options are kept. State of full parameters, which some optimizers create when they are
    built, is sharded. The step first synchronizes gradients. After it, compute weights are out of date, and the next
    unshard reads the new main weights. A second call attaches parameters that have been added or sharded since the
    first.

    Args:
        optimizer: The optimizer.
        needs_gradient: Whether a step without any gradient raises an error instead of doing nothing.

    Raises:
        ValueError: No parameter belongs to a sharded model, state cannot be sharded, or the optimizer needs full
            matrices or parameters, and some are split between ranks.
        NotImplementedError: It is unknown whether the optimizer can update shards.
    """
    if (inner := wrapped_by(optimizer)) is not None:
        attach_optimizer(inner, needs_gradient)
        return _shard_state_of(optimizer, inner)
    engines = engines_of(_parameters(optimizer))
    if not engines:
        raise ValueError(
            "fully_shard_optimizer: none of the optimizer's parameters belongs to a sharded model. Shard the model "
            "first. The optimizer may be built from the model's parameters before or after that."
        )
    check_optimizer(optimizer, [group for engine in engines for group in engine.groups])
    params = {id(param.original): param for engine in engines for param in engine.params()}
    for options in optimizer.param_groups:
        options["params"] = [_main_weight(optimizer, p, params.get(id(p))) for p in options["params"]]
    attachment = attachment_of(optimizer) or Attachment(optimizer)
    attachment.needs_gradient |= needs_gradient
    attachment.add(engines)
    attachment.shard_state(optimizer)


def attachment_of(optimizer: torch.optim.Optimizer) -> "Attachment | None":
    """The hooks of :func:`attach_optimizer`; None if it was not called with the optimizer."""
    return vars(optimizer).get(_ATTACHMENT)


def is_attached(optimizer: torch.optim.Optimizer, engine: Engine) -> bool:
    """Whether the optimizer has been attached to the engine's model."""
    attachment = attachment_of(optimizer)
    return attachment is not None and engine in attachment.engines()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for options in optimizer.param_groups for parameter in options["params"])


def _main_weight(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, param: ShardedParameter | None
) -> nn.Parameter:
    """Return the main weight of ``parameter``, and move the parameter's optimizer state to it."""
    if param is None:
        return parameter
    state = optimizer.state.pop(parameter, None)
    for key, value in (state or {}).items():
        if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != param.main.shape:
            raise ValueError(
                f"fully_shard_optimizer: cannot shard state {key!r} of {param.name}: expected the parameter's "
                f"shape {tuple(param.main.shape)}; got {tuple(value.shape)}."
            )
    if state:
        optimizer.state[param.main] = state
    return param.main


# The attribute of an optimizer that has its attachment.
_ATTACHMENT = "_fsdp_attachment"


class Attachment:
    """Actions around the step, the state dicts and the loads of an optimizer, in this order.

    It refers to engines weakly. The optimizer owns it, and scripts often keep an optimizer longer than the model: a
    strong reference would keep the memory of a deleted model.

    Args:
        optimizer: The optimizer.

    Attributes:
        fresh: State that was created for a load.
        needs_gradient: Whether a step without any gradient raises an error instead of doing nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.fresh = FreshState()
        self.needs_gradient = False
        self._engines: list[weakref.ref[Engine]] = []
        self._looks_at = looks_at(optimizer)
        self.local = LocalStep(optimizer)
        # The arguments of the current step, and the engines whose units it has unsharded.
        self._sync = self._install = True
        self._has_loaded = False
        self._prefetching: weakref.WeakSet[Engine] = weakref.WeakSet()
        setattr(optimizer, _ATTACHMENT, self)
        self._hooks = [optimizer.register_step_pre_hook(self.before_step)]
        self._hooks.append(optimizer.register_step_post_hook(self.after_step))
        optimizer.register_state_dict_post_hook(self.state_dict)
        optimizer.register_load_state_dict_pre_hook(self.before_load)
        optimizer.register_load_state_dict_post_hook(self.after_load)

    def add(self, engines: Iterable[Engine]) -> None:
        """Surround the updates of these engines' main weights as well."""
        new = [engine for engine in engines if engine not in self.engines()]
        self._engines += [weakref.ref(engine) for engine in new]
        self.local.add(group for engine in new for group in engine.groups)

    def engines(self) -> list[Engine]:
        """The engines of the models that exist still."""
        return [engine for reference in self._engines if (engine := reference()) is not None]

    # The step --------------------------------------------------------------------------------------------------

    def surround_update(self) -> None:
        """Let the user's hooks of the step run around ours, which show the optimizer local tensors."""
        for hook, is_last in zip(self._hooks, (True, False), strict=True):
            if (hooks := hook.hooks_dict_ref()) is not None and hook.id in hooks:
                hooks.move_to_end(hook.id, last=is_last)

    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Put gradients into ``.grad``, show the optimizer local tensors, and update units one by one.

        ``step`` also takes the keyword arguments ``sync_grad_before_optimizer_step``: whether to synchronize gradients
        first, and ``install_optimized_model_weights``: whether to update compute weights afterwards.
        """
        self._sync = kwargs.pop("sync_grad_before_optimizer_step", True)
        self._install = kwargs.pop("install_optimized_model_weights", True)
        self._prepare_gradients()
        closure = closure_of(args, kwargs)
        if closure is None and self.needs_gradient:
            self._require_gradient(optimizer)
        if self._has_loaded:
            require_all_state(optimizer)  # not in the load: options may change after it
            self._has_loaded = False
        self.fresh.discard_unloaded(optimizer)  # before the swap: it compares DTensors
        self.fresh.drop_none_yet(optimizer, closure is not None)
        if self._looks_at == "block":
            make_state(optimizer)
        changed = self.local.before_step(optimizer, args, kwargs, self._prepare_gradients)
        self._prefetching.clear()
        if self._install and closure is None and type(optimizer) in BY_PARAMETER:
            for engine in self.engines():
                if _update_by_unit(optimizer, engine, self.local):
                    self._prefetching.add(engine)
        return changed

    def _prepare_gradients(self) -> None:
        for engine in self.engines():
            if self._sync:
                engine.finish_pending_gradients()
            else:
                engine.leave_gradients_waiting()
            engine.wait_before_write()

    def _require_gradient(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if neither the optimizer's parameters nor others of their models, which it may lack, have gradients."""
        models = (param.main for engine in self.engines() for param in engine.params())
        if all(
            p.grad is None and getattr(p, "decoupled_grad", None) is None
            for p in itertools.chain(_parameters(optimizer), models)
        ):
            raise RuntimeError(
                "The optimizer's step found no gradient on any of its parameters and would change nothing. "
                "Call backward first, and check that the optimizer was given to fully_shard_optimizer."
            )

    def after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Restore the DTensors, and mark compute weights as out of date."""
        self.local.after_step(optimizer, args, kwargs)
        for engine in self.engines() if self._install else ():
            if engine in self._prefetching:
                # Weights were invalidated before the all-gathers that are in flight. Wait for these: after the last
                # step of a script, they would be in flight when the process group is destroyed.
                engine.wait_for_prefetched()
            else:
                engine.invalidate_weights()

    # State dicts -----------------------------------------------------------------------------------------------

    def state_dict(self, optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
        """Add what this rank lacks to a state dict of the optimizer. For some optimizers, a collective."""
        self.fresh.add_missing(optimizer, state_dict)  # first, so that the other ranks get it
        if self._looks_at == "block":
            split_state(optimizer, state_dict)
        if self._looks_at == "parameter":
            self.local.share_full_state(optimizer, state_dict)

    def before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict) -> dict | None:
        """Give a state dict the form that the optimizer itself has."""
        join_text_keys(state_dict)
        return join_state(optimizer, state_dict) if self._looks_at == "block" else None

    def after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop created state that was not loaded into, and shard full state."""
        self.fresh.discard_unloaded(optimizer)
        self.shard_state(optimizer)
        self.fresh.own_initial(optimizer)  # what it marks depends on this rank's shards
        self._has_loaded = True

    def shard_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace full or evenly sharded state by this rank's shards."""
        for param in (param for engine in self.engines() for param in engine.params()):
            state = optimizer.state.get(param.main, {})
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or not value.dim() or value.shape != param.main.shape:
                    continue
                if not isinstance(value, DTensor) or not same_layout(value, param.main):  # type: ignore[arg-type]
                    # With offload, the optimizer may have made its state on the device of the model.
                    shard = own_shard(param, value).to(local_shard(param.main).device, copy=True)
                    state[key] = make_like(shard, param.main)


def _update_by_unit(optimizer: torch.optim.Optimizer, engine: Engine, local: LocalStep) -> bool:
    """Update parts of the model one by one, and unshard the units that the next forward needs first meanwhile.

    Calls the optimizer's step once per part, with the parameters of that part only. The step proper then updates the
    remaining parameters. This is valid for optimizers that update every parameter independently.

    torch's optimizers compute on lists of all parameters, so their temporary tensors would have the size of the model.
    On a CPU a part is a unit, or a few small ones: new memory for the model in every step fits into no cache. On a GPU
    it is several units, so that kernels stay few and large.

    Args:
        optimizer: The optimizer, whose parameters are local tensors.
        engine: The engine of the model.
        local: Maps main weights to these tensors.

    Returns:
        Whether units have been unsharded.
    """
    first = engine.schedule.units_to_prefetch_first() if engine.config.gather_during_step else []
    others = [unit for unit in engine.units if unit not in first]
    if first:
        # Before any all-gather starts: invalidating afterwards would drop the weights that it has gathered.
        engine.invalidate_weights()
    # The step proper updates the last part, and LocalStep restores all parameters.
    parts = [[unit] for unit in first] + _parts(others, is_on_host(engine.device))[:-1]
    *each, remaining = _split(optimizer, parts, local)
    for part, parameters in zip(parts, each, strict=True):
        if any(parameters):
            _set_parameters(optimizer, parameters)
            # __wrapped__ is the step without hooks, which would start this one again.
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        if part[0] in first:
            engine.schedule.prefetch_first(until=part[0])
    _set_parameters(optimizer, remaining)
    return bool(first)


def _parts(units: list[Unit], on_host: bool) -> list[list[Unit]]:
    """Units to update together: as many as have :data:`ELEMENTS_AT_ONCE` on this rank; an offloaded one alone."""
    parts: list[list[Unit]] = []
    left = 0
    for unit in units:
        if left <= 0 or unit.is_offloaded:
            parts.append([])
            left = 0 if unit.is_offloaded else ELEMENTS_ON_HOST if on_host else ELEMENTS_AT_ONCE
        parts[-1].append(unit)
        left -= sum(local_shard(entry.main).numel() for group in unit.groups for entry in group.params)
    return parts


def _split(
    optimizer: torch.optim.Optimizer, parts: list[list[Unit]], local: LocalStep
) -> list[list[list[nn.Parameter]]]:
    """For each part, and finally for what remains: the parameters in each of the optimizer's groups."""
    part_of = {local.shown(e.main): i for i, part in enumerate(parts) for u in part for g in u.groups for e in g.params}
    split: list[list[list[nn.Parameter]]] = [[[] for _ in optimizer.param_groups] for _ in [*parts, None]]
    for number, options in enumerate(optimizer.param_groups):
        for parameter in options["params"]:
            split[part_of.get(id(parameter), len(parts))][number].append(parameter)
    return split


def _set_parameters(optimizer: torch.optim.Optimizer, parameters: list[list[nn.Parameter]]) -> None:
    for options, of_group in zip(optimizer.param_groups, parameters, strict=True):
        options["params"] = of_group


class ZeroGrad:
    """An optimizer's ``zero_grad`` that also drops the model's gradients that are not in ``.grad`` yet.

    If the optimizer updates only some of the model's trainable parameters, these gradients are synchronized instead, so
    that it drops its own and the other optimizers keep theirs.

    Args:
        optimizer: The optimizer, which is referred to weakly: this object becomes one of its attributes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        functools.update_wrapper(self, type(optimizer).zero_grad)
        self.__signature__ = inspect.signature(self.__call__)

    def __call__(self, set_to_none: bool = True, *, zero_grad_buffer: bool = True) -> None:
        """Drop gradients.

        Args:
            set_to_none: Set ``.grad`` to None. If False, fill it with zeros.
            zero_grad_buffer: Whether to drop gradients that are not synchronized yet as well.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        _restore(optimizer)
        parameters = {p for options in optimizer.param_groups for p in options["params"]}
        engines = engines_of(parameters)
        # A graph writes to the gradients that it was captured with. Without ``.grad``, the step would ignore them.
        set_to_none = set_to_none and not any(engine.config.cuda_graph_mode for engine in engines)
        for engine in engines:
            with torch._C.DisableTorchFunctionSubclass():
                others = [param.main for param in engine.params() if param.main not in parameters]
                # One that has been frozen since keeps its gradient, too.
                shared = any(main.requires_grad or main.grad is not None for main in others)
            if not zero_grad_buffer:
                engine.leave_gradients_waiting()
            elif shared:
                engine.finish_pending_gradients()  # the other optimizers keep theirs
            else:
                engine.clear_gradients(set_to_none)
        # Last: reading ``.grad`` would synchronize the gradients that are dropped.
        with torch._C.DisableTorchFunctionSubclass() if set_to_none else contextlib.nullcontext():
            type(optimizer).zero_grad(optimizer, set_to_none)
