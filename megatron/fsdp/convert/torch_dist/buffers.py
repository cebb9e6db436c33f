"""Reads optimizer state that is stored in flat buffers without names (``dp_reshardable``).

The position of each parameter is derived from the model's parameters and the sizes of the buffers. The caller compares
the main weights in them with the model's weights, which detects a wrong position.
"""

import argparse
import math
import re

from megatron.fsdp.checkpoint import lazy
from megatron.fsdp.checkpoint.lazy import LazyTensor
from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.convert.canonical import Tensors, is_buffer
from megatron.fsdp.convert.groups import is_expert
from megatron.fsdp.convert.rewrites import TORCH_DIST, Facts, to_canonical
from megatron.fsdp.convert.torch_dist import order
from megatron.fsdp.convert.torch_dist.flat import unflatten
from megatron.fsdp.convert.torch_dist.stages import Atom, Buffer, Homes, Parallelism, Parameter, Ranks, find_homes
from megatron.fsdp.naming.names import without_half

_KEY = re.compile(
    r"^(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<rank>\d+)\.gbuf_idx_(?P<buffer>\d+)"
    r"\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<kind>\w+)$"
)


def is_buffer_key(key: str) -> bool:
    """Whether a tensor of a torch_dist checkpoint belongs to such a buffer, by its key."""
    return _KEY.match(key) is not None


def read_buffers(
    reader: CheckpointReader, model: Tensors, facts: Facts, args: argparse.Namespace
) -> dict[str, Tensors]:
    """Read optimizer state, by kind (``param`` for the main weights) and canonical name.

    Args:
        reader: The checkpoint.
        model: The tensors of its model, by stored key.
        facts: How they are stored.
        args: Its training arguments, with the numbers of ranks.

    Raises:
        ValueError: The parameters do not fill the buffers exactly.
        NotImplementedError: The order of the model's parameters is unknown, or they are in float8.
    """
    if getattr(args, "mla_down_proj_fusion", False):
        raise NotImplementedError(f"{reader.path}: dp_reshardable optimizer state of fused MLA down projections.")
    ranks = _parallelism(args)
    chains = _chains(reader)
    _check_ranks(reader, chains, ranks)
    parameters = _parameters(reader, model, facts, ranks)
    experts = chains[1] if len(chains) > 1 else None
    homes = find_homes(chains[0], experts, parameters, ranks)
    states: dict[str, Tensors] = {kind: {} for kind in chains[0][0][0][0].keys[0]}
    for parameter in parameters:
        shared = ranks.expert_tensor if experts is not None and is_expert(parameter.name) else ranks.tensor
        for kind, tensors in states.items():
            for index, atom in enumerate(parameter.atoms):
                tensors[atom.name] = _assembled(reader, homes, parameter, index, kind, shared)
    return states


def _parallelism(args: argparse.Namespace) -> Parallelism:
    tensor = getattr(args, "tensor_model_parallel_size", None) or 1
    return Parallelism(
        tensor,
        getattr(args, "pipeline_model_parallel_size", None) or 1,
        getattr(args, "expert_model_parallel_size", None) or 1,
        getattr(args, "expert_tensor_parallel_size", None) or tensor,
    )


def _assembled(
    reader: CheckpointReader, homes: Homes, parameter: Parameter, index: int, kind: str, ranks: int
) -> LazyTensor:
    """One atom of a parameter, put together from the shards of its tensor-parallel ranks."""
    atom = parameter.atoms[index]
    before = sum(math.prod(other.local(ranks)) for other in parameter.atoms[:index])
    parts = []
    for rank in range(ranks if atom.cut is not None else 1):
        home = homes[parameter.name, rank]
        flat = reader.tensors[home.buffer.keys[home.spot.bucket][kind]]
        parts.append(unflatten(flat, home.spot.start + before, atom.local(ranks)))
    return parts[0] if atom.cut is None else lazy.cat(parts, atom.cut)


def _chains(reader: CheckpointReader) -> list[Ranks]:
    """The buffers of every optimizer. On a rank, a dtype that occurs again begins the next model chunk."""
    keys: dict[tuple[int, int, int], dict[int, dict[str, str]]] = {}
    dtypes: dict[tuple[int, int, int], str] = {}
    for key in reader.tensors:
        match = _KEY.match(key)
        if match is None:
            continue
        place = int(match["chain"] or 0), int(match["rank"]), int(match["buffer"])
        keys.setdefault(place, {}).setdefault(int(match["bucket"]), {})[match["kind"]] = key
        dtypes[place] = match["dtype"]
    chains: dict[int, dict[int, list[list[Buffer]]]] = {}
    for place in sorted(keys):
        buckets = tuple(keys[place][index] for index in sorted(keys[place]))
        sizes = tuple(reader.tensors[next(iter(kinds.values()))].shape[0] for kinds in buckets)
        if dtypes[place] == "uint8" or dtypes[place].startswith("float8"):
            raise NotImplementedError(f"{reader.path}: dp_reshardable optimizer state of parameters in float8.")
        chunks = chains.setdefault(place[0], {}).setdefault(place[1], [[]])
        if any(other.dtype == dtypes[place] for other in chunks[-1]):
            chunks.append([])
        chunks[-1].append(Buffer(dtypes[place], buckets, sizes))
    return [[chains[chain][rank] for rank in sorted(chains[chain])] for chain in sorted(chains)]


def _check_ranks(reader: CheckpointReader, chains: list[Ranks], ranks: Parallelism) -> None:
    expected = [ranks.tensor * ranks.pipeline, ranks.expert_tensor * ranks.expert * ranks.pipeline]
    found = [len(chain) for chain in chains]
    if len(found) > 2 or found != expected[: len(found)]:
        raise ValueError(
            f"{reader.path}: expected optimizer buffers of {expected[0]} model-parallel ranks, and of {expected[1]} "
            f"for experts that have an optimizer of their own, as the arguments say; got {found}."
        )
    if len({len(chunks) for chain in chains for chunks in chain}) != 1:
        raise ValueError(f"{reader.path}: expected as many model chunks on every rank; their buffers differ in number.")


def _parameters(reader: CheckpointReader, model: Tensors, facts: Facts, ranks: Parallelism) -> list[Parameter]:
    """The model's parameters, in the order in which the model registers them."""
    atoms: dict[str, list[Atom]] = {}
    dtypes: dict[str, str] = {}
    for key, tensor in model.items():
        shared = ranks.expert_tensor if is_expert(key) else ranks.tensor
        sizes = reader.chunks(key)[0].sizes if shared > 1 else ()
        for name, part in to_canonical({key: tensor}, TORCH_DIST, facts).items():
            if is_buffer(name):
                continue
            cut = _cut(name, part.shape, sizes[len(sizes) - len(part.shape) :], shared)
            atoms.setdefault(without_half(name), []).append(Atom(name, part.shape, cut))
            dtypes[without_half(name)] = str(part.dtype).removeprefix("torch.")
    # The gate (_w) comes before the up projection (_v).
    found = [Parameter(name, dtypes[name], tuple(sorted(parts, reverse=True))) for name, parts in atoms.items()]
    return sorted(found, key=lambda parameter: order.place(parameter.name))


def _cut(name: str, shape: tuple[int, ...], chunk: tuple[int, ...], ranks: int) -> int | None:
    """The dimension in which ranks shard a tensor: the one in which a chunk of the checkpoint is smaller."""
    cuts = [d for d, size in enumerate(chunk) if size < shape[d]]
    if not cuts:
        return None
    if len(cuts) > 1 or chunk[cuts[0]] * ranks != shape[cuts[0]]:
        raise ValueError(f"{name}: expected chunks cut into {ranks} along one dimension of {shape}; got {chunk}.")
    return cuts[0]
