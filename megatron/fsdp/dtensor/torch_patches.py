"""The functions of PyTorch that are replaced while sharded models exist.

PyTorch offers no hook in these places. Each replacement does what the original does for tensors and optimizers that do
not belong to a sharded model.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from megatron.fsdp.dtensor.gathering import reduce_over
from megatron.fsdp.dtensor.placements import (
    RaggedShard,
    ReportedPlacements,
    SectionedShard,
    local_slice,
    spanning_mesh,
    spec_like,
)
from megatron.fsdp.dtensor.ragged_dtensor import RaggedDTensor, has_ragged, local_shard, replicated
from megatron.fsdp.dtensor.unsupported import refuse_memory
from megatron.fsdp.helpers import patches
from megatron.fsdp.helpers.patches import Patches

_HERE = "dtensor.torch_patches"
_DISPATCHER = "torch.distributed.tensor._dispatch:OpDispatcher"

_ROWS = f"""
    torch.distributed._state_dict_utils:_distribute_tensors -> {_HERE}:distribute_tensors
        cuts a full tensor into even chunks when a state dict is broadcast from rank 0
    torch.distributed.checkpoint.state_dict:_init_optim_state -> optim.hooks:initialize_state
        creates optimizer state to load into by taking a step, so that training would begin with the second step
    torch.distributed.checkpoint.state_dict:_verify_options -> state.loading:before_state_dict
        notes parameters of a model that is sharded meanwhile, and takes one rank's experts for all
    torch.nn.utils.clip_grad:_get_total_norm -> {_HERE}:total_norm
        misses the experts of other ranks, which are not in the mesh of this rank's experts
    torch.nn.utils:get_total_norm -> {_HERE}:total_norm
        misses the experts of other ranks, which are not in the mesh of this rank's experts
    torch.utils._foreach_utils:_foreach_supported_types -> {_HERE}:with_ragged FACTORY
        makes clipping multiply gradients one by one
    torch.distributed.tensor:DTensor.from_local -> {_HERE}:from_local
        takes a shard of any size for an even one, where optimizers make state like a parameter
    {_DISPATCHER}._propagate_op_sharding_dispatch_slow_path -> {_HERE}:dispatch_in_backward before=2.13
        ignores __torch_dispatch__ of subclasses in backward, where no dispatch mode runs before it
    torch.utils.dlpack:to_dlpack -> {_HERE}:to_dlpack
        gives the memory of a sharded tensor, which has none, and reading it is a crash
    torch.nn:Module._apply -> runtime.structure:apply_if_allowed
        converts or moves the parameters of a part of a sharded model, which then would not be trained
    torch.autograd:_engine_run_backward -> runtime.graph:run_backward
        weights that backward reads are unsharded before, however it comes to them
    torch.optim:Optimizer.state_dict -> optim.hooks:attach_before
        may be called before the first step, at which the optimizer of a model sharded in place is attached
    torch.optim:Optimizer.load_state_dict -> optim.hooks:attach_before
        may be called before the first step, at which the optimizer of a model sharded in place is attached
"""
TORCH = Patches("PyTorch", patches.rows_of(_ROWS, "megatron.fsdp", patches.TORCH))


def apply() -> None:
    """Install the patches, and log a warning if this version of PyTorch was not tried. A second call changes nothing.

    Raises:
        ImportError: This version of PyTorch lacks one of the names; the message says which.
    """
    TORCH.install()
    patches.warn_if_untried(patches.TORCH, torch.__version__)


def distribute_tensors(
    original: Callable[..., None], local_state_dict: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any
) -> None:
    """Copy this rank's slice of a broadcast tensor into its ragged shard; leave other tensors to PyTorch."""
    for key in keys:
        value = local_state_dict.get(key)
        if isinstance(value, tuple) and isinstance(value[0], RaggedDTensor):
            local, whole = value
            local._local_tensor.copy_(local_slice(local._spec).take_from(whole))
            local_state_dict[key] = local
    original(local_state_dict, keys, *args, **kwargs)


def dispatch_in_backward(
    original: Callable[..., Any], dispatcher: Any, op_call: Any, args: tuple, kwargs: dict, *more: Any
) -> Any:
    """Run an operation on the shards of a :class:`RaggedDTensor`; PyTorch returns what is no sharding as it is."""
    if has_ragged(args, kwargs):
        return RaggedDTensor.__torch_dispatch__(op_call, (), args, kwargs)
    return original(dispatcher, op_call, args, kwargs, *more)


@torch.no_grad()
def total_norm(
    original: Callable[..., torch.Tensor],
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Compute the norm of DTensors and tensors that all ranks have, and count every element once. A collective.

    PyTorch handles tensors of which none belongs to this engine. A rank that has not sharded a model lacks the patch.
    """
    tensors, norm_type = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors), float(norm_type)
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    is_partial = any(placement.is_partial() for tensor in sharded for placement in tensor._spec.placements)
    if not any(isinstance(tensor, RaggedDTensor) for tensor in sharded) or is_partial or norm_type <= 0:
        return original(tensors, norm_type, error_if_nonfinite, foreach)
    mesh, copies = spanning_mesh(tensors)
    held: dict[int, list[torch.Tensor]] = {}
    for tensor, number in zip(tensors, copies, strict=True):
        held.setdefault(number, []).append(local_shard(tensor) if isinstance(tensor, DTensor) else tensor)
    # torch's infinity norm rejects tensors without elements.
    filled = [(number, [x for x in each if x.numel()] or [each[0].new_zeros(1)]) for number, each in held.items()]
    norms = [original(each, norm_type, False, foreach) / number ** (1 / norm_type) for number, each in filled]
    # Ranks may have elements of tensors of other dtypes.
    norm = original(norms, norm_type).to(functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors)))
    if math.isinf(norm_type):
        norm = reduce_over(norm, dist.ReduceOp.MAX, mesh, range(mesh.ndim))
    else:
        powers = norm.to(torch.promote_types(norm.dtype, torch.float32)) ** norm_type
        total = reduce_over(powers, dist.ReduceOp.SUM, mesh, range(mesh.ndim))
        norm = (total ** (1 / norm_type)).to(norm.dtype)
    norm = original([norm], norm_type, error_if_nonfinite)
    # torch multiplies plain gradients, and those of another mesh, by a plain tensor only.
    alike = all(isinstance(tensor, DTensor) and tensor.device_mesh == mesh for tensor in tensors)
    return replicated(norm, mesh) if alike else norm


def with_ragged(original: list[type]) -> list[type]:
    """The classes of tensors that torch's clipping passes to ``_foreach_`` operations."""
    return [*original, RaggedDTensor]


def to_dlpack(original: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """Refuse sharded tensors."""
    return refuse_memory() if isinstance(tensor, RaggedDTensor) else original(tensor)


def from_local(
    original: Callable[..., DTensor],
    local_tensor: torch.Tensor,
    device_mesh: Any = None,
    placements: Any = None,
    **options: Any,
) -> DTensor:
    """Make a DTensor like the one whose placements are given, if the local tensor has the shape of its shard."""
    if isinstance(placements, ReportedPlacements) and local_tensor.shape == local_slice(placements.spec).local_shape:
        return RaggedDTensor(local_tensor, spec_like(placements.spec, local_tensor.dtype), requires_grad=False)
    return original(local_tensor, device_mesh, placements, **options)


# Classes in pickled DTensors, which torch.load(weights_only=True) may create.
torch.serialization.add_safe_globals([RaggedDTensor, RaggedShard, SectionedShard, DTensorSpec])
