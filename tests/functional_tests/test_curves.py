"""TensorBoard, Weights & Biases (offline) and PyTorch's profiler, started by Megatron's flags, with our FSDP."""

import gzip
import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from scripts.real_loop import Run, run
from tests.functional_tests.test_training_loop import DDP, MODEL, OURS

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
wandb_messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo; Megatron runs on CUDA here"),
]

RANKS, ITERATIONS = 2, 4
# Tokens that no batch holds have zeros as the gradients of their embeddings, so that there are zeros to count.
UNTIED = f"{MODEL} --untie-embeddings-and-output-weights"
LOGGED = (
    "--log-params-norm --log-num-zeros-in-grad --log-throughput --log-timers-to-tensorboard --timing-log-level 2 "
    "--log-memory-to-tensorboard --log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard"
)
NORMS = ("grad-norm", "params-norm")
SAME = ("lm loss", "learning-rate", *NORMS, "num-zeros", "batch-size", "world-size", "lm loss validation")

Curves = dict[str, dict[int, float]]


@dataclass(frozen=True)
class Logged:
    """A run with all of Megatron's logging, and its folder."""

    run: Run
    folder: Path

    def tensorboard(self) -> Curves:
        """The values by tag and iteration. Fails if more than one rank wrote a file."""
        (file,) = (self.folder / "tensorboard").iterdir()
        events = event_accumulator.EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}

    def wandb(self) -> Curves:
        """The values by name and iteration. Fails if more than one rank made a run."""
        (file,) = (self.folder / "wandb").glob("wandb/offline-run-*/*.wandb")
        curves: Curves = defaultdict(dict)
        for content in wandb_records(file.read_bytes()):
            record = wandb_messages.Record.FromString(content)
            for item in record.history.item:
                curves["/".join(item.nested_key) or item.key][record.history.step.num] = json.loads(item.value_json)
        return curves


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file of an offline run: chunks in LevelDB's log format after a header of 7 bytes."""
    position, record = 7, b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last chunk of one
            yield record
            record = b""


def log(sharding: str, folder: Path, more: str = "") -> Logged:
    arguments = f"{UNTIED} {sharding} {LOGGED} --tensorboard-dir {folder / 'tensorboard'} {more}"
    return Logged(run(arguments.split(), RANKS, environment={"WANDB_MODE": "offline"}), folder)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    folder = tmp_path_factory.mktemp("ours")
    wandb = f"--wandb-project test --wandb-exp-name tiny --wandb-save-dir {folder / 'wandb'}"
    profiler = "--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 3 --profile-ranks 0 1"
    return log(OURS, folder, f"{wandb} {profiler}")


def test_tensorboard_holds_the_numbers_of_the_log(ours: Logged) -> None:
    curves = ours.tensorboard()
    for tag, name in {
        "lm loss": "loss",
        "grad-norm": "grad_norm",
        "params-norm": "params_norm",
        "num-zeros": "zeros",
    }.items():
        expected = {step: getattr(numbers, name) for step, numbers in enumerate(ours.run.iterations, 1)}
        assert curves[tag] == pytest.approx(expected, rel=1e-6), tag
        assert min(expected.values()) > 0
    assert curves["learning-rate"] == pytest.approx({1: 7.5e-4, 2: 5e-4, 3: 2.5e-4, 4: 0.0})
    for tag in ("mem-allocated-bytes", "mem-max-allocated-bytes", "forward-backward-time", "optimizer-inner-step-time"):
        assert list(curves[tag]) == [1, 2, 3, 4] and min(curves[tag].values()) > 0, tag
    # Megatron writes these from the second iteration on, or only at the end.
    assert {"iteration-time", "throughput", "lm loss validation", "lm loss validation ppl"} <= set(curves)


def test_weights_and_biases_holds_what_tensorboard_does(ours: Logged) -> None:
    curves, expected = ours.wandb(), ours.tensorboard()
    for name in (*SAME[:-1], "throughput", "iteration-time"):
        assert curves[name] == pytest.approx(expected[name], rel=1e-6), name
    assert len(curves["lm loss"]) == ITERATIONS
    assert "lm loss validation" in curves


def test_the_profiler_writes_a_trace_of_every_rank(ours: Logged) -> None:
    for rank in range(RANKS):
        trace = json.loads(gzip.decompress((ours.folder / "torch_profile" / f"rank-{rank}.json.gz").read_bytes()))
        names = {event.get("name") for event in trace["traceEvents"]}
        assert trace["distributedInfo"]["rank"] == rank
        assert {"ProfilerStep#2", "aten::mm"} <= names


def test_curves_are_those_of_ddp(ours: Logged, tmp_path: Path) -> None:
    ddp, sharded = log(DDP, tmp_path).tensorboard(), ours.tensorboard()
    # Megatron times the steps of its chained optimizer, which DDP has, under fewer names.
    assert {tag for tag in set(sharded) ^ set(ddp) if not tag.endswith("-time")} == set()
    for tag in SAME:
        assert sharded[tag] == pytest.approx(ddp[tag], rel=2e-6 if tag in NORMS else 5e-7), tag
