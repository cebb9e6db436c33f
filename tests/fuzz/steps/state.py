"""Steps that save and load state, and use other models."""

import copy
import io
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.utils._pytree import tree_map

from ..sides import Side, full
from .kinds import step

SAVES = ("clone", "deepcopy", "pickle", "full", "get", "dcp")


def _own_buffers(side: Side) -> bool:
    """Whether the forwards of a rank write buffers, so that ranks that run other blocks have others."""
    return side.setting.features.batchnorm or side.setting.features.extra == "spectral_norm"


@step(4, kind=SAVES, optimizer=(False, True))
def save(side: Side, kind: str, optimizer: bool) -> None:
    """Keep a state for a later load."""
    if _own_buffers(side) and kind in ("dcp", "get"):
        kind = "pickle"  # of buffers that differ between ranks, these keep those of one rank
    state: dict[str, Any] = {"model": side.model.state_dict()}
    if optimizer:
        state["optimizer"] = side.optimizer.state_dict()
    if kind in ("clone", "full"):
        change = full if kind == "full" else lambda value: value
        state["model"] = {name: change(value).detach().clone() for name, value in state["model"].items()}
        state = copy.deepcopy(state)
    elif kind == "deepcopy" or (kind == "dcp" and side.plain):
        # Without sharding, dcp refuses to load a state that an optimizer has not had yet.
        state = copy.deepcopy(state)
    elif kind == "pickle":
        file = io.BytesIO()
        torch.save(state, file)
        state = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    elif kind == "get":
        state["model"] = get_model_state_dict(side.model, options=StateDictOptions(full_state_dict=True))
        state = copy.deepcopy(state)
    else:
        dcp.save(state, checkpoint_id=side.folder())
    side.kept["state"] = kind, side.model, side.optimizer, state


@step(4, assign=(False,) * 6 + (True,), alike=(True,) * 9 + (False,), in_place=(False, True))
def load(side: Side, assign: bool, alike: bool, in_place: bool) -> None:
    """Load what was saved, or else a model that was trained elsewhere, of which ranks may have another one each.

    ``in_place``: ``dcp.load`` writes into the weights, and nothing else is called for them.
    """
    kind, model, optimizer, state = side.kept.get("state", (None,) * 4)
    if model is not side.model or optimizer is not side.optimizer:
        kind, state = (
            "full",
            {"model": side.build(seed=99 if alike or side.plain else 99 + side.place.rank).state_dict()},
        )
    side.written()
    if kind == "dcp" and not side.plain:
        kept = state
        state = {"model": side.model.state_dict()}
        if "optimizer" in kept:
            state["optimizer"] = side.optimizer.state_dict()
        dcp.load(state, checkpoint_id=side.folder())
    if kind == "get":
        # Ranks that are not the first have nothing.
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not side.plain)
        set_model_state_dict(side.model, copy.deepcopy(state["model"]), options=options)
    elif kind == "dcp" and in_place:
        # A write to shards counts as one through .data, which autograd does not see.
        for name, value in side.model.state_dict().items() if side.plain else ():
            value.data.copy_(state["model"][name])
    else:
        side.model.load_state_dict(copy.deepcopy(state["model"]), assign=assign and not side.plain)
    if "optimizer" in state:
        side.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


@step(2, strategy=(3, 2, 1, 0), units=("block", "none", "whole", "fine"), kind=("full", "shards", "dcp"))
def resume(side: Side, strategy: int, units: str, kind: str) -> None:
    """Go on in a new model with other settings, from a checkpoint."""
    if side.optimizer is not side.firsts[id(side.net)]:
        return  # of another class than the new one
    side.synchronized()
    frozen = not all(parameter.requires_grad for parameter in side.parameters())
    if kind == "dcp" and (_own_buffers(side) or frozen or side.setting.optimizer == "adagrad"):
        # See "save". DCP loads what a new optimizer has: no state of frozen weights. Adagrad's may have been cleared.
        kind = "full"
    state = {"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()}
    if kind == "full":
        state = tree_map(full, state)
    elif kind == "dcp" and not side.plain:
        dcp.save(state, checkpoint_id=side.folder())
    state = copy.deepcopy(state)
    side.rebuild(strategy=strategy, units=units)
    if kind == "dcp" and not side.plain:
        state = {"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()}
        dcp.load(state, checkpoint_id=side.folder())
    side.model.load_state_dict(state["model"])
    side.optimizer.load_state_dict(state["optimizer"])


@step()
def other_model(side: Side) -> None:
    """Train another model of the same kind in turn."""
    side.switch()


@step(3, how=("copy_", "lerp_", "load"))
def teach(side: Side, how: str) -> None:
    """Another model takes this one's weights, or moves towards them: target networks, mean teachers."""
    student, state = dict(side.net.named_parameters()), side.model.state_dict()
    side.switch()
    teacher, model = dict(side.net.named_parameters()), side.model
    side.switch()
    side.written()
    if how == "load":
        model.load_state_dict(state)
        return
    with torch.no_grad():
        for name, parameter in teacher.items():
            parameter.copy_(student[name]) if how == "copy_" else parameter.lerp_(student[name].detach(), 0.5)
