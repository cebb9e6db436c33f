"""The table of everything that running Megatron on a CPU changes, each row with its reason."""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

from megatron.fsdp.mcore.cpu import cuda_stand_in as cuda
from megatron.fsdp.mcore.cpu.arguments import adjusting
from megatron.fsdp.mcore.cpu.attention import accepting_more, gathering_keys_and_values
from megatron.fsdp.mcore.cpu.torch_view import (
    called_from,
    creates_on_cpu,
    device_class,
    loader_class,
    mesh_class,
    takes_cpu_type,
    takes_cpu_type_by_name,
    unchanged,
)

PACKAGES = ("megatron.core", "megatron.training")


class Scope(Enum):
    """Who sees a change."""

    VIEW = "modules of megatron.core and megatron.training, when they read this name of torch"
    CALL = "modules of megatron.core and megatron.training, when they call this method"
    MEGATRON = "everyone: the name belongs to Megatron"
    HIDDEN = "modules of megatron.core and megatron.training, when they import this package"
    ABSENT = "this module, when it imports this package and the package is not installed"


@dataclass(frozen=True)
class Change:
    """One name that has another value on a CPU.

    Attributes:
        where: who has the name, as pkgutil.resolve_name takes it: "package.module" or "package.module:Class".
        name: the name.
        what: what stands there instead.
        reason: why Megatron cannot run on a CPU with the original.
        scope: who sees the change.
        make: given the original, or None where there is none, returns what stands there instead.
    """

    where: str
    name: str
    what: str
    reason: str
    scope: Scope
    make: Callable[[Any], Any] = field(repr=False, compare=False)

    def apply(self) -> None:
        """Replace the name where it is. For scopes CALL and MEGATRON: the others leave the original alone."""
        owner = pkgutil.resolve_name(self.where)
        setattr(owner, self.name, self.make(getattr(owner, self.name)))


def when_megatron_calls(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a `make` for a method: calls from Megatron's modules get the replacement, all others the original.

    The replacement is called with the original and the method's arguments.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if called_from(PACKAGES):
                return replacement(original, self, *args, **kwargs)
            return original(self, *args, **kwargs)

        return method

    return make


def itself(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for a move to the GPU or to pinned memory: return the object where it is."""
    return self


def cuda_type(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for Tensor.type(): name the type of the same tensor on a GPU. Conversions are the original's."""
    if args or kwargs:
        return original(self, *args, **kwargs)
    return original(self).replace("torch.", "torch.cuda.", 1)


def helpers_unless_missing(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """Return a compile_helpers() that compiles only where the wheel brought no compiled helpers."""

    def compile_if_missing() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    return compile_if_missing


def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Stand in for maybe_move_tensor_to_cpu(): the tensor is there already, only the conversion is left."""
    return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor


def marking_sequence_parallel(new: Callable[..., torch.nn.Module]) -> staticmethod[..., torch.nn.Module]:
    """Return a WrappedTorchNorm.__new__ that marks the parameters whose gradients tensor ranks have to add up."""

    def new_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        accepted = copy.copy(config)
        accepted.sequence_parallel = False
        norm = new(cls, accepted, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    return staticmethod(new_marked)


def without_rng_warning(tracker: type) -> type:
    """Return the random state tracker as it is, its one warning muted."""
    warning = "CPU RNG state changed within GPU RNG context"
    logging.getLogger(tracker.__module__).addFilter(lambda record: record.msg != warning)
    return tracker


def before_first_step(state_dict: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a DistributedOptimizer.state_dict() that also works while its optimizer has no state: at step 0."""

    @functools.wraps(state_dict)
    def state_dict_at_any_step(self: Any) -> Any:
        if self.optimizer.state:
            return state_dict(self)
        _complete_state(self.optimizer)
        try:
            return state_dict(self)
        finally:
            # Loading allocates the state itself, and only if it finds none.
            self.optimizer.state.clear()

    return state_dict_at_any_step


def with_separate_steps(load_state_dict: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return a DistributedOptimizer.load_state_dict() after which no two parameters share their step count."""

    @functools.wraps(load_state_dict)
    def load_separate_steps(self: Any, state_dict: Any) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return load_separate_steps


def without_step(set_states: Callable[..., None]) -> Callable[..., None]:
    """Return a _set_main_param_and_optimizer_states() that keeps the step count load_state_dict() has set."""

    @functools.wraps(set_states)
    @torch.no_grad()
    def set_tensor_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        set_states(self, model_param, {**tensors, "step": None})  # what is no tensor is passed over

    return set_tensor_states


def with_state_of_empty_shards(sharded_state: Callable[..., Any]) -> Callable[..., Any]:
    """Return a sharded_param_state_fsdp_dtensor() that has the same parameters on all ranks."""

    @functools.wraps(sharded_state)
    def complete_sharded_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        _complete_state(self.optimizer)
        return sharded_state(self, *args, **kwargs)

    return complete_sharded_state


def _complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter without Adam state the state it has before its first gradient. Only for torch's Adam."""
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return
    step = next((state["step"] for state in optimizer.state.values()), torch.zeros(()))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter):
                zeros = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": step.clone(), **zeros}


def value(replacement: Any) -> Callable[[Any], Any]:
    """Return a `make` that ignores the original."""
    return lambda original: replacement


def _views(where: str, what: str, reason: str, values: dict[str, Any]) -> Iterable[Change]:
    """Return rows for names of a torch module that share what and why."""
    for name, replacement in values.items():
        yield Change(where, name, what, reason, Scope.VIEW, value(replacement))


def _factories(names: str) -> Iterable[Change]:
    """Return rows for the functions of torch that create tensors."""
    for name in names.split():
        what, reason = "the same, on the CPU", "called with device='cuda' or pin_memory=True"
        yield Change("torch", name, what, reason, Scope.VIEW, creates_on_cpu)


def _meshes(*modules: str) -> Iterable[Change]:
    """Return rows for the device mesh and its factory in the modules that export them."""
    for where in modules:
        what, reason = "the same, of CPUs", "called with device_type='cuda'"
        yield Change(where, "DeviceMesh", what, reason, Scope.VIEW, mesh_class)
        yield Change(where, "init_device_mesh", what, reason, Scope.VIEW, takes_cpu_type)


TORCH = (
    *_factories("tensor as_tensor empty zeros ones full eye arange linspace rand randn randint"),
    *_factories("empty_like zeros_like ones_like full_like rand_like randn_like"),
    Change("torch", "device", "the CPU for a CUDA device", "torch.device('cuda')", Scope.VIEW, device_class),
    Change("torch", "autocast", "autocast on the CPU", "called for 'cuda'", Scope.VIEW, takes_cpu_type),
    Change(
        "torch", "compile", "the function itself", "compiling for a CPU takes minutes", Scope.VIEW, value(unchanged)
    ),
    Change("torch.amp", "custom_fwd", "for the CPU", "called for 'cuda'", Scope.VIEW, takes_cpu_type_by_name),
    Change("torch.amp", "custom_bwd", "for the CPU", "called for 'cuda'", Scope.VIEW, takes_cpu_type_by_name),
    Change(
        "torch.utils.data",
        "DataLoader",
        "the same, with random numbers of its own and without pinned memory",
        "drawing seeds from the CPU's random numbers, it would change the dropout of a run that is resumed",
        Scope.VIEW,
        loader_class,
    ),
    Change(
        "torch.autograd.profiler",
        "emit_nvtx",
        "nothing",
        "--profile calls the CUDA profiler",
        Scope.VIEW,
        value(cuda.in_context),
    ),
    *_meshes("torch.distributed", "torch.distributed.device_mesh"),
)

CUDA = (
    *_views(
        "torch.cuda",
        "one device per process, the CPU",
        "Megatron refuses to start without a device",
        {
            "is_available": cuda.yes,
            "is_initialized": cuda.yes,
            "device_count": cuda.device_count,
            "current_device": cuda.current_device,
            "set_device": cuda.nothing,
            "device": cuda.in_context,
            "get_device_name": cuda.device_name,
            "get_device_capability": cuda.capability,
            "get_device_properties": cuda.device_properties,
            "_lazy_init": cuda.nothing,
            "_lazy_call": cuda.call,
        },
    ),
    *_views(
        "torch.cuda",
        "one stream, whose work is always finished",
        "work on a CPU is finished when the call returns",
        {
            "Stream": cuda.Stream,
            "Event": cuda.Event,
            "stream": cuda.in_context,
            "current_stream": cuda.current_stream,
            "default_stream": cuda.current_stream,
            "set_stream": cuda.nothing,
            "synchronize": cuda.nothing,
            "is_current_stream_capturing": cuda.no,
        },
    ),
    *_views(
        "torch.cuda",
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
    *_views(
        "torch.cuda",
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
    *_views(
        "torch.cuda",
        "nothing is profiled, and readings of the GPU are 0",
        "--profile, --nvtx-ranges and --log-straggler ask CUDA",
        {
            "temperature": cuda.unknown,
            "power_draw": cuda.unknown,
            "utilization": cuda.unknown,
            "clock_rate": cuda.unknown,
            "nvtx": SimpleNamespace(range_push=cuda.nothing, range_pop=cuda.nothing, range=cuda.in_context),
            "cudart": cuda.Profiler,
            "check_error": cuda.nothing,
        },
    ),
)

METHODS = (
    Change(
        "torch:Tensor",
        "cuda",
        "the tensor itself",
        "there is no GPU to move to",
        Scope.CALL,
        when_megatron_calls(itself),
    ),
    Change(
        "torch.nn:Module",
        "cuda",
        "the module itself",
        "there is no GPU to move to",
        Scope.CALL,
        when_megatron_calls(itself),
    ),
    Change(
        "torch:Tensor",
        "pin_memory",
        "the tensor itself",
        "only transfers to a GPU gain from pinned memory",
        Scope.CALL,
        when_megatron_calls(itself),
    ),
    Change(
        "torch:Tensor",
        "record_stream",
        "nothing",
        "streams are not used",
        Scope.CALL,
        when_megatron_calls(cuda.nothing),
    ),
    Change(
        "torch:Tensor",
        "type",
        "torch.cuda.FloatTensor for torch.FloatTensor, and so on",
        "the optimizers and the gradient norm accept only CUDA types",
        Scope.CALL,
        when_megatron_calls(cuda_type),
    ),
)

MEGATRON = (
    Change(
        "megatron.training.arguments",
        "validate_args",
        "the same, after the arguments were adjusted",
        "arguments that need a GPU take the value that works",
        Scope.MEGATRON,
        adjusting,
    ),
    Change(
        "megatron.training.initialize",
        "_warmup_jit_function",
        "nothing",
        "nothing is compiled; its random inputs would make initial weights depend on the parallel sizes",
        Scope.MEGATRON,
        value(cuda.nothing),
    ),
    Change(
        "megatron.core.parallel_state",
        "get_nccl_options",
        "no options",
        "gloo does not take the options of NCCL",
        Scope.MEGATRON,
        value(cuda.nothing),
    ),
    Change(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
        "state_dict",
        "the same, and at step 0 before there is state",
        "torch's Adam counts steps in the state, which does not exist when a checkpoint is loaded",
        Scope.MEGATRON,
        before_first_step,
    ),
    Change(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
        "load_state_dict",
        "the same, with a step count of its own for each parameter",
        "it gives all parameters one tensor, which torch's Adam then counts up once for each of them",
        Scope.MEGATRON,
        with_separate_steps,
    ),
    Change(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
        "_set_main_param_and_optimizer_states",
        "the same, without gradients and without the step count",
        "torch forbids writing fp32 weights, views of the model's, with gradients on; the count given is out of date",
        Scope.MEGATRON,
        without_step,
    ),
    Change(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
        "sharded_param_state_fsdp_dtensor",
        "the same, with the state of empty shards",
        "torch's Adam, unlike Transformer Engine's, has none for them; ranks with other keys than their peers hang",
        Scope.MEGATRON,
        with_state_of_empty_shards,
    ),
    Change(
        "megatron.core.datasets.utils",
        "compile_helpers",
        "compiles only what the wheel does not have",
        "a missing compiler would end the run",
        Scope.MEGATRON,
        helpers_unless_missing,
    ),
    Change(
        "megatron.core.tensor_parallel.random",
        "CudaRNGStatesTracker",
        "the same, without its warning that the CPU's random state changed",
        "the CPU's random numbers stand for the GPU's, so it would warn in every forward pass",
        Scope.MEGATRON,
        without_rng_warning,
    ),
    Change(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm",
        "__new__",
        "the same, also for sequence parallelism",
        "it refuses only because it does not mark its parameters; without Apex there is no other norm",
        Scope.MEGATRON,
        marking_sequence_parallel,
    ),
    Change(
        "megatron.core.transformer.dot_product_attention:DotProductAttention",
        "__init__",
        "the same, also for context parallelism, and for values of another size than keys",
        "only Transformer Engine's attention has them",
        Scope.MEGATRON,
        accepting_more,
    ),
    Change(
        "megatron.core.transformer.dot_product_attention:DotProductAttention",
        "forward",
        "the same, over keys and values of all context-parallel ranks",
        "only Transformer Engine's attention has that",
        Scope.MEGATRON,
        gathering_keys_and_values,
    ),
    Change(
        "megatron.core.transformer.moe.moe_utils",
        "maybe_move_tensor_to_cpu",
        "the tensor, converted to NumPy if that is asked for",
        "it converts only what it moved off a GPU",
        Scope.MEGATRON,
        value(on_host),
    ),
)

PACKAGES_OF_KERNELS = (
    *(
        Change(
            "megatron.core",
            package,
            "not installed",
            "its kernels need CUDA, and Megatron uses what it can import",
            Scope.HIDDEN,
            value(None),
        )
        for package in ("transformer_engine", "transformer_engine_torch", "apex", "amp_C", "flash_attn")
    ),
    Change(
        "megatron.core.transformer.moe.ops.paged_stash",
        "triton",
        "a package whose decorators do nothing",
        "torch for the CPU comes without triton; this module imports it whether or not its kernels are used",
        Scope.ABSENT,
        value(cuda.NoTriton()),
    ),
)

CHANGES: tuple[Change, ...] = (*TORCH, *CUDA, *METHODS, *MEGATRON, *PACKAGES_OF_KERNELS)
