"""Settings that raise, are adjusted, or have no effect: three tables, and the generated page."""

import argparse
import dataclasses
import functools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tests.megatron_models as mm
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.fsdp.api.ddp_config import FLAGS
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.mcore import limits, statistics
from megatron.fsdp.mcore.adapter import fsdp_config
from megatron.fsdp.mcore.limits import ADJUSTMENTS, IGNORED, LIMITS, Settings, adjust, check, validate_args
from megatron.fsdp.mcore.options import EXPERTS, OPTIONS
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.training.arguments import add_megatron_arguments
from scripts import limit_table

# The values at which a row applies, where it is not enough to set what it names (`_set`).
BROKEN: dict[str, dict[str, Any]] = {
    "cuda_graph_impl other than none or full_iteration": {"cuda_graph_impl": "local"},
    "fsdp_buffer_count below 2 or without fsdp_double_buffer": {"fsdp_buffer_count": 3},
    "create_all_gather_group with several optimizer instances": {
        "create_all_gather_group": True,
        "num_distributed_optimizer_instances": 2,
    },
    "optimizer other than adam and muon": {"optimizer": "soap"},
    "optimizer muon with fp16, use_precision_aware_optimizer or optimizer_cpu_offload": {
        "optimizer": "muon",
        "fp16": True,
    },
    "lr_warmup_iters or lr_warmup_samples not below the end of the decay": {"train_iters": 20, "lr_warmup_iters": 20},
    "optimizer_offload_fraction below 0 or above 1": {"optimizer_offload_fraction": 2.0},
    "muon_scalar_optimizer lion": {"optimizer": "muon", "muon_scalar_optimizer": "lion"},
    "save_wgrads_interval": {"save_wgrads_interval": 10},
    "cuda_graph_impl full_iteration with overlap_moe_expert_parallel_comm": {
        "cuda_graph_impl": "full_iteration",
        "overlap_moe_expert_parallel_comm": True,
    },
    "moe_latent_size with overlap_moe_expert_parallel_comm": {
        "moe_latent_size": 8,
        "overlap_moe_expert_parallel_comm": True,
    },
    "save_params_interval": {"save_params_interval": 10},
    "check_weight_hash_across_dp_replicas_interval with optim_grads_params": {
        "check_weight_hash_across_dp_replicas_interval": 1,
        "data_parallel_sharding_strategy": "optim_grads_params",
    },
    next(limit.setting for limit in LIMITS if limit.setting.startswith("save on object storage")): {
        "save": "s3://bucket/run",
        "log_progress": True,
    },
    "skip_train with load or pretrained_checkpoint": {"skip_train": True, "load": "run"},
    "qk_clip or log_max_attention_logit": {"log_max_attention_logit": True},
    "has_cond_embedder or flextron with pipeline_model_parallel_size": {
        "has_cond_embedder": True,
        "pipeline_model_parallel_size": 2,
    },
    "non_persistent_ckpt_type global, or none with non_persistent_save_interval": {
        "non_persistent_ckpt_type": "global"
    },
    "ckpt_format torch or torch_dcp": {"ckpt_format": "torch"},
    "ckpt_convert_format": {"ckpt_convert_format": "torch_dist"},
    "megatron_fsdp_main_params_dtype other than fp32 with clip_grad": {
        "megatron_fsdp_main_params_dtype": "auto",
        "bf16": True,
        "clip_grad": 1.0,
    },
    "param_name_patterns_for_fp32_local_accumulation": {"param_name_patterns_for_fp32_local_accumulation": ("all",)},
}


def _set(row: str) -> dict[str, Any]:
    """The settings that a row such as ``a with b``, ``a or b`` or ``a > 1`` names, with values at which it applies."""
    return {setting.split()[0]: 2 if row.endswith("> 1") else True for setting in row.split(" with ")}


@pytest.mark.parametrize(
    ("strategy", "given", "refused"),
    [
        ("optim_grads_params", {"process_non_loss_data_func": print}, True),
        ("optim_grads_params", {"process_non_loss_data_func": print, "non_loss_data_func": print}, False),
        ("optim_grads_params", {"process_non_loss_data_func": None}, False),
        ("optim_grads", {"process_non_loss_data_func": print}, False),
        (None, {"process_non_loss_data_func": print}, False),
    ],
)
def test_an_evaluation_on_one_rank_is_refused(strategy: str | None, given: dict[str, Any], refused: bool) -> None:
    def loop(model: list[Any], process_non_loss_data_func: Any, non_loss_data_func: Any = None) -> str:
        return "trained"

    chunks = [SimpleNamespace(ddp_config=mm.ddp_config(strategy))]
    if not refused:
        assert limits.train(loop, chunks, **given) == "trained"
        return
    with pytest.raises(NotImplementedError, match="non_loss_data_func, which is called with the model on all ranks"):
        limits.train(loop, chunks, **given)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.setting)
def test_each_limit_is_an_error_that_says_what_to_do(limit: limits.Limit) -> None:
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        check(Settings(SimpleNamespace(**(BROKEN.get(limit.setting) or _set(limit.setting)))))
    assert any(line.startswith(f"{limit.setting}: ") for line in str(caught.value).splitlines())
    assert limit.reason in str(caught.value) and limit.remedy in str(caught.value)
    assert caught.type is limit.error


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--skip-train", ""),
        ("--skip-train --load run", "skip_train with load"),
        ("--qk-clip", "qk_clip or log_max_attention_logit"),
        ("--save memory://run --async-save", "save on object storage with async_save"),
        ("--save /mnt/s3 --async-save", ""),
        ("--train-iters 20 --lr-warmup-iters 100", "lr_warmup_iters or lr_warmup_samples"),
        ("--train-iters 20 --lr-decay-iters 101 --lr-warmup-iters 100", ""),
        ("--train-iters 100 --lr-decay-iters 20 --lr-warmup-iters 20", "lr_warmup_iters or lr_warmup_samples"),
        ("--train-samples 20 --lr-warmup-samples 20", "lr_warmup_iters or lr_warmup_samples"),
        ("--train-samples 20 --lr-warmup-fraction 0.5", ""),
        ("--save /mnt/bucket/run --load runs/s3", ""),
        ("--save-params-interval 5 --data-parallel-sharding-strategy optim", "save_params_interval"),
        ("--save-params-interval 5 --data-parallel-sharding-strategy optim_grads_params", "save_params_interval"),
        ("--save-params-interval 5 --data-parallel-sharding-strategy no_shard", "save_params_interval"),
        ("--check-weight-hash-across-dp-replicas-interval 1", "check_weight_hash_across_dp_replicas_interval with"),
        (
            "--check-weight-hash-across-dp-replicas-interval 1 --data-parallel-sharding-strategy optim_grads",
            "",
        ),
        ("--non-persistent-ckpt-type global", "non_persistent_ckpt_type"),
        ("--non-persistent-save-interval 2", "non_persistent_ckpt_type"),
        ("--non-persistent-save-interval 2 --non-persistent-ckpt-type local", ""),
        ("--ckpt-convert-format torch_dist", "ckpt_convert_format"),
        ("--bf16 --megatron-fsdp-main-params-dtype bf16", "megatron_fsdp_main_params_dtype"),
        ("--bf16 --megatron-fsdp-main-params-dtype auto", "megatron_fsdp_main_params_dtype"),
        ("--bf16 --megatron-fsdp-main-params-dtype bf16 --clip-grad 0", ""),
        ("--megatron-fsdp-main-params-dtype auto", ""),
        ("--bf16 --megatron-fsdp-main-params-dtype fp32", ""),
        ("--moe-single-grouped-weight", "moe_single_grouped_weight"),
        ("--moe-single-grouped-bias", "moe_single_grouped_weight or moe_single_grouped_bias"),
        ("--use-sharp", "use_sharp"),
        ("--use-sharp --sharp-enabled-group dp_replica", "use_sharp"),
        ("--use-sharp --sharp-enabled-group dp_replica --num-distributed-optimizer-instances 2", ""),
    ],
)
def test_flags_are_refused_before_megatron_validates_them(words: str, refused: str) -> None:
    args = _command_line().parse_args(["--use-megatron-fsdp", *words.split()])
    if not refused:
        assert validate_args(lambda args: "validated", args) == "validated"
        return
    with pytest.raises((ValueError, NotImplementedError), match=f"^{refused}"):
        validate_args(lambda args: pytest.fail("Megatron's validation ran"), args)


@pytest.mark.parametrize("flag", ["--save", "--load", "--pretrained-checkpoint"])
def test_an_address_that_cannot_be_reached_is_refused_before_megatron_validates_it(flag: str) -> None:
    args = _command_line().parse_args(["--use-megatron-fsdp", flag, "hdfs://host/run"])
    with pytest.raises(ImportError, match=f"^{flag}: hdfs://: expected one of s3://, gs://, msc://"):
        validate_args(lambda args: pytest.fail("Megatron's validation ran"), args)


def test_manual_registration_is_off_where_megatron_asserts_that_buffers_are_registered() -> None:
    args = _command_line().parse_args(["--use-megatron-fsdp", "--fsdp-manual-registration"])
    assert validate_args(lambda args: args.fsdp_manual_registration, args) is False


def test_clipping_is_checked_where_both_settings_are_known() -> None:
    optimizer = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0)
    check(Settings(optimizer))
    check(Settings(optimizer, DistributedDataParallelConfig(use_megatron_fsdp=True)))
    chunk = SimpleNamespace(ddp_config=DistributedDataParallelConfig(megatron_fsdp_main_params_dtype=torch.bfloat16))
    with (
        patch.object(statistics, "FullyShardedDataParallel", SimpleNamespace),
        pytest.raises(ValueError, match="^megatron_fsdp_main_params_dtype other than fp32 with clip_grad"),
    ):
        statistics.get_megatron_optimizer(lambda *args: pytest.fail("the optimizer was built"), optimizer, [chunk])


def test_all_that_is_wrong_is_said_at_once() -> None:
    settings = Settings(SimpleNamespace(gtp_weight_remat_size=2, use_tp_pp_dp_mapping=True, optimizer="lion"))
    with pytest.raises(ValueError) as caught:
        check(settings)
    assert len(str(caught.value).splitlines()) == 3


def test_supported_parallelism_passes() -> None:
    for axis in ("tensor_model", "pipeline_model", "context", "expert_model"):
        check(Settings(SimpleNamespace(**{f"{axis}_parallel_size": 2})))


def test_what_fits_passes() -> None:
    check(Settings(SimpleNamespace(tensor_model_parallel_size=1, ckpt_format="fsdp_dtensor", nccl_ub=False)))
    check(Settings(None, SimpleNamespace()))
    registered = {"nccl_ub": True, "fsdp_manual_registration": True, "disable_symmetric_registration": True}
    check(Settings(SimpleNamespace(**registered)))


ADJUSTED: dict[str, dict[str, Any]] = {
    "average_in_collective": {"ddp_average_in_collective": True},
    "ckpt_format": {"ckpt_format": "torch_dist"},
    "verify_integrity": {"verify_integrity": True},
    "gradient_accumulation_fusion": {"gradient_accumulation_fusion": True},
    "disable_parameter_transpose_cache": {
        "fp8": "hybrid",
        "disable_parameter_transpose_cache": False,
        "data_parallel_sharding_strategy": "optim_grads_params",
    },
    "reuse_grad_buf_for_mxfp8_param_ag": {"reuse_grad_buf_for_mxfp8_param_ag": True},
    "fsdp_double_buffer": {"nccl_ub": True, "fsdp_double_buffer": False},
    "fsdp_manual_registration": {"fsdp_manual_registration": True, "nccl_ub": False},
    "megatron_fsdp_cuda_graph_mode": {"cuda_graph_impl": "full_iteration", "megatron_fsdp_cuda_graph_mode": False},
    "megatron_fsdp_version": {"megatron_fsdp_version": 2},
    "overlap_grad_reduce": {"overlap_grad_reduce": False, "data_parallel_sharding_strategy": "optim_grads"},
    "overlap_param_gather": {"overlap_param_gather": False, "data_parallel_sharding_strategy": "optim_grads_params"},
}


@pytest.mark.parametrize("adjustment", ADJUSTMENTS, ids=lambda adjustment: adjustment.setting)
def test_each_adjustment_is_made_and_logged_once(
    adjustment: limits.Adjustment, caplog: pytest.LogCaptureFixture
) -> None:
    limits._log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            settings = Settings(SimpleNamespace(**ADJUSTED[adjustment.setting]))
            adjust(settings)
            assert settings[adjustment.setting] == adjustment.value
    messages = [record.message for record in caplog.records if adjustment.setting in record.message]
    assert len(messages) == 1
    assert adjustment.reason in messages[0]


def test_the_default_strategy_of_megatrons_config_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    limits._log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for strategy in ("optim", "optim_grads", "optim_grads_params"):
            adjust(
                Settings(
                    DistributedDataParallelConfig(use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy)
                )
            )
        assert not [record for record in caplog.records if "no_shard" in record.message]
        for _ in range(2):
            adjust(Settings(DistributedDataParallelConfig(use_megatron_fsdp=True)))
    (message,) = [record.message for record in caplog.records if "no_shard" in record.message]
    assert "every rank keeps full weights" in message and "optim_grads_params" in message


def test_nothing_is_adjusted_where_there_is_no_reason() -> None:
    arguments_ = SimpleNamespace(
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        data_parallel_sharding_strategy="optim",
        average_in_collective=False,
        gradient_accumulation_fusion=False,
        fp8="hybrid",  # a rank keeps full weights between steps, and may keep quantized ones as well
        disable_parameter_transpose_cache=False,
        nccl_ub=False,
        fsdp_double_buffer=False,
    )
    before = vars(arguments_).copy()
    adjust(Settings(arguments_))
    assert vars(arguments_) == before


ASKED_FOR: dict[str, dict[str, Any]] = {
    "suggested_communication_unit_size with fsdp_double_buffer": {
        "suggested_communication_unit_size": 1_000_000,
        "fsdp_double_buffer": True,
    },
    "num_buckets": {"ddp_num_buckets": 4},
    "bucket_size": {"ddp_bucket_size": 40_000_000},
    "gradient_reduce_div_fusion": {"gradient_reduce_div_fusion": False},
    "outer_dp_sharding_strategy with one optimizer instance": {
        "outer_dp_sharding_strategy": "optim",
        "num_distributed_optimizer_instances": 1,
    },
    **{
        f"{name} with one expert-parallel rank": {name: value, "expert_model_parallel_size": 1}
        for name, value in zip(EXPERTS, ("optim", "optim", 2), strict=True)
    },
    "pin_cpu_grads": {"pin_cpu_grads": False, "optimizer_cpu_offload": True},
    "pin_cpu_params": {"pin_cpu_params": False, "optimizer_cpu_offload": True},
    "exp_avg_dtype with optimizer_cpu_offload": {"exp_avg_dtype": torch.bfloat16, "optimizer_cpu_offload": True},
    "exp_avg_sq_dtype with optimizer_cpu_offload": {"exp_avg_sq_dtype": torch.bfloat16, "optimizer_cpu_offload": True},
    "torch_fsdp2_reshard_after_forward": {"torch_fsdp2_reshard_after_forward": False},
}


@pytest.mark.parametrize("ignored", IGNORED, ids=lambda ignored: ignored.setting)
def test_settings_without_effect_are_logged_once(
    ignored: limits.Rule, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits._log_once.cache_clear()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # on a CPU the fused division is off anyway
    given = ASKED_FOR.get(ignored.setting) or _set(ignored.setting)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            adjust(Settings(SimpleNamespace(**given)))
    assert [record.message for record in caplog.records] == [
        f"Megatron-FSDP: {ignored.setting} has no effect: {ignored.reason}."
    ]


def test_the_optimizers_settings_alone_say_nothing_of_experts(caplog: pytest.LogCaptureFixture) -> None:
    limits._log_once.cache_clear()
    given = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim")
    given.expert_data_parallel_sharding_strategy = "optim_grads"
    with caplog.at_level(logging.WARNING):
        adjust(Settings(OptimizerConfig(), given))
    assert "expert" not in caplog.text


def test_megatrons_default_arguments_are_not_reported_as_ignored(caplog: pytest.LogCaptureFixture) -> None:
    limits._log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        adjust(Settings(_command_line().parse_args([])))
        # The loop computes a size of buckets.
        for size in (None, 40_000_000, 512_000_000):
            adjust(Settings(DistributedDataParallelConfig(bucket_size=size)))
    assert not [record.message for record in caplog.records if "no effect" in record.message]


@pytest.mark.parametrize("name", ["muon", "dist_muon"])
def test_megatron_validates_adam_in_place_of_muon(name: str) -> None:
    args = SimpleNamespace(use_megatron_fsdp=True, optimizer=name)
    validated = []
    validate_args(lambda args: validated.append(args.optimizer), args)
    assert validated == ["adam"] and args.optimizer == "muon"
    # Without FSDP, Megatron's own validation takes it.
    args = SimpleNamespace(use_megatron_fsdp=False, optimizer=name)
    validate_args(lambda args: validated.append(args.optimizer), args)
    assert validated[1:] == [args.optimizer] == [name]


# Every setting of data parallelism -----------------------------------------------------------------------------------

# Arguments that are read outside the adapter, or not at all.
ELSEWHERE = {
    "use_megatron_fsdp": "asks for the wrapper",
    "use_custom_fsdp": "its older name",
    "use_distributed_optimizer": "of Megatron's optimizer",
    "delay_wgrad_compute": "of the model's layers; a unit is reduced when its schedule releases it after them",
    "align_param_gather": "the loop's, which calls start_param_sync",
    "fp8_param_gather": "of the model's layers, whose parameters are quantized then",
    "fp4_param_gather": "of the model's layers, whose parameters are quantized then",
    "check_for_nan_in_grad": "read after each backward",
    "check_for_large_grads": "read after each backward",
    "fsdp_all_gather_in_start_param_sync": "read after each step",
    "num_distributed_optimizer_instances": "which process groups there are",
}
# Arguments about process groups, pipelines, ranks and other wrappers.
OTHERS = """
    distributed_backend distributed_timeout_minutes align_grad_reduce local_rank lazy_mpu_init use_megatron_fsdp
    nccl_communicator_config_path use_gloo_process_groups use_sharp sharp_enabled_group high_priority_stream_groups
    distributed_timeout_seconds_after_init flight_recorder_dump_path flight_recorder_trace_buffer_size
    flight_recorder_dump_on_timeout flight_recorder_include_stack_trace flight_recorder_include_only_active
    flight_recorder_extra_dump_on_exec disable_jit_fuser decoder_first_pipeline_num_layers
    decoder_last_pipeline_num_layers pipeline_model_parallel_layout model_parallel_size
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank overlap_p2p_comm
    use_layer_wise_param_layout cp_comm_type
""".split()


def _in_tables() -> set[str]:
    rows = {row.setting.split()[0] for row in (*LIMITS, *ADJUSTMENTS, *IGNORED)}
    return rows | {f"ddp_{name}" for name in rows}


def _command_line() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return parser


def test_every_ddp_setting_has_an_effect_or_is_listed() -> None:
    config = DistributedDataParallelConfig()
    read: set[str] = set()

    class Reading:
        def __getattr__(self, name: str) -> Any:
            value = getattr(config, name)
            read.add(name)
            return value

    fsdp_config(mm.transformer_config(), Reading())  # type: ignore[arg-type]
    fields = {field.name for field in dataclasses.fields(config)}
    assert read <= fields
    assert fields - read - _in_tables() - ELSEWHERE.keys() == set()
    assert not ELSEWHERE.keys() & (read | {row.setting for row in IGNORED})


def test_megatrons_settings_map_to_the_engines() -> None:
    def names(config: type) -> set[str]:
        return {field.name for field in dataclasses.fields(config)}

    settings = {field.name: field.default for field in dataclasses.fields(FSDPConfig) if field.init}
    megatrons = names(DistributedDataParallelConfig) | names(TransformerConfig)
    assert FLAGS.keys() <= settings.keys() | names(MixedPrecisionPolicy)
    assert set(FLAGS.values()) <= megatrons | names(OptimizerConfig) | OPTIONS.keys()
    # A setting that has the same name in Megatron needs no row.
    assert not FLAGS.keys() & megatrons
    for name, default in settings.items():
        flag = FLAGS.get(name, name)
        needs_cuda = name in ("nccl_ub", "cuda_graph_mode")
        if flag in names(DistributedDataParallelConfig) and isinstance(default, bool) and not needs_cuda:
            ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim", **{flag: True})
            assert getattr(fsdp_config(mm.transformer_config(), ddp_config), name) is True, name


def test_every_parallelism_argument_has_an_effect_or_is_listed() -> None:
    (group,) = [group for group in _command_line()._action_groups if group.title == "distributed init"]
    found = {action.dest for action in group._group_actions}
    fields = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    prefixed = {f"ddp_{name}" for name in fields}
    assert found - fields - prefixed - _in_tables() - set(OTHERS) == set()


def test_fitting_transformer_engine_keeps_the_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_transformer_engine_fits", lambda: True)
    arguments_ = SimpleNamespace(gradient_accumulation_fusion=True)
    adjust(Settings(arguments_))
    assert arguments_.gradient_accumulation_fusion


def test_megatrons_validation_runs_after_ours_and_only_fsdp_is_checked() -> None:
    seen: list[Any] = []
    validate = functools.partial(validate_args, lambda args, defaults: seen.append((args, defaults)))
    with pytest.raises(NotImplementedError):
        validate(SimpleNamespace(use_megatron_fsdp=True, gtp_weight_remat_size=2), {})
    assert not seen
    plain = SimpleNamespace(use_megatron_fsdp=False, gtp_weight_remat_size=2)
    validate(plain, {})
    assert seen == [(plain, {})]


def test_the_page_prints_the_tables() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "limits.md"
    assert limit_table.of_limits() in page.read_text(), (
        "run: python scripts/limit_table.py limits, and put it into docs/limits.md"
    )
    for row in (*LIMITS, *ADJUSTMENTS, *IGNORED):
        assert f"`{row.setting}`" in limit_table.of_limits()
