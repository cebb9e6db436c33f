"""Optimizer state of parameters that have not been updated yet, so that a checkpoint has something to load into.

torch's optimizers make their state at the first step. ``torch.distributed.checkpoint.load`` loads into the tensors that
a state dict has, so a new process that loads into ``optimizer.state_dict()`` would restore nothing, without a word.
Here a state dict always has the state of every parameter that takes gradients, with the values that the first step
would begin with.
"""

import logging
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from megatron.fsdp.dtensor.ragged_dtensor import local_shard, make_like
from megatron.fsdp.optim.classes import BY_PARAMETER, looks_at
from megatron.fsdp.optim.local_step import State

logger = logging.getLogger(__name__)

# What torch's optimizers begin with, where that is not zero; "lr" stands for the learning rate.
_INITIAL: dict[str, float | str] = {"mu_product": 1.0, "mu": 1.0, "eta": "lr", "step_size": "lr"}
# A shape that state has only if it has its parameter's.
_DISTINCT = (2, 3, 5, 7, 11, 13, 17, 19)
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class FreshState:
    """Gives an optimizer's state dicts the state of parameters that have none, and takes back what was not loaded into.

    Taking it back leaves the optimizer as it was, so that its first step is what it would have been.
    """

    def __init__(self) -> None:
        # The version of each tensor when it was made: a load changes it.
        self._versions = WeakTensorKeyDictionary()
        self._warned = False

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook the optimizer's state dicts."""
        optimizer.register_state_dict_post_hook(self.fill)
        optimizer.register_load_state_dict_post_hook(self.take_back)
        optimizer.register_step_pre_hook(self.before_step)

    def fill(self, optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
        """State-dict post-hook."""
        states = state_dict["state"]
        missing = [(number, *found) for number, found in enumerate(_parameters(optimizer)) if number not in states]
        # What an unknown class begins with is not known, so it gets state only where all of it is to be loaded.
        if not missing or (states and type(optimizer) not in BY_PARAMETER):
            return
        for number, options, main in missing:
            state = self._state_of(optimizer, options, main)
            if state:
                states[number] = state
        state_dict["state"] = dict(sorted(states.items()))

    def initialize(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer itself the state that it lacks; what nothing is loaded into goes at its next step."""
        for options, main in _parameters(optimizer):
            if main not in optimizer.state and (state := self._state_of(optimizer, options, main)):
                optimizer.state[main] = state

    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Step pre-hook."""
        if len(self._versions):
            self.take_back(optimizer)

    def take_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove state that is as it was made."""
        for main in list(optimizer.state):
            values = [value for value in optimizer.state[main].values() if isinstance(value, torch.Tensor)]
            if values and all(self._versions.get(value) == _version(value) for value in values):
                del optimizer.state[main]
        self._versions.clear()

    def _state_of(self, optimizer: torch.optim.Optimizer, options: dict, main: nn.Parameter) -> State | None:
        if not main.requires_grad:
            return None
        local, by_parameter = local_shard(main), looks_at(optimizer) == "parameter"
        if by_parameter and not local.numel():
            return None  # the rank that has the parameter has its state
        shape = tuple(local.shape) if by_parameter else _DISTINCT[: main.dim()]
        try:
            probe = _state_after_a_step(optimizer, options, torch.zeros(shape, dtype=local.dtype, device=local.device))
            state = {
                key: _initial(key, value, options, main, None if by_parameter else shape)
                for key, value in probe.items()
            }
        except Exception as error:
            if not self._warned:
                logger.warning(
                    "%s has no state yet, and state to load into could not be made (%s). What is loaded into this "
                    "state dict is lost: take a step before, or load with torch.distributed.checkpoint.state_dict.",
                    type(optimizer).__name__,
                    error,
                )
            self._warned = True
            return None
        for value in state.values():
            if isinstance(value, torch.Tensor):
                self._versions[value] = _version(value)
        return state


def _parameters(optimizer: torch.optim.Optimizer) -> list[tuple[dict, nn.Parameter]]:
    """Every parameter with its options, in the order in which state dicts number them."""
    found: dict[int, tuple[dict, nn.Parameter]] = {}
    for options in optimizer.param_groups:
        for parameter in options["params"]:
            found.setdefault(id(parameter), (options, parameter))
    return list(found.values())


def _version(value: torch.Tensor) -> int:
    return (value._local_tensor if hasattr(value, "_local_tensor") else value)._version


def _state_after_a_step(optimizer: torch.optim.Optimizer, options: dict, value: torch.Tensor) -> State:
    """What the optimizer keeps for a parameter with this value, after a step of its own on that alone."""
    tiny = nn.Parameter(value)
    tiny.grad = torch.zeros_like(tiny)
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.update({name: {} for name in _HOOKS})
    twin.state = defaultdict(dict)
    twin.param_groups = [{**options, "params": [tiny]}]
    # Not `twin.step`, which a learning rate scheduler may have replaced to count steps.
    type(optimizer).step(twin)
    state: State = twin.state[tiny]
    return state


def _initial(key: str, value: Any, options: dict, main: nn.Parameter, shape: tuple[int, ...] | None) -> Any:
    """What state is before the first step.

    Args:
        key: Its name.
        value: What it is after a step on a parameter of ``shape``; None: of the main weight's own.
        options: Of the optimizer's parameter group.
        main: The parameter.
        shape: See ``value``.
    """
    named = _INITIAL.get(key, 0.0)
    start = float(options["lr"] if isinstance(named, str) else named)
    if not isinstance(value, torch.Tensor):
        return value if value is None else type(value)(start)
    if not value.dim() or shape is None:
        return torch.full_like(value, start)
    if tuple(value.shape) != shape:
        raise ValueError(f"state {key!r} is not shaped like its parameter")
    return make_like(torch.full_like(local_shard(main), start, dtype=value.dtype), main)


# The fresh state of every optimizer that is attached to a sharded model.
_of_optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, FreshState] = weakref.WeakKeyDictionary()


def attach_fresh_state(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer's state dicts the state of parameters without any, once however often this is called."""
    if optimizer not in _of_optimizers:
        _of_optimizers[optimizer] = FreshState()
        _of_optimizers[optimizer].attach(optimizer)


def initialize_state(optimizer: torch.optim.Optimizer) -> bool:
    """Give an attached optimizer state to load into; False for others."""
    fresh = _of_optimizers.get(optimizer)
    if fresh is None:
        return False
    if not optimizer.state:
        fresh.initialize(optimizer)
    return True
