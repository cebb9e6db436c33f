"""Which tests are quick (``make test``), and which ones CI adds after those (marked ``merge``).

A test marked ``slow`` is left to ``make test-all``. So are the cases of a test with ranks that have no value of a
parameter (with three parameters and more: no pair of values) that others do not have. Of the others, all that start no
ranks are quick. Of a test's cases with ranks, quick ones train with ZeRO-3 where the test has strategies, exchange
buffers by gloo's sends where it has exchanges, and of what remains they are two cases with different values. The tables
name what takes long and reaches nothing that cheaper tests do not reach: ``make evidence`` prints what the tests marked
``merge`` alone reach.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from tests.exchanges import COLLECTIVES
from tests.slow import LATER_STRATEGIES

ZERO_3 = "optim_grads_params"
# Beginnings of names below tests/. The longest one that fits counts.
QUICK = (
    "functional_tests/test_checkpoint_survival.py::test_killed_over_a_checkpoint_without_checksums[os.fsync-none]",
    "functional_tests/test_docs_code.py::test_every_block_is_marked",
    "functional_tests/test_packaging.py::test_wheel_holds_the_packages_and_nothing_else",
    "functional_tests/test_readme.py",
    # With every strategy and exchange.
    "unit_tests/test_mixed_precision.py::test_bf16_compute_with_fp32_main_weights[grad_dtype0",
    "unit_tests/test_training.py::test_one_unit_for_everything",
)
MERGE = (
    "functional_tests/",
    "functional_tests/test_readme.py::test_the_commands_for_megatron_run",
    "unit_tests/checkpoint/test_object_storage.py::test_converter_reads_and_writes",
    "unit_tests/checkpoint/test_object_storage.py::test_killed_at_every_request_of_a_save",
    "unit_tests/checkpoint/test_odd_files.py::test_many_chunks_are_read_quickly",
    "unit_tests/checkpoint/test_odd_files.py::test_names_that_are_not_utf_8",
    "unit_tests/checkpoint/test_saving.py::test_a_save_without_space_in_megatrons_loop_leaves_no_files",
    "unit_tests/checkpoint/test_saving.py::test_the_processes_of_background_saves_end_with_a_killed_rank",
    "unit_tests/checkpoint/test_stopping.py::test_a_second_interrupt_ends_the_process",
    "unit_tests/checkpoint/test_stopping.py::test_workers_that_load_data_outlive_the_signal",
    "unit_tests/convert/test_convert_commands.py::test_processes_share_the_work",
    "unit_tests/mcore/test_adapters.py::test_adapters_are_saved_alone_and_merged",
    "unit_tests/mcore/test_adapters.py::test_tensor_parallel_training",
    "unit_tests/mcore/test_checkpoint.py::test_loading_in_place_on_other_ranks",
    "unit_tests/mcore/test_contract.py::test_settings_of_the_model",
    "unit_tests/mcore/test_expert_instances.py::test_trains_as_with_ddp",
    "unit_tests/mcore/test_full_weights.py::test_expert_and_tensor_parallel_models",
    "unit_tests/mcore/test_fused_names.py::test_both_models_store_the_same_keys",
    "unit_tests/mcore/test_models.py::test_trains_as_with_ddp",
    "unit_tests/mcore/test_muon.py::test_trains_as_megatrons_ddp_with_tensor_parallelism",
    "unit_tests/mcore/test_overlapped_micro_batches.py::test_two_passes_have_twice_as_many_fixed_buffers",
    "unit_tests/mcore/test_precision_aware.py::test_moments_are_saved_as_what_they_mean_and_resharded",
    "unit_tests/mcore/test_precision_aware.py::test_narrow_gradients_and_moments",
    "unit_tests/mcore/test_precision_aware.py::test_trains_as_ddp_with_torchs_adam",
    "unit_tests/mcore/test_quantized_weights.py::test_bf16_checkpoints_go_through_quantized_runs_unchanged",
    "unit_tests/mcore/test_quantized_weights.py::test_every_format_trains_as_with_ddp",
    "unit_tests/mcore/test_quantized_weights.py::test_variants_train_as_with_ddp",
    "unit_tests/mcore/test_uneven_dtensor.py::test_functions_of_megatron_core",
    "unit_tests/mcore/test_vocabulary.py::test_rows_that_both_have_are_loaded[128-1-True]",
    "unit_tests/simulated/test_engine.py::test_exceptions",
    "unit_tests/simulated/test_engine.py::test_offload_of_some_units",
    "unit_tests/simulated/test_engine.py::test_values",
    "unit_tests/simulated/test_faults.py::test_main_weights_written_while_an_unused_unit_is_gathered_are_found",
    "unit_tests/simulated/test_graphs.py::test_evaluations_do_not_change_training",
    "unit_tests/simulated/test_graphs.py::test_quantized_weights",
    "unit_tests/simulated/test_graphs.py::test_settings_of_quantized_weights",
    "unit_tests/simulated/test_graphs.py::test_two_axes",
    "unit_tests/simulated/test_megatron.py::test_full_iteration_graphs_train_as_the_eager_loop",
    "unit_tests/simulated/test_megatron.py::test_offload",
    "unit_tests/simulated/test_quantized.py::test_values_with_settings",
    "unit_tests/test_block_state.py::test_resumes_exactly_on_other_numbers_of_ranks",
    "unit_tests/test_compile.py::test_compiled_b",
    "unit_tests/test_deferred.py::test_model_of_transformers",
    "unit_tests/test_exceptions.py::test_unshard_after_a_failed_unshard_over_two_axes",
    "unit_tests/test_fsdp2.py::test_hybrid_mesh",
    "unit_tests/test_fsdp2.py::test_resharding_to_a_number_of_ranks",
    "unit_tests/test_full_weights.py::test_memory_is_two_buckets",
    "unit_tests/test_gpu_checks.py::test_dry_run",
    "unit_tests/test_gpu_checks.py::test_long_suites_run_in_parts",
    "unit_tests/test_interleaved_micro_batches.py::test_ordinary_steps_and_evaluations_in_between",
    "unit_tests/test_local_step.py::test_fused_optimizers_of_other_libraries_save_load_and_reshard",
    "unit_tests/test_memory.py::test_optimizer_updates_one_unit_at_a_time",
    "unit_tests/test_meta_device.py::test_no_more_than_one_unit_is_whole",
    "unit_tests/test_mistakes.py",
    "unit_tests/test_nccl_memory.py::test_all_groups_are_registered_alike_and_once",
    "unit_tests/test_nccl_memory.py::test_all_ranks_register_local_memory_if_windows_fail",
    "unit_tests/test_nccl_memory.py::test_ranks_that_use_other_units_register_and_use_the_same_windows",
    "unit_tests/test_offload.py::test_optimizers_train_as_unsharded",
    "unit_tests/test_optimizer_classes.py::test_resuming_on_other_ranks",
    "unit_tests/test_order.py::test_delays_change_no_bit",
    "unit_tests/test_predict.py::test_estimates_without_activations_are_the_measured_bytes",
    "unit_tests/test_predict.py::test_memory_of_a_step",
    "unit_tests/test_quantized.py::test_products_of_other_functions_read_the_planes_of_their_pass",
    "unit_tests/test_quantized.py::test_resumes_exactly_on_other_numbers_of_ranks",
    "unit_tests/test_quantized.py::test_tensor_parallel_parameters",
    "unit_tests/test_reads.py::test_gradients",
    "unit_tests/test_reads.py::test_trains_as_unsharded",
    "unit_tests/test_resuming.py::test_whole_",
    "unit_tests/test_torchao.py::test_plain_models_do_not_import_torchao",
    "unit_tests/test_training.py::test_axes_of_one_rank",
    "unit_tests/test_training.py::test_granularities",
    "unit_tests/test_training.py::test_recomputed_at_two_levels",
    "unit_tests/test_troubleshooting_page.py::test_quoted_messages_exist",
    "unit_tests/test_version_report.py::test_does_not_import_megatron_core",
)
# Of one test with ranks.
MOST_CASES = 2


def strategy_of(item: pytest.Item) -> str:
    """The strategy that a case trains with, if it is one of its parameters."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    strategy = parameters.get("strategy", parameters.get("kind"))
    is_named = "strategy" in parameters or strategy in ("optim", ZERO_3, *LATER_STRATEGIES)
    return str(strategy) if is_named else ""


def function_of(item: pytest.Item) -> str:
    """The key that the cases of one test share."""
    return item.nodeid.split("[")[0]


def other_strategies(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases with other strategies, of tests that take ZeRO-3, too."""
    items = list(items)
    has_zero_3 = {function_of(item) for item in items if strategy_of(item) == ZERO_3}
    return (item for item in items if function_of(item) in has_zero_3 and strategy_of(item) not in ("", ZERO_3))


def covering(cases: Sequence[dict[str, Any]]) -> set[int]:
    """The indices of cases that have all values of the parameters and, of three or more parameters, all pairs."""
    columns = {tuple(repr(case.get(name)) for case in cases): None for name in cases[0]}
    patterns = {tuple(map(column.index, column)): None for column in columns}  # of parameters that vary together, one
    rows = list(zip(*(pattern for pattern in patterns if any(pattern)), strict=True))
    targets = [set(itertools.combinations(enumerate(row), 2 if len(row) > 2 else 1)) for row in rows]
    if not rows or len(set(rows)) < len(rows):
        return set(range(len(cases)))  # values that print alike
    left, used, chosen = set().union(*targets), Counter[Any](), set()
    while left:
        best = max(range(len(rows)), key=lambda i: (len(targets[i] & left), -sum(used[each] for each in targets[i])))
        chosen.add(best)
        left -= targets[best]
        used.update(targets[best])
    return chosen


def mark_slow(items: list[pytest.Item]) -> None:
    """Mark the combinations that are left out."""
    cases: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        has_cases = "ranks" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec")
        if has_cases and item.get_closest_marker("slow") is None:
            cases[function_of(item)].append(item)
    for of_one in (each for each in cases.values() if len(each) > MOST_CASES):
        chosen = covering([item.callspec.params for item in of_one])
        for index in set(range(len(of_one))) - chosen:
            of_one[index].add_marker(pytest.mark.slow)


def mark_merge(items: list[pytest.Item]) -> None:
    """Mark the tests that are not quick."""
    mark_slow(items)
    others = set(other_strategies(items))
    taken: dict[str, list[set[tuple[str, str]]]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None and not _is_quick(item, others, taken[function_of(item)]):
            item.add_marker(pytest.mark.merge)


def _is_quick(item: pytest.Item, others: set[pytest.Item], taken: list[set[tuple[str, str]]]) -> bool:
    name = item.nodeid.removeprefix("tests/")
    listed = max((rule for rule in (*QUICK, *MERGE) if name.startswith(rule)), key=len, default=None)
    if listed is not None:
        return listed in QUICK
    call = getattr(item, "callspec", None)
    if call is None or "ranks" not in getattr(item, "fixturenames", ()):
        return True
    values = {
        (name, repr(value)) for name, value in call.params.items() if name not in ("strategy", "kind", "exchange")
    }
    if item in others or call.params.get("exchange") == COLLECTIVES or len(taken) == MOST_CASES:
        return False
    if any(values & earlier for earlier in taken):
        return False
    taken.append(values)
    return True
