"""Support for Megatron-Bridge's adapters (LoRA) of a sharded model: saving them alone, merging them in an export."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.gathering import gather_full
from megatron.fsdp.mcore.checkpoint_state import CheckpointState


def filter_adapters(original: Callable[..., Any], state_dict: dict[str, Any], *args: Any) -> dict[str, Any]:
    """Keep only the adapters of the models' weights, and remember the model chunks that the state belongs to."""
    adapters = original(state_dict, *args)
    if not isinstance(state_dict, CheckpointState):
        return adapters
    return CheckpointState(adapters, state_dict.chunks, state_dict.loading)


def materialize_adapters(original: Callable[..., Any], self: Any, tasks: list[Any]) -> Any:
    """Gather the adapters of a few layers, which are then merged into base weights or exported. A collective."""
    whole = [
        replace(task, linear_in_task=_gathered(task.linear_in_task), linear_out_task=_gathered(task.linear_out_task))
        for task in tasks
    ]
    return original(self, whole)


def _gathered(task: Any) -> Any:
    weight = task.param_weight
    return replace(task, param_weight=gather_full(weight)) if isinstance(weight, DTensor) else task
