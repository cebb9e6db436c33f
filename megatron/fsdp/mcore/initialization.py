"""Records how Megatron's models are initialized when they are built on the meta device.

Megatron's own layers have no ``reset_parameters()``, and draw some values in a named random state. A recording
repeats every operation in the random state in which it was done.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.fsdp.helpers.patches import MEGATRON_CORE, Patch, Patches, Versions
from megatron.fsdp.init.deferred import record

_FORK = "megatron.fsdp.mcore.initialization:fork"
_REASON = "does not tell in which random state a value is drawn, so that it could be drawn again"

RANDOM_STATES = Patches(
    "Named random states, while a model is built on the meta device",
    [
        Patch("megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork", _REASON, _FORK, MEGATRON_CORE),
        # Could not be checked, since Transformer Engine needs CUDA. Megatron's tracker of that name inherits from it.
        Patch(
            "transformer_engine.pytorch.distributed:CudaRNGStatesTracker.fork",
            _REASON,
            _FORK,
            Versions("transformer-engine"),
            optional=True,
        ),
    ],
)
# The arguments of the calls of fork() that have been entered and not left; the innermost one is last.
_entered: list[tuple[Any, ...]] = []


@contextmanager
def fork(original: Callable[..., Any], tracker: Any, *name: Any, **named: Any) -> Iterator[None]:
    """Enter a named random state, and remember its name until it is left."""
    _entered.append((*name, *named.values()))
    try:
        with original(tracker, *name, **named):
            yield
    finally:
        _entered.pop()


def _random_state() -> Callable[[], Any]:
    """Return a function that enters the present random state again, when the operation is repeated."""
    return functools.partial(get_cuda_rng_tracker().fork, *_entered[-1]) if _entered else nullcontext


class _InitialValuesOnMeta(TorchFunctionMode):
    """Makes functions that create parameters do so on the meta device: Megatron's layers name another one.

    Constants keep their device: some are in no buffer, such as the frequencies of rotary embeddings.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = kwargs.get("out")
        if func in (torch.empty, torch.rand) or (isinstance(out, torch.Tensor) and out.is_meta):
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def build_recorded(
    original: Callable[..., Any], model_provider_func: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Build a model with one of Megatron's functions; if that is on the meta device, record its initialization.

    Args:
        original: Megatron's function, which is given a function that builds a model as its first argument.
        model_provider_func: That function.
        args: Further arguments of ``original``.
        kwargs: Keyword arguments of ``original``.
    """
    return original(functools.partial(_record_on_meta, model_provider_func), *args, **kwargs)


def _record_on_meta(model_provider_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.get_default_device().type != "meta":
        return model_provider_func(*args, **kwargs)

    def build() -> Any:
        with _InitialValuesOnMeta():
            return model_provider_func(*args, **kwargs)

    with RANDOM_STATES.installed():
        return record(build, _random_state)
