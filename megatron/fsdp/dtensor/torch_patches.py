"""The functions of PyTorch that are replaced while sharded models exist.

PyTorch offers no hook in these places. Each replacement does what the original does for tensors and optimizers that do
not belong to a sharded model.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from megatron.fsdp.comm.collectives import all_reduce
from megatron.fsdp.dtensor.placements import (
    RaggedShard,
    ReportedPlacements,
    SectionedShard,
    local_slice,
    spanning_mesh,
    spec_like,
)
from megatron.fsdp.dtensor.ragged_dtensor import PartialDTensor, RaggedDTensor, local_shard
from megatron.fsdp.dtensor.unsupported import OWNER
from megatron.fsdp.helpers import patches
from megatron.fsdp.helpers.patches import Patch, Patches

_HERE = "megatron.fsdp.dtensor.torch_patches"

TORCH = Patches(
    "PyTorch",
    [
        Patch(
            "torch.distributed._state_dict_utils:_distribute_tensors",
            "cuts a whole tensor into even chunks when a state dict is broadcast from rank 0",
            f"{_HERE}:distribute_tensors",
            patches.TORCH,
        ),
        Patch(
            "torch.distributed.checkpoint.state_dict:_init_optim_state",
            "creates optimizer state to load into by taking a step, so that training would begin with the second step",
            "megatron.fsdp.optim.hooks:initialize_state",
            patches.TORCH,
        ),
        Patch(
            "torch.distributed.tensor:DTensor.__reduce_ex__",
            "fails for a DTensor whose local tensor is a view at an offset, or that refers to its model",
            f"{_HERE}:reduce_at_offset_zero",
            patches.TORCH,
        ),
        Patch(
            "torch:_amp_foreach_non_finite_check_and_unscale_",
            "lets ranks skip different steps: it reduces over the axes along which the first gradient is sharded",
            f"{_HERE}:unscale_gradients",
            patches.TORCH,
        ),
        *(
            Patch(
                f"torch.nn.utils{name}",
                "misses the experts of other ranks, which are not in the mesh of this rank's experts",
                f"{_HERE}:total_norm",
                patches.TORCH,
            )
            for name in (".clip_grad:_get_total_norm", ":get_total_norm")
        ),
        Patch(
            "torch.distributed.tensor:DTensor.from_local",
            "takes a shard of any size for an even one, where optimizers make state like a parameter",
            f"{_HERE}:from_local",
            patches.TORCH,
        ),
        Patch(
            "torch.nn:Module._apply",
            "converts or moves the parameters of a part of a sharded model, which then would not be trained",
            "megatron.fsdp.runtime.structure:apply_if_allowed",
            patches.TORCH,
        ),
        Patch(
            "torch.autograd:_engine_run_backward",
            "weights that backward reads are unsharded before, however it comes to them",
            "megatron.fsdp.runtime.graph:run_backward",
            patches.TORCH,
        ),
        *(
            Patch(
                f"torch.optim:Optimizer.{name}",
                "may be called before the first step, at which the optimizer of a model sharded in place is attached",
                "megatron.fsdp.optim.hooks:attach_before",
                patches.TORCH,
            )
            for name in ("state_dict", "load_state_dict")
        ),
    ],
)


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


def unscale_gradients(
    original: Callable[..., None], grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Unscale gradients, and set ``found_inf`` if any rank has a non-finite one. A collective."""
    original([local_shard(g) if isinstance(g, DTensor) else g for g in grads], found_inf, inv_scale)
    if any(isinstance(grad, DTensor) for grad in grads):
        found_inf.copy_(_reduced(found_inf, spanning_mesh(grads)[0], dist.ReduceOp.MAX))


@torch.no_grad()
def total_norm(
    original: Callable[..., torch.Tensor],
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Compute the norm of DTensors and tensors that all ranks have, and count every element once. A collective."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    is_partial = any(placement.is_partial() for tensor in sharded for placement in tensor._spec.placements)
    if not sharded or is_partial or norm_type <= 0:
        return original(tensors, norm_type, error_if_nonfinite, foreach)
    mesh, copies = spanning_mesh(tensors)
    held: dict[int, list[torch.Tensor]] = {}
    for tensor, number in zip(tensors, copies, strict=True):
        held.setdefault(number, []).append(local_shard(tensor) if isinstance(tensor, DTensor) else tensor)
    # torch's infinity norm rejects tensors without elements.
    filled = [(number, [x for x in each if x.numel()] or [each[0].new_zeros(1)]) for number, each in held.items()]
    norms = [original(each, norm_type, False, foreach) / number ** (1 / norm_type) for number, each in filled]
    norm = original(norms, norm_type)
    if math.isinf(norm_type):
        norm = _reduced(norm, mesh, dist.ReduceOp.MAX)
    else:
        powers = norm.to(torch.promote_types(norm.dtype, torch.float32)) ** norm_type
        norm = (_reduced(powers, mesh, dist.ReduceOp.SUM) ** (1 / norm_type)).to(norm.dtype)
    norm = original([norm], norm_type, error_if_nonfinite)
    # torch multiplies gradients of another mesh by a plain tensor only.
    alike = all(tensor.device_mesh == mesh for tensor in sharded)
    if not alike:
        return norm
    everywhere: Any = DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return PartialDTensor(norm, everywhere._spec, requires_grad=False)  # which can be formatted


def _reduced(value: torch.Tensor, mesh: DeviceMesh, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """Reduce over all axes, on the mesh's device: gradients may be in host memory, where NCCL cannot reduce."""
    sent = value.clone() if value.device.type == mesh.device_type else value.to(mesh.device_type)
    for group in mesh.get_all_groups():
        all_reduce(sent, op, group)
    return sent.to(value.device)


def reduce_at_offset_zero(original: Callable[..., Any], tensor: DTensor, *args: Any) -> Any:
    """Pickle a DTensor through one without a storage offset, which PyTorch would take for memory of the wrapper."""
    if hasattr(tensor, OWNER):  # its attributes refer to the model, which cannot be pickled
        tensor = nn.Parameter(tensor.detach(), tensor.requires_grad)  # type: ignore[assignment]
    if type(tensor) is DTensor and tensor.storage_offset():
        copy = torch.Tensor._make_wrapper_subclass(
            DTensor,
            tensor.shape,
            strides=tensor.stride(),
            dtype=tensor.dtype,
            layout=tensor.layout,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        copy._spec, copy._local_tensor = tensor._spec, tensor._local_tensor
        tensor = copy
    return original(tensor, *args)


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


# Classes in pickled DTensors, which torch.load(weights_only=True) may create; also by their paths in earlier versions.
torch.serialization.add_safe_globals(
    [
        *(RaggedDTensor, RaggedShard, SectionedShard, DTensorSpec),
        (RaggedDTensor, "megatron.fsdp.ragged_dtensor.RaggedDTensor"),
        (RaggedShard, "megatron.fsdp.ragged.RaggedShard"),
        (SectionedShard, "megatron.fsdp.ragged.SectionedShard"),
    ]
)
