"""Whether the weights that forward reads are those that the optimizer has: on every rank, and equal among ranks."""

import torch

from megatron.fsdp.buffers.flat_buffer import slot_view
from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.comm.collectives import all_gather
from megatron.fsdp.runtime.engine import Engine
from megatron.fsdp.sharding.ownership import within

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd, so that no bit of an element is lost when it is multiplied.
_FACTOR = 0x9E3779B97F4A7C1 | 1


def inconsistent_weights(engine: Engine) -> list[str]:
    """Names of parameters whose compute weights are not their main weights in another dtype, on any rank.

    Looked at are compute weights that stay, as with ZeRO-0, 1 and 2; where they come and go, each gather makes them of
    the main weights anew. Ranks compare a 64-bit hash of each parameter, so what is sent is 8 bytes per parameter.
    All ranks of the model must call this.
    """
    flags, names = [], []
    for group in engine.groups:
        if not group.weights.temporary:
            flags += _inconsistent(group).tolist()
            names += [param.name for param in group.params]
    if not flags:
        return []
    return [name for name, flag in zip(names, engine.on_any_rank(flags), strict=True) if flag]


def _inconsistent(group: ParameterGroup) -> torch.Tensor:
    """For each parameter of a group, whether this rank has found something wrong with it."""
    weights = group.weights
    weights.unshard()
    weights.wait()
    flat = weights.compute.flat
    expected = flat.clone()
    expected[within(weights.owned.main, slice(0, flat.numel()))] = weights.main.to(flat.device, flat.dtype)
    views = [slot_view(expected, weights.layout, i) for i in range(len(group.params))]
    differs = [not torch.equal(a, b) for a, b in zip(views, weights.compute.views, strict=True)]
    hashes = torch.stack([hash_of(view) for view in weights.compute.views])
    everyone = hashes.new_empty(group.axes.dp_group.size() * hashes.numel())
    all_gather(everyone, hashes, group.axes.dp_group)
    unequal = (everyone.view(-1, hashes.numel()) != hashes).any(0)
    return unequal | torch.tensor(differs, device=unequal.device)


def hash_of(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of a tensor's bits and their places, made where the tensor is: an int64 scalar."""
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()]).long()
    places = torch.arange(1, bits.numel() + 1, device=bits.device) * _FACTOR
    mixed = (bits ^ places) * _FACTOR
    return (mixed ^ (mixed >> 29)).sum()
