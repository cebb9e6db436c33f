"""Alternatives to operations that sharded tensors do not support."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

# The one attribute that the engine sets on parameters: a weak reference to the engine.
OWNER = "_fsdp_owner"

_GATHER = "Use .full_tensor(), which all ranks must call, or .to_local() for this rank's shard."
_CALL = (
    "parameters are unsharded only while their unit runs in the forward of the sharded model: call that, and "
    "modules as block(x), not block.forward(x). If a module reads another one's parameters, give its class in "
    "fsdp_unit_modules, not the other's. Another method needs megatron_fsdp.register_forward_method(module, 'name') "
    "(register_fsdp_forward_method in the FSDP2 interface). The body of a generator runs after its forward: return a "
    "list. " + _GATHER
)
BEFORE = "Tie, parametrize, prune and normalize weights before the model is sharded."
_COLLECTIVE = "every rank has a different shard, and gradients are averaged over the ranks already. "
_HOOKS = (
    "In place of register_multi_grad_hook and _apply_optimizer_in_backward, use register_post_accumulate_grad_hook of "
    "each parameter."
)
# By the names of operations, or by their namespace.
_REMEDIES = {
    "t mm addmm bmm mv linear convolution embedding _embedding_bag native_layer_norm native_group_norm": _CALL,
    "native_batch_norm _fused_rms_norm _native_multi_head_attention": _CALL,
    "view _unsafe_view permute transpose expand unsqueeze": (
        f"shards have other shapes. {_GATHER} {BEFORE} {_HOOKS} In place of replicate() or DDP around it, shard the "
        "whole model with replicated_params."
    ),
    "select slice index index_put_ gather scatter_ unbind narrow": f"{_GATHER} To write, p.copy_(full tensor).",
    "eye t_ triu tril linalg_qr": "initialize a plain tensor of its shape, equal on all ranks, and p.copy_(that).",
    "cat stack": "join the full tensors, from p.full_tensor(), or the shards, from p.to_local().flatten().",
    "mse_loss smooth_l1_loss huber_loss": "use element-wise operations, such as (p - q).square().mean().",
    "c10d": _COLLECTIVE + _GATHER,
}
_REMEDY_OF = {name: remedy for names, remedy in _REMEDIES.items() for name in names.split()}

# Sets the error that an access of a storage's memory raises. torch 2.11 and 2.12 cannot take it back.
_CAN_ALLOW = hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg")
refuse_reads = torch._C._set_storage_data_ptr_access_error_msg if _CAN_ALLOW else None
NO_COPY = (
    "A sharded model cannot be copied. For averaged weights, copy its state: {name: value.clone() for name, value in "
    "model.state_dict().items()}. For a second model, build and shard another one, and load this state into it."
)
# ``plain.data = sharded.data`` takes the storage of the wrapper.
NO_MEMORY = (
    "This tensor was given the .data of a sharded tensor, which has no memory of its own. Copy the full tensor "
    "instead: plain.data.copy_(sharded.full_tensor())."
)
SHARED_DATA = (
    "parameter.data = other: a sharded parameter cannot share the memory of another parameter or of a gradient. Assign "
    "a copy, parameter.data = other.clone(), or write parameter.data.copy_(other)."
)


class Unsupported(NotImplementedError):
    """Raised for an operation that sharded tensors do not support. Its arguments: the operation and, at times, why."""


def explained(error: Unsupported, values: Iterable[Any]) -> NotImplementedError:
    """The error to show to the user: it names the main weight among ``values``, and says what to write instead."""
    func, *why = error.args
    space, operation = func._schema.name.split("::")
    known = _REMEDY_OF.get(operation if space == "aten" else space)
    remedy = known or f"{why[0] if why else 'it works on full tensors only'}. {_GATHER}"
    subject = f"the sharded parameter {name}" if (name := _name_of(values)) else "a sharded tensor"
    return NotImplementedError(f"{func} on {subject}: {remedy}")


def _name_of(values: Iterable[Any]) -> str:
    """The name of the first main weight among ``values``; empty if there is none."""
    engines = [(getattr(value, OWNER, lambda: None)(), value) for value in values]
    names = [param.name for engine, value in engines if engine for param in engine.params() if param.main is value]
    return names[0] if names else ""


def local_gradient(main: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The local tensor of a main weight's gradient, which users may have set.

    Raises:
        TypeError: It is not a DTensor.
    """
    if not isinstance(grad, DTensor):
        raise TypeError(
            f"{_name_of([main])}.grad: expected a DTensor like the parameter; got a {type(grad).__name__}. Of a full "
            "tensor that all ranks have, set parameter.grad = torch.zeros_like(parameter).copy_(tensor)."
        )
    return grad._local_tensor


def refuse_join(*unused: Any, **unused_options: Any) -> Any:
    """Takes the place of the method that ``torch.distributed.algorithms.Join`` calls."""
    raise NotImplementedError(
        "Join does not work with a sharded model: all ranks run the same number of batches. Leave out what is left of "
        "some ranks, as DistributedSampler(drop_last=True) does."
    )


def refuse_memory(*unused: Any, **unused_options: Any) -> Any:
    """Takes the place of methods that need the memory of the full tensor."""
    # Not a NotImplementedError, which safetensors would take for a tensor without values.
    raise RuntimeError(
        "numpy(), tolist(), share_memory_(), apply_(), DLPack and safetensors' save_file need the memory "
        f"of a full tensor. {_GATHER} "
        "To save a model, use megatron_fsdp.save_safetensors(model, folder)."
    )


def refuse_tracing(*unused: Any) -> Any:
    """Takes the place of the method by which torch.compile makes a fake tensor.

    ``__tensor_flatten__`` names the local tensor: CommDebugMode also calls it, to look for fake ones.
    """
    raise NotImplementedError(
        "torch.compile and torch.export cannot trace sharded tensors. Compile modules before sharding, and neither the "
        "optimizer's step nor a function around it."
    )
