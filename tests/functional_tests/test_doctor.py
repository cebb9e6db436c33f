"""The doctor reports the memory of a command line at any number of ranks, and the settings that are not supported."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron.fsdp.tools.fit import with_overhead
from megatron.fsdp.tools.predict.space import SETTINGS
from tests import replay_cases
from tests.doctor_cases import Result
from tests.doctor_cases import run as run_doctor
from tests.launch import ROOT, printed, python, start, tree_of
from tests.slow import all_but_slow

SCRIPTS = sorted(path for path in (ROOT / "examples" / "megatron_fsdp").iterdir() if path.suffix in (".sh", ".sbatch"))
MODEL = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 1 --max-position-embeddings 32 --train-iters 5 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 255 "
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params"
)
SCRIPT = str(ROOT / "pretrain_gpt.py")
EXPERTS = "--no-bias-gelu-fusion --num-experts"
WORDS = [SCRIPT, *MODEL.split(), "--global-batch-size", "8"]


def doctor(*words: object, world_size: object = 8, change: str = "") -> Any:
    """The doctor's report on a command."""
    found = run_doctor(["--json", "--world-size", *map(str, (world_size, *words))], change=change)
    assert found.code == 0, found
    return json.loads(found.out)


def test_bytes_of_a_command_line() -> None:
    parallel = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    found = doctor("--rank", 0, *WORDS, "--bf16", *parallel.split())
    assert found["sizes"]["tensor"] == found["sizes"]["pipeline"] == 2 and found["sizes"]["data (with context)"] == 2
    assert found["units"] == [{"TransformerLayer": 2}]
    # The first stage has word embeddings (divided by 2), position embeddings, and two layers (matrices divided by 2).
    embeddings = 256 // 2 * 64 + 32 * 64
    matrices = (3 * 64 * 64 + 3 * 64 + 64 * 64 + 2 * 64 * 256 + 256) // 2
    layer = matrices + 2 * 64 + 4 * 64
    total = embeddings + 2 * layer
    (sizes,) = found["bytes"]
    assert sizes["elements"] == total
    assert sizes["main"] == 4 * (total + sizes["padding"]) // 2 and sizes["optimizer"] == 2 * sizes["main"]
    assert found["resting"] == 12 * (total + sizes["padding"]) // 2
    assert found["peak_without_activations"] > found["resting"]


def test_bytes_of_quantized_weights() -> None:
    """The first layer stays in bf16; embeddings, norms and biases do."""
    quantized = "--fp8-format hybrid --fp8-recipe mxfp8 --fp8-param-gather --first-last-layers-bf16"
    layers = "--num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 0"
    found = doctor(*WORDS, "--bf16", *quantized.split(), *layers.split())
    (sizes,) = found["bytes"]
    matrices = 3 * (3 * 64 * 64 + 64 * 64 + 2 * 64 * 256)
    # This rank's shard of two planes, and scales of both, which are not sharded.
    assert sizes["compute"] == 2 * matrices // 8 + matrices // 16
    assert any(text.startswith("mxfp8 (as bfloat16) compute") for text in found["dtypes"])
    assert sizes["forward"] == sizes["backward"] == sizes["unsharded"] - matrices


RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LONG = "--seq-length 128 --max-position-embeddings 128"


@pytest.mark.parametrize(
    ("layers", "more"),
    [
        ("5", "--tensor-model-parallel-size 2"),
        ("7", "--tensor-model-parallel-size 2"),
        ("10", "--tensor-model-parallel-size 2"),
        # With few layers, most bytes are needed for logits; with many, when gradients are reduced.
        ("24", f"--vocab-size 4095 --data-parallel-sharding-strategy optim {RECOMPUTED} {LONG}"),
    ],
)
def test_the_layers_of_a_command_line(layers: str, more: str) -> None:
    """Layers beyond the first few are extrapolated: the same as when all of them run."""
    words = [*WORDS, "--num-layers", layers, "--bf16", *more.split()]
    predicted = doctor("--gpu", "h100", *words)
    full = doctor("--gpu", "h100", *words, change="command.MORE = 99")["step"]
    found, moved = predicted["step"], {name: size for name, size in full["peak"].items() if size > 1000}
    assert found["seconds"] == pytest.approx(full["seconds"], rel=0.01)
    assert {name: found["peak"][name] for name in moved} == pytest.approx(moved, rel=0.01)
    assert found["mfu"] == pytest.approx(full["mfu"], rel=0.01) and 0 < found["mfu"] < 1
    # What stays between steps is what the report counts from shapes.
    assert found["peak"]["shards"] + found["peak"]["optimizer"] == pytest.approx(predicted["resting"], rel=0.02)


def test_a_training_of_one_step() -> None:
    steps = [doctor(*ON_GPU, *more)["step"] for more in ([], ["--train-iters", "1", "--exit-interval", "1"])]
    assert steps[0]["seconds"] == steps[1]["seconds"]


def test_recomputation_of_a_command_line() -> None:
    found = doctor("--gpu", "h100", *WORDS, "--bf16")["step"]
    less = doctor("--gpu", "h100", *WORDS, "--bf16", *RECOMPUTED.split())["step"]
    assert less["peak"]["activations"] < found["peak"]["activations"] / 2 and less["seconds"] > found["seconds"]


@pytest.mark.parametrize("chunks", [[], ["--num-layers-per-virtual-pipeline-stage", "1"]], ids=["1F1B", "interleaved"])
def test_the_micro_batches_of_a_pipeline(chunks: list[str]) -> None:
    """Micro-batches beyond the first few are extrapolated: the same as when all of them run."""
    words = [*WORDS, *"--pipeline-model-parallel-size 2 --global-batch-size 48 --bf16".split(), *chunks]
    every = "command._Run._taken = property(lambda run: run._micro_batches, lambda run, taken: None)"
    found, full = (doctor("--gpu", "h100", *words, change=change)["step"] for change in ("", every))
    assert found["seconds"] == pytest.approx(full["seconds"], rel=0.01)
    assert found["peak"] == pytest.approx(full["peak"], rel=0.01)
    for unit, parts in full["units"].items():
        assert found["units"][unit] == pytest.approx(parts, rel=0.02, abs=1e-6)


@pytest.mark.parametrize("dispatcher", all_but_slow(["alltoall", "allgather"], "alltoall"))
def test_a_step_with_experts(dispatcher: str) -> None:
    """Each expert has as many tokens as every other one, and work grows with the experts of a token."""
    experts = f"{EXPERTS} 8 --expert-model-parallel-size 4 --moe-token-dispatcher-type {dispatcher}".split()
    few, many = (
        doctor("--gpu", "h100", *WORDS, "--bf16", *experts, "--disable-bias-linear", "--moe-router-topk", chosen)[
            "step"
        ]
        for chosen in "24"
    )
    assert few["seconds"] < many["seconds"] and 0 < few["mfu"] < 1
    assert few["peak"]["activations"] < many["peak"]["activations"]
    # The time of what ranks send to each other's experts is not that of the computation.
    sent = [sum(unit.get("other communication", 0.0) for unit in step["units"].values()) for step in (few, many)]
    assert (sent[0] < sent[1]) == (dispatcher == "alltoall")  # the other one sends all tokens to all
    assert 0 < sent[0] and sent[1] < many["waits"]["other communication"]


def test_a_step_with_grouped_experts() -> None:
    """One matmul of all experts takes less time than one for each, and as much memory, also for many ranks."""
    words = [*WORDS, *f"--global-batch-size 64 {EXPERTS} 256 --expert-model-parallel-size 64 --bf16".split()]
    alone, grouped = (
        doctor("--gpu", "h100", *words, "--disable-bias-linear", *more, world_size=64)["step"]
        for more in ([], ["--moe-grouped-gemm"])
    )
    assert grouped["seconds"] < alone["seconds"]
    assert grouped["peak"]["activations"] == pytest.approx(alone["peak"]["activations"], rel=0.05)


@pytest.fixture(scope="module")
def replayed() -> dict[str, Any]:
    """Steps of ``replay_cases``: with layers that run, with layers that are recorded, and with repeated ones."""
    return json.loads(printed(python("-m", "tests.replay_cases")))


@pytest.mark.parametrize("name", replay_cases.CASES)
def test_repeated_layers_do_what_layers_do(replayed: dict[str, Any], name: str) -> None:
    run, *others, number = replayed[name]
    assert number > 10
    for found in others:
        assert found["seconds"] == pytest.approx(run["seconds"], rel=1e-9)
        assert found["waits"] == pytest.approx(run["waits"], abs=1e-7)
        # With experts and full recomputation, the last layer's graph is freed earlier than Megatron's. In pipelines,
        # layers that are recorded and layers that are repeated do not meet all that the other ones have left.
        tolerance = {"experts, full": 0.012, "experts, selective, pipeline": 0.035}.get(name, 1e-4)
        assert sum(found["peak"].values()) == pytest.approx(sum(run["peak"].values()), rel=tolerance)


def test_a_layer_whose_backward_never_ends_is_not_repeated() -> None:
    never = "replay._Recording._end = lambda *unused: None"
    found, ended = (doctor(*ON_GPU, change=change)["step"] for change in (never, ""))
    assert found["seconds"] == pytest.approx(ended["seconds"], rel=1e-9)


def _running(processes: list[int], name: str) -> list[int]:
    """Those processes that run, and have a word in their command lines."""
    found = []
    for process in processes:
        with suppress(OSError):
            found += [process] if name in Path(f"/proc/{process}/cmdline").read_text() else []
    return found


def test_the_processes_of_a_search_end_with_it(tmp_path: Path) -> None:
    """Also if it is killed."""
    code = (
        "from pathlib import Path; from megatron.fsdp.tools.predict import search; "
        "from megatron.fsdp.tools.predict.machine import cluster_of; "
        f"search.Search(Path({SCRIPT!r}), {WORDS[1:]!r}, 8, cluster_of('h100'), 'memory', 99, print).run()"
    )
    (tmp_path / "searching.py").write_text(f"if __name__ == '__main__':\n    {code}\n")
    parent = subprocess.Popen([sys.executable, tmp_path / "searching.py"], cwd=ROOT)
    ends = time.monotonic() + 120
    while len(begun := _running(tree_of(parent.pid), "spawn_main")) < 2 and time.monotonic() < ends:
        time.sleep(0.2)
    parent.kill()
    parent.wait()
    while (left := _running(begun, "spawn_main")) and time.monotonic() < ends:
        time.sleep(0.2)
    assert len(begun) >= 2 and not left


def test_a_search_from_a_command_line() -> None:
    words = [*WORDS, "--bf16", "--recompute-granularity", "full", "--recompute-method", "uniform"]
    flags = {flag.removeprefix("--") for values in SETTINGS.values() for value in values for flag in value}
    kept = {flag for flag in flags if not flag.startswith(("recompute", "micro-batch"))}
    searched = ("--gpus", 8, "--gpu", "h100", "--keep", ",".join(sorted(kept)), "--explain")
    output = printed(python("-m", "megatron.fsdp.tools.predict.plan", *searched, *words, "--recompute-num-layers", "1"))
    own = next(line for line in output.splitlines() if line.endswith("your command line"))
    best, mine = (int(line.split()[1].replace(",", "")) for line in (output.splitlines()[2], own))  # tokens per second
    assert best > mine and "Seconds of your command line" in output
    line = output.splitlines()[-1].removeprefix("The best: ").split()
    assert "full" not in line and doctor(*line)["accepted"]


# Reports for people -------------------------------------------------------------------------------------------------

FILES = {
    "crash.py": "import os\nimport no_such_module\n",
    "never.py": "print('no model here')\n",
    "exit.py": "import sys\nsys.exit(5)\n",
    "silent.py": "import sys\nsys.exit()\n",
    "says.py": "import sys\nsys.exit('no data')\n",
    "at_once.py": "import os\nos._exit(4)\n",
    "false.py": "x = 1\nassert x == 2\n",
}
ON_GPU = ["--gpu", "h100", *WORDS, "--bf16"]
GRAPH = ("--cuda-graph-impl", "full_iteration")
LOCAL = ("--transformer-impl", "local")
# Commands with an exit code, and what the report or, with code 2, stderr contains.
MISTAKES: dict[str, tuple[list[str], int, tuple[str, ...]]] = {
    "limits": (
        [*WORDS, "--use-tp-pp-dp-mapping", "--save-wgrads-interval", "10"],
        1,
        ("NOT POSSIBLE  use_tp_pp_dp_mapping", "NOT POSSIBLE  save_wgrads_interval"),
    ),
    "megatron": ([*WORDS, "--global-batch-size", "7"], 1, ("ERROR  AssertionError: ", "at ")),
    "unknown": ([*WORDS, "--no-such-flag", "3"], 1, ("ERROR  unrecognized arguments: --no-such-flag 3",)),
    "misspelled": (
        [*WORDS, "--use-megatron-fsd"],
        1,
        ("unrecognized arguments: --use-megatron-fsd", "Did you mean '--use-megatron-fsdp'?"),
    ),
    "choice": (
        [*WORDS, "--ckpt-format", "fsdp_dtens"],
        1,
        (
            "argument --ckpt-format: invalid choice: 'fsdp_dtens'",
            "Did you mean 'fsdp_dtensor'?",
            "usage: --ckpt-format {",
        ),
    ),
    "no value": (
        [*WORDS, "--hidden-size"],
        1,
        ("argument --hidden-size: expected one argument", "usage: --hidden-size"),
    ),
    "no number": ([*WORDS, "--num-layers", "four"], 1, ("argument --num-layers: invalid int value: 'four'",)),
    # As on a GPU, which has Transformer Engine unless Megatron's own layers are chosen.
    "graph": ([*ON_GPU, *GRAPH], 1, ("--no-check-for-nan-in-loss-and-grad should be set",)),
    "fp4": (
        ["--gpu", "b200", *WORDS, "--bf16", *LOCAL, "--fp4-format", "e2m1"],
        1,
        ("ERROR  ValueError: fp4: needs Transformer Engine",),
    ),
    "no mxfp8": (
        [*ON_GPU, "--fp8-format", "hybrid", "--fp8-recipe", "mxfp8"],
        1,
        ("mxfp8: needs a GPU with compute capability 10.0 or higher; h100 has 9.0",),
    ),
    "delayed": ([*ON_GPU, "--delay-wgrad-compute"], 1, ("overlap_moe_expert_parallel_comm must be enabled",)),
    # Megatron raises in the first forward.
    "experts": ([*WORDS, "--num-experts", "4"], 1, ("or turn fusion off: --no-bias-gelu-fusion",)),
    "biases": ([*ON_GPU, "--swiglu", "--num-experts", "4"], 1, ("or turn fusion off: --no-bias-swiglu-fusion",)),
    "local": ([*ON_GPU, *LOCAL, "--delay-wgrad-compute"], 1, ("delay_wgrad_compute: needs Transformer Engine",)),
    "no fsdp": ([SCRIPT, "--num-layers", "2"], 1, ("does not contain --use-megatron-fsdp",)),
    "crash": (["crash.py"], 1, ("ModuleNotFoundError: No module named 'no_such_module'", "at crash.py:2")),
    "never": (["never.py"], 1, ("The script ended without wrapping a model",)),
    "exit": (["exit.py"], 1, ("The script ended with exit code 5",)),
    "silent": (["silent.py"], 1, ("The script ended with exit code 0",)),
    "says": (["says.py"], 1, ("ERROR  no data",)),
    "at once": (["at_once.py"], 1, ("os._exit(4)",)),
    "false": (["false.py"], 1, ("ERROR  AssertionError", "at false.py:2: assert x == 2")),
    "no script": (["nowhere.py"], 2, ("no such script: nowhere.py",)),
    "own flag": (["--word-size", "8", *WORDS], 2, ("unrecognized arguments: --word-size",)),
    "gpu": (["--gpu", "h10", *WORDS], 2, ("argument --gpu: expected one of", "Did you mean 'h100'?")),
    "size": (["--device-memory", "80XB", *WORDS], 2, ("argument --device-memory: expected a size such as 80",)),
    "rank": (["--rank", "8", *WORDS], 2, ("expected a rank below 8",)),
}
STAGES = "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --vocab-size 60000".split()
ACCEPTED = {
    "plain": WORDS,
    "fits": ["--gpu", "h100", "--json", *WORDS, "--bf16", *STAGES],
    "as on a gpu": [*ON_GPU, *GRAPH, "--no-check-for-nan-in-loss-and-grad", "--use-nccl-ub"],
    "needs transformer engine": [*ON_GPU, "--fp8-format", "hybrid", "--te-rng-tracker"],
    "megatron's layers": [*ON_GPU, *LOCAL],
    "does not fit": ["--device-memory", "1GB", *WORDS],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    commands = {**{name: words for name, (words, _, _) in MISTAKES.items()}, **ACCEPTED}
    return {name: run_doctor(words, folder) for name, words in commands.items()}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported(results: dict[str, Result], name: str) -> None:
    found, (_, code, texts) = results[name], MISTAKES[name]
    assert found.code == code, found
    report = found.err if code == 2 else found.out
    assert all(text in report for text in texts), report
    assert "Traceback" not in found.out + found.err


def test_progress_is_shown_on_stderr(results: dict[str, Result]) -> None:
    phases = [line.partition(" ... ")[0] for line in results["plain"].err.splitlines()]
    assert phases[0] == "importing Megatron" and phases[-1] == "planning units and layouts" and len(phases) == 5
    assert all(line.endswith(" s") for line in results["plain"].err.splitlines())


def test_the_report_says_how_to_ask_for_a_device(results: dict[str, Result]) -> None:
    found = results["plain"]
    assert found.code == 0 and "add --gpu h100 or --device-memory" in found.out and "activations " not in found.out


def test_the_fullest_stage_is_compared_with_the_device(results: dict[str, Result]) -> None:
    assert results["fits"].code == 0
    found = json.loads(results["fits"].out)
    # The last stage has the output layer.
    assert found["stage"] == 1 and len(found["stages"]) == 2
    fit = found["fit"]
    assert fit["fits"] and fit["missing"] == 0 and fit["capacity"] == 81559 << 20
    assert fit["total"] == with_overhead(sum(found["step"]["peak"].values())) and fit["predicted"]
    assert fit["fewest_ranks"] == 2
    assert found["step"]["seconds"] > 0 and found["step"]["timed"]


@pytest.mark.parametrize("name", ["as on a gpu", "needs transformer engine", "megatron's layers"])
def test_what_starts_on_a_gpu_is_accepted(results: dict[str, Result], name: str) -> None:
    assert results[name].code == 0, results[name]
    assert re.search(r"does it fit\? +(without activations, )?fits", results[name].out), results[name]


def test_what_does_not_fit_has_its_own_exit_code(results: dict[str, Result]) -> None:
    found = results["does not fit"]
    assert found.code == 3 and re.search("does not fit by 0.8. GiB, 1.7. GiB at the peak", found.out)


def words_of(script: Path, **variables: str) -> list[str]:
    return printed(start(["bash", script], DRY_RUN="1", SLURM_SUBMIT_DIR=str(ROOT), **variables)).splitlines()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script: Path) -> None:
    printed(start(["bash", "-n", script]))
    printed(start(["shellcheck", "--shell=bash", "--external-sources", "--source-path=SCRIPTDIR", script]))


@pytest.mark.parametrize("back", ["", "1"])
@pytest.mark.parametrize("script", [s for s in SCRIPTS if "convert" in s.name], ids=lambda path: path.name)
def test_conversion_scripts_pass_valid_arguments(script: Path, back: str, tmp_path: Path) -> None:
    _, tool, command, source, target = words_of(script, CHECKPOINT=str(tmp_path), OUT=str(tmp_path / "out"), BACK=back)
    assert (source, target) == (str(tmp_path), str(tmp_path / "out"))
    result = python(tool, command, source, target)
    assert result.returncode == 1 and ".metadata" in result.stderr, "an empty folder is not a checkpoint"


LLAMA3_8B, LLAMA3_70B = "train_llama3_8b_fsdp_h100_fp8.sh", "llama3_70b.sbatch"
DEEPSEEK_V3 = "sbatch_mfsdp_deepseek_v3.sh"
# The recommended settings.
RECOMMENDED = "--use-nccl-ub --fsdp-double-buffer --init-model-with-meta-device --calculate-per-token-loss".split()


@pytest.mark.parametrize("name", all_but_slow([LLAMA3_8B, LLAMA3_70B, DEEPSEEK_V3], LLAMA3_8B))
def test_launch_scripts_pass_valid_arguments(name: str) -> None:
    ranks = {"NODES": "128", "GBS": "8192"} if name == DEEPSEEK_V3 else {}
    world_size, entry, *arguments = words_of(SCRIPTS[0].parent / name, **ranks)
    assert (ROOT / entry).samefile(ROOT / "pretrain_gpt.py") and set(arguments) >= set(RECOMMENDED)
    found = doctor(entry, *arguments, world_size=world_size)
    assert found["world_size"] == {LLAMA3_8B: 8, LLAMA3_70B: 64, DEEPSEEK_V3: 1024}[name]
    assert all("bfloat16 reduction" in text for text in found["dtypes"])
    # The number of parameters is the published one. DeepSeek-V3's is 671.0e9, and 11.6e9 of the layer that predicts a
    # further token; a rank has one of 8 parts of its experts.
    experts = 59 * 256 * 3 * 7168 * 2048  # of 58 layers and that one
    expected = {LLAMA3_8B: 8.03e9, LLAMA3_70B: 70.6e9 / 4, DEEPSEEK_V3: 682.6e9 - experts * 7 / 8}
    assert found["bytes"][0]["elements"] == pytest.approx(expected[name], rel=0.01)


LAUNCH_SCRIPTS = [path.name for path in SCRIPTS if "convert" not in path.name]


@pytest.mark.parametrize("name", LAUNCH_SCRIPTS)
def test_launch_scripts_fit_into_their_gpus(name: str) -> None:
    """With the numbers of ranks and micro-batches that they have by default; all are for GPUs with 80 GB."""
    assert {LLAMA3_8B, LLAMA3_70B, DEEPSEEK_V3} <= set(LAUNCH_SCRIPTS)
    found = run_doctor(["--gpu", "h100", "--world-size", *words_of(SCRIPTS[0].parent / name)])
    assert found.code == 0 and re.search(r"does it fit\? +fits", found.out), f"{found.out}{found.err}"
    # In the folder of a job that runs, a file of this kind would say that the job has failed.
    assert not [path for path in ("checkpoints", "runs") if (ROOT / path).exists()]


def flag(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_positional_arguments_and_variables_of_the_llama_script(tmp_path: Path) -> None:
    script = ROOT / "examples" / "megatron_fsdp" / LLAMA3_8B
    variables = {"DRY_RUN": "1", "OUTER_SHARDING_STRATEGY": "optim", "INSTANCES": "2"}
    arguments = ("saved", "0.3 a 0.7 b", "/tok", "prof", "board")
    words = printed(start(["bash", script, *arguments], folder=tmp_path, **variables)).splitlines()
    assert flag(words, "--save") == flag(words, "--load") == "saved" and flag(words, "--tensorboard-dir") == "board"
    assert words[words.index("--data-path") + 1 :][:4] == ["0.3", "a", "0.7", "b"]
    assert flag(words, "--tokenizer-model") == "/tok" and "--mock-data" not in words
    assert flag(words, "--outer-dp-sharding-strategy") == "optim"
    assert "--use-megatron-fsdp" not in words_of(script, USE_MEGATRON_FSDP="0")


# Commands of a Slurm cluster of one machine. sbatch runs a copy, as Slurm does, and keeps the job's exit code; srun
# skips its own options; Python prints its words and leaves what a run leaves.
CLUSTER = {
    "sbatch": """
        echo "$@" > "$LOG/options"
        for FILE in "$@"; do [[ ! -f $FILE ]] || break; done
        mkdir -p "$LOG/spool" && cp "$FILE" "$LOG/spool/slurm_script" && echo "   Command=$FILE" > "$LOG/job"
        echo "   ${STATE:-JobState=RUNNING Reason=None PreemptTime=None}" >> "$LOG/job"
        SLURM_JOB_NODELIST=n1 SLURM_JOB_ID=7 bash "$LOG/spool/slurm_script" > "$LOG/output"
        echo $? > "$LOG/code"
    """,
    "scontrol": """
        case "$1 $2" in
            "show job") cat "$LOG/job" ;;
            "show hostnames") echo n1 ;;
            requeue*) echo "$2" > "$LOG/requeued" ;;
        esac
    """,
    "srun": """
        echo "$@" > "$LOG/srun"
        while [[ $1 == --* ]]; do case $1 in --label | *=*) shift ;; *) shift 2 ;; esac; done
        exec "$@"
    """,
    "python": """
        printf '%s\\n' "$@" >> "$LOG/words"
        echo "$NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $TP_SOCKET_IFNAME" > "$LOG/interfaces"
        printf %s "a last line without an end"
        [[ -z $SAYS ]] || (mkdir -p "$SAVED" && echo "$SAYS" > "$SAVED/outcome.txt")
        exit "${ENDS:-0}"
    """,
}


def cluster(folder: Path, **variables: str) -> dict[str, str]:
    """The environment of a shell on that cluster, whose commands and records are in a folder."""
    for command, text in CLUSTER.items():
        (folder / command).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / command).chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "DRY_RUN"}
    return {**environment, "SAYS": "", **variables, "PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(folder)}


# How a run ends, the exit code of its job, and whether the job is queued again.
ENDS = [
    ("finished", "0", 0, False),
    ("stopped SIGTERM", "0", 75, True),
    ("stopped SIGTERM", "1", 75, True),  # torchrun's code after a signal that it has handled
    ("failed rank 1", "1", 1, False),
    ("", "0", 1, False),
    ("", "137", 1, False),
]


def submit(script: Path, folder: Path, saved: Path, **variables: str) -> tuple[int, bool]:
    """Submit a job where an earlier one was stopped. Returns its exit code, and whether it is queued again."""
    saved.mkdir(parents=True)
    (saved / "outcome.txt").write_text("stopped by an earlier run\n")
    env = cluster(folder, OUT=str(folder / "out"), SAVED=str(saved), **variables)
    # From a folder that has nothing to do with the repository; the job runs a copy in another one.
    subprocess.run(["sbatch", script], env=env, cwd=folder, check=True, timeout=60)
    return int((folder / "code").read_text()), (folder / "requeued").exists()


@pytest.mark.parametrize(("says", "ends", "code", "requeued"), [*ENDS, ("finished", "1", 1, False)])
def test_the_exit_code_of_a_job_says_how_it_ended(
    says: str, ends: str, code: int, requeued: bool, tmp_path: Path
) -> None:
    script = ROOT / "examples" / "megatron_fsdp" / LLAMA3_70B
    variables = {"SAYS": says, "ENDS": ends, "INTERFACE": "ib0"}
    assert submit(script, tmp_path, tmp_path / "out" / "checkpoints", **variables) == (code, requeued)
    assert "a last line without an end\n" in (tmp_path / "output").read_text()
    assert "--kill-on-bad-exit=1" in (tmp_path / "srun").read_text().split()
    assert (tmp_path / "interfaces").read_text() == "ib0 ib0 ib0\n"
    assert flag((tmp_path / "words").read_text().splitlines(), "--log-dir") == str(tmp_path / "out" / "logs")


def script_of_the_page(folder: Path) -> Path:
    """The script for Slurm without torchrun."""
    page = (ROOT / "docs" / "guide" / "multi_node.md").read_text()
    script = folder / "train.sbatch"
    script.write_text(page.split('```bash title="train.sbatch"\n')[1].split("```")[0])
    return script


@pytest.mark.parametrize(("says", "ends", "code", "requeued"), ENDS)
def test_the_exit_code_of_the_pages_job(says: str, ends: str, code: int, requeued: bool, tmp_path: Path) -> None:
    script = script_of_the_page(tmp_path)
    assert submit(script, tmp_path, tmp_path / "run", SAYS=says, ENDS=ends) == (code, requeued)


@pytest.mark.parametrize(
    ("state", "requeued"),
    [
        ("JobState=COMPLETING Reason=None PreemptTime=None", False),  # scancel, or Slurm has queued it
        ("JobState=CANCELLED Reason=None PreemptTime=None", False),
        ("JobState=COMPLETING Reason=TimeLimit PreemptTime=None", True),  # it saved in the last seconds
        ("JobState=COMPLETING Reason=None PreemptTime=2026-11-28T06:00:00", True),  # PreemptMode=CANCEL
        ("JobState=RUNNING Reason=None PreemptTime=2026-11-28T06:00:00", True),  # GraceTime
    ],
)
@pytest.mark.parametrize("of_page", [False, True], ids=["examples", "page"])
def test_a_cancelled_job_is_not_queued_again(of_page: bool, state: str, requeued: bool, tmp_path: Path) -> None:
    script = script_of_the_page(tmp_path) if of_page else ROOT / "examples" / "megatron_fsdp" / LLAMA3_70B
    saved = tmp_path / ("run" if of_page else "out/checkpoints")
    assert submit(script, tmp_path, saved, SAYS="stopped SIGTERM", STATE=state) == (75, requeued)


@pytest.mark.parametrize("name", [LLAMA3_70B, DEEPSEEK_V3, "sbatch_checkpoint_convert.sh"])
def test_sbatch_runs_a_script_as_bash_does(name: str, tmp_path: Path) -> None:
    """The lines for sbatch have the options that the script gives to sbatch, but those that need the arguments."""
    script = ROOT / "examples" / "megatron_fsdp" / name
    variables = {"CHECKPOINT": str(tmp_path), "OUT": str(tmp_path / "out"), "OUTPUT_PATH": str(tmp_path / "out")}
    subprocess.run(["bash", script], env=cluster(tmp_path, **variables), check=True, timeout=60)
    words = (tmp_path / "options").read_text().split()
    given = re.findall(r"--[a-z-]+(?:[ =][^- ]\S*)?", " ".join(words[: words.index(str(script))]))
    lines = " ".join(line for line in script.read_text().splitlines() if line.startswith("#SBATCH"))
    assert "--dependency singleton" in given
    needs_arguments = ("--job-name", "--dependency", "--output", "--export")
    expected = {option.replace(" ", "=") for option in given if not option.startswith(needs_arguments)}
    assert expected <= set(lines.split()) and "--nodes" in str(expected), expected


@pytest.mark.parametrize(
    ("name", "missing", "variables"),
    [
        (LLAMA3_70B, "/data/corpus.bin", {"DATA": "/data/corpus", "TOKENIZER": "meta-llama/Meta-Llama-3-70B"}),
        (LLAMA3_70B, "/data/llama", {"TOKENIZER": "/data/llama"}),
        (DEEPSEEK_V3, "/data/v3", {"TOKENIZER": "/data/v3"}),
        (DEEPSEEK_V3, "/images/x.sqsh", {"TOKENIZER": "/data/v3", "CONTAINER_IMAGE": "/images/x.sqsh"}),
    ],
)
def test_missing_files_are_reported_before_the_job_is_queued(
    name: str, missing: str, variables: dict[str, str], tmp_path: Path
) -> None:
    script, out = ROOT / "examples" / "megatron_fsdp" / name, str(tmp_path / "out")
    env = cluster(tmp_path, OUT=out, OUTPUT_PATH=out, **variables)
    run = subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and run.stderr.endswith(f": expected {missing}; it does not exist\n"), run.stderr
    assert not (tmp_path / "options").exists()


@pytest.mark.parametrize("name", [DEEPSEEK_V3, "sbatch_checkpoint_convert.sh"])
def test_submitted_jobs_run_the_printed_command(name: str, tmp_path: Path) -> None:
    megatron = tmp_path / "Megatron-LM"
    megatron.mkdir()
    (megatron / "pretrain_gpt.py").touch()
    (tmp_path / "a b.sqsh").touch()
    (tmp_path / "iter_1").mkdir()
    variables = {
        "MEGATRON_PATH": str(megatron),
        "CONTAINER_IMAGE": str(tmp_path / "a b.sqsh"),
        "OUTPUT_PATH": str(tmp_path / "out"),
        "CHECKPOINT": str(tmp_path / "iter_1"),
        "OUT": "/new/iter_1",
        "EP": "16",
        "COMMENT": "first try",
        "WANDB_API_KEY": "0",
        "NODES": "32",
    }
    script = ROOT / "examples" / "megatron_fsdp" / name
    _, *expected = words_of(script, **variables)
    subprocess.run(["bash", script], env=cluster(tmp_path, **variables), check=True, timeout=60)
    words = (tmp_path / "words").read_text().splitlines()
    start = words.index(expected[0])
    assert words[start : start + len(expected)] == expected
    assert flag(words, "--nnodes") == "32" and flag(words, "--rdzv-endpoint") == "n1:29500"
    assert "--nodes 32" in (tmp_path / "options").read_text()
    if name == DEEPSEEK_V3:
        assert expected[0] == str(megatron / "pretrain_gpt.py") and words[start - 1] == "megatron.fsdp.launch"
        assert flag(words, "--expert-model-parallel-size") == "16"
        assert flag(words, "--wandb-exp-name") == "DeepSeek-V3-TP1EP16-MBS1GBS2048-first try"
