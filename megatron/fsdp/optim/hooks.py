"""Makes a torch optimizer update main weights: replaces its parameters by DTensors, and adds hooks around its step.

The order of the hooks matters, and :func:`attach_optimizer` registers them in this order. Before the step:

1. :class:`_StepArguments` removes keyword arguments that the optimizer's own ``step`` does not have.
2. :class:`_FinishGradients` synchronizes gradients and puts them into ``.grad`` of the DTensors.
3. ``FreshState`` discards state that was created for a load and not loaded into: it must compare DTensors.
4. :class:`LocalStep` swaps DTensors, their final ``.grad`` and their state for local tensors.
5. :class:`_UpdateByUnit` updates units one by one with these local tensors.

After the step, :class:`LocalStep` restores the DTensors before :class:`_InvalidateWeights` marks compute weights as out
of date.

All hooks refer to engines and models weakly. The optimizer owns its hooks, and scripts often keep an optimizer longer
than the model: a strong reference would keep the memory of a deleted model.
"""

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.comm.backends import is_on_host
from megatron.fsdp.dtensor.ragged_dtensor import make_like, same_layout
from megatron.fsdp.dtensor.torch_patches import call_at
from megatron.fsdp.helpers.weak import weak_method
from megatron.fsdp.optim.block_state import attach_block_state
from megatron.fsdp.optim.classes import BY_PARAMETER, check_optimizer, looks_at
from megatron.fsdp.optim.fresh_state import attach_fresh_state, initialize_state
from megatron.fsdp.optim.local_step import LocalStep, closure_of
from megatron.fsdp.runtime.engine import Engine, engines_of
from megatron.fsdp.runtime.unit import Unit
from megatron.fsdp.state.loading import own_shard

# Attaches an optimizer that has parameters of an engine, before its step or before its state is saved or loaded.
Attach = Callable[[torch.optim.Optimizer], None]

_attach_of: weakref.WeakKeyDictionary[Engine, Attach] = weakref.WeakKeyDictionary()
_generations = itertools.count(1)
_generation = 0
# For each optimizer that has been attached: the generation at that time, and its number of parameters. Comparing these
# two numbers makes the hook cheap, which torch runs before every step of every optimizer in the process.
_attached: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


def attach_at_first_use(engine: Engine, attach: Attach) -> None:
    """Call ``attach`` with every optimizer that has parameters of ``engine``.

    It is called before the optimizer's first step and before its state is saved or loaded. It is called again if the
    optimizer has received parameters, or another model has been sharded, since then. Hooks that it registers already
    run in the same step.
    """
    global _generation
    _generation = next(_generations)
    _attach_of[engine] = attach
    watch_steps()
    call_at("attach", attach_if_needed)


@functools.cache
def watch_steps() -> None:
    """Attach optimizers before their steps from now on, if they have parameters of an engine."""
    register_optimizer_step_pre_hook(attach_if_needed)


def attach_if_needed(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    """Attach an optimizer that has parameters of engines and is not attached, or has got parameters since."""
    now = _generation, sum(len(options["params"]) for options in optimizer.param_groups)
    if _attached.get(optimizer) == now:
        return
    engines = engines_of(p for options in optimizer.param_groups for p in options["params"])
    for attach in dict.fromkeys(_attach_of[engine] for engine in engines if engine in _attach_of):
        attach(optimizer)
    _attached[optimizer] = now


def attach_optimizer(optimizer: torch.optim.Optimizer, needs_gradient: bool = True) -> None:
    """Replace the optimizer's parameters by main weights, and add hooks around its step.

    Parameter groups and their options are kept. State of whole parameters, which some optimizers create when they are
    built, is sharded. The step first synchronizes gradients. After it, compute weights are out of date, and the next
    unshard reads the new main weights. A second call attaches parameters that have been added or sharded since the
    first.

    Args:
        optimizer: The optimizer.
        needs_gradient: Whether a step without any gradient raises an error instead of doing nothing.

    Raises:
        ValueError: No parameter belongs to a sharded model, state cannot be sharded, or the optimizer needs whole
            matrices or parameters, and some are divided between ranks.
        NotImplementedError: It is unknown whether the optimizer can update shards.
    """
    engines = engines_of(p for group in optimizer.param_groups for p in group["params"])
    if not engines:
        raise ValueError(
            "fully_shard_optimizer: none of the optimizer's parameters belongs to a sharded model. Shard the model "
            "first. The optimizer may be built from the model's parameters before or after that."
        )
    groups = [group for engine in engines for group in engine.groups]
    check_optimizer(optimizer, groups)
    places = {id(param.original): (group, i) for group in groups for i, param in enumerate(group.params)}
    for options in optimizer.param_groups:
        options["params"] = [_main_weight(optimizer, p, places) for p in options["params"]]
    # A second call replaces the hooks of the first, so that the order described above is kept.
    _detach(optimizer, (_StepArguments, _FinishGradients, _UpdateByUnit, _InvalidateWeights, LocalStep, _ShardState))
    local = LocalStep(groups)
    arguments = _StepArguments()
    optimizer.register_step_pre_hook(arguments)
    for engine in engines:
        optimizer.register_step_pre_hook(_FinishGradients(engine, needs_gradient, arguments))
    # Before LocalStep, also for state dicts: state has to be added before LocalStep sends it to the other ranks.
    attach_fresh_state(optimizer)
    if looks_at(optimizer) == "block":
        attach_block_state(optimizer)
    call_at("initialize", initialize_state)
    local.attach(optimizer)
    for engine in engines:
        by_unit = _UpdateByUnit(engine, local, arguments)
        optimizer.register_step_pre_hook(by_unit)
        optimizer.register_step_post_hook(_InvalidateWeights(engine, by_unit, arguments))
    for engine in engines:
        shard_state = _ShardState(engine)
        shard_state(optimizer)
        optimizer.register_load_state_dict_post_hook(shard_state)


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
        parameters = {p for options in optimizer.param_groups for p in options["params"]}
        engines = engines_of(parameters)
        # A graph writes to the gradients that it was captured with. Without ``.grad``, the step would ignore them.
        set_to_none = set_to_none and not any(engine.config.cuda_graph_mode for engine in engines)
        for engine in engines:
            with torch._C.DisableTorchFunctionSubclass():
                shared = any(param.main.requires_grad and param.main not in parameters for param in engine.params())
            if not zero_grad_buffer:
                engine.leave_gradients_waiting()
            elif shared:
                engine.finish_pending_gradients()  # the other optimizers keep theirs
            else:
                engine.clear_gradients(set_to_none)
        # Last: reading ``.grad`` would synchronize the gradients that are dropped.
        with torch._C.DisableTorchFunctionSubclass() if set_to_none else contextlib.nullcontext():
            type(optimizer).zero_grad(optimizer, set_to_none)


def attach_of_wrapped(optimizer: torch.optim.Optimizer) -> None:
    """Attach an optimizer that :func:`attach_optimizer` was not called with, or that has got parameters since."""
    parameters = {p for options in optimizer.param_groups for p in options["params"]}
    engines = [engine for engine in engines_of(parameters) if _attach_of.get(engine) is attach_of_wrapped]
    earlier = {p for engine in engines for param in engine.params() for p in (param.original, param.compute)}
    if not parameters.isdisjoint(earlier) or any(not is_attached(optimizer, engine) for engine in engines):
        attach_optimizer(optimizer, needs_gradient=False)


def is_attached(optimizer: torch.optim.Optimizer, engine: Engine) -> bool:
    """Whether :func:`attach_optimizer` has added hooks for the engine to the optimizer's step."""
    hooks = optimizer._optimizer_step_post_hooks.values()
    return any(isinstance(hook, _InvalidateWeights) and hook.engine() is engine for hook in hooks)


def attach_local_step(optimizer: torch.optim.Optimizer, groups: list[ParameterGroup]) -> None:
    """Make the optimizer's step update local shards instead of DTensors. The caller synchronizes gradients."""
    _detach(optimizer, (LocalStep,))
    LocalStep(groups).attach(optimizer)


def require_synchronized_gradients(optimizer: torch.optim.Optimizer, engines: Iterable[Engine], how: str) -> None:
    """Make the optimizer's step raise an error if a backward has ended since gradients were last synchronized.

    Args:
        optimizer: The optimizer.
        engines: The engines of its models.
        how: What the error tells the user to call.
    """
    _detach(optimizer, (_RequireSynchronizedGradients,))
    optimizer.register_step_pre_hook(_RequireSynchronizedGradients(engines, how))


def _detach(optimizer: torch.optim.Optimizer, kinds: tuple[type, ...]) -> None:
    """Remove the hooks of the given classes that an earlier call has added."""
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
    """Return the main weight of ``parameter``, and move the parameter's optimizer state to it, sharded."""
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
                        f"fully_shard_optimizer: cannot shard state {key!r} of {param.name}: expected the parameter's "
                        f"shape {tuple(param.main.shape)}; got {tuple(value.shape)}."
                    )
                value = group.shard(i, value)
            sharded[key] = value
        optimizer.state[param.main] = sharded
    return param.main


class _StepArguments:
    """Step pre-hook that removes the keyword arguments that only sharded models have, and stores their values.

    Attributes:
        sync: Whether to synchronize gradients before the step (``sync_grad_before_optimizer_step``).
        install: Whether to update compute weights after the step (``install_optimized_model_weights``).
    """

    def __init__(self) -> None:
        self.sync = self.install = True

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self.sync = kwargs.pop("sync_grad_before_optimizer_step", True)
        self.install = kwargs.pop("install_optimized_model_weights", True)


class _FinishGradients:
    """Step pre-hook that synchronizes the model's gradients. If ``needs_gradient``, it raises if there are none."""

    def __init__(self, engine: Engine, needs_gradient: bool, arguments: _StepArguments) -> None:
        self._finish = weak_method(engine.finish_pending_gradients)
        self._leave = weak_method(engine.leave_gradients_waiting)
        self._wait = weak_method(engine.wait_before_write)
        self._needs_gradient = needs_gradient
        self._arguments = arguments

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        (self._finish if self._arguments.sync else self._leave)()
        self._wait()
        closure = closure_of(args, kwargs)
        if closure is not None:
            # Gradients are computed later, in the step.
            return (args[:1], {"closure": self._finishing(closure)}) if self._arguments.sync else None
        if not self._needs_gradient:
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if all(p.grad is None and getattr(p, "decoupled_grad", None) is None for p in parameters):
            raise RuntimeError(
                "The optimizer's step found no gradient on any of its parameters and would change nothing. "
                "Call backward first, and check that the optimizer was given to fully_shard_optimizer."
            )
        return None

    def _finishing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            loss = closure()
            self._finish()
            self._wait()
            return loss

        return call


class _RequireSynchronizedGradients:
    """Step pre-hook that raises if gradients are not in ``.grad`` yet."""

    def __init__(self, engines: Iterable[Engine], how: str) -> None:
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet(engines)
        self._how = how

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if any(engine.has_pending_gradients for engine in self._engines):
            raise RuntimeError(
                "The optimizer's step would ignore the gradients of the latest backward, which are not synchronized "
                f"yet. {self._how} before the step."
            )


class _InvalidateWeights:
    """Step post-hook that marks compute weights as out of date, so that the next unshard reads the new main weights."""

    def __init__(self, engine: Engine, by_unit: "_UpdateByUnit", arguments: _StepArguments) -> None:
        self.engine = weakref.ref(engine)
        self._by_unit = by_unit
        self._arguments = arguments

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        engine = self.engine()
        if engine is None or not self._arguments.install:
            return
        if self._by_unit.prefetching:
            # _UpdateByUnit has invalidated weights already, before the all-gathers that it started. Wait for these:
            # after the last step of a script, they would be in flight when the process group is destroyed.
            engine.wait_for_prefetched()
        else:
            engine.invalidate_weights()


class _ShardState:
    """Load-state-dict post-hook that replaces whole or evenly sharded state by this rank's shards."""

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


class _UpdateByUnit:
    """Step pre-hook that updates units one by one, and unshards those that the next forward needs first meanwhile.

    It calls the optimizer's step once per unit, with the parameters of that unit only. The step proper then updates the
    remaining parameters. This is valid for optimizers that update every parameter independently; for all others the
    hook does nothing. It also does nothing if the user has registered a later pre-hook, which must see all parameters.

    Main weights on a CPU are all updated in this way. torch's optimizers compute on lists of all parameters, so their
    temporary tensors have the size of the model: new memory in every step, which does not fit into any cache. On a GPU,
    where fewer and larger kernels are faster, only the units to unshard are updated one by one.

    Args:
        engine: The engine of the model.
        local: Maps main weights to the local tensors in the optimizer's parameter groups.
        arguments: The arguments of the current step.

    Attributes:
        prefetching: Whether the latest step has unsharded units.
    """

    def __init__(self, engine: Engine, local: LocalStep, arguments: _StepArguments) -> None:
        self._engine = weakref.ref(engine)
        self._local = local
        self._arguments = arguments
        self.prefetching = False

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        engine = self._engine()
        self.prefetching = False
        is_last = isinstance(next(reversed(optimizer._optimizer_step_pre_hooks.values())), _UpdateByUnit)
        by_unit = is_last and type(optimizer) in BY_PARAMETER and closure_of(args, kwargs) is None
        if engine is None or not self._arguments.install or not by_unit:
            return
        first = engine.units_to_prefetch_first if engine.config.gather_during_step else []
        on_host = engine.units if is_on_host(engine.device) else [unit for unit in engine.units if unit.is_offloaded]
        others = [unit for unit in on_host if unit not in first]
        if first:
            # Before any all-gather starts: invalidating afterwards would drop the weights that it has gathered.
            engine.invalidate_weights()
            self.prefetching = True
        # The step proper updates the last unit, and LocalStep restores all parameters.
        units = first + others[:-1]
        *each, remaining = self._split(optimizer, units)
        for unit, parameters in zip(units, each, strict=True):
            if any(parameters):
                _set_parameters(optimizer, parameters)
                # __wrapped__ is the step without hooks, which would start this one again.
                type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
            if unit in first:
                engine.prefetch_first(until=unit)
        _set_parameters(optimizer, remaining)

    def _split(self, optimizer: torch.optim.Optimizer, units: list[Unit]) -> list[list[list[nn.Parameter]]]:
        """For each unit, and finally for what remains: the parameters in each of the optimizer's groups."""
        unit_of = {self._local.shown(e.main): i for i, u in enumerate(units) for g in u.groups for e in g.params}
        split: list[list[list[nn.Parameter]]] = [[[] for _ in optimizer.param_groups] for _ in [*units, None]]
        for number, options in enumerate(optimizer.param_groups):
            for parameter in options["params"]:
                split[unit_of.get(id(parameter), len(units))][number].append(parameter)
        return split


def _set_parameters(optimizer: torch.optim.Optimizer, parameters: list[list[nn.Parameter]]) -> None:
    for options, of_group in zip(optimizer.param_groups, parameters, strict=True):
        options["params"] = of_group
