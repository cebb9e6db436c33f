"""Megatron's training loop from the command line: resuming, different numbers of ranks, and third-party scripts."""

import functools
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from scripts.parity_cases import ALLTOALL, EP, TP
from tests.launch import ROOT, Ended, printed, torchrun, tree_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo; Megatron runs on CUDA here")

MODEL = (
    "--num-layers 2 --hidden-size 60 --ffn-hidden-size 172 --num-attention-heads 4 --seq-length 64 --swiglu "
    "--disable-bias-linear --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 6 --train-iters 4 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --eval-iters 1 --log-interval 1 "
    "--save-interval 2 --hidden-dropout 0 --attention-dropout 0"
)
DDP = "--use-distributed-optimizer --ckpt-format torch_dist"
OURS = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor"
# Muon in fp32: rounding in bf16, which it iterates in by default, makes a gradient's last bit a difference of 1e-6.
MUON = "--optimizer muon --muon-nesterov --muon-fp32-matmul-prec high"
BF16 = f"{OURS} --bf16"
# Which recipe it is does not matter: the script decides on the format.
FP8 = "--fp8-format hybrid --fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag"
KINDS = {"ddp": DDP, "ours": OURS, "ours_bf16": BF16, "ours_muon": f"{OURS} {MUON}", "quantized": f"{BF16} {FP8}"}
# Simulated: a reference format replaces Transformer Engine's.
QUANTIZED = "tests/functional_tests/quantized.py"
SCRIPTS = {"quantized": QUANTIZED}


needs_muon = pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="emerging-optimizers is missing")


@dataclass(frozen=True)
class Run:
    """The log of a run, as printed.

    Attributes:
        iterations: Loss and gradient norm by iteration.
        validation: Losses of the validation and the test set after the last iteration.
        output: The complete output.
    """

    iterations: dict[int, tuple[str, str]]
    validation: list[str]
    output: str


def launch(script: str, arguments: str, ranks: int, model: str = MODEL, packages: str = "") -> Ended:
    return torchrun([*script.split(), *model.split(), *arguments.split()], ranks, packages=packages)


def train(
    arguments: str, script: str = "pretrain_gpt.py", ranks: int = 2, model: str = MODEL, packages: str = ""
) -> Run:
    """Run a script and return its log."""
    result = launch(script, arguments, ranks, model, packages)
    output = printed(result) + result.stderr
    number = r"(\S+)"
    steps = re.findall(rf"iteration +{number}/.*?lm loss: {number} .*?grad norm: {number} ", output)
    validation = re.findall(rf"validation loss at .*?lm loss value: {number}", output)
    return Run({int(step): (loss, norm) for step, loss, norm in steps}, validation, output)


@functools.cache
def uninterrupted(kind: str, folder: Path) -> Run:
    """A run that saves checkpoints at iterations 2 and 4."""
    return train(f"{KINDS[kind]} --save {folder / kind}", SCRIPTS.get(kind, "pretrain_gpt.py"))


def resumed_at_2(kind: str, folder: Path, ranks: int = 2) -> Run:
    """A run that continues the checkpoint of iteration 2."""
    return train(f"{KINDS[kind]} --load {folder / kind} --ckpt-step 2", SCRIPTS.get(kind, "pretrain_gpt.py"), ranks)


def numbers(run: Run) -> list[float]:
    steps = [value for pair in run.iterations.values() for value in pair]
    return [float(value) for value in steps + run.validation]


@pytest.mark.slow
def test_prints_what_ddp_prints_to_six_digits(folder: Path) -> None:
    ddp, ours = uninterrupted("ddp", folder), uninterrupted("ours", folder)
    assert list(ours.iterations) == list(ddp.iterations) == [1, 2, 3, 4]
    assert len(ours.validation) == len(ddp.validation) == 2
    # The two add up the norm for clipping in different orders. Norms are printed with three digits.
    assert numbers(ours) == pytest.approx(numbers(ddp), rel=5e-7)


@pytest.mark.slow
def test_ranks_that_initialize_differently_begin_as_with_ddp() -> None:
    ddp, ours = (train(f"{each} --data-parallel-random-init") for each in (DDP, OURS))
    assert list(ours.iterations) == list(ddp.iterations) == [1, 2, 3, 4]
    assert numbers(ours) == pytest.approx(numbers(ddp), rel=5e-7)


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel --muon-tp-mode"


@functools.cache
def _with_muon(arguments: str, ranks: int) -> Run:
    """A run with our FSDP or, without its flags, with DDP; Megatron's layer-wise Muon cannot gather over gloo."""
    return train(f"{MUON} {arguments}", ranks=ranks, model=MODEL.replace("batch-size 6", "batch-size 8"))


@pytest.mark.slow
@needs_muon
@pytest.mark.parametrize(
    ("strategy", "settings", "ranks"),
    [
        ("optim", "", 2),
        ("optim_grads", "", 2),
        ("optim_grads_params", "", 2),
        ("optim_grads_params", EXPERTS, 4),
        ("optim_grads_params", "--pipeline-model-parallel-size 2", 4),
        ("optim_grads_params", f"{TENSOR} duplicated", 4),
        ("optim_grads_params", f"{TENSOR} distributed", 4),
    ],
)
def test_muon_prints_what_megatrons_own_prints_to_six_digits(strategy: str, settings: str, ranks: int) -> None:
    ours = _with_muon(f"{OURS} --data-parallel-sharding-strategy {strategy} {settings}", ranks)
    reference = _with_muon(settings, ranks)
    assert list(ours.iterations) == [1, 2, 3, 4]
    assert numbers(ours) == pytest.approx(numbers(reference), rel=1e-6)


@pytest.mark.slow
@needs_muon
def test_a_run_of_ddp_with_muon_is_continued_after_conversion(folder: Path) -> None:
    whole = _with_muon(f"--ckpt-format torch_dist --save {folder / 'ddp_muon'}", 1)
    last = Path("iter_0000002")
    tool = "-m megatron.fsdp.convert convert-torch-dist-to-fsdp-dtensor"
    result = launch(tool, f"{folder / 'ddp_muon' / last} {folder / 'converted' / last}", ranks=1, model="")
    assert result.returncode == 0, result.stderr[-2000:]
    (folder / "converted" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = _with_muon(f"{OURS} --load {folder / 'converted'}", 2)
    assert list(resumed.iterations) == [3, 4]
    assert float(resumed.iterations[3][0]) == pytest.approx(float(whole.iterations[3][0]), rel=1e-6)
    assert [float(v) for v in resumed.validation] == pytest.approx([float(v) for v in whole.validation], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "ours_bf16", pytest.param("ours_muon", marks=needs_muon), "quantized"])
def test_a_resumed_run_continues_exactly(kind: str, folder: Path) -> None:
    whole, resumed = uninterrupted(kind, folder), resumed_at_2(kind, folder)
    assert list(resumed.iterations) == [3, 4]
    assert resumed.iterations[3] == whole.iterations[3]
    # Megatron logs the loss of the second iteration after a start as the mean of two.
    assert resumed.iterations[4][1] == whole.iterations[4][1]
    assert resumed.validation == whole.validation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tolerance"), [("ours", 2e-6), pytest.param("ours_muon", 2e-6, marks=needs_muon), ("quantized", 2e-4)]
)
def test_a_checkpoint_is_resumed_on_a_different_number_of_ranks(kind: str, tolerance: float, folder: Path) -> None:
    whole, resumed = uninterrupted(kind, folder), resumed_at_2(kind, folder, ranks=3)
    for ours, reference in zip(resumed.iterations[3], whole.iterations[3], strict=True):
        assert float(ours) == pytest.approx(float(reference), rel=tolerance)
    # After two steps with the state that was loaded.
    after = [[float(value) for value in run.validation] for run in (resumed, whole)]
    assert after[0] == pytest.approx(after[1], rel=tolerance)


@pytest.mark.slow
@needs_muon
def test_another_model_and_optimizer_than_the_saved_runs_are_named(folder: Path) -> None:
    uninterrupted("ours_muon", folder)
    arguments = f"{OURS} --load {folder / 'ours_muon'}"
    result = launch("pretrain_gpt.py", arguments, 2, MODEL.replace("layers 2", "layers 3"))
    assert result.returncode != 0
    assert "was saved with --num-layers 2 (here 3), --optimizer muon (here adam)." in result.stderr


@pytest.mark.slow
def test_softmax_offsets_are_resumed_with_tensor_parallelism(folder: Path) -> None:
    model = f"{MODEL.replace('--lr 1e-3', '--lr 1e-2')} --softmax-type learnable"
    two = f"{OURS} --tensor-model-parallel-size 2"
    whole = train(f"{two} --save {folder / 'offsets'}", model=model)
    resumed = train(f"{two} --load {folder / 'offsets'} --ckpt-step 2", model=model)
    assert resumed.iterations[3] == whole.iterations[3]
    assert resumed.validation == whole.validation
    alone = train(f"{OURS} --load {folder / 'offsets'} --ckpt-step 2", ranks=1, model=model)
    assert float(alone.iterations[3][0]) == pytest.approx(float(whole.iterations[3][0]), rel=2e-6)


def test_the_launcher_runs_an_unmodified_script_with_this_project(folder: Path) -> None:
    script = "-m megatron.fsdp.launch tests/functional_tests/plain_script.py"
    run = train(OURS, script)
    assert "wrapped by megatron.fsdp.mcore.adapter: True" in run.output
    assert run.iterations == uninterrupted("ours", folder).iterations


@pytest.mark.slow
def test_fine_grained_unshard_of_layers_that_return_their_bias() -> None:
    biases = MODEL.replace("--disable-bias-linear", "").replace("--swiglu", "")
    ours = f"{OURS} --megatron-fsdp-enable-fine-grained-param-gather"
    runs = [train(arguments, model=biases) for arguments in (DDP, ours)]
    assert numbers(runs[1]) == pytest.approx(numbers(runs[0]), rel=5e-7)


# A script that ends in the examples' tail, without Slurm.
LAUNCH = """
SAVE=$1 PYTHON=$2 ARGUMENTS=("${@:3}" --save "$1" --load "$1" --exit-signal-handler)
NAME=loop LOGS=$SAVE/logs NODES=1 GPUS=2 SCRIPT=pretrain_gpt.py RENDEZVOUS=(--standalone)
ENTRY=() PROFILER=() FILES=() THEN=()
source examples/megatron_fsdp/job.bash
"""


def stop(script: int, by_a_person: bool) -> None:
    """Signal all processes, as Slurm does, or torchrun alone, as Ctrl-C would if it reached no rank."""
    for process in tree_of(script):
        words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
        if not by_a_person:
            os.kill(process, signal.SIGTERM)
        elif words[1:3] == ["-m", "torch.distributed.run"]:
            os.kill(process, signal.SIGINT)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("by_a_person", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["SIGTERM", "SIGINT"])
def test_a_launch_script_stops_at_a_signal_and_resumes(by_a_person: bool, tmp_path: Path) -> None:
    model = MODEL.replace("save-interval 2", "save-interval 1000")

    def start(iterations: int) -> subprocess.Popen[str]:
        arguments = (
            f"{model.replace('train-iters 4', f'train-iters {iterations}')} {OURS} --override-opt-param-scheduler"
        )
        command = ["bash", "-c", LAUNCH, "launch", str(tmp_path), sys.executable, *arguments.split()]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    with start(1000) as run:
        assert run.stdout is not None
        assert any("iteration        3/" in line for line in run.stdout)
        stop(run.pid, by_a_person)
        run.stdout.read()
    assert (run.returncode, (tmp_path / "outcome.txt").read_text()) == (75, "stopped\n")
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    with start(saved + 2) as run:
        output = run.communicate()[0]
    assert (run.returncode, (tmp_path / "outcome.txt").read_text()) == (0, "finished\n")
    assert re.findall(r"iteration +(\d+)/", output) == [str(saved + 1), str(saved + 2)]


def test_incompatible_settings_raise_an_error_before_the_model_is_built() -> None:
    result = launch("pretrain_gpt.py", f"{OURS} --use-tp-pp-dp-mapping", ranks=1)
    assert result.returncode != 0
    error = result.stderr[result.stderr.index("ValueError") :]
    assert "use_tp_pp_dp_mapping" in error
    assert "building" not in result.stdout


# Quantized weights -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_settings_reach_the_model(folder: Path) -> None:
    whole, plain = uninterrupted("quantized", folder), uninterrupted("ours_bf16", folder)
    assert whole.output.count("reuse_grad_buf_for_mxfp8_param_ag is set to False: ") == 1
    assert whole.output.count("disable_parameter_transpose_cache is set to True: ") == 1
    assert plain.iterations[1] != whole.iterations[1]
    assert numbers(whole) == pytest.approx(numbers(plain), rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "kind"), [("ours_bf16", "quantized"), ("quantized", "ours_bf16")])
def test_bf16_runs_load_and_are_loaded(saved: str, kind: str, folder: Path) -> None:
    whole = uninterrupted(saved, folder)
    resumed = train(f"{KINDS[kind]} --load {folder / saved} --ckpt-step 2", SCRIPTS.get(kind, "pretrain_gpt.py"))
    assert resumed.iterations[3] != whole.iterations[3]
    assert float(resumed.iterations[3][0]) == pytest.approx(float(whole.iterations[3][0]), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["", TP, f"{ALLTOALL} {EP}"], ids=["data", "tensor", "expert"])
def test_quantized_weights_print_what_ddp_prints(parallelism: str) -> None:
    """DDP has plain weights, which every forward rounds in the same way."""
    model = MODEL.replace("--global-batch-size 6", "--global-batch-size 4")
    ddp, ours = (train(f"{each} {parallelism}", QUANTIZED, 4, model) for each in (DDP, f"{OURS} {FP8}"))
    assert numbers(ours) == pytest.approx(numbers(ddp), rel=5e-7)
