"""Makes a torch optimizer update main weights: parameters out, DTensors in, and hooks around the step."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.megatron_fsdp import MegatronFSDP
from megatron.fsdp.partition import OWNER
from megatron.fsdp.uneven_dtensor import describe_piece
from megatron.fsdp.weak import weak_method


def owners(parameters: Iterable[nn.Parameter]) -> list[MegatronFSDP]:
    """The sharded models that the parameters belong to, each once."""
    found: list[MegatronFSDP] = []
    for parameter in parameters:
        reference = getattr(parameter, OWNER, None)
        model = reference() if reference is not None else None
        if model is not None and model not in found:
            found.append(model)
    return found


def attach_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Replace the optimizer's parameters by the main weights of the models they belong to, and hook its step.

    Parameter groups and their options stay as they are. A step first finishes the gradients' synchronization, and
    ends with the compute weights out of date, so that they are made of the new main weights before their next use.

    Raises:
        ValueError: No parameter belongs to a sharded model, or the optimizer has state for unsharded parameters.
    """
    models = owners(p for group in optimizer.param_groups for p in group["params"])
    if not models:
        raise ValueError(
            "fully_shard_optimizer: none of the optimizer's parameters belongs to a sharded model. Shard the model "
            "first, and give the optimizer parameters of the model before or after that."
        )
    main = {id(e.compute): e.main for model in models for e in model.entries()}
    replaced = [p for group in optimizer.param_groups for p in group["params"] if id(p) in main]
    if any(p in optimizer.state for p in replaced):
        raise ValueError("fully_shard_optimizer: the optimizer has state for whole parameters. Shard before the first step.")
    for group in optimizer.param_groups:
        group["params"] = [main.get(id(p), p) for p in group["params"]]
    for model in models:
        hooks = _StepHooks(model)
        # The optimizer keeps the hooks alive, and the hooks do not keep the model alive.
        optimizer.register_step_pre_hook(hooks.before)
        optimizer.register_step_post_hook(hooks.after)
        optimizer.register_state_dict_post_hook(hooks.describe_state)


class _StepHooks:
    """What one model needs around an optimizer's step."""

    def __init__(self, model: MegatronFSDP) -> None:
        self._finish = weak_method(model.finish_waiting_gradients)
        self._install = weak_method(model.install_optimized_model_weights)
        self._pieces = {id(entry.main): entry.piece for entry in model.entries()}

    def before(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Finish gradients; refuse a step that would do nothing.

        Raises:
            RuntimeError: No parameter of the optimizer has a gradient.
        """
        self._finish()
        if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                "The optimizer's step found no gradient on any of its parameters and would change nothing. "
                "Call backward first, and check that the optimizer was given to fully_shard_optimizer."
            )

    def after(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Compute weights are made of the new main weights before their next use."""
        self._install()

    def describe_state(self, optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
        """Describe each DTensor's part of the whole tensor, which torch.distributed.checkpoint asks for."""
        # State is numbered in the order in which parameters first occur.
        order = dict.fromkeys(id(p) for group in optimizer.param_groups for p in group["params"])
        for number, key in enumerate(order):
            piece = self._pieces.get(key)
            for value in state_dict["state"].get(number, {}).values():
                if piece is not None and isinstance(value, DTensor) and value.placements[0].is_shard():
                    describe_piece(value, piece)
