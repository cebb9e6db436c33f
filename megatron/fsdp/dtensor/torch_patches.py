"""The functions of PyTorch that are replaced while sharded models exist.

PyTorch offers no hook in these places. Each replacement does what the original does for tensors and optimizers that do
not belong to a sharded model.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from megatron.fsdp.dtensor.placements import RaggedShard, SectionedShard, local_slice
from megatron.fsdp.dtensor.ragged_dtensor import RaggedDTensor
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
            f"{_HERE}:initialize_optimizer_state",
            patches.TORCH,
        ),
        Patch(
            "torch.distributed.tensor:DTensor.__reduce_ex__",
            "fails for a DTensor whose local tensor is a view at an offset, or that refers to its model",
            f"{_HERE}:reduce_at_offset_zero",
            patches.TORCH,
        ),
        Patch(
            "torch.nn:Module._apply",
            "converts or moves the parameters of a part of a sharded model, which then would not be trained",
            f"{_HERE}:apply_if_allowed",
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
                f"{_HERE}:attach_before",
                patches.TORCH,
            )
            for name in ("state_dict", "load_state_dict")
        ),
    ],
)

_called: dict[str, list[Callable[..., Any]]] = {"initialize": [], "attach": [], "apply": []}


def call_at(event: str, function: Callable[..., Any]) -> None:
    """Call a function from now on.

    Args:
        event: "initialize": with every optimizer for which ``torch.distributed.checkpoint.state_dict`` needs state. It
            returns True if it has created the state, so that PyTorch does not take a step for that.
            "attach": with every optimizer whose state is about to be saved or loaded.
            "apply": with every module that is converted or moved, and the function that does so. It may raise.
        function: The function. A second call with it changes nothing.
    """
    if function not in _called[event]:
        _called[event].append(function)


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


def apply_if_allowed(
    original: Callable[..., nn.Module],
    module: nn.Module,
    fn: Callable[[torch.Tensor], torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> nn.Module:
    """Ask the guards before ``fn`` is applied to the module's parameters."""
    for guard in _called["apply"]:
        guard(module, fn)
    return original(module, fn, *args, **kwargs)


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


def initialize_optimizer_state(original: Callable[..., None], optimizer: torch.optim.Optimizer) -> None:
    """Create optimizer state without a step where the optimizer updates a sharded model."""
    for attach in _called["attach"]:
        attach(optimizer)
    # A list: every initializer has to be called.
    if not any([initialize(optimizer) for initialize in _called["initialize"]]):
        original(optimizer)


def attach_before(original: Callable[..., Any], optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Attach the optimizer to the sharded models it updates, then save or load its state."""
    for attach in _called["attach"]:
        attach(optimizer)
    return original(optimizer, *args, **kwargs)


# Classes in pickled DTensors, which torch.load(weights_only=True) may create; also by their paths in earlier versions.
torch.serialization.add_safe_globals(
    [
        *(RaggedDTensor, RaggedShard, SectionedShard, DTensorSpec),
        (RaggedDTensor, "megatron.fsdp.ragged_dtensor.RaggedDTensor"),
        (RaggedShard, "megatron.fsdp.ragged.RaggedShard"),
        (SectionedShard, "megatron.fsdp.ragged.SectionedShard"),
    ]
)
