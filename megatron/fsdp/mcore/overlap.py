"""Megatron-Core's schedule that overlaps the forward of one micro-batch with the backward of another, layer by layer.

It runs parts of layers (attention, dispatch, experts, combine) as passes of autograd of their own, so that no hooks of
units run. The functions that replace its own unshard and reshard the units.
"""

from collections import UserList
from collections.abc import Callable
from typing import Any

from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import find_megatron_fsdp
from megatron.fsdp.quantized.storage import Direction
from megatron.fsdp.runtime.engine import Engine, engines_of


def interleaved_step(
    original: Callable[..., Any], config: Any, forward_step: Any, data: Any, model: Any, *rest: Any, **kwargs: Any
) -> Any:
    """Run one step of the interleaved pipeline schedule.

    Megatron-Core rejects FSDP here if ``model`` is a list or a tuple, since it begins passes of its own FSDP elsewhere.
    """
    return original(config, forward_step, data, UserList(model), *rest, **kwargs)


def combined_step(
    original: Callable[..., Any],
    forward_step: Any,
    data: Any,
    f_model: Any,
    micro_batches: Any,
    f_input: Any,
    results: Any,
    b_model: Any,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Run the forward of one micro-batch and the backward of another. One of the models may be None."""
    forward, backward = find_megatron_fsdp(f_model), find_megatron_fsdp(b_model)
    try:
        if backward is not None:
            backward.pre_backward()
        if forward is not None:
            forward.pre_forward()
        result = original(forward_step, data, f_model, micro_batches, f_input, results, b_model, *rest, **kwargs)
        if backward is not None:
            backward.post_backward()
        if forward is not None:
            forward.post_forward()
    except BaseException:
        for model in (forward, backward):
            if model is not None:
                model.engine.abandon_pass()
        raise
    return result


def run_layers(
    original: Callable[..., Any],
    f_layer: Any,
    b_layer: Any,
    f_input: Any = None,
    b_grad: Any = None,
    is_last_layer_in_bwd: bool = False,
) -> Any:
    """Run the forward of one layer and the backward of another. One of them may be None."""
    forward: Any = None if f_layer is None else f_layer.layer
    backward: Any = None if b_layer is None else b_layer.layer
    for engine in _engines(backward):
        engine.hold(backward, Direction.BACKWARD)
    for engine in _engines(forward):
        engine.hold(forward, Direction.FORWARD)
    result = original(f_layer, b_layer, f_input, b_grad, is_last_layer_in_bwd)
    for engine in _engines(forward):
        engine.let_go(forward, Direction.FORWARD)
    for engine in _engines(backward):
        # The last layer's delayed weight gradients are computed later. The end of the whole backward reduces them.
        if not (is_last_layer_in_bwd and backward.config.delay_wgrad_compute):
            engine.let_go(backward, Direction.BACKWARD)
    return result


def _engines(layer: Any) -> list[Engine]:
    """The engine that shards a layer, if any does. Megatron's DDP uses the same schedule."""
    return [] if layer is None else engines_of(layer.parameters())
