"""Makes a torch optimizer update main weights: parameters out, DTensors in, and hooks around the step."""

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.dtensor.ragged_dtensor import make_like, same_layout
from megatron.fsdp.dtensor.torch_patches import attach_with, prepare_with
from megatron.fsdp.helpers.weak import weak_method
from megatron.fsdp.optim.classes import BY_PARAMETER, check_optimizer
from megatron.fsdp.optim.fresh_state import attach_fresh_state, initialize_state
from megatron.fsdp.optim.local_step import LocalStep, closure_of
from megatron.fsdp.runtime.engine import Engine, engines_of
from megatron.fsdp.state.loading import own_shard

# What to do with an optimizer that has parameters of an engine, before it steps or its state is saved or loaded.
Attach = Callable[[torch.optim.Optimizer], None]

_attach_of: weakref.WeakKeyDictionary[Engine, Attach] = weakref.WeakKeyDictionary()
_generations = itertools.count(1)
_generation = 0
# For each optimizer that was looked at: the generation then, and its number of parameters.
_examined: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


def attach_at_first_use(engine: Engine, attach: Attach) -> None:
    """Have ``attach`` called with every optimizer that has parameters of ``engine``.

    It is called before the optimizer's first step and before its state is saved or loaded, and once more when the
    optimizer has got parameters, or models were sharded, since. Hooks that it registers run in the same step.
    """
    global _generation
    _generation = next(_generations)
    _attach_of[engine] = attach
    _watch_steps()
    attach_with(_examine)


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_examine)


def _examine(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    now = _generation, sum(len(options["params"]) for options in optimizer.param_groups)
    if _examined.get(optimizer) == now:
        return
    engines = engines_of(p for options in optimizer.param_groups for p in options["params"])
    for attach in dict.fromkeys(_attach_of[engine] for engine in engines if engine in _attach_of):
        attach(optimizer)
    _examined[optimizer] = now


def attach_optimizer(optimizer: torch.optim.Optimizer, needs_gradient: bool = True) -> None:
    """Replace the optimizer's parameters by the main weights of the models they belong to, and hook its step.

    Parameter groups and their options stay as they are; state for whole parameters (some optimizers create it when
    they are built) becomes state for this rank's parts. A step first finishes the gradients' synchronization, and
    ends with the compute weights out of date, so that they are made of the new main weights before their next use.
    A second call also takes parameters over that have been added, or sharded, since the first.

    Args:
        optimizer: The optimizer.
        needs_gradient: A step that finds no gradient at all is an error, and not nothing.

    Raises:
        ValueError: No parameter belongs to a sharded model, there is state that cannot be sharded, or the optimizer
            looks at whole matrices or parameters that are divided between ranks.
        NotImplementedError: It is not known whether the optimizer works on parts of parameters.
    """
    engines = engines_of(p for group in optimizer.param_groups for p in group["params"])
    if not engines:
        raise ValueError(
            "fully_shard_optimizer: none of the optimizer's parameters belongs to a sharded model. Shard the model "
            "first, and give the optimizer parameters of the model before or after that."
        )
    groups = [group for engine in engines for group in engine.groups]
    check_optimizer(optimizer, groups)
    places = {id(param.original): (group, i) for group in groups for i, param in enumerate(group.params)}
    for options in optimizer.param_groups:
        options["params"] = [_main_weight(optimizer, p, places) for p in options["params"]]
    _detach(optimizer, (_StepArguments, _Before, _FirstUnits, _After, LocalStep, _Reshard))
    local = LocalStep(groups)
    arguments = _StepArguments()
    optimizer.register_step_pre_hook(arguments)
    for engine in engines:
        optimizer.register_step_pre_hook(_Before(engine, needs_gradient, arguments))
    # The optimizer keeps what these need, and they do not keep the optimizer or a model. State is made before it is
    # shared between ranks.
    attach_fresh_state(optimizer)
    prepare_with(initialize_state)
    local.attach(optimizer)
    for engine in engines:
        first = _FirstUnits(engine, local, arguments) if engine.config.gather_during_step else None
        if first is not None:
            optimizer.register_step_pre_hook(first)
        optimizer.register_step_post_hook(_After(engine, first, arguments))
    for engine in engines:
        reshard = _Reshard(engine)
        reshard(optimizer)
        optimizer.register_load_state_dict_post_hook(reshard)


class ZeroGrad:
    """``zero_grad`` of an optimizer of a sharded model, which also drops gradients that are not in ``.grad`` yet.

    These belong to the model. An optimizer drops them if it updates all of the model's trainable parameters; one of
    several optimizers must not drop gradients that the others need.

    Args:
        optimizer: The optimizer. It is not kept alive.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        functools.update_wrapper(self, type(optimizer).zero_grad)
        self.__signature__ = inspect.signature(self.__call__)

    def __call__(self, set_to_none: bool = True, *, zero_grad_buffer: bool = True) -> None:
        """Drop gradients.

        Args:
            set_to_none: Set ``.grad`` to None. If False, fill it with zeros.
            zero_grad_buffer: Also drop gradients that are not synchronized yet.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        type(optimizer).zero_grad(optimizer, set_to_none)
        parameters = {p for options in optimizer.param_groups for p in options["params"]}
        for engine in engines_of(parameters):
            apart = any(param.main.requires_grad and param.main not in parameters for param in engine.params())
            if apart or not zero_grad_buffer:
                continue
            if set_to_none:
                engine.clear_gradients()
                continue
            for group in engine.groups:
                group.abandon_gradients()


def require_attachment(optimizer: torch.optim.Optimizer) -> None:
    """Attach an optimizer of main weights; raise if it has parameters as they were before the model was sharded.

    Raises:
        RuntimeError: It has such parameters, and its step would train nothing of the model.
    """
    parameters = {p for options in optimizer.param_groups for p in options["params"]}
    engines = [engine for engine in engines_of(parameters) if _attach_of.get(engine) is require_attachment]
    for param in (param for engine in engines for param in engine.params()):
        if not parameters.isdisjoint({param.original, param.compute}):
            raise RuntimeError(
                f"The optimizer ({type(optimizer).__name__}) has {param.name} as it was before the model was sharded, "
                "which nothing trains any more: its step would change nothing. Call fully_shard_optimizer(optimizer) "
                "after fully_shard_model, or once more for parameters that were added since."
            )
    if any(not is_attached(optimizer, engine) for engine in engines):
        attach_optimizer(optimizer, needs_gradient=False)


def is_attached(optimizer: torch.optim.Optimizer, engine: Engine) -> bool:
    """Whether the optimizer's step is hooked for the engine."""
    hooks = optimizer._optimizer_step_post_hooks.values()
    return any(isinstance(hook, _After) and hook.engine() is engine for hook in hooks)


def attach_local_step(optimizer: torch.optim.Optimizer, groups: list[ParameterGroup]) -> None:
    """Give the optimizer's step local shards instead of DTensors. The caller finishes the gradients."""
    _detach(optimizer, (LocalStep,))
    LocalStep(groups).attach(optimizer)


def _detach(optimizer: torch.optim.Optimizer, kinds: tuple[type, ...]) -> None:
    """Remove the hooks of an earlier :func:`attach_optimizer` that are of one of the kinds."""
    for hooks in (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        optimizer._optimizer_state_dict_post_hooks,
        optimizer._optimizer_load_state_dict_post_hooks,
    ):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", hook), kinds):
                del hooks[key]


def _main_weight(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, places: dict[int, tuple[ParameterGroup, int]]
) -> nn.Parameter:
    """What the optimizer is to update in place of ``parameter``, whose state it gets."""
    if id(parameter) not in places:
        return parameter
    group, i = places[id(parameter)]
    param = group.params[i]
    state = optimizer.state.pop(parameter, None)
    if state:
        sharded = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                if value.shape != param.main.shape:
                    raise ValueError(
                        f"fully_shard_optimizer: state {key!r} of {param.name} has shape {tuple(value.shape)}, which "
                        f"is not the parameter's {tuple(param.main.shape)}: it cannot be sharded along with it."
                    )
                value = group.shard(i, value)
            sharded[key] = value
        optimizer.state[param.main] = sharded
    return param.main


class _StepArguments:
    """Step pre-hook: takes the keyword arguments that only a sharded model's ``step`` has.

    Attributes:
        sync: Finish the synchronization of gradients before the step (``sync_grad_before_optimizer_step``).
        install: Update the compute weights after the step (``install_optimized_model_weights``).
    """

    def __init__(self) -> None:
        self.sync = self.install = True

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self.sync = kwargs.pop("sync_grad_before_optimizer_step", True)
        self.install = kwargs.pop("install_optimized_model_weights", True)


class _Before:
    """Step pre-hook: finish the model's gradients; refuse a step that would do nothing if ``needs_gradient``."""

    def __init__(self, engine: Engine, needs_gradient: bool, arguments: _StepArguments) -> None:
        self._finish = weak_method(engine.finish_pending_gradients)
        self._needs_gradient = needs_gradient
        self._arguments = arguments

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if self._arguments.sync:
            self._finish()
        # A closure computes the gradients.
        if not self._needs_gradient or closure_of(args, kwargs) is not None:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if all(p.grad is None and getattr(p, "decoupled_grad", None) is None for p in parameters):
            raise RuntimeError(
                "The optimizer's step found no gradient on any of its parameters and would change nothing. "
                "Call backward first, and check that the optimizer was given to fully_shard_optimizer."
            )


class _After:
    """Step post-hook: compute weights are made of the new main weights before their next use."""

    def __init__(self, engine: Engine, first: "_FirstUnits | None", arguments: _StepArguments) -> None:
        self.engine = weakref.ref(engine)
        self._first = first
        self._arguments = arguments

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        engine = self.engine()
        if engine is None or not self._arguments.install:
            return
        if self._first is not None and self._first.gathering:
            # What nobody waits for would be on its way still when a script ends and destroys the process group.
            engine.wait_for_prefetched()
        else:
            engine.invalidate_weights()


class _Reshard:
    """Load-state-dict post-hook: state that is whole, or sharded evenly, becomes state for this rank's parts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        engine = self._engine()
        if engine is None:
            return
        for param in engine.params():
            state = optimizer.state.get(param.main, {})
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or not value.dim() or value.shape != param.main.shape:
                    continue
                if not isinstance(value, DTensor) or not same_layout(value, param.main):  # type: ignore[arg-type]
                    state[key] = make_like(own_shard(param, value).clone(), param.main)


class _FirstUnits:
    """Step pre-hook: update the units that forward needs first one by one, and gather each while the next is updated.

    The step itself then updates what is left. Optimizers of torch are known to allow that; others take their step as a
    whole.

    Args:
        engine: Of the model.
        local: What the optimizer is shown in place of DTensors.
        arguments: What the step was called with.

    Attributes:
        gathering: The latest step has been taken so.
    """

    def __init__(self, engine: Engine, local: LocalStep, arguments: _StepArguments) -> None:
        self._engine = weakref.ref(engine)
        self._local = local
        self._arguments = arguments
        self.gathering = False

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        engine = self._engine()
        units = [] if engine is None or not self._arguments.install else engine.units_to_prefetch_first
        self.gathering = bool(units) and type(optimizer) in BY_PARAMETER and closure_of(args, kwargs) is None
        if engine is None or not self.gathering:
            return
        engine.invalidate_weights()
        parts = {self._local.shown(e.main): i for i, u in enumerate(units) for g in u.groups for e in g.params}
        split: list[list[list[nn.Parameter]]] = [[[] for _ in optimizer.param_groups] for _ in [*units, None]]
        for number, options in enumerate(optimizer.param_groups):
            for parameter in options["params"]:
                split[parts.get(id(parameter), len(units))][number].append(parameter)
        for unit, parameters in zip([*units, None], split, strict=True):
            for options, part in zip(optimizer.param_groups, parameters, strict=True):
                options["params"] = part
            if unit is None:
                return
            if any(parameters):
                type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
            engine.prefetch_first(until=unit)
