"""Optimizer state of parameters that have not been updated yet, so that checkpoints have tensors to load into.

torch's optimizers create their state in the first step. ``torch.distributed.checkpoint.load`` only fills the tensors
that a state dict contains, so a new process that loads into ``optimizer.state_dict()`` would silently restore nothing.
Therefore, state dicts of attached optimizers contain the state of every parameter that requires gradients, with the
initial values that the first step would create.
"""

import logging
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron.fsdp.dtensor.ragged_dtensor import make_like
from megatron.fsdp.optim.block_state import initial_state
from megatron.fsdp.optim.classes import BY_PARAMETER, looks_at, updates_like
from megatron.fsdp.optim.local_step import State, move_scales
from megatron.fsdp.optim.trial import twin_of

logger = logging.getLogger(__name__)

# Initial values of state in torch's optimizers that are not zero; "lr" is the learning rate.
_INITIAL: dict[str, float | str] = {"mu_product": 1.0, "mu": 1.0, "eta": "lr", "step_size": "lr"}
# That there was no state yet is kept in a sign, which files and copies keep, too: of SGD's momentum, since SGD dampens
# its first gradient only if there is one, and of all state of classes whose initial values are not known.
_NONE_YET = -0.0
# Dimensions of the trial parameter. They are distinct, so that state of this shape must be shaped like its parameter.
_DISTINCT = (2, 3, 5, 7, 11, 13, 17, 19)


class FreshState:
    """Adds initial state to an optimizer's state dicts, and discards it again if nothing was loaded into it.

    Discarding leaves the optimizer without state, so its first step is the same as without a state dict.
    """

    def __init__(self) -> None:
        # The version counter of each tensor when it was created. Loading into a tensor increments it.
        self._versions = WeakTensorKeyDictionary()
        self._warned = False
        # Parameters whose state was loaded and says that there was none.
        self._none_yet: list[torch.Tensor] = []

    def add_missing(self, optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
        """Add the state of parameters that have none, or an empty entry that a look at it has made, to a state dict."""
        states = state_dict["state"]
        missing = [(number, *found) for number, found in enumerate(_parameters(optimizer)) if not states.get(number)]
        if not missing:
            return
        is_known = updates_like(optimizer, BY_PARAMETER)
        for number, options, main in missing:
            state = self._state_of(optimizer, options, main)
            if state:
                states[number] = state
                if not is_known:
                    optimizer.state[main] = state  # where a method that calls torch's state_dict() may look it up
        state_dict["state"] = dict(sorted(states.items()))
        for group, options in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
            group.update({key: value for key, value in options.items() if key not in group})

    def initialize(self, optimizer: torch.optim.Optimizer) -> None:
        """Create missing state in the optimizer itself. The next step discards tensors that nothing was loaded into."""
        for options, main in _parameters(optimizer):
            if not optimizer.state.get(main) and (state := self._state_of(optimizer, options, main)):
                optimizer.state[main] = state

    def discard_unloaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove state whose tensors have not changed since they were created."""
        for main in list(optimizer.state) if len(self._versions) else ():
            # Of tensors without elements, the versions do not tell. Such state may be kept: nothing depends on it.
            values = [v for v in optimizer.state[main].values() if isinstance(v, torch.Tensor) and _local(v).numel()]
            if values and all(self._versions.get(value) == _version(value) for value in values):
                del optimizer.state[main]
        self._versions.clear()

    def own_initial(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy loaded state from before a first step. torch would have loaded none, to which no step could write.

        A program may load the state dict from before its first step again and again, to restart.
        """
        states = optimizer.state.items() if _marks(optimizer) else ()
        self._none_yet = [main for main, state in states if _is_marked(state)]
        for state in optimizer.state.values() if not isinstance(optimizer, torch.optim.Adagrad) else ():
            # Adagrad has state from the beginning. SGD counts no steps.
            first = state.get("step", state.get("momentum_buffer"))
            if first is not None and not (_local(first).any() if isinstance(first, torch.Tensor) else first):
                state.update({key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)})

    def drop_none_yet(self, optimizer: torch.optim.Optimizer, runs_closure: bool) -> None:
        """Drop loaded state of parameters without any that a step updates now, and so creates.

        Ranks without elements cannot see the mark. They keep the state, which a step creates on the other ranks: keys
        of state dicts are equal on all ranks at any time.
        """
        kept = []
        for main in self._none_yet:
            gradients = main.grad, getattr(main, "decoupled_grad", None)
            if main.requires_grad if runs_closure else any(gradient is not None for gradient in gradients):
                optimizer.state.pop(main, None)
            else:
                kept.append(main)
        self._none_yet = kept

    def _state_of(self, optimizer: torch.optim.Optimizer, options: dict, main: nn.Parameter) -> State | None:
        if not main.requires_grad:
            return None
        local, by_parameter = _local(main), looks_at(optimizer) == "parameter"
        if by_parameter and not local.numel():
            return None  # only the rank that owns the parameter has state
        if looks_at(optimizer) == "block":
            return initial_state(optimizer, options, main)
        shape = tuple(local.shape) if by_parameter else _DISTINCT[: main.dim()]
        none_yet = _NONE_YET if _marks(optimizer) else 0.0
        try:
            tiny = nn.Parameter(torch.zeros(shape, dtype=local.dtype, device=local.device))
            probe, counters = _state_after_a_step(optimizer, options, tiny)
            move_scales(optimizer, tiny, main)
            options.update({key: value * 0 for key, value in counters.items()})
            state = {
                key: _initial(key, value, options, main, None if by_parameter else shape, none_yet)
                for key, value in probe.items()
            }
        except Exception as error:
            if not self._warned:
                logger.warning(
                    "%s has no state yet, and creating state to load into failed (%s). Values loaded into this state "
                    "dict are lost: take a step first, or load with torch.distributed.checkpoint.state_dict.",
                    type(optimizer).__name__,
                    error,
                )
            self._warned = True
            return None
        for value in state.values():
            if isinstance(value, torch.Tensor):
                self._versions[value] = _version(value)
        return state


def require_all_state(optimizer: torch.optim.Optimizer) -> None:
    """Check that loaded state has what a step reads: otherwise, torch's step raises a KeyError.

    ``torch.distributed.checkpoint.load`` replaces the options in a state dict, but adds no state to it.

    Raises:
        ValueError: The saved options, such as ``amsgrad``, need state that the optimizer did not have.
    """
    # SGD creates what it lacks.
    for options in optimizer.param_groups if updates_like(optimizer, BY_PARAMETER - {torch.optim.SGD}) else ():
        main = next((main for main in options["params"] if optimizer.state.get(main)), None)
        if main is None:
            continue
        tiny = nn.Parameter(torch.zeros(_DISTINCT[: main.dim()], dtype=main.dtype, device=_local(main).device))
        if lacking := _state_after_a_step(optimizer, options, tiny)[0].keys() - optimizer.state[main].keys():
            raise ValueError(
                f"{type(optimizer).__name__}: the loaded options need {', '.join(sorted(lacking))}, which the state "
                "lacks. Build the optimizer with the saved options, and load into its state_dict()."
            )


def join_text_keys(state_dict: dict) -> None:
    """Move state under a parameter's number as text to the number, in a state dict to load.

    ``torch.distributed.checkpoint.load`` fills tensors in place, but adds other values, such as a step count that is an
    int, under the number as text. The optimizer would ignore them.
    """
    state: dict[Any, State] = {}
    for key, values in state_dict["state"].items():
        number = int(key) if isinstance(key, str) and key.isdigit() else key
        state[number] = {**state.get(number, {}), **values}
    state_dict["state"] = state


def _parameters(optimizer: torch.optim.Optimizer) -> list[tuple[dict, nn.Parameter]]:
    """All parameters with their options, in the order of their numbers in state dicts."""
    found: dict[int, tuple[dict, nn.Parameter]] = {}
    for options in optimizer.param_groups:
        for parameter in options["params"]:
            found.setdefault(id(parameter), (options, parameter))
    return list(found.values())


def _local(value: torch.Tensor) -> torch.Tensor:
    return value._local_tensor if hasattr(value, "_local_tensor") else value


def _version(value: torch.Tensor) -> int:
    return _local(value)._version


def _state_after_a_step(
    optimizer: torch.optim.Optimizer, options: dict, tiny: nn.Parameter
) -> tuple[State, dict[str, Any]]:
    """The state that the optimizer keeps for a parameter after one step with a zero gradient.

    The step is taken by a shallow copy of the optimizer, so the optimizer itself does not change.

    Returns:
        The state, and what the step has added to the options of the parameter's group: a count of steps.
    """
    tiny.grad = torch.zeros_like(tiny)
    # Schedule-free optimizers take no step between their eval() and train().
    mode = {"train_mode": True} if "train_mode" in options else {}
    twin = twin_of(optimizer, [{**options, **mode, "params": [tiny]}])
    # Call the class's step: a learning rate scheduler may have replaced the attribute to count steps.
    type(optimizer).step(twin)
    return twin.state[tiny], {key: value for key, value in twin.param_groups[0].items() if key not in options}


def _marks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether state that was created says so."""
    return updates_like(optimizer, {torch.optim.SGD}) or not updates_like(optimizer, BY_PARAMETER)


def _is_marked(state: State) -> bool:
    """Whether state was created, and not by a step. Always False if this rank has no elements of it."""
    values = [_local(v) for v in state.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    values = [value for value in values if value.numel()]
    return bool(values) and not any(value.any() or not value.signbit().all() for value in values)


def _initial(  # noqa: PLR0913
    key: str, value: Any, options: dict, main: nn.Parameter, shape: tuple[int, ...] | None, none_yet: float
) -> Any:
    """The initial value of one entry of a parameter's state.

    Args:
        key: Name of the entry.
        value: Its value after a trial step.
        options: Options of the optimizer's parameter group.
        main: The parameter.
        shape: Shape of the trial parameter; None if it had that of this rank's main weight.
        none_yet: The value of entries that start at zero, or whose start is not known.
    """
    named = _INITIAL.get(key, none_yet)
    start = float(options["lr"] if isinstance(named, str) else named)
    if not isinstance(value, torch.Tensor):
        return value if value is None else type(value)(start)
    if not value.dim() or shape is None:
        return torch.full_like(value, start)
    if tuple(value.shape) != shape:
        raise ValueError(f"state {key!r} is not shaped like its parameter")
    local = torch.full_like(_local(main), start, dtype=value.dtype)
    return make_like(local, main) if isinstance(main, DTensor) else local
