"""Checkpoints in Megatron's training loop: training resumes exactly, and any topology loads any other's checkpoint."""

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.helpers.spelling import bare_name
from scripts.parity import DDP, fsdp_arguments, model_arguments, write_corpus
from scripts.parity_cases import ALLTOALL, CP, EP, INSTANCES, LLAMA, MTP, OF_EXPERTS, PP, TP, Case
from scripts.real_loop import Run, RunFailure, run, started
from tests.launch import torchrun
from tests.ranks import DEVICE
from tests.slow import all_but_slow

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="Megatron runs on the CPU here")

SAVED, LAST = 2, 4
SCHEDULE = ["--use-checkpoint-opt_param-scheduler"]


class Topology(NamedTuple):
    """Ranks, Megatron's arguments and our strategy."""

    ranks: int
    arguments: str = ""
    strategy: str = "optim_grads_params"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The dataset."""
    yield write_corpus(tmp_path_factory.mktemp("corpus"))


def words_of(
    corpus: Path, model: str, topology: Topology, *options: str, layers: int = 2, iterations: int = LAST
) -> list[str]:
    case = Case("checkpoint", "", topology.ranks, f"{model} {topology.arguments}", layers=layers, batch=12)
    arguments = [word for word in model_arguments(case, corpus, iterations) if word != "--no-save-optim"]
    return [*arguments, "--lr-decay-iters", str(max(LAST, iterations)), *fsdp_arguments(topology.strategy), *options]


def train(corpus: Path, model: str, topology: Topology, *options: str, layers: int = 2, iterations: int = LAST) -> Run:
    return run(words_of(corpus, model, topology, *options, layers=layers, iterations=iterations), topology.ranks)


def save(corpus: Path, model: str, topology: Topology, folder: Path, *options: str, layers: int = 2) -> Run:
    """Train to iteration ``SAVED`` and save."""
    words = ("--save", str(folder), "--save-interval", str(SAVED), "--exit-interval", str(SAVED))
    return train(corpus, model, topology, *words, *options, layers=layers)


def pass_on(corpus: Path, model: str, topology: Topology, source: Path, target: Path, layers: int = 2) -> None:
    """Load into a model with other initial values, and save it again."""
    words = ["--load", str(source), "--save", str(target), "--save-interval", str(SAVED + 1), "--seed", "7"]
    train(corpus, model, topology, *words, *SCHEDULE, "--no-load-rng", layers=layers, iterations=SAVED)


def of_iteration(folder: Path) -> Path:
    return folder / f"iter_{SAVED:07d}"


def content(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """All tensors, unsharded, and the settings of all parameter groups."""
    reader = CheckpointReader(of_iteration(folder))
    reader.check()
    objects = {key: reader.read_object(key) for key in reader.objects if ".param_to_group_meta." in key}
    return {key: tensor.full_tensor() for key, tensor in reader.tensors.items() if not key.startswith("rng")}, objects


# Resuming ------------------------------------------------------------------------------------------------------------

RESUMED = {
    "ZeRO-3": (LLAMA, Topology(3)),
    "ZeRO-1, dropout": ("--hidden-dropout 0.1 --attention-dropout 0.1", Topology(2, strategy="optim")),
    "no_shard, bf16": (f"{LLAMA} --bf16", Topology(2, strategy="no_shard")),
    "ZeRO-2, TP 2, PP 2, tied": ("", Topology(4, f"{TP} {PP} --sequence-parallel", "optim_grads")),
    "EP 2": (ALLTOALL, Topology(4, EP)),
    # Its second stage has no parameters with rates of their own.
    "PP 3, decoupled rates": (
        f"{LLAMA} --num-layers 3 --untie-embeddings-and-output-weights --decoupled-lr 1e-3",
        Topology(3, "--pipeline-model-parallel-size 3"),
    ),
}


@pytest.mark.parametrize("name", all_but_slow(RESUMED, "ZeRO-3"))
def test_resumed_training_is_the_same(corpus: Path, tmp_path: Path, name: str) -> None:
    model, topology = RESUMED[name]
    whole = train(corpus, model, topology)
    save(corpus, model, topology, tmp_path)
    resumed = train(corpus, model, topology, "--load", str(tmp_path))
    assert len(resumed.iterations) == LAST - SAVED
    assert resumed.iterations == whole.iterations[SAVED:]


@pytest.mark.slow
def test_rates_of_another_run(corpus: Path, tmp_path: Path) -> None:
    topology, words = Topology(1), ("--untie-embeddings-and-output-weights", "--lr-decay-style", "linear")
    refused, rates = "", []
    for options in (
        ("--save", str(tmp_path), "--save-interval", str(SAVED)),
        ("--lr", "1e-3"),
        ("--lr", "1e-3", "--override-opt_param-scheduler"),
        ("--lr", "1e-3", "--use-checkpoint-opt_param-scheduler"),
    ):
        loads = () if "--save" in options else ("--load", str(tmp_path), "--ckpt-step", str(SAVED))
        try:
            found = train(corpus, LLAMA, topology, *words, *options, *loads).log
            rates.append([float(rate) for rate in re.findall(r"learning rate: ([\d.E+-]+)", found)])
        except RunFailure as failure:
            refused = str(failure)
    whole, own, saved = rates
    assert "expected max_lr 0.002, as in the checkpoint" in refused and "--override-opt_param-scheduler" in refused
    assert saved == whole[SAVED:] and own == pytest.approx([rate / 2 for rate in saved], rel=1e-3)


@pytest.mark.slow
def test_saving_in_the_background(corpus: Path, tmp_path: Path) -> None:
    topology = Topology(2)
    at_once, meanwhile = tmp_path / "at_once", tmp_path / "meanwhile"
    save(corpus, LLAMA, topology, at_once)
    # Without the persistent worker, Megatron turns --async-save off.
    words = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore", "--save-interval", str(SAVED))
    arguments = words_of(corpus, LLAMA, topology, *words, "--save", str(meanwhile))
    # In processes of their own: the worker's main module must be the script.
    finished = torchrun(["pretrain_gpt.py", *arguments], topology.ranks, timeout=250)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "scheduled an async checkpoint save" in finished.stdout
    tensors, settings = content(meanwhile)
    expected, expected_settings = content(at_once)
    assert tensors.keys() == expected.keys() and settings == expected_settings
    for key, value in expected.items():
        assert torch.equal(tensors[key], value), f"{key}: training changed it while it was being saved"
    assert (of_iteration(meanwhile) / "checksums.json").exists()


@pytest.mark.slow
def test_without_optimizer_state(corpus: Path, tmp_path: Path) -> None:
    model, topology = f"{LLAMA} --bf16", Topology(2)
    before = save(corpus, model, topology, tmp_path)
    for options in (["--finetune"], ["--no-load-optim", "--no-load-rng"]):
        after = train(corpus, model, topology, "--load", str(tmp_path), *options, *SCHEDULE)
        assert after.iterations[0].loss < before.iterations[0].loss - 0.01, "the weights were not loaded"


@pytest.mark.slow
@pytest.mark.parametrize("topology", [Topology(2), Topology(4, f"{EP} {PP}")], ids=["dense", "EP 2, PP 2"])
def test_dumped_groups_are_those_of_ddp(corpus: Path, tmp_path: Path, topology: Topology) -> None:
    model = ALLTOALL if topology.arguments else LLAMA
    found: list[dict[str, int]] = []
    for flags in (DDP, fsdp_arguments(topology.strategy)):
        folder = tmp_path / str(len(found))
        case = Case("checkpoint", "", topology.ranks, f"{model} {topology.arguments} --decoupled-lr 1e-3")
        words = [*model_arguments(case, corpus, 3), *flags, "--dump-param-to-param-group-map", str(folder)]
        run([*words, "--exit-interval", "1"], topology.ranks)
        reader = CheckpointReader(folder)
        found.append({bare_name(key): reader.read_object(key) for key in reader.objects})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 10
    # The numbering of the groups may differ; which parameters share a group may not.
    assert _together(found[0]) == _together(found[1])
    assert len(set(found[0].values())) > 1


def _together(numbers: dict[str, int]) -> set[frozenset[str]]:
    return {frozenset(name for name, n in numbers.items() if n == number) for number in numbers.values()}


def test_loading_from_an_empty_folder_starts_from_scratch(corpus: Path, tmp_path: Path) -> None:
    topology, at_once = Topology(2), ["--lr-warmup-iters", "0"]
    whole = train(corpus, LLAMA, topology, *at_once)
    assert train(corpus, LLAMA, topology, *at_once, "--load", str(tmp_path)).iterations == whole.iterations


@pytest.mark.slow
def test_killed_training_resumes(corpus: Path, tmp_path: Path) -> None:
    """Training is killed three times, while it saves a checkpoint or just after."""
    topology, iterations, dice = Topology(2), 24, random.Random(5)
    whole = train(corpus, LLAMA, topology, iterations=iterations)
    folder, logs = tmp_path / "checkpoints", tmp_path / "logs"
    logs.mkdir()
    words = ["--save", str(folder), "--load", str(folder), "--save-interval", "1"]
    for killed in range(3):
        with started(words_of(corpus, LLAMA, topology, *words, iterations=iterations), 2, str(logs)) as processes:
            here = len(list(folder.glob("iter_*")))
            end = time.monotonic() + 120
            while len(list(folder.glob("iter_*"))) < here + 2 + killed and time.monotonic() < end:
                assert all(process.is_alive() for process in processes), (logs / "0.log").read_text()[-2000:]
                time.sleep(0.002)
            time.sleep(dice.uniform(0, 0.1))
    resumed = train(corpus, LLAMA, topology, *words, iterations=iterations)
    done = iterations - len(resumed.iterations)
    assert 3 <= done < iterations
    assert resumed.iterations == whole.iterations[done:]


# Changing the topology -----------------------------------------------------------------------------------------------

# Each topology loads the checkpoint of the one before it. Every checkpoint must be bit-identical to the first one.
DENSE = (
    Topology(2, strategy="optim"),
    Topology(1),
    Topology(4, f"{TP} {PP}", "no_shard"),
    Topology(3, strategy="optim_grads"),
    Topology(4, f"{TP} --sequence-parallel"),
    Topology(4, f"{PP} --num-layers-per-virtual-pipeline-stage 1", "optim_grads"),
    Topology(4, INSTANCES),
    Topology(4, PP),
    Topology(4, CP, "no_shard"),
    Topology(4, f"{TP} {INSTANCES}", "optim"),
)
EXPERTS = (
    Topology(4, EP),
    Topology(2),
    Topology(4, f"{EP} {TP} --sequence-parallel --expert-tensor-parallel-size 1", "optim"),
    Topology(4, "--expert-model-parallel-size 4", "optim_grads"),
    Topology(4, f"{EP} {PP}"),
    Topology(4, f"{EP} {OF_EXPERTS}"),
    Topology(1, strategy="optim"),
)
CHAINS = {
    "learned positions, tied embeddings": ("", DENSE, 4),
    "Llama-like": (LLAMA, DENSE[::-1], 4),
    "a prediction layer, tied embeddings": (MTP, (Topology(2), Topology(4, f"{TP} {PP}", "optim"), Topology(1)), 2),
    "experts": (f"{ALLTOALL} --moe-shared-expert-intermediate-size 32", EXPERTS, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_any_topology_loads_any_other(corpus: Path, tmp_path: Path, name: str) -> None:
    model, topologies, layers = CHAINS[name]
    save(corpus, model, topologies[0], tmp_path / "0", layers=layers)
    expected, expected_settings = content(tmp_path / "0")
    assert any(value.float().std() > 0 for value in expected.values())
    for number, topology in enumerate(topologies[1:]):
        pass_on(corpus, model, topology, tmp_path / str(number), tmp_path / str(number + 1), layers)
        found, settings = content(tmp_path / str(number + 1))
        assert found.keys() == expected.keys(), f"{topology}: {found.keys() ^ expected.keys()}"
        different = [key for key, value in expected.items() if not torch.equal(found[key], value)]
        assert not different, f"{topology}: {len(different)} tensors differ, such as {different[:5]}"
        assert settings == expected_settings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "topology"), [(LLAMA, Topology(2)), (ALLTOALL, Topology(4, EP))], ids=["Llama-like", "experts, EP 2"]
)
def test_megatron_cores_fsdp_resumes_from_ours(corpus: Path, tmp_path: Path, model: str, topology: Topology) -> None:
    model = f"{model} --bf16 --calculate-per-token-loss"
    save(corpus, model, topology, tmp_path)
    ours = train(corpus, model, topology, "--load", str(tmp_path))
    theirs = train(corpus, model, topology, "--load", str(tmp_path), "--fsdp-implementation", "megatron-core")
    assert len(theirs.iterations) == len(ours.iterations) == LAST - SAVED
    for one, other in zip(ours.iterations, theirs.iterations, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-4)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-2)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped(corpus: Path, tmp_path: Path) -> None:
    topology = Topology(2)
    words = ("--save", str(tmp_path), "--save-interval", "1")
    whole = train(corpus, LLAMA, topology, *words, iterations=3)
    newest = tmp_path / "iter_0000003"
    data = bytearray((newest / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 4
    (newest / "__1_0.distcp").write_bytes(data)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")  # as after a crash between two writes
    resumed = train(corpus, LLAMA, topology, "--load", str(tmp_path), iterations=3)
    assert resumed.iterations == whole.iterations[2:], "expected to resume from iteration 2"
    assert "__1_0.distcp" in resumed.log and "falling back to the checkpoint of iteration 2" in resumed.log


@pytest.mark.slow
def test_training_resumes_without_a_tracker_file(corpus: Path, tmp_path: Path) -> None:
    topology = Topology(2)
    words = ("--save", str(tmp_path), "--save-interval", "1")
    whole = train(corpus, LLAMA, topology, *words, iterations=3)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "iter_0000003" / ".metadata").unlink()
    resumed = train(corpus, LLAMA, topology, "--load", str(tmp_path), *words, iterations=3)
    assert resumed.iterations == whole.iterations[2:], "expected to resume from iteration 2"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
