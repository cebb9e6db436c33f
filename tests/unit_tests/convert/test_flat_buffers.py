"""Optimizer state in flat buffers: offsets of parameters for every parallelism, and errors for other sizes."""

import argparse
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from megatron.fsdp.checkpoint import lazy
from megatron.fsdp.checkpoint.lazy import Region
from megatron.fsdp.convert.rewrites import Facts, gated_parameters, to_canonical
from megatron.fsdp.convert.run import read_state, write_state
from megatron.fsdp.convert.torch_dist.buffers import read_buffers
from megatron.fsdp.convert.torch_dist.order import expert_index, place
from megatron.fsdp.convert.torch_dist.stages import Spot, lay_out
from megatron.fsdp.naming.names import without_half
from tests.checkpoints import DECAYED, ITERATION, PLAIN, plain_tensors, random_tensors, sample, write_torch_dist

HIDDEN, FFN, VOCABULARY, EXPERTS = 8, 12, 36, 4


def test_literal_offsets_in_one_bucket() -> None:
    # Each parameter begins at a multiple of 64.
    assert lay_out([10, 64, 100, 1], [257]) == [Spot(0, 0), Spot(0, 64), Spot(0, 128), Spot(0, 256)]


def test_literal_offsets_in_several_buckets() -> None:
    assert lay_out([10, 64, 100, 1], [128, 100, 1]) == [Spot(0, 0), Spot(0, 64), Spot(1, 0), Spot(2, 0)]


def test_a_bucket_may_end_where_the_next_parameter_would_have_begun() -> None:
    assert lay_out([10, 100], [64, 100]) == [Spot(0, 0), Spot(1, 0)]


@pytest.mark.parametrize(
    ("numels", "buckets"), [([10, 64], [127]), ([10, 64], [129]), ([10], [10, 10]), ([10, 10], [10]), ([], [10])]
)
def test_buffers_of_the_wrong_size_raise(numels: list[int], buckets: list[int]) -> None:
    assert lay_out(numels, buckets) is None


class Trained(NamedTuple):
    """A parameter of the model that is trained: its full value, and the dimension tensor parallelism cuts."""

    name: str
    value: torch.Tensor
    cut: int | None
    gated: bool = False


def layer(index: int, moe: bool) -> list[tuple[str, tuple[int, ...], int | None]]:
    prefix = f"decoder.layers.{index}."
    attention: list[tuple[str, tuple[int, ...], int | None]] = [
        (f"{prefix}input_layernorm.weight", (HIDDEN,), None),
        (f"{prefix}self_attention.linear_proj.weight", (HIDDEN, HIDDEN), 1),
        (f"{prefix}self_attention.linear_proj.bias", (HIDDEN,), None),
        (f"{prefix}self_attention.linear_qkv.weight", (3 * HIDDEN, HIDDEN), 0),
        (f"{prefix}pre_mlp_layernorm.weight", (HIDDEN,), None),
    ]
    if not moe:
        return [
            *attention,
            (f"{prefix}mlp.linear_fc1.weight", (2 * FFN, HIDDEN), 0),
            (f"{prefix}mlp.linear_fc2.weight", (HIDDEN, FFN), 1),
        ]
    experts = [
        (f"{prefix}mlp.experts.local_experts.{e}.linear_fc{n}.weight", shape, cut)
        for e in range(EXPERTS)
        for n, shape, cut in ((1, (2 * FFN, HIDDEN), 0), (2, (HIDDEN, FFN), 1))
    ]
    return [*attention, (f"{prefix}mlp.router.weight", (EXPERTS, HIDDEN), None), *experts]


def model(layers: int, moe: bool, tied: bool) -> list[Trained]:
    """Parameters in the order in which Megatron's modules register them."""
    listed: list[tuple[str, tuple[int, ...], int | None]] = [
        ("embedding.word_embeddings.weight", (VOCABULARY, HIDDEN), 0)
    ]
    for index in range(layers):
        listed += layer(index, moe)
    listed.append(("decoder.final_layernorm.weight", (HIDDEN,), None))
    if not tied:
        listed.append(("output_layer.weight", (VOCABULARY, HIDDEN), 0))
    values = random_tensors({name: shape for name, shape, _ in listed})
    return [Trained(name, values[name], cut, "linear_fc1" in name) for name, _, cut in listed]


def local_part(parameter: Trained, rank: int, ranks: int) -> torch.Tensor:
    if parameter.cut is None:
        return parameter.value
    halves = parameter.value.chunk(2) if parameter.gated else (parameter.value,)
    return torch.cat([half.chunk(ranks, parameter.cut)[rank] for half in halves])


def flat_buckets(parts: list[torch.Tensor], bucket_size: int | None, alone: list[bool]) -> list[torch.Tensor]:
    """A rank's buckets, from the last parameter to the first, with garbage in gaps; ``alone`` take one each."""
    buckets: list[torch.Tensor] = []
    flat = torch.empty(0)
    for part, own in zip(reversed(parts), reversed(alone), strict=True):
        flat = torch.cat([flat, torch.full((-len(flat) % 64,), float("nan"))])
        if own and len(flat):
            buckets.append(flat)
            flat = torch.empty(0)
        flat = torch.cat([flat, part.reshape(-1)])
        if own or (bucket_size is not None and len(flat) >= bucket_size):
            buckets.append(flat)
            flat = torch.empty(0)
    return [*buckets, flat] if len(flat) else buckets


class Case(NamedTuple):
    """Numbers of ranks, model chunks per rank, and properties of the model."""

    tp: int = 1
    pp: int = 1
    chunks: int = 1
    ep: int = 1
    etp: int = 1
    moe: bool = False
    tied: bool = False
    bucket_size: int | None = None
    layers: int = 4


CASES = [
    Case(),
    Case(bucket_size=300),
    Case(tp=2),
    Case(tp=2, bucket_size=200),
    Case(pp=2),
    Case(pp=3, layers=5),
    Case(pp=2, tied=True),
    Case(tied=True),
    Case(pp=2, chunks=2),
    Case(tp=2, pp=2, chunks=2, tied=True),
    Case(moe=True),
    Case(moe=True, ep=2, bucket_size=300),
    Case(moe=True, ep=2, tp=2, etp=2),
    Case(moe=True, ep=4, tp=2, pp=2, layers=3),
    Case(moe=True, ep=2, pp=2, chunks=2, tied=True),
]


def stages(parameters: list[Trained], case: Case) -> list[list[Trained]]:
    """The parameters of each stage: layers dealt out, embedding and final layers at the ends."""
    count = case.pp * case.chunks
    per_stage = -(-case.layers // count)
    found: list[list[Trained]] = [[] for _ in range(count)]
    for p in parameters:
        if p.name.startswith("embedding"):
            found[0].append(p)
        elif p.name.startswith("decoder.layers."):
            found[int(p.name.split(".")[2]) // per_stage].append(p)
        else:
            found[-1].append(p)
    if case.tied and case.pp > 1:
        found[-1].append(parameters[0]._replace(name="output_layer.weight"))
    return found


def stored(parameters: list[Trained], case: Case) -> SimpleNamespace:
    """A checkpoint of these parameters, as far as reading its buffers looks at it."""
    tensors: dict[str, lazy.LazyTensor] = {}
    chunks: dict[str, Region] = {}
    for p in parameters:
        key = p.name.replace("local_experts.", "experts.")
        tensors[key] = lazy.of(p.value.bfloat16())
        ranks = case.etp if ".experts." in key else case.tp
        sizes = [n // (ranks * (2 if p.gated else 1)) if d == p.cut else n for d, n in enumerate(p.value.shape)]
        chunks[key] = Region((0,) * len(sizes), tuple(sizes))
    spread = case.moe and case.ep > 1
    runs = stages(parameters, case)
    for pp, chunk in itertools.product(range(case.pp), range(case.chunks)):
        run = runs[chunk * case.pp + pp]
        dense = [p for p in run if not (spread and ".experts." in p.name)]
        alone = [
            case.tied and case.pp > 1 and p.name in ("embedding.word_embeddings.weight", "output_layer.weight")
            for p in dense
        ]
        for tp in range(case.tp):
            prefix = f"{'chained_0.' if spread else ''}optimizer.distributed.dp_group_idx_{pp * case.tp + tp}."
            add(
                tensors,
                prefix,
                chunk,
                flat_buckets([local_part(p, tp, case.tp) for p in dense], case.bucket_size, alone),
            )
        for ep, etp in itertools.product(range(case.ep if spread else 0), range(case.etp)):
            mine = [p for p in run if ".experts." in p.name and expert_index(p.name) // (EXPERTS // case.ep) == ep]
            index = etp + case.etp * (ep + case.ep * pp)
            parts = [local_part(p, etp, case.etp) for p in mine]
            prefix = f"chained_1.optimizer.distributed.dp_group_idx_{index}."
            add(tensors, prefix, chunk, flat_buckets(parts, case.bucket_size, [False] * len(parts)))
    return SimpleNamespace(path=Path("made-up"), tensors=tensors, chunks=lambda key: [chunks[key]])


def add(tensors: dict[str, lazy.LazyTensor], prefix: str, buffer: int, buckets: list[torch.Tensor]) -> None:
    for index, flat in enumerate(buckets):
        key = f"{prefix}gbuf_idx_{buffer}.dtype_(torch.bfloat16, torch.float32).bucket_idx_{index}"
        tensors |= {f"{key}.param": lazy.of(flat), f"{key}.exp_avg": lazy.of(flat * 2 + 1)}


def read(reader: Any, case: Case) -> dict[str, dict[str, lazy.LazyTensor]]:
    args = argparse.Namespace(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )
    weights = {key: tensor for key, tensor in reader.tensors.items() if "optimizer." not in key}
    facts = Facts(single_experts=True)
    facts = Facts(single_experts=True, gated=gated_parameters(to_canonical(weights, "torch_dist", facts)))
    return read_buffers(reader, weights, facts, args)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_parameter_is_found_bit_for_bit(case: Case) -> None:
    parameters = model(case.layers, case.moe, case.tied)
    states = read(stored(parameters, case), case)
    assert set(states) == {"param", "exp_avg"}
    for p in parameters:
        halves = (
            {f"{p.name}_w": p.value.chunk(2)[0], f"{p.name}_v": p.value.chunk(2)[1]} if p.gated else {p.name: p.value}
        )
        for name, value in halves.items():
            assert torch.equal(states["param"].pop(name).full_tensor(), value), name
            assert torch.equal(states["exp_avg"].pop(name).full_tensor(), value * 2 + 1), name
    assert not states["param"] and not states["exp_avg"]


@pytest.mark.parametrize("case", [Case(), Case(tp=2, pp=2, chunks=2), Case(moe=True, ep=2)], ids=str)
def test_reading_slices_equals_reading_the_whole(case: Case) -> None:
    parameters = model(case.layers, case.moe, case.tied)
    for name, tensor in read(stored(parameters, case), case)["param"].items():
        for region in tensor.blocks(40):
            where = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))
            assert torch.equal(tensor.read(region), tensor.full_tensor()[where]), (name, region)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (Case(), {"tp": 2}),
        (Case(pp=2), {"pp": 1}),
        (Case(moe=True, ep=2), {"ep": 4}),
    ],
    ids=str,
)
def test_mismatched_rank_counts_raise(case: Case, changes: dict[str, int]) -> None:
    reader = stored(model(case.layers, case.moe, case.tied), case)
    with pytest.raises(ValueError, match="model-parallel ranks"):
        read(reader, case._replace(**changes))


def test_an_extra_parameter_raises() -> None:
    parameters = model(4, False, False)
    reader = stored(parameters, Case())
    reader.tensors["decoder.layers.0.mlp.linear_fc1.bias"] = lazy.of(torch.zeros(2 * FFN, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="fill the optimizer's buffers"):
        read(reader, Case())


def test_parameters_of_unknown_modules_raise() -> None:
    parameters = model(4, False, False)
    reader = stored(parameters, Case())
    reader.tensors["decoder.layers.0.mlp.mystery.weight"] = lazy.of(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(NotImplementedError, match="mystery"):
        read(reader, Case())


def test_float8_parameters_raise() -> None:
    reader = stored(model(1, False, False), Case(layers=1))
    key = next(key for key in reader.tensors if "gbuf_idx" in key)
    reader.tensors[key.replace("dtype_(torch.bfloat16,", "dtype_(torch.uint8,")] = reader.tensors.pop(key)
    with pytest.raises(NotImplementedError, match="float8"):
        read(reader, Case(layers=1))


def test_names_are_in_the_order_of_registration() -> None:
    for moe in (False, True):
        names = [p.name for p in model(12, moe, False)]
        assert sorted(reversed(names), key=place) == names


def test_weights_missing_from_the_buffers_raise(tmp_path: Path) -> None:
    source = sample("torch_dist_dp2_dp_reshardable") / ITERATION
    tensors = plain_tensors(source)
    # Two parameters of equal size change places: every size still fits.
    proj = tensors["decoder.layers.self_attention.linear_proj.weight"]
    tensors["decoder.layers.self_attention.linear_proj.weight"] = proj.flip(0)
    from_reader = read_state(source)
    buffer = "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"
    objects = {buffer: [{"param_groups": [{**DECAYED}, {**PLAIN}]}]}
    state = "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2"
    made = write_torch_dist(tmp_path / "source", tensors, {"args": from_reader.args}, {**objects, state: [None]})
    with pytest.raises(ValueError, match="linear_proj.*do not round to the model's weights"):
        write_state(read_state(made), tmp_path / "target", "fsdp_dtensor")
    assert not (tmp_path / "target").exists()


def test_halves_of_one_parameter_have_one_name() -> None:
    assert (
        without_half("decoder.layers.1.mlp.experts.linear_fc1.weight3_w")
        == "decoder.layers.1.mlp.experts.linear_fc1.weight3"
    )
    assert without_half("decoder.layers.0.mlp.linear_fc1.bias_v") == "decoder.layers.0.mlp.linear_fc1.bias"
    assert without_half("decoder.layers.0.mlp.linear_fc2.weight") == "decoder.layers.0.mlp.linear_fc2.weight"
