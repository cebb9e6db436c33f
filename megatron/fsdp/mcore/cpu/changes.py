"""Tables of everything that running Megatron on a CPU changes, each row with its reason.

``CHANGES`` are names that Megatron's modules see with other values. The names themselves keep their values.
``METHODS`` and ``MEGATRON`` are names that are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

from megatron.fsdp.helpers.patches import MEGATRON_CORE, TORCH, Patches, rows_of
from megatron.fsdp.mcore.cpu import fake_cuda as cuda
from megatron.fsdp.mcore.cpu.torch_view import (
    creates_on_cpu,
    device_class,
    loader_class,
    mesh_class,
    takes_cpu_type,
    unchanged,
)


class Scope(Enum):
    """When a module of megatron.core or megatron.training sees a change."""

    VIEW = "when it reads this name of PyTorch"
    HIDDEN = "when it imports this package, which then seems not to be installed"
    ABSENT = "when this one module imports this package and the package is not installed"


@dataclass(frozen=True)
class Change:
    """A name that Megatron's modules see with another value.

    Attributes:
        where: The module that has the name; for ``ABSENT``, the module that imports the package.
        name: The name, or the package's.
        what: The value that Megatron sees, in words.
        reason: Why Megatron cannot run on a CPU with the original value.
        scope: When a module sees the change.
        make: Given the original value, or None if there is none, returns the value that Megatron sees.
    """

    where: str
    name: str
    what: str
    reason: str
    scope: Scope
    make: Callable[[Any], Any] = field(repr=False, compare=False)


def _value(replacement: Any) -> Callable[[Any], Any]:
    """A ``make`` that ignores the original value."""
    return lambda original: replacement


def _view(where: str, names: str, what: str, reason: str, make: Callable[[Any], Any]) -> Iterable[Change]:
    """Rows for names that are changed in the same way."""
    return [Change(where, name, what, reason, Scope.VIEW, make) for name in names.split()]


def _cuda(what: str, reason: str, values: dict[str, Any]) -> Iterable[Change]:
    """Rows for names of torch.cuda that have something in common."""
    return [
        Change("torch.cuda", name, what, reason, Scope.VIEW, _value(replacement))
        for name, replacement in values.items()
    ]


_TORCH = (
    *_view(
        "torch",
        "tensor as_tensor empty zeros ones full eye arange linspace rand randn randint "
        "empty_like zeros_like ones_like full_like rand_like randn_like",
        "the same, on the CPU",
        "called with device='cuda' or pin_memory=True",
        creates_on_cpu,
    ),
    *_view("torch", "device", "the CPU for a CUDA device", "torch.device('cuda')", device_class),
    *_view("torch", "autocast", "autocast on the CPU", "called for 'cuda'", takes_cpu_type),
    *_view("torch", "compile", "the function itself", "compiling for a CPU takes minutes", _value(unchanged)),
    *_view("torch.amp", "custom_fwd custom_bwd", "for the CPU", "called for 'cuda'", takes_cpu_type),
    *_view(
        "torch.utils.data",
        "DataLoader",
        "the same, with its own random numbers and without pinned memory",
        "it would draw seeds from the CPU's random numbers, and so change the dropout of a resumed run",
        loader_class,
    ),
    *_view(
        "torch.autograd.profiler",
        "emit_nvtx",
        "nothing",
        "--profile calls the CUDA profiler",
        _value(cuda.in_context),
    ),
    *(
        row
        for where in ("torch.distributed", "torch.distributed.device_mesh")
        for name, make in (("DeviceMesh", mesh_class), ("init_device_mesh", takes_cpu_type))
        for row in _view(where, name, "the same, of CPUs", "called with device_type='cuda'", make)
    ),
)

_TORCH_CUDA = (
    *_cuda(
        "one device per process, the CPU",
        "Megatron refuses to start without a device",
        {
            "is_available": cuda.always(True),
            "is_initialized": cuda.always(True),
            "device_count": cuda.device_count,
            "current_device": cuda.current_device,
            "set_device": cuda.nothing,
            "device": cuda.in_context,
            "get_device_name": cuda.always(cuda.NAME),
            "get_device_capability": cuda.always(cuda.CAPABILITY),
            "get_device_properties": cuda.device_properties,
            "_lazy_init": cuda.nothing,
            "_lazy_call": cuda.call,
        },
    ),
    *_cuda(
        "one stream, whose work is always finished",
        "work on a CPU is finished when the call returns",
        {
            "Stream": cuda.Stream,
            "Event": cuda.Event,
            "stream": cuda.in_context,
            "current_stream": cuda.always(cuda.THE_STREAM),
            "default_stream": cuda.always(cuda.THE_STREAM),
            "set_stream": cuda.nothing,
            "synchronize": cuda.nothing,
            "is_current_stream_capturing": cuda.always(False),
        },
    ),
    *_cuda(
        "resident bytes of the process; the machine's for device_memory_used",
        "memory is logged, and must be true",
        {
            "memory_allocated": cuda.resident_bytes,
            "memory_reserved": cuda.resident_bytes,
            "max_memory_allocated": cuda.peak_resident_bytes,
            "max_memory_reserved": cuda.peak_resident_bytes,
            "memory_stats": cuda.memory_stats,
            "device_memory_used": cuda.used_machine_bytes,
            "empty_cache": cuda.nothing,
        },
    ),
    *_cuda(
        "the CPU's random numbers",
        "random state is forked, saved and restored",
        {
            "get_rng_state": cuda.get_rng_state,
            "set_rng_state": cuda.set_rng_state,
            "manual_seed": cuda.manual_seed,
            "default_generators": cuda.Generators(),
            "random": SimpleNamespace(get_rng_state=cuda.get_rng_state, set_rng_state=cuda.set_rng_state),
        },
    ),
    *_cuda(
        "nothing is profiled, and readings of the GPU are 0",
        "--profile, --nvtx-ranges and --log-straggler call CUDA",
        {
            "temperature": cuda.always(0),
            "power_draw": cuda.always(0),
            "utilization": cuda.always(0),
            "clock_rate": cuda.always(0),
            "nvtx": SimpleNamespace(range_push=cuda.nothing, range_pop=cuda.nothing, range=cuda.in_context),
            "cudart": cuda.Profiler,
            "check_error": cuda.nothing,
        },
    ),
)

_KERNELS = (
    *(
        Change(
            "megatron.core",
            package,
            "not installed",
            "its kernels need CUDA, and Megatron uses whatever it can import",
            Scope.HIDDEN,
            _value(None),
        )
        for package in ("transformer_engine", "transformer_engine_torch", "apex", "amp_C", "flash_attn")
    ),
    Change(
        "megatron.core.transformer.moe.ops.paged_stash",
        "triton",
        "a package whose decorators do nothing",
        "PyTorch for the CPU comes without triton; this module imports it whether or not its kernels are used",
        Scope.ABSENT,
        _value(cuda.NoTriton()),
    ),
)

CHANGES: tuple[Change, ...] = (*_TORCH, *_TORCH_CUDA, *_KERNELS)

_CPU = "megatron.fsdp.mcore.cpu"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_ATTENTION = "megatron.core.transformer.dot_product_attention:DotProductAttention"
_TENSOR_PARALLEL = "megatron.core.tensor_parallel"

_OF_TORCH = """
    torch:Tensor.cuda -> replacements:stay
        needs a GPU
    torch.nn:Module.cuda -> replacements:stay
        needs a GPU
    torch:Tensor.pin_memory -> replacements:stay
        needs a GPU, and speeds up nothing but transfers to one
    torch:Tensor.record_stream -> replacements:record_no_stream
        needs a GPU
    torch:Tensor.type -> replacements:cuda_type
        names types that Megatron's optimizers and gradient norm do not accept: they expect CUDA types
"""
METHODS = Patches("PyTorch's methods, when Megatron calls them on a CPU", rows_of(_OF_TORCH, _CPU, TORCH))

_OF_MEGATRON = f"""
    megatron.training.arguments:validate_args -> arguments:validate_adjusted
        accepts arguments that need a GPU, which are adjusted first
    megatron.training.initialize:_warmup_jit_function -> fake_cuda:nothing VALUE
        has nothing to compile; its random inputs would make initial weights depend on the parallel sizes
    megatron.core.parallel_state:get_nccl_options -> fake_cuda:nothing VALUE
        returns options that gloo does not take
    {_OPTIMIZER}.state_dict -> replacements:state_dict_at_any_step
        needs the step counts in the state of PyTorch's Adam, which does not exist when a checkpoint is loaded
    {_OPTIMIZER}.load_state_dict -> replacements:load_separate_steps
        gives all parameters one tensor of steps, which PyTorch's Adam then increments once per parameter
    {_OPTIMIZER}._set_main_param_and_optimizer_states -> replacements:set_states_without_step
        writes fp32 weights, which are views of the model's, with gradients enabled, and an outdated step count
    {_OPTIMIZER}.sharded_param_state_fsdp_dtensor -> replacements:complete_sharded_state
        leaves out empty shards, for which PyTorch's Adam has no state; ranks with different keys hang
    megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__ -> replacements:new_norm
        refuses sequence parallelism, because it does not mark its parameters, and weights that are centered
        at 0; other norms need Apex
    {_ATTENTION}.__init__ -> attention:initialize
        refuses context parallelism, and values that are not as large as keys
    {_ATTENTION}.forward -> attention:attend_to_all
        attends to the keys and values of its own rank only
    {_TENSOR_PARALLEL}.mappings:reduce_from_tensor_model_parallel_region -> replacements:reduce_over_several
        returns a view if there is one rank, to which experts with biases cannot add; other layers need CUDA
    {_TENSOR_PARALLEL}.random:CheckpointWithoutOutput.__init__ -> replacements:recompute_unquantized
        reads Transformer Engine's FP8 state for norms and activations, whether or not there is FP8
    {_TENSOR_PARALLEL}.random:_get_share_storage -> replacements:storage_copier VALUE
        compiles a C++ extension on each rank during the first backward; a copy costs less on a CPU
    megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu -> replacements:on_host VALUE
        converts to NumPy only what it moved off a GPU
"""
MEGATRON = Patches("Megatron-Core on a CPU", rows_of(_OF_MEGATRON, _CPU, MEGATRON_CORE, optional=True))
