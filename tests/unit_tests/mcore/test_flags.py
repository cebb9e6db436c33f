"""The flags that the documentation names exist, and those that the tables of limits.py do not have reach the engine."""

import argparse
import dataclasses
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import tests.megatron_models as mm
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.fsdp.config import SYNCHRONOUS
from megatron.fsdp.mcore import options
from megatron.fsdp.mcore.adapter import fsdp_config, largest_unit, units_of
from megatron.fsdp.mcore.limits import Settings, adjust, validate_args
from megatron.fsdp.mcore.statistics import get_megatron_optimizer
from megatron.training import arguments
from scripts import flag_table
from tests.ranks import ROOT, on_ranks


def test_what_megatron_reads_where_fsdp_is_on() -> None:
    assert "check_weight_hash_across_dp_replicas_interval" in flag_table.read_for_fsdp()


# Of torchrun, srun, sbatch, the doctor, verify, the tools for checkpoints and this project's pretrain_gpt.py, and
# Megatron's own name for --use-nccl-ub.
OTHERS = set(
    """--nproc-per-node --tee --rdzv-conf --rdzv-endpoint --requeue --container-image --container-mounts --world-size
    --ranks --gpu --device-memory --json --no-verify --exit-code --config --param-to-param-group-map-json --to --nccl-ub
    --fsdp-synchronous --shutdown-timeout --signal --script""".split()
)


def test_megatrons_flags_in_the_pages_exist() -> None:
    docs = ROOT / "docs"
    known = {option for action in flag_table.parser()._actions for option in action.option_strings}
    folders = [page for folder in ("guide", "coming_from", "tutorials") for page in docs.glob(f"{folder}/*.md")]
    names = ("start/megatron", "troubleshooting", "faq", "limits", "checkpoints")
    for page in [*folders, *(docs / f"{name}.md" for name in names)]:
        # Names in code, without placeholders such as `--muon-...`. Two pages have options of their own commands.
        named = set(re.findall(r"`(--[a-z0-9-]*[a-z0-9])(?![a-z0-9-])", page.read_text()))
        assert page.name in ("doctor.md", "verify.md") or not named - known - OTHERS, page


def _parser(original: Callable[..., Any] = arguments.add_megatron_arguments) -> argparse.ArgumentParser:
    return options.add_megatron_arguments(original, argparse.ArgumentParser(allow_abbrev=False))


def test_options_of_later_versions_reach_the_wrapper() -> None:
    words = (
        "--expert-num-distributed-optimizer-instances 2 --expert-outer-dp-sharding-strategy optim --fsdp-buffer-count 3"
    )
    # Of a version that has the first option, too.
    newer = argparse.ArgumentParser(allow_abbrev=False)
    newer.add_argument(words.split()[0], type=int)
    for original in (arguments.add_megatron_arguments, lambda parser: newer):
        parsed = _parser(original).parse_args([*words.split(), "--fsdp-buffer-count", "3"])
        config = options.get_megatron_ddp_config(lambda args: DistributedDataParallelConfig(), parsed)
        assert [getattr(config, name) for name in options.EXPERTS] == [None, "optim", 2]
        config.fsdp_double_buffer, config.data_parallel_sharding_strategy = True, "optim_grads"
        found = fsdp_config(mm.transformer_config(), config)
        assert (found.max_unsharded_units, found.expert_outer_dp_sharding_strategy) == (3, "optim")


def test_options_of_later_versions_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    given, plain = _parser().parse_args([]), arguments.add_megatron_arguments(argparse.ArgumentParser()).parse_args([])
    assert vars(given).keys() == vars(plain).keys(), "Megatron's configs would take what was not given"
    for option in options.LATER:
        with pytest.raises(SystemExit):
            _parser().parse_args([option, "1"])
        assert f"{option}: expected an option of megatron-core" in capsys.readouterr().err
    own = _parser()
    own.add_argument("--grad-norm-skip-threshold", type=float)  # by a script, as extra_args_provider
    assert own.parse_args(["--grad-norm-skip-threshold", "5"]).grad_norm_skip_threshold == 5
    args = SimpleNamespace(use_megatron_fsdp=False, fsdp_buffer_count=3)
    with pytest.raises(ValueError, match="--fsdp-buffer-count: expected --use-megatron-fsdp"):
        validate_args(lambda args: None, args)


# What Megatron-Core's FSDP does with this size: prefetch until half of it is in flight, and reduce at most all of it.
@pytest.mark.parametrize(
    ("size", "unsharded", "reducing"), [(None, 2, 1), (1, 1, 1), (100, 2, 1), (200, 2, 2), (202, 3, 2), (1000, 6, 10)]
)
def test_the_communication_size_limits_units_in_flight(size: int | None, unsharded: int, reducing: int) -> None:
    ddp_config = DistributedDataParallelConfig(suggested_communication_unit_size=size)
    found = fsdp_config(mm.transformer_config(), ddp_config, unit_size=100)
    assert (found.max_unsharded_units, found.max_reducing_units) == (unsharded, reducing)
    double = dataclasses.replace(ddp_config, fsdp_double_buffer=True)
    assert fsdp_config(mm.transformer_config(), double, unit_size=100).max_unsharded_units == 2


def test_one_switch_refuses_captures_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, eager = (mm.transformer_config(cuda_graph_impl=kind) for kind in ("full_iteration", "none"))
    assert not fsdp_config(captured, DistributedDataParallelConfig()).synchronous
    monkeypatch.setenv(SYNCHRONOUS, "1")
    assert fsdp_config(eager, DistributedDataParallelConfig()).synchronous
    with pytest.raises(ValueError, match=f"{SYNCHRONOUS}=1 .* expected --cuda-graph-impl none; got full_iteration"):
        fsdp_config(captured, DistributedDataParallelConfig())


@on_ranks(1)
def test_the_wrapper_measures_its_units() -> None:
    with mm.megatron():
        module = mm.gpt(mm.transformer_config())
        layer = sum(p.numel() for p in module.decoder.layers[0].parameters())
        assert largest_unit(module, units_of(module)) == layer
        model = mm.wrapped("optim_grads_params", suggested_communication_unit_size=6 * layer)
        config = model.module.fsdp_config
        assert (config.max_unsharded_units, config.max_reducing_units) == (4, 6)


def test_the_largest_pool_is_a_double_buffer() -> None:
    args = flag_table.parser().parse_args(["--megatron-fsdp-max-pool-double-buffer"])
    later = DistributedDataParallelConfig()
    later.megatron_fsdp_max_pool_double_buffer = args.megatron_fsdp_max_pool_double_buffer
    for ddp_config in (DistributedDataParallelConfig(megatron_fsdp_max_pool_double_buffer=True), later):
        assert fsdp_config(mm.transformer_config(), ddp_config).fsdp_double_buffer
    assert not fsdp_config(mm.transformer_config(), DistributedDataParallelConfig()).fsdp_double_buffer


# Settings that are set to False, from the command line and from config objects --------------------------------------

FALSE = ("ddp_average_in_collective", "gradient_accumulation_fusion", "reuse_grad_buf_for_mxfp8_param_ag")
# Megatron-Core's config demands the third for the second.
GIVEN = {"average_in_collective": True, "reuse_grad_buf_for_mxfp8_param_ag": True, "fp8_param_gather": True}


def test_the_command_line_is_adjusted() -> None:
    args = flag_table.parser().parse_args(
        ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor", "--ddp-average-in-collective"]
        + ["--reuse-grad-buf-for-mxfp8-param-ag"]
    )
    assert all(getattr(args, name) for name in FALSE)
    seen: list[Any] = []
    validate_args(lambda args: seen.extend(getattr(args, name) for name in FALSE), args)
    assert seen == [False] * 3, "before Megatron's own validation"


def test_config_objects_are_adjusted() -> None:
    ddp_config = DistributedDataParallelConfig(**GIVEN)
    config = SimpleNamespace(gradient_accumulation_fusion=True)
    adjust(Settings(ddp_config, config))  # as the wrapper does
    assert not ddp_config.average_in_collective and not ddp_config.reuse_grad_buf_for_mxfp8_param_ag
    assert not config.gradient_accumulation_fusion


@on_ranks(1)
def test_the_wrapper_and_the_optimizer_adjust_their_configs() -> None:
    with mm.megatron():
        model = mm.wrapped("optim", **GIVEN)
        assert not model.ddp_config.average_in_collective and not model.ddp_config.reuse_grad_buf_for_mxfp8_param_ag
        config = OptimizerConfig(reuse_grad_buf_for_mxfp8_param_ag=True)
        seen: list[bool] = []

        def original(config: OptimizerConfig, chunks: list[Any]) -> SimpleNamespace:
            seen.append(config.reuse_grad_buf_for_mxfp8_param_ag)
            return SimpleNamespace()

        get_megatron_optimizer(original, config, [model])
        assert seen == [False]
