"""Trial steps of an optimizer's class on tiny parameters, which leave the optimizer itself as it is.

A trial on parameters that are split as between two ranks shows whether a class looks at more than was declared. Equal
results do not prove the declaration.
"""

import copy
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# Private attributes of torch.optim.Optimizer: the hooks that a trial step must not call.
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_STEPS = 10
# A model may have hundreds of groups, which differ in their rates.
_GROUPS = 8
_SHAPE = (4, 3, 2, 2, 2, 2)


def twin_of(optimizer: torch.optim.Optimizer, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """A shallow copy of an optimizer, without its state and hooks, that updates these groups.

    It copies the attributes and not the constructor's arguments, which are unknown for subclasses.
    """
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.update({name: {} for name in _HOOKS})
    twin.state = defaultdict(dict)
    twin.param_groups = param_groups
    return twin


class _Tiny(NamedTuple):
    """A tiny parameter: its group's number, the gradients of all steps, and how many rows the first rank has."""

    group: int
    value: torch.Tensor
    gradients: torch.Tensor
    first: int


def looks_at_more(optimizer: torch.optim.Optimizer, kind: str) -> bool:
    """Whether a trial shows that an update depends on more than ``kind``, one of ``LOOKS_AT``.

    False, too, if there is no trial: of steps that need a closure or communicate, and of random ones.
    """
    generator = torch.Generator().manual_seed(0)
    tiny = []
    for group, options in enumerate(optimizer.param_groups[:_GROUPS]):
        for dim in sorted({p.dim() for p in options["params"]} - {0}):
            for number in range(2):
                value, *gradients = torch.randn(_STEPS + 1, *_SHAPE[:dim], generator=generator, dtype=torch.float64)
                # Rows of different sizes, so that each norm differs from that of a part. Gradients of different steps
                # agree, since D-Adaptation and Prodigy estimate a rate from that.
                sizes = torch.tensor([1.0, 2.0, 5.0, 9.0 + 9.0 * number]).view(-1, *[1] * (dim - 1))
                whole = kind == "parameter" or (kind == "matrix" and dim > 1)
                first = len(value) * (1 - number) if whole else 2
                tiny.append(_Tiny(group, value * sizes, (torch.stack(gradients) + gradients[0]) / sizes**2, first))
    try:
        with _WithoutCommunication(), torch.random.fork_rng(devices=[]):
            full, again = (_train(optimizer, tiny, [slice(None)] * len(tiny), seed) for seed in (1, 2))
            heads, tails = [slice(each.first) for each in tiny], [slice(each.first, None) for each in tiny]
            parts = zip(*(_train(optimizer, tiny, rows, 1) for rows in (heads, tails)), strict=True)
            return _same(full, again) and not _same(full, [torch.cat(rows) for rows in parts])
    except Exception:  # noqa: BLE001 - of any kind: the class is not ours
        return False


def _train(optimizer: torch.optim.Optimizer, tiny: list[_Tiny], rows: list[slice], seed: int) -> list[torch.Tensor]:
    """Take steps on these rows of the parameters; return the changes of each."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() would also seed the devices
    given = [nn.Parameter(each.value[mine].clone()) for each, mine in zip(tiny, rows, strict=True)]
    before = [parameter.detach().clone() for parameter in given]
    groups = [copy.deepcopy({**options, "params": []}) for options in optimizer.param_groups[:_GROUPS]]
    for each, parameter in zip(tiny, given, strict=True):
        groups[each.group]["params"].append(parameter)
    twin = twin_of(optimizer, groups)
    kept = {name: value for name, value in vars(twin).items() if name not in ("param_groups", "state")}
    # What is called may refer to the optimizer itself, such as a step that a scheduler has replaced.
    vars(twin).update(copy.deepcopy({name: value for name, value in kept.items() if not callable(value)}))
    for step in range(_STEPS):
        for each, parameter, mine in zip(tiny, given, rows, strict=True):
            # No gradient without elements: what looks at a full parameter need not expect that.
            parameter.grad = each.gradients[step][mine].clone() if parameter.numel() else None
        type(twin).step(twin)
    return [parameter.detach() - old for parameter, old in zip(given, before, strict=True)]


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(float((a - b).norm()) <= 1e-3 * float(a.norm()) for a, b in zip(left, right, strict=True))


class _WithoutCommunication(TorchDispatchMode):
    """Raises before a collective: an optimizer that communicates sees more than its rank's parameters."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if "c10d" in func.namespace:
            raise NotImplementedError
        return func(*args, **kwargs or {})
