"""Swaps an optimizer's DTensor parameters for plain local tensors while its step runs.

Outside the step, parameters, gradients and state are DTensors: state dicts, clipping and resharding need to know which
slice of which tensor a rank holds. Inside the step they are plain tensors, for which torch's foreach and fused kernels
are several times faster. An element-wise update gives the same result on a shard as on the full parameter.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.dtensor.ragged_dtensor import local_shard, make_like
from megatron.fsdp.dtensor.unsupported import local_gradient
from megatron.fsdp.optim.classes import skips_empty

State = dict[str, Any]


def closure_of(args: tuple, kwargs: dict) -> Callable[[], Any] | None:
    """The closure that ``step`` was called with. ``args`` starts with the optimizer, as in torch's step hooks."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


class _Shown(nn.Parameter):
    """A plain parameter that has the attributes of its main weight, such as ``lr_scale``.

    Attributes:
        main: The main weight.
        _given: The gradient with which the step began.
        _known: The main weight's state in DTensors, by name.
    """

    main: nn.Parameter
    _given: torch.Tensor | None
    _known: dict[str, DTensor]

    def __getattr__(self, name: str) -> Any:
        # Not what a gradient is in, which a rank without elements hides, nor the engine's and DTensor's own.
        marks = {} if name.startswith("_") or name in ("main", "decoupled_grad") else vars(self.main)
        if name not in marks:
            raise AttributeError(name)
        return marks[name]


class LocalStep:
    """Shows an optimizer plain tensors instead of DTensors during its step.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._skips_empty = skips_empty(optimizer)
        _scale_nothing_empty(optimizer)
        self._dp_groups: dict[nn.Parameter, dist.ProcessGroup] = {}
        self._local: dict[nn.Parameter, _Shown] = {}
        # The parameter lists of the optimizer's param_groups while plain tensors replace them.
        self._replaced: list[list[nn.Parameter]] | None = None

    def add(self, groups: Iterable[ParameterGroup]) -> None:
        """Show local tensors instead of the main weights of these groups as well."""
        self._dp_groups |= {param.main: group.axes.dp_group for group in groups for param in group.params}

    def before_step(
        self,
        optimizer: torch.optim.Optimizer,
        args: tuple,
        kwargs: dict,
        after_closure: Callable[[], None] = lambda: None,
    ) -> tuple[tuple, dict] | None:
        """Step pre-hook: swap the parameters, and wrap the closure, which runs forward and backward, to see DTensors.

        Args:
            optimizer: The optimizer.
            args: The arguments of ``step``, after the optimizer.
            kwargs: Its keyword arguments.
            after_closure: Called after the closure.
        """
        self.restore(optimizer)  # torch does not call post-hooks of a step that raised an error
        self._swap(optimizer)
        closure = closure_of(args, kwargs)
        if closure is None:
            return None

        def call() -> Any:
            self.restore(optimizer)
            # If the closure raises an error, DTensors stay in place: callers may save a checkpoint then.
            loss = closure()
            after_closure()
            self._swap(optimizer)
            return loss

        return args[:1], {"closure": call}

    def shown(self, main: nn.Parameter) -> int:
        """The identity of the tensor that stands for a main weight during a step."""
        return id(self._local.get(main, main))

    def after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Step post-hook: restore the DTensors, and count the writes to them, which their local tensors have seen."""
        self.restore(optimizer)
        with torch._C.DisableTorchFunctionSubclass():
            mains = [main for options in optimizer.param_groups for main in options["params"]]
            mains = [m for m in mains if m in self._dp_groups and m.grad is not None]
            # The optimizer has not seen those without elements here, and all ranks have to count the same writes.
            torch._C._increment_version([*mains, *(local_shard(m) for m in mains if self._is_hidden(m))])

    def _swap(self, optimizer: torch.optim.Optimizer) -> None:
        self._replaced = [options["params"] for options in optimizer.param_groups]
        with torch._C.DisableTorchFunctionSubclass():
            for options in optimizer.param_groups:
                options["params"] = [self._localize(optimizer, main) for main in options["params"]]

    def _localize(self, optimizer: torch.optim.Optimizer, main: nn.Parameter) -> nn.Parameter:
        """The plain parameter for a main weight, with its gradient and state; other parameters stay as they are."""
        local = self._local.get(main)
        if local is None and main not in self._dp_groups:
            return main
        shard = local_shard(main)
        if local is None:
            local = self._local[main] = _Shown(shard, main.requires_grad)
            local.main, local._known = main, {}
        elif local.data_ptr() != shard.data_ptr():  # the main weight has moved
            local.data = shard
        if local.requires_grad is not main.requires_grad:
            local.requires_grad = main.requires_grad
        hidden, grad = self._is_hidden(main), main.grad
        local._given = local.grad = None if grad is None or hidden else local_gradient(main, grad)
        decoupled = getattr(main, "decoupled_grad", None)
        if decoupled is not None and not hidden:
            local.decoupled_grad = local_shard(decoupled)  # type: ignore[attr-defined]
        state = optimizer.state.pop(main, None)
        if state is not None:
            local._known = {k: v for k, v in state.items() if isinstance(v, DTensor)}
            optimizer.state[local] = state | {k: v._local_tensor for k, v in local._known.items()}
        move_scales(optimizer, main, local)
        return local

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the DTensors back, with the gradients and state of the plain tensors, unless that is done."""
        if self._replaced is None:
            return
        # A group may have been added after a step that raised.
        for options, mains in zip(optimizer.param_groups, self._replaced, strict=False):
            options["params"] = mains
            for main in mains:
                if (local := self._local.get(main)) is not None:
                    self._globalize(optimizer, main, local)
        self._replaced = None
        if self._skips_empty:
            for options in optimizer.param_groups:
                self._give_state_to_hidden(optimizer, options["params"])
            _sort_state(optimizer)

    def _globalize(self, optimizer: torch.optim.Optimizer, main: nn.Parameter, local: _Shown) -> None:
        """Move the state of a plain parameter back to its main weight, as DTensors where it has the same shape."""
        shard, grad = local_shard(main), local.grad
        if grad is not local._given:  # the step has set another, as ``p.grad = None`` does
            main.grad = None if grad is None else make_like(grad, main)
        local.grad = local._given = None
        if local.data_ptr() != shard.data_ptr():  # ``p.data = x``
            shard.copy_(local.detach())
            local.data = shard
        move_scales(optimizer, local, main)
        vars(local).pop("decoupled_grad", None)
        state = optimizer.state.pop(local, None)
        if state is None:
            return
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == shard.shape:
                # Reuse the DTensor unless the optimizer has replaced the tensor: making one costs more than the rest.
                known = local._known.get(key)
                if known is None or known._local_tensor is not value:
                    known = make_like(value, main)
                state[key] = known
        local._known = {}
        optimizer.state[main] = state

    # Parameters without elements on this rank ------------------------------------------------------------------

    def _is_hidden(self, main: nn.Parameter) -> bool:
        """True if this rank's shard of a main weight is empty and the optimizer must not see empty tensors."""
        return self._skips_empty and main in self._dp_groups and not local_shard(main).numel() and main.numel() > 0

    def _give_state_to_hidden(self, optimizer: torch.optim.Optimizer, mains: list[nn.Parameter]) -> None:
        """Give hidden parameters state without elements, because gathering state is a collective over all ranks."""
        # Of the same group if possible: the options of another one may mean other state, such as no momentum.
        found = itertools.chain(mains, *(options["params"] for options in optimizer.param_groups))
        seen = next((m for m in found if optimizer.state.get(m) and not self._is_hidden(m)), None)
        for main in mains:
            has_gradient = main.grad is not None or getattr(main, "decoupled_grad", None) is not None
            if seen is None or not self._is_hidden(main) or not has_gradient or main in optimizer.state:
                continue
            state: State = {}
            for key, value in optimizer.state[seen].items():
                if isinstance(value, DTensor):
                    state[key] = _empty_like(main, value.dtype)
                elif not isinstance(value, torch.Tensor):
                    state[key] = value
                elif not value.dim():
                    state[key] = value.clone()  # such as the step count, which parameters must not have in common
            optimizer.state[main] = state
            move_scales(optimizer, seen, main, copied=True)

    # State dicts -----------------------------------------------------------------------------------------------

    def share_full_state(self, optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
        """State-dict post-hook: send the state of every parameter from its owner to all ranks.

        Optimizers that look at full parameters have state of any shape, such as sums of rows or scales of blocks. It
        exists only on the rank that owns the parameter. This is a collective: all ranks must create a state dict.
        """
        states = state_dict["state"]
        order = dict.fromkeys(p for options in optimizer.param_groups for p in options["params"])
        for group in dict.fromkeys(self._dp_groups[main] for main in order if main in self._dp_groups):
            here = {n: main for n, main in enumerate(order) if self._dp_groups.get(main) is group}
            mine = {n: _describe(states[n]) for n, main in here.items() if n in states and local_shard(main).numel()}
            gathered: list[dict[int, State]] = [{} for _ in range(group.size())]
            dist.all_gather_object(gathered, mine, group=group)
            for number, state in (item for theirs in gathered for item in theirs.items()):
                # The owner's state wins: what this rank has of it may be out of date, from the last load.
                if number not in mine:
                    states[number] = {key: _rebuild(value, here[number]) for key, value in state.items()}


def move_scales(
    optimizer: torch.optim.Optimizer, source: nn.Parameter, target: nn.Parameter, copied: bool = False
) -> None:
    """Move the scales of state in 16 bits or fewer, which Transformer Engine's Adam keeps by parameter as well."""
    scales = getattr(optimizer, "_scales", None)
    if scales and source in scales:
        scales[target] = {k: v.clone() for k, v in scales[source].items()} if copied else scales.pop(source)


def _scale_nothing_empty(optimizer: torch.optim.Optimizer) -> None:
    """Let Transformer Engine's Adam load an empty shard into narrow state: it scales by the largest value."""
    scale: Callable[..., None] | None = getattr(type(optimizer), "_apply_scale", None)
    if scale is not None:
        own = weakref.ref(optimizer)  # the optimizer must not refer to itself
        vars(optimizer)["_apply_scale"] = lambda name, wide, *rest: wide.numel() and scale(own(), name, wide, *rest)


def _describe(state: State) -> State:
    """A parameter's state for other ranks, with dtypes in place of DTensors and all other tensors on the CPU."""
    return {
        key: value.dtype if isinstance(value, DTensor) else value.cpu() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def _rebuild(value: Any, main: nn.Parameter) -> Any:
    """The inverse of :func:`_describe` on a rank that owns no element of the main weight."""
    if isinstance(value, torch.dtype):
        return _empty_like(main, value)
    return value.to(main.device) if isinstance(value, torch.Tensor) and value.dim() else value


def _empty_like(main: torch.Tensor, dtype: torch.dtype) -> DTensor:
    return make_like(torch.empty_like(local_shard(main), dtype=dtype), main)


def _sort_state(optimizer: torch.optim.Optimizer) -> None:
    """Sort state in parameter order, because ranks that gather full state must go through it in the same order."""
    for options in optimizer.param_groups:
        for parameter in options["params"]:
            if parameter in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(parameter)
