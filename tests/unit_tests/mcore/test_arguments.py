"""Settings that do not fit, or are changed: two tables, and the page that prints them."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fsdp.mcore import arguments
from megatron.fsdp.mcore.arguments import (
    ADJUSTMENTS,
    LIMITS,
    Settings,
    adjust,
    as_markdown,
    check,
    checking_validate_args,
)

# One value for each row at which it applies.
BROKEN: dict[str, dict[str, Any]] = {
    "ckpt_format other than fsdp_dtensor": {"ckpt_format": "torch_dist"},
    "nccl_ub with expandable segments": {"nccl_ub": True},
    "cuda_graph_impl other than none": {"cuda_graph_impl": "local"},
    "save_wgrads_interval": {"save_wgrads_interval": 10},
    "param_name_patterns_for_fp32_local_accumulation": {"param_name_patterns_for_fp32_local_accumulation": ("all",)},
}


def _broken(setting: str) -> dict[str, Any]:
    return BROKEN.get(setting) or ({setting.split()[0]: 2} if setting.endswith("> 1") else {setting: True})


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.setting)
def test_each_limit_is_an_error_that_says_what_to_do(limit: arguments.Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    if "expandable" in limit.setting:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        check(Settings(SimpleNamespace(**_broken(limit.setting))))
    assert any(line.startswith(f"{limit.setting}: ") for line in str(caught.value).splitlines())
    assert limit.message in str(caught.value) and limit.remedy in str(caught.value)
    if "nccl_ub" not in limit.setting:
        assert caught.type is limit.error


def test_all_that_is_wrong_is_said_at_once() -> None:
    settings = Settings(SimpleNamespace(gtp_weight_remat_size=2, use_torch_fsdp2=True, ckpt_format="torch"))
    with pytest.raises(ValueError) as caught:
        check(settings)
    assert len(str(caught.value).splitlines()) == 3


def test_other_parallelism_fits() -> None:
    for axis in ("tensor_model", "pipeline_model", "context", "expert_model"):
        check(Settings(SimpleNamespace(**{f"{axis}_parallel_size": 2})))


def test_what_fits_passes() -> None:
    check(Settings(SimpleNamespace(tensor_model_parallel_size=1, ckpt_format="fsdp_dtensor", nccl_ub=False)))
    check(Settings(None, SimpleNamespace()))


ADJUSTED: dict[str, dict[str, Any]] = {
    "average_in_collective": {"ddp_average_in_collective": True},
    "gradient_accumulation_fusion": {"gradient_accumulation_fusion": True},
    "fsdp_double_buffer": {"nccl_ub": True, "fsdp_double_buffer": False},
    "overlap_grad_reduce": {"overlap_grad_reduce": False, "data_parallel_sharding_strategy": "optim_grads"},
    "overlap_param_gather": {"overlap_param_gather": False, "data_parallel_sharding_strategy": "optim_grads_params"},
}


@pytest.mark.parametrize("adjustment", ADJUSTMENTS, ids=lambda adjustment: adjustment.setting)
def test_each_adjustment_is_made_and_logged_once(
    adjustment: arguments.Adjustment, caplog: pytest.LogCaptureFixture
) -> None:
    arguments._log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            settings = Settings(SimpleNamespace(**ADJUSTED[adjustment.setting]))
            adjust(settings)
            assert settings[adjustment.setting] == adjustment.value
    messages = [record.message for record in caplog.records if adjustment.setting in record.message]
    assert len(messages) == 1
    assert adjustment.reason in messages[0]


def test_nothing_is_adjusted_where_there_is_no_reason() -> None:
    arguments_ = SimpleNamespace(
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        data_parallel_sharding_strategy="optim",
        average_in_collective=False,
        gradient_accumulation_fusion=False,
        nccl_ub=False,
        fsdp_double_buffer=False,
    )
    before = vars(arguments_).copy()
    adjust(Settings(arguments_))
    assert vars(arguments_) == before


def test_fitting_transformer_engine_keeps_the_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_transformer_engine_fits", lambda: True)
    arguments_ = SimpleNamespace(gradient_accumulation_fusion=True)
    adjust(Settings(arguments_))
    assert arguments_.gradient_accumulation_fusion


def test_megatrons_validation_runs_after_ours_and_only_fsdp_is_checked() -> None:
    seen: list[Any] = []
    validate = checking_validate_args(lambda args, defaults: seen.append((args, defaults)))
    with pytest.raises(NotImplementedError):
        validate(SimpleNamespace(use_megatron_fsdp=True, gtp_weight_remat_size=2), {})
    assert not seen
    plain = SimpleNamespace(use_megatron_fsdp=False, gtp_weight_remat_size=2)
    validate(plain, {})
    assert seen == [(plain, {})]


def test_the_page_prints_the_tables() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "limits.md"
    assert as_markdown() in page.read_text(), (
        "run: python -m megatron.fsdp.mcore.arguments, and put it into docs/limits.md"
    )
    for row in (*LIMITS, *ADJUSTMENTS):
        assert f"`{row.setting}`" in as_markdown()
