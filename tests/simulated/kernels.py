"""Effects of an operator on a device: the tensors that it reads and writes, and whether the host waits for it."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX, zip_arguments
from torch.utils._pytree import tree_leaves

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
        schema = function._schema
        short = schema.name.partition("::")[2]
        call = cls(
            schema.name,
            copies=schema.name in _COPIES,
            waits=schema.name in _WAITING,
            views=any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns),
            writes_result=short not in _EMPTY,
            device=kwargs.get("device"),
            pinned=bool(kwargs.get("pin_memory")),
        )
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = None
        masked = False
        factory = FACTORY_FUNCTION_REGEX.match(short) is not None
        arguments = {argument.name: value for argument, value in zip_arguments(schema, args, kwargs)}
        # Arguments with the default value, which is True, are left out.
        has_option = any(argument.name == "async_op" for argument in schema.arguments)
        if schema.name.startswith("c10d::") and arguments.get("async_op", has_option):
            call.group = dist.ProcessGroup.unbox(arguments["process_group"]).group_name
        for argument, value in zip_arguments(schema, args, kwargs):
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            call.inputs += tensors
            if argument.name == "non_blocking":
                call.non_blocking = bool(value)
            elif schema.name.startswith("c10d::"):
                # Their schemas say nothing about writes.
                reads = argument.name.startswith("input") or short == "send"
                (call.reads if reads else call.writes).extend(tensors)
            elif argument.alias_info is not None and argument.alias_info.is_write:
                call.writes += tensors
            elif argument.alias_info is None and not factory:
                call.reads += tensors
                masked |= argument.name == "indices" and any(t.dtype == torch.bool for t in tensors)
        # torch fills with a single value without asking how many elements there are.
        call.waits |= masked and not (short.startswith("index_put") and call.inputs[-1].numel() == 1)
        return call
