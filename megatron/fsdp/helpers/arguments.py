"""Errors about arguments: unknown ones, for which those of other engines have equivalents, and wrong types."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from megatron.fsdp.helpers.spelling import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

_STAGES = "Use zero_dp_strategy=0, 1, 2 or 3 (the stage of ZeRO)."
_DTYPES = "Use mixed_precision_policy=MixedPrecisionPolicy(compute_dtype=..., grad_comm_dtype=...)."
_OFFLOAD = "Use offload_optimizer=True."
_PREFETCH = "Use overlap_param_gather=True, the default."
_ALWAYS = "Leave it out: {}."
# Arguments of torch's DDP, FSDP and FSDP2, of FairScale and of DeepSpeed, and what stands for them here.
_EQUIVALENTS = {
    "sharding_strategy": "Use zero_dp_strategy=3 for FULL_SHARD, 2 for SHARD_GRAD_OP, 0 for NO_SHARD; for "
    "HYBRID_SHARD, also device_mesh, dp_shard_dim and dp_outer_dim.",
    "zero_stage": _STAGES,
    "stage": _STAGES,
    "reshard_after_forward": "Use zero_dp_strategy=3 for True, 2 for False.",
    "auto_wrap_policy": "Use fsdp_unit_modules=[TransformerLayer], with the classes to shard as units.",
    "mesh": "Use device_mesh.",
    "process_group": "Use device_mesh.",
    "mixed_precision": _DTYPES,
    "mp_policy": _DTYPES,
    "param_dtype": "Use compute_dtype.",
    "reduce_dtype": "Use grad_comm_dtype.",
    "output_dtype": _ALWAYS.format("forward returns the dtype that the model computes"),
    "buffer_dtype": _ALWAYS.format("buffers keep their dtype"),
    "cast_forward_inputs": _ALWAYS.format("inputs keep their dtype"),
    "cpu_offload": _OFFLOAD,
    "offload_policy": _OFFLOAD,
    "device_id": "Use device.",
    "param_init_fn": "Use init_model_with_meta_device=True, which calls the modules' reset_parameters.",
    "use_orig_params": _ALWAYS.format("parameters always keep their names and shapes"),
    "find_unused_parameters": _ALWAYS.format("unused parameters are always found"),
    "forward_prefetch": _PREFETCH,
    "backward_prefetch": _PREFETCH,
    "limit_all_gathers": "Use max_unsharded_units.",
    "overlap_comm": "Use overlap_grad_reduce=True and overlap_param_gather=True, the defaults.",
    "optimizer": "To shard a model without one, call fully_shard_model.",
}
# Methods of the same engines, which the sharded model does not have.
METHODS = {
    "backward": "Call loss.backward().",
    "step": "Call step() of the optimizer that fully_shard returned.",
    "clip_grad_norm_": "Call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) on all ranks.",
    "join_hook": "Join: give all ranks the same number of batches, by drop_last=True or a padding sampler.",
    "set_requires_gradient_sync": "Use the context no_sync().",
    "summon_full_params": "Use the context unsharded().",
    "save_checkpoint": "Save state_dict() of the model and the optimizer with torch.distributed.checkpoint.",
    "load_checkpoint": "Load state_dict() of the model and the optimizer with torch.distributed.checkpoint.",
}


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:  # noqa: UP047 - for Python 3.10
    """Decorate a function: missing and unknown arguments are a TypeError that suggests the right ones."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            name = function.__qualname__.removesuffix(".__init__")
            raise TypeError(f"{name}: {_explained(error, signature)}") from None
        return function(*args, **kwargs)

    return call


def check_fields(cls: C) -> C:  # noqa: UP047 - for Python 3.10
    """Decorate a dataclass: like :func:`check_arguments`, for its fields."""
    cls.__init__ = check_arguments(cls.__init__)  # type: ignore[misc]
    return cls


def _explained(error: TypeError, signature: inspect.Signature) -> str:
    found = re.search(r"'(\w+)'", str(error))
    name = found[1] if found else ""
    known = [each for each in signature.parameters if each != "self"]
    return f"{error}.{f' {_EQUIVALENTS[name]}' if name in _EQUIVALENTS else did_you_mean(name, known)}"


def check_type(name: str, value: object, kind: type, remedy: str = "") -> None:
    """Check the type of an argument.

    Raises:
        TypeError: ``value`` is not of the class ``kind``. The message ends with ``remedy``, a sentence.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {full_name(kind)}; got {described(value)}.{remedy and ' ' + remedy}")


def full_name(cls: type) -> str:
    """The name of a class, with the package that it is imported from."""
    package = {"torch.nn.modules.module": "torch.nn", "torch.optim.optimizer": "torch.optim"}
    return f"{package.get(cls.__module__, cls.__module__)}.{cls.__qualname__}".removeprefix("builtins.")


def described(value: Any) -> str:
    """A value in an error message: itself if its text is short, else its class."""
    text = value.__qualname__ if isinstance(value, type) else repr(value)
    return text if len(text) <= 80 and "\n" not in text and " at 0x" not in text else f"a {full_name(type(value))}"
