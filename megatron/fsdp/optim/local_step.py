"""What an optimizer is shown during its step: plain tensors in place of DTensors, and few long ones in place of many.

What an optimizer does element by element is the same on each part of a parameter, and on the parts of many parameters
at once. So main weights that lie next to each other in a flat buffer, and that have the same options, are updated as
one flat parameter (:class:`_Run`), and the others one by one. Outside of the step, parameters, gradients and state are
those of each parameter, as DTensors: state of a run is flat, and a parameter's state is views of that.
"""

import collections
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.dtensor.ragged_dtensor import local_shard, make_like
from megatron.fsdp.optim.classes import ELEMENTWISE, looks_at, skips_empty

# Elements of a run at most. Joining spares the work per tensor; a large tensor has little of that per element, and
# temporary memory of its size is slower to get than that of several smaller ones.
JOINED_ELEMENTS = 1 << 18

State = dict[str, Any]


def closure_of(args: tuple, kwargs: dict) -> Callable[[], Any] | None:
    """The closure that ``step`` was called with; the first of ``args`` is the optimizer."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


class _Member(NamedTuple):
    """A parameter of a run: its elements ``begin`` to ``end`` of the flat tensor, in ``shape`` on this rank."""

    main: nn.Parameter
    begin: int
    end: int
    shape: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its part of a tensor that is flat like the run."""
        return flat[self.begin : self.end].view(self.shape)


class _Run:
    """Main weights next to each other, with the same options, as one flat parameter.

    Args:
        flat: The group's main weights on this rank.
        params: The parameters, in the order in which they lie there.

    Attributes:
        parameter: What the optimizer is shown.
    """

    def __init__(self, flat: torch.Tensor, params: list[ShardedParameter]) -> None:
        start = min((e.shard_slice.shard_offset for e in params if _numel(e)), default=0)
        self._members = []
        for param in params:
            begin = param.shard_slice.shard_offset - start if _numel(param) else 0
            self._members.append(_Member(param.main, begin, begin + _numel(param), tuple(param.shard_slice.shape)))
        self._flat = flat[start : start + max(member.end for member in self._members)]
        self.parameter = nn.Parameter(self._flat, requires_grad=any(e.main.requires_grad for e in params))
        self._state: State | None = None
        # What was left to each member: its state, and the very values in it.
        self._left: list[tuple[State, State]] = []

    def enter(self, optimizer: torch.optim.Optimizer) -> bool:
        """Give the optimizer the run's gradient and state; False if its members cannot be updated together."""
        grads = [member.main.grad for member in self._members]
        present = [grad for grad in grads if grad is not None]
        if (present and len(present) < len(grads)) or not self._take_state(optimizer):
            return False
        self.parameter.grad = self._join_gradients([local_shard(grad) for grad in present]) if present else None
        if self._state is not None:
            optimizer.state[self.parameter] = dict(self._state)
        return True

    def _join_gradients(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """One flat gradient: reductions leave such a one, which the members' are parts of; others are copied."""
        base: torch.Tensor | None = None
        for member, grad in zip(self._members, grads, strict=True):
            if member.begin == member.end:
                continue
            if base is None:
                base = self._around(member, grad)
            if base is None or grad.data_ptr() != base.data_ptr() + member.begin * base.element_size():
                break
            if grad.dtype != base.dtype or not grad.is_contiguous():
                break
        else:
            return torch.empty_like(self._flat) if base is None else base
        joined = torch.zeros_like(self._flat, dtype=grads[0].dtype)
        torch._foreach_copy_([member.of(joined) for member in self._members], grads)
        return joined

    def _around(self, member: _Member, grad: torch.Tensor) -> torch.Tensor | None:
        """What ``grad`` would be a part of if all gradients lay as the weights do."""
        offset = grad.storage_offset() - member.begin
        there = grad.untyped_storage().nbytes() // grad.element_size()
        if offset < 0 or offset + self._flat.numel() > there:
            return None
        return grad.as_strided(self._flat.shape, (1,), offset)

    def _take_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Find the members' state where it was left, or make flat state of what they have now."""
        states = [optimizer.state.get(member.main) for member in self._members]
        if self._left and all(map(_is_what_was_left, states, self._left)):
            return True
        self._state, self._left = None, []
        if not any(states):
            return True
        if not all(states):
            return False
        present = [state for state in states if state is not None]
        if any(state.keys() != present[0].keys() for state in present):
            return False
        flat: State = {}
        for key in present[0]:
            values = [state[key] for state in present]
            if not self._join(key, values, flat):
                return False
        self._state = flat
        return True

    def _join(self, key: str, values: list[Any], flat: State) -> bool:
        """Put one kind of state of all members together, if that can be done."""
        if all(isinstance(value, DTensor) for value in values):
            joined = torch.zeros_like(self._flat, dtype=values[0].dtype)
            for member, value in zip(self._members, values, strict=True):
                if local_shard(value).shape != member.shape or value.dtype != joined.dtype:
                    return False
                member.of(joined).copy_(local_shard(value))
            flat[key] = joined
            return True
        if all(isinstance(value, torch.Tensor) and not value.dim() for value in values):
            if not all(torch.equal(value, values[0]) for value in values):
                return False
            flat[key] = values[0].clone()
            return True
        flat[key] = values[0]
        return not any(isinstance(value, torch.Tensor) for value in values) and all(v == values[0] for v in values)

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the members their state."""
        self.parameter.grad = None
        state = optimizer.state.pop(self.parameter, None)
        if state is None:
            return
        known = self._state
        if known is None or not self._left or not _same_values(state, known):
            self._left = []
            for member in self._members:
                values = {key: self._view(member, value) for key, value in state.items()}
                optimizer.state[member.main] = dict(values)
                self._left.append((optimizer.state[member.main], values))
        self._state = dict(state)

    def _view(self, member: _Member, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim():
            return make_like(member.of(value), member.main)
        return value

    def dissolve(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """The members from now on are updated one by one, and share no state; returns them."""
        for main in self.mains:
            if main in optimizer.state:
                optimizer.state[main] = unshared(optimizer.state[main])
        return self.mains

    @property
    def mains(self) -> list[nn.Parameter]:
        """The members' main weights."""
        return [member.main for member in self._members]


def unshared(state: State) -> State:
    """The same state with scalars of its own; members of a run share the run's."""
    return {key: value.clone() if _is_scalar(value) else value for key, value in state.items()}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and not value.dim()


def _described(state: State) -> State:
    """What other ranks have to know of a parameter's state: tensors that are sharded with it by their dtype only."""
    return {
        key: value.dtype if isinstance(value, DTensor) else value.cpu() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def _undescribed(value: Any, main: nn.Parameter) -> Any:
    if isinstance(value, torch.dtype):
        return _empty_like(main, value)
    return value.to(main.device) if isinstance(value, torch.Tensor) and value.dim() else value


def _empty_like(main: torch.Tensor, dtype: torch.dtype) -> DTensor:
    return make_like(torch.empty_like(local_shard(main), dtype=dtype), main)


def _numel(param: ShardedParameter) -> int:
    return param.shard_slice.stop - param.shard_slice.start


def _is_what_was_left(state: State | None, left: tuple[State, State]) -> bool:
    shown, values = left
    return state is shown and _same_values(shown, values)


def _same_values(one: State, other: State) -> bool:
    return len(one) == len(other) and all(other.get(key) is value for key, value in one.items())


class LocalStep:
    """Shows an optimizer, during its step, plain tensors in place of DTensors.

    So it needs nothing that DTensor has no rule for, and spends no time on DTensor's dispatch.

    Args:
        groups: Of the parameters that the optimizer may have.
    """

    def __init__(self, groups: list[ParameterGroup]) -> None:
        self._flat = [(group.weights.main, group.params) for group in groups]
        self._entries = {id(param.main): param for group in groups for param in group.params}
        self._ranks = {id(param.main): group.axes.dp_group for group in groups for param in group.params}
        self._local: dict[int, nn.Parameter] = {}
        self._dtensors: dict[int, dict[str, DTensor]] = {}
        self._planned: list[list[nn.Parameter]] = []
        self._plan: list[list[_Run | nn.Parameter]] = []
        self._shown: list[list[nn.Parameter]] | None = None
        self._skips_empty = False

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook the optimizer's step and its state dicts."""
        self._skips_empty = skips_empty(optimizer)
        optimizer.register_step_pre_hook(self.before_step)
        optimizer.register_step_post_hook(self.after_step)
        optimizer.register_state_dict_post_hook(self.unshare_state)
        if looks_at(optimizer) == "parameter":
            optimizer.register_state_dict_post_hook(self.share_whole_state)

    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Step pre-hook."""
        self._leave(optimizer)  # a step that raised has not left
        self._enter(optimizer)
        closure = closure_of(args, kwargs)
        return None if closure is None else (args[:1], {"closure": self._outside(optimizer, closure)})

    def shown(self, main: nn.Parameter) -> int:
        """Identity of what the optimizer is shown in place of a main weight, during a step."""
        return id(self._local.get(id(main), main))

    def after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Step post-hook."""
        self._leave(optimizer)

    def _outside(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure runs the model and its backward: it sees DTensors."""

        def call() -> Any:
            self._leave(optimizer)
            try:
                return closure()
            finally:
                self._enter(optimizer)

        return call

    # What is updated together ----------------------------------------------------------------------------------

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Plan anew what is updated together, if the optimizer's parameters are others than before."""
        now = [options["params"] for options in optimizer.param_groups]
        known = self._planned
        if len(now) == len(known) and all(
            len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in zip(now, known, strict=True)
        ):
            return
        for run in (shown for plan in self._plan for shown in plan if isinstance(shown, _Run)):
            run.dissolve(optimizer)
        self._planned = [list(params) for params in now]
        self._local.clear()
        if type(optimizer) in ELEMENTWISE:
            self._plan = self._runs(now)
        else:
            self._plan = [list(params) for params in now]
        for run in (shown for plan in self._plan for shown in plan if isinstance(shown, _Run)):
            self._local.update((id(main), run.parameter) for main in run.mains)

    def _runs(self, now: list[list[nn.Parameter]]) -> list[list[_Run | nn.Parameter]]:
        options_of = {id(parameter): number for number, params in enumerate(now) for parameter in params}
        plan: list[list[_Run | nn.Parameter]] = [[] for _ in now]
        together = set()
        for flat, members_of_group in self._flat:
            # State of a scalar parameter looks like what the elements of others share.
            entries = sorted((e for e in members_of_group if e.local_shape), key=lambda e: e.shard_slice.shard_offset)
            numbers = [options_of.get(id(param.main)) for param in entries]
            runs: list[tuple[int | None, list[ShardedParameter]]] = []
            elements = 0
            for number, param in zip(numbers, entries, strict=True):
                if not runs or runs[-1][0] != number or elements + _numel(param) > JOINED_ELEMENTS:
                    runs.append((number, []))
                    elements = 0
                runs[-1][1].append(param)
                elements += _numel(param)
            for number, members in runs:
                if number is not None and len(members) > 1:
                    plan[number].append(_Run(flat, members))
                    together |= {id(param.main) for param in members}
        for params, shown in zip(now, plan, strict=True):
            shown += [parameter for parameter in params if id(parameter) not in together]
        return plan

    # In and out ------------------------------------------------------------------------------------------------

    def _enter(self, optimizer: torch.optim.Optimizer) -> None:
        self._follow(optimizer)
        self._shown = [options["params"] for options in optimizer.param_groups]
        for options, plan in zip(optimizer.param_groups, self._plan, strict=True):
            for run in [shown for shown in plan if isinstance(shown, _Run)]:
                if not run.enter(optimizer):
                    mains = run.dissolve(optimizer)
                    for main in mains:
                        del self._local[id(main)]
                    plan.remove(run)
                    plan += mains
            options["params"] = [
                shown.parameter if isinstance(shown, _Run) else self._localize(optimizer, shown) for shown in plan
            ]

    def _localize(self, optimizer: torch.optim.Optimizer, main: nn.Parameter) -> nn.Parameter:
        if id(main) not in self._entries:
            return main
        local = self._local.get(id(main))
        if local is None:
            local = self._local[id(main)] = nn.Parameter(local_shard(main), requires_grad=main.requires_grad)
        hidden = self._is_hidden(main)
        local.grad = None if main.grad is None or hidden else local_shard(main.grad)
        decoupled = getattr(main, "decoupled_grad", None)
        if decoupled is not None and not hidden:
            local.decoupled_grad = local_shard(decoupled)  # type: ignore[attr-defined]
        state = optimizer.state.pop(main, None)
        if state is not None:
            self._dtensors[id(main)] = {k: v for k, v in state.items() if isinstance(v, DTensor)}
            optimizer.state[local] = {k: local_shard(v) if isinstance(v, DTensor) else v for k, v in state.items()}
        return local

    def _leave(self, optimizer: torch.optim.Optimizer) -> None:
        if self._shown is None:
            return
        for options, mains, plan in zip(optimizer.param_groups, self._shown, self._plan, strict=True):
            options["params"] = mains
            for shown in plan:
                if isinstance(shown, _Run):
                    shown.leave(optimizer)
                elif id(shown) in self._entries:
                    self._globalize(optimizer, shown)
        self._shown = None
        if self._skips_empty:
            for options in optimizer.param_groups:
                self._give_state_to_hidden(optimizer, options["params"])
        _sort_state(optimizer)

    def _is_hidden(self, main: nn.Parameter) -> bool:
        """True for a parameter of which this rank owns nothing, if the optimizer must not see such."""
        return self._skips_empty and id(main) in self._entries and not local_shard(main).numel() and main.numel() > 0

    def _give_state_to_hidden(self, optimizer: torch.optim.Optimizer, mains: list[nn.Parameter]) -> None:
        """State without elements for what the optimizer did not see, as others have: ranks gather state together."""
        seen = next((m for m in mains if optimizer.state.get(m) and not self._is_hidden(m)), None)
        for main in mains:
            has_gradient = main.grad is not None or getattr(main, "decoupled_grad", None) is not None
            if seen is None or not self._is_hidden(main) or not has_gradient or main in optimizer.state:
                continue
            optimizer.state[main] = {
                key: _empty_like(main, value.dtype) if isinstance(value, DTensor) else value
                for key, value in unshared(optimizer.state[seen]).items()
                if isinstance(value, DTensor) or _is_scalar(value) or not isinstance(value, torch.Tensor)
            }

    def _globalize(self, optimizer: torch.optim.Optimizer, main: nn.Parameter) -> None:
        local = self._local[id(main)]
        local.grad = None
        if hasattr(local, "decoupled_grad"):
            del local.decoupled_grad
        state = optimizer.state.pop(local, None)
        if state is None:
            return
        known = self._dtensors.get(id(main), {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == local.shape:
                dtensor = known.get(key)
                if dtensor is None or local_shard(dtensor) is not value:
                    dtensor = make_like(value, main)
                state[key] = dtensor
        optimizer.state[main] = state

    # State dicts -----------------------------------------------------------------------------------------------

    def unshare_state(self, optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
        """State-dict post-hook: every parameter has scalars of its own, as whoever loads them expects."""
        states = state_dict["state"]
        times = collections.Counter(id(value) for state in states.values() for value in state.values())
        for key in states:
            if any(times[id(value)] > 1 for value in states[key].values()):
                states[key] = unshared(states[key])

    def share_whole_state(self, optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
        """State-dict post-hook: a parameter's state is known to every rank, as if all of them had updated it.

        What looks at whole parameters has state of any shape (sums of rows, scales of blocks), of which the rank that
        owns the parameter has all, and nobody else anything. A collective: all ranks must ask for a state dict.
        """
        states = state_dict["state"]
        order = dict.fromkeys(p for options in optimizer.param_groups for p in options["params"])
        for group in dict.fromkeys(self._ranks[id(main)] for main in order if id(main) in self._ranks):
            here = {n: main for n, main in enumerate(order) if self._ranks.get(id(main)) is group}
            mine = {n: _described(states[n]) for n, main in here.items() if n in states and local_shard(main).numel()}
            everyone: list[dict[int, State]] = [{} for _ in range(group.size())]
            dist.all_gather_object(everyone, mine, group=group)
            for number, state in (item for theirs in everyone for item in theirs.items()):
                if number not in mine:  # what a rank knows of another's may be as old as what it has loaded
                    states[number] = {key: _undescribed(value, here[number]) for key, value in state.items()}


def _sort_state(optimizer: torch.optim.Optimizer) -> None:
    """Put state into the order of the parameters: ranks that gather whole state go through it in one order."""
    for options in optimizer.param_groups:
        for parameter in options["params"]:
            if parameter in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(parameter)
