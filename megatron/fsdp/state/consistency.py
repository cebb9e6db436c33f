"""Checks that compute weights match the main weights on every rank, and that they are equal on all ranks."""

import torch

from megatron.fsdp.buffers.flat_buffer import slot_view
from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.comm.collectives import collectives_of
from megatron.fsdp.runtime.agreement import hash_of
from megatron.fsdp.runtime.engine import Engine


def inconsistent_weights(engine: Engine) -> list[str]:
    """Return the names of parameters whose compute weights do not equal their main weights, or differ between ranks.

    Only compute weights that stay allocated are checked, as with ZeRO-0, 1 and 2. Those that are resharded are copied
    from the main weights at every unshard. Weights whose scales have a history are compared between ranks only. Ranks
    compare a 64-bit hash of each parameter, so each rank sends 8 bytes per parameter. A collective: all ranks of the
    model must call this.
    """
    flags, names = [], []
    for group in engine.groups:
        if not group.weights.temporary:
            flags += _inconsistent(group).tolist()
            names += [param.name for param in group.params]
    if not flags:
        return []
    return [name for name, flag in zip(names, engine.context.any_rank(flags).read(), strict=True) if flag]


def _inconsistent(group: ParameterGroup) -> torch.Tensor:
    """For each parameter of a group, whether compute weights differ from this rank's main weights or between ranks."""
    weights = group.weights
    weights.unshard()
    weights.wait()
    buffers = [plane.buffer for plane in weights.planes]
    # Overwrite this rank's shard with its main weights: elements of other ranks are compared by the hashes below.
    expected = [buffer.flat.clone() for buffer in buffers]
    if group.storage is None:
        (flat,) = expected
        flat[weights.owned.main] = weights.main.to(flat.device, flat.dtype)
    elif group.storage.is_repeatable:
        # Quantizing needs the other ranks. What an unshard makes of the present main weights replaces the weights.
        weights.invalidate()
        weights.unshard()
        weights.wait()
    differs, hashes = [], []
    for i in range(len(group.params)):
        views = [slot_view(flat, buffer.layout, i) for flat, buffer in zip(expected, buffers, strict=True)]
        present = [buffer.views[i] for buffer in buffers]
        differs.append(not all(torch.equal(a, b) for a, b in zip(views, present, strict=True)))
        hashes += [hash_of(view) for view in present]
    mine = torch.stack(hashes)
    dp_group = group.axes.dp_group
    of_all_ranks = mine.new_empty(dp_group.size() * mine.numel())
    collectives_of(dp_group, mine.device).all_gather(of_all_ranks, mine, dp_group)
    unequal = (of_all_ranks.view(-1, len(differs), len(buffers)) != mine.view(-1, len(buffers))).any(2).any(0)
    return unequal | torch.tensor(differs, device=unequal.device)
