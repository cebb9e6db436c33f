"""Writes out/compatibility.md from the results of the tests: feature by strategy and device.

    make compatibility      runs the tests with --results out/compatibility.json and writes the page

A cell shows the outcome of the tests that its row names. docs/status.md gets a summary.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import status  # noqa: E402

RESULTS = status.OUT / "compatibility.json"
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
UNIT, FUNCTIONAL = "tests/unit_tests/", "tests/functional_tests/"


class Feature(NamedTuple):
    """One row of the table.

    Attributes:
        name: The feature, as a user would call it.
        tests: Test files, or single tests (``file::test``), that cover it.
        raises: Those tests expect an error.
        simulated: Tests that cover it on the simulated CUDA device.
    """

    name: str
    tests: tuple[str, ...]
    raises: bool = False
    simulated: tuple[str, ...] = ()


FEATURES = (
    Feature(
        "trains as the unsharded model does, 1 to 4 ranks",
        ("test_training.py::test_ranks",),
        simulated=("test_engine.py::test_settings", "test_engine.py::test_values"),
    ),
    Feature(
        "bf16 compute with fp32 main weights; dtypes of gradients",
        ("test_mixed_precision.py",),
        simulated=("test_engine.py::test_settings",),
    ),
    Feature(
        "gradient accumulation, no_sync",
        ("test_training.py::test_accumulation", "test_accumulation.py"),
        simulated=("test_engine.py::test_settings",),
    ),
    Feature("tied parameters, also across units", ("test_training.py::test_tied",)),
    Feature("frozen parameters", ("test_training.py::test_frozen",)),
    Feature("parameters without gradients, on all ranks or on some", ("test_training.py::test_unused",)),
    Feature(
        "activation recomputation, both ways",
        ("test_training.py::test_recomputation",),
        simulated=("test_engine.py::test_settings",),
    ),
    Feature("several forwards before backward; evaluation", ("test_training.py::test_forwards", "test_forwards.py")),
    Feature(
        "torch.optim optimizers, schedulers, closures", ("test_training.py::test_optimizers", "test_optimizers.py")
    ),
    Feature("several dtypes in one unit", ("test_dtypes.py",)),
    Feature("parameters frozen and unfrozen during training", ("test_freezing.py",)),
    Feature("scalars, empty parameters, fewer rows than ranks", ("test_training.py::test_small_parameters",)),
    Feature("methods other than forward; modules called twice", ("test_forward_methods.py",)),
    Feature("units inside units", ("test_training.py::test_units_inside_units",)),
    Feature(
        "units that return their own parameters",
        ("test_training.py::test_returned_parameters", "test_returned_parameters.py"),
    ),
    Feature(
        "no unit classes: every rank keeps full weights",
        ("test_training.py::test_without_units_weights_are_replicated",),
    ),
    Feature("torch.compile", ("test_compile.py",)),
    Feature("loss scaling (GradScaler)", ("test_loss_scaling.py",)),
    Feature(
        "training continues after exceptions", ("test_exceptions.py",), simulated=("test_engine.py::test_exceptions",)
    ),
    Feature("gradient clipping", ("test_clipping.py",), simulated=("test_engine.py::test_settings",)),
    Feature("learning-rate schedulers", ("test_schedulers.py",)),
    Feature(
        "code written for PyTorch's FSDP2",
        ("test_fsdp2.py", "test_fsdp2_state.py"),
        simulated=("test_engine.py::test_fsdp2",),
    ),
    Feature(
        "HSDP and hybrid FSDP",
        ("test_training.py::test_two_axes", "test_hybrid.py"),
        simulated=("test_engine.py::test_settings",),
    ),
    Feature(
        "outer strategy optim with inner no_shard",
        ("test_hybrid.py::test_sharding_over_the_outer_axis_alone_is_refused",),
        raises=True,
    ),
    Feature("ignored and replicated parameters", ("test_unsharded_parameters.py",)),
    Feature("full weights in buckets, for inference", ("test_full_weights.py",)),
    Feature("tensor parallelism with DTensors", ("test_tensor_parallel.py",)),
    Feature("experts on a separate mesh", ("test_model_arguments.py::test_experts_are_sharded_over_their_own_mesh",)),
    Feature("initialization on the meta device", ("test_meta_device.py",)),
    Feature("deferred initialization, equal to the model's own", ("test_deferred.py",)),
    Feature("shard granularities, and rows that have to be cut", ("test_training.py::test_granularities",)),
    Feature("Muon, which needs full matrices", ("test_granularity.py::test_muon_sees_full_matrices",)),
    Feature(
        "optimizer in host memory",
        ("test_training.py::test_offload", "test_offload.py"),
        simulated=("test_engine.py::test_offload",),
    ),
    Feature(
        "double buffer",
        ("test_training.py::test_double_buffer", "test_double_buffer.py"),
        simulated=("test_engine.py::test_settings",),
    ),
    Feature("buffers registered with NCCL (mocked)", ("test_nccl_memory.py",)),
    Feature(
        "nccl_ub, cuda_graph_mode without CUDA",
        ("test_model_arguments.py::test_what_needs_cuda_says_so",),
        raises=True,
    ),
    Feature("fused weight gradients (mocked)", ("test_fused.py",)),
    Feature("a whole iteration in a CUDA graph", (), simulated=("test_graphs.py",)),
    Feature("no host-device sync in a step", (), simulated=("test_engine.py::test_settings",)),
    Feature("faults injected into the engine are found", (), simulated=("test_faults.py",)),
    Feature(
        "quantized weights: formats in plain torch",
        ("test_quantized.py",),
        simulated=("test_quantized.py",),
    ),
    Feature("quantized weights: torchao's float8", ("test_torchao.py",)),
    Feature("quantized weights: Transformer Engine (mocked)", ("test_transformer_engine_storage.py",)),
    Feature(
        "units unsharded and resharded by the caller's schedule",
        ("test_interleaved_micro_batches.py",),
        simulated=("test_interleaved.py",),
    ),
    Feature("torchao's 8-bit Adam", ("test_block_state.py",)),
    Feature("state dicts, torch.distributed.checkpoint, a different number of ranks", ("test_state_dict.py",)),
    Feature("checkpoints across granularities", ("test_granularity.py::test_checkpoint_is_loaded_whatever_was_cut",)),
    Feature("one order of communication, under random delays", ("test_order.py",)),
    Feature("memory follows the formulas, 8 to 4,096 ranks", ("test_memory.py",), simulated=("test_peak.py",)),
    Feature("deleting a model frees its memory", ("test_deletion.py",)),
    Feature("Megatron-Core: the wrapper's interface", ("mcore/test_contract.py",), simulated=("test_megatron.py",)),
    Feature("Megatron-Core: quantized weights, in reference formats", ("mcore/test_quantized_weights.py",)),
    Feature("Megatron-Core: fsdp_dtensor checkpoints", ("mcore/test_checkpoint.py",)),
    Feature("Megatron-Core: Muon on sharded matrices", ("mcore/test_muon.py",)),
    Feature(
        "Megatron-Core: --optimizer-cpu-offload, all or some units",
        ("mcore/test_cpu_offload.py",),
        simulated=("test_megatron.py::test_offload",),
    ),
    Feature(
        "Megatron-Core: forward and backward of two micro-batches at once", ("mcore/test_overlapped_micro_batches.py",)
    ),
    Feature("Megatron-Core: low-rank adapters on a frozen base", ("mcore/test_adapters.py",)),
)


def outcome(results: dict[str, dict[str, str]], feature: Feature, strategy: str) -> str:
    """The outcome of a feature's tests: ``works``, ``error``, ``fails``, or an empty text if none ran."""
    found = _outcomes(results, feature.tests, strategy)
    if "failed" in found:
        return "**fails**"
    if "passed" not in found:
        return ""
    return "error" if feature.raises else "works"


def simulated(results: dict[str, dict[str, str]], feature: Feature) -> str:
    """The strategies that pass a feature's tests on the simulated device, or ``fails``."""
    tests = tuple(f"simulated/{test}" for test in feature.simulated)
    found = {strategy: _outcomes(results, tests, strategy) for strategy in STRATEGIES}
    if any("failed" in outcomes for outcomes in found.values()):
        return "**fails**"
    passed = [strategy for strategy, outcomes in found.items() if "passed" in outcomes]
    return "all pass" if len(passed) == len(STRATEGIES) else ", ".join(passed)


def _outcomes(results: dict[str, dict[str, str]], tests: tuple[str, ...], strategy: str) -> list[str]:
    found = []
    for test, outcomes in results.items():
        if any(_matches(test, wanted) for wanted in tests):
            # A test without strategies uses the default strategy.
            default = [outcomes[""]] if "" in outcomes and strategy == STRATEGIES[-1] else []
            found += [outcomes[strategy]] if strategy in outcomes else default
    return found


def _matches(test: str, wanted: str) -> bool:
    test = test.removeprefix(UNIT).removeprefix(FUNCTIONAL)
    return test == wanted or test.startswith(f"{wanted}::")


def as_markdown(results: dict[str, dict[str, dict[str, str]]]) -> str:
    """Return the page."""
    lines = [
        "# What works with what",
        "",
        "`make compatibility` generates this page from the results of the tests. *error* means that the combination",
        "raises an error with the reason. An empty cell means that the strategy has no test. Tests that are not",
        "parametrized by strategy count for the default, `optim_grads_params`.",
        "",
        "*CUDA, simulated* names the strategies that pass on the simulated device of `tests/simulated`, where the",
        "engine's CUDA code runs on CPU tensors, and a checker finds memory that streams use in an undefined order. It",
        "says nothing about kernels, NCCL or speed. *CUDA* says what has run on a GPU; empty means that nothing has.",
        "",
        f"| feature | {' | '.join(STRATEGIES)} | CUDA, simulated | CUDA | tests |",
        f"|---|{'---|' * len(STRATEGIES)}---|---|---|",
    ]
    for feature in FEATURES:
        cells = [outcome(results["cpu"], feature, strategy) for strategy in STRATEGIES]
        on_cuda = (
            {outcome(results["cuda"], feature, strategy) for strategy in STRATEGIES} if "cuda" in results else set()
        )
        cells += [simulated(results["cpu"], feature), ", ".join(sorted(on_cuda - {""}))]
        tests = [*feature.tests, *(f"simulated/{test}" for test in feature.simulated)]
        lines.append(f"| {feature.name} | {' | '.join(cells)} | {', '.join(f'`{test}`' for test in tests)} |")
    return "\n".join(lines) + "\n"


def summary(results: dict[str, dict[str, dict[str, str]]]) -> str:
    """The features by what they work with, and the numbers of tests."""
    groups: dict[str, list[str]] = {}
    for feature in FEATURES:
        cells = {strategy: outcome(results["cpu"], feature, strategy) for strategy in STRATEGIES}
        works = [strategy for strategy, cell in cells.items() if cell == "works"]
        words = "all strategies" if len(works) == len(STRATEGIES) else ", ".join(f"`{name}`" for name in works)
        other = "".join(sorted({*cells.values()} - {"", "works"})) or "the simulated device only"
        groups.setdefault("**fails**" if "**fails**" in cells.values() else words or other, []).append(feature.name)
    counts = Counter(found for outcomes in results["cpu"].values() for found in outcomes.values())
    by_number = sorted(groups.items(), key=lambda group: -len(group[1]))
    lines = [f"| {words} | {'<br>'.join(names)} |" for words, names in by_number]
    head = ["| works with | features |", "|---|---|"]
    return "\n".join([*head, *lines, "", f"Tests: {', '.join(f'{n:,} {word}' for word, n in counts.most_common())}."])


def main() -> None:
    """Write the page and the summary."""
    results = json.loads(RESULTS.read_text())
    RESULTS.with_suffix(".md").write_text(as_markdown(results))
    status.write("compatibility", f"`make compatibility`, {status.stamp()}.\n\n{summary(results)}")


if __name__ == "__main__":
    main()
