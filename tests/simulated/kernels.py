"""Effects of an operator on a device: the tensors that it reads and writes, and whether the host waits for it."""

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX

# The host needs their result, or the size of it.
_WAITING = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::_unique2",
}
# They write nothing into the memory they return, or what they return is not memory.
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"}


class _Operator(NamedTuple):
    """The schema of an operator. ``uses`` has "reads", "writes" or "" for each argument, in their order."""

    name: str
    uses: dict[str, str]
    is_collective: bool
    views: bool
    writes_result: bool
    fills: bool


@functools.cache
def _operator(function: Any) -> _Operator:
    schema = function._schema
    short = schema.name.partition("::")[2]
    is_collective = schema.name.startswith("c10d::")
    makes_others = FACTORY_FUNCTION_REGEX.match(short) is not None

    def use(argument: Any) -> str:
        if is_collective:
            # Their schemas say nothing about writes.
            return "reads" if argument.name.startswith("input") or short == "send" else "writes"
        if argument.alias_info is not None:
            return "writes" if argument.alias_info.is_write else ""
        return "" if makes_others else "reads"

    return _Operator(
        schema.name,
        {argument.name: use(argument) for argument in schema.arguments},
        is_collective,
        any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns),
        short not in _EMPTY,
        short.startswith("index_put"),
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


@dataclass
class Call:
    """One call of an operator.

    Attributes:
        name: Name of the operator.
        inputs: All tensors among the arguments.
        reads: Those whose elements it reads.
        writes: Those whose elements it writes.
        copies: It may copy between the host and the device.
        non_blocking: Such a copy need not make the host wait.
        waits: The host always waits for it.
        views: It only returns views.
        writes_result: It writes into the new memory that it returns.
        device: The device that new memory was asked for on; None if there was no such wish.
        pinned: The new memory was asked for as pinned.
        group: The process group of an asynchronous collective; None for all other operators.
    """

    name: str
    inputs: list[torch.Tensor] = field(default_factory=list)
    reads: list[torch.Tensor] = field(default_factory=list)
    writes: list[torch.Tensor] = field(default_factory=list)
    copies: bool = False
    non_blocking: bool = False
    waits: bool = False
    views: bool = False
    writes_result: bool = True
    device: torch.device | None = None
    pinned: bool = False
    group: str | None = None

    @classmethod
    def of(cls, function: Any, args: tuple, kwargs: dict) -> "Call":
        """Describe a call. ``pin_memory`` is taken out of ``kwargs``, since there is no device to pin memory for."""
        operator = _operator(function)
        call = cls(
            operator.name,
            copies=operator.name in _COPIES,
            waits=operator.name in _WAITING,
            views=operator.views,
            writes_result=operator.writes_result,
            device=kwargs.get("device"),
            pinned=bool(kwargs.get("pin_memory")),
        )
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = None
        given = {**dict(zip(operator.uses, args, strict=False)), **kwargs}
        call.non_blocking = bool(given.get("non_blocking"))
        masked = False
        for name, value in given.items():
            if tensors := _tensors(value):
                call.inputs += tensors
                if use := operator.uses[name]:
                    getattr(call, use).extend(tensors)
                masked |= name == "indices" and any(t.dtype == torch.bool for t in tensors)
        # Arguments with the default value, which is True, are left out.
        if operator.is_collective and given.get("async_op", "async_op" in operator.uses):
            call.group = dist.ProcessGroup.unbox(given["process_group"]).group_name
        # torch fills with a single value without asking how many elements there are.
        call.waits |= masked and not (operator.fills and call.inputs[-1].numel() == 1)
        return call
