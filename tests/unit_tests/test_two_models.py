"""In a process that trains two models, every report is about one of them only."""

import json
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.comm.journal import JOURNAL
from megatron.fsdp.state.consistency import inconsistent_weights
from megatron.fsdp.tools.trace import trace_step
from megatron_fsdp import MegatronFSDP, fully_shard_model
from tests.models import Block, TinyModel, batches, device, loss_of
from tests.needs import MEGATRON, missing
from tests.ranks import DEVICE, RankPool, on_ranks

DEPTHS = {"student": 2, "teacher": 3}


class Pair(NamedTuple):
    """Two models whose units have the same names, as far as the shallower one has them."""

    student: MegatronFSDP
    teacher: MegatronFSDP

    def step(self) -> None:
        """Forward through both, then backward through both."""
        losses = [loss_of(model, batches(1, 1)[0, 0]) for model in self]
        torch.stack(losses).sum().backward()


def _pair(**arguments: object) -> Pair:
    models = [TinyModel(depth=depth).to(device()) for depth in DEPTHS.values()]
    return Pair(*(fully_shard_model(model, fsdp_unit_modules=[Block], **arguments) for model in models))


def _units_of(depth: int) -> list[str]:
    return ["<root>", *(f"blocks.{number}" for number in range(depth))]


# trace ---------------------------------------------------------------------------------------------------------------


def _traces() -> list[tuple[list[str], set[str], int]]:
    """For each model, from a trace of a step of both: its units, those with spans, and how many spans there are."""
    pair = _pair()
    pair.step()
    found = []
    for model in pair:
        with trace_step(model) as timeline:
            pair.step()
        if dist.get_rank() == 0:
            trace = timeline.ranks[0]
            spans = [span for span in trace.spans if span.unit]
            found.append((list(trace.units), {span.unit for span in spans}, len(spans)))
    return found


def test_a_trace_shows_the_units_of_its_model(ranks: RankPool) -> None:
    student, teacher = ranks.run(2, _traces)[0]
    assert student[0] == _units_of(2) and student[1] == set(_units_of(2))
    assert teacher[0] == _units_of(3) and teacher[1] == set(_units_of(3))
    assert student[2] < teacher[2], "a block that the student does not have adds spans to the teacher's trace only"


# reports on waits ----------------------------------------------------------------------------------------------------


def _journal() -> dict[tuple[int, ...], set[str]]:
    """The operations issued, by ranks: the student is sharded over all ranks, the teacher on each rank alone."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    student = fully_shard_model(TinyModel(depth=2).to(device()), fsdp_unit_modules=[Block])
    teacher = fully_shard_model(
        TinyModel(depth=3).to(device()),
        fsdp_unit_modules=[Block],
        device_mesh=DeviceMesh.from_group(alone, DEVICE, mesh_dim_names=("dp",)),
        dp_shard_dim="dp",
    )
    Pair(student, teacher).step()
    logs = json.loads(JOURNAL.as_json())["logs"]
    return {tuple(log["peers"]): set(log["issued"].split("\n")) for log in logs}


def test_waits_are_recorded_by_the_ranks_that_share_a_model(ranks: RankPool) -> None:
    for rank, issued in enumerate(ranks.run(2, _journal)):
        assert issued.keys() == {(0, 1), (rank,)}
        assert not any("blocks.2" in what for what in issued[0, 1]), "only the teacher has this block"
        assert any("blocks.1" in what for what in issued[0, 1])
        assert any("blocks.2" in what for what in issued[rank,])


# consistency ---------------------------------------------------------------------------------------------------------


def _inconsistencies() -> list[list[str]]:
    pair = _pair(zero_dp_strategy="optim_grads")
    assert [inconsistent_weights(model.engine) for model in pair] == [[], []]
    for parameter in pair.teacher.engine.params():
        if parameter.name == "blocks.0.up.weight" and dist.get_rank() == 1:
            parameter.compute.data.view(-1)[-1] += 1
    return [inconsistent_weights(model.engine) for model in pair]


def test_inconsistent_weights_are_those_of_one_model(ranks: RankPool) -> None:
    assert ranks.run(2, _inconsistencies) == [[[], ["blocks.0.up.weight"]]] * 2


# gradients that are not finite ---------------------------------------------------------------------------------------


# estimates of memory -------------------------------------------------------------------------------------------------


# verify --------------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.skipif(DEVICE == "cuda" or bool(missing(MEGATRON)), reason="Megatron runs on the CPU here")
def test_verify_reads_each_model_separately() -> None:
    from megatron.fsdp.tools.megatron_run import full_gradients, full_weights
    from tests.megatron_models import forward_backward, megatron, tokens, wrapped

    with megatron():
        student, teacher = wrapped("optim_grads_params"), wrapped("optim_grads_params", num_layers=3)
        for model in (student, teacher):
            forward_backward(model, tokens(0, 2))
        for read in (full_weights, full_gradients):
            alone = [dict(read([model])) for model in (student, teacher)]
            assert not any("layers.2" in name for name in alone[0])
            assert any("layers.2" in name for name in alone[1])
            together = dict(read([student, teacher]))
            expected = alone[0] | {f"chunk 1: {name}": tensor for name, tensor in alone[1].items()}
            torch.testing.assert_close(together, expected, rtol=0, atol=0)
