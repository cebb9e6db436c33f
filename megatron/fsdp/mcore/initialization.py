"""Megatron's models built on the meta device: how they would be initialized is recorded, random states by name."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.fsdp.init.deferred import record


def recording_initialization(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that records how a model on the meta device would be initialized, if it builds one there.

    Megatron-Core's own layers have no method for that, and what is done to others from outside would be lost.

    Args:
        build: Its first argument is a function that builds a model.
    """

    @functools.wraps(build)
    def build_recorded(model_provider_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return build(functools.partial(_recorded, model_provider_func), *args, **kwargs)

    return build_recorded


class _EmptyOnMeta(TorchFunctionMode):
    """Memory for weights is not taken, whatever device it is asked for on: Megatron-Core's own layers name one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, "device": "meta"} if func is torch.empty else kwargs))


def _recorded(model_provider_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the function builds; on the meta device by :func:`megatron.fsdp.init.deferred.record`, in named random
    states.
    """
    if torch.get_default_device().type != "meta":
        return model_provider_func(*args, **kwargs)
    tracker = get_cuda_rng_tracker()
    entered: list[tuple[Any, ...]] = []

    @contextmanager
    def fork(*name: Any, **named: Any) -> Iterator[None]:
        entered.append((*name, *named.values()))
        try:
            with type(tracker).fork(tracker, *name, **named):
                yield
        finally:
            entered.pop()

    def build() -> Any:
        with _EmptyOnMeta():
            return model_provider_func(*args, **kwargs)

    def surroundings() -> Callable[[], Any]:
        return functools.partial(get_cuda_rng_tracker().fork, *entered[-1]) if entered else nullcontext

    tracker.fork = fork
    try:
        return record(build, surroundings)
    finally:
        del tracker.fork
