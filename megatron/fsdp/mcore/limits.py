"""What Megatron's settings may be together with our FSDP: three tables, checked before anything is allocated.

``LIMITS`` names what does not fit and what to do; ``ADJUSTMENTS`` names what is changed, and why; ``IGNORED`` names
what changes nothing. All read settings by their names in Megatron, from a parsed command line or from the configs that
a wrapper is given.

``python -m megatron.fsdp.mcore.limits`` prints the tables as they are in docs/limits.md.
"""

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Megatron's command line has other names for these fields of its configs.
ALIASES = {
    name: (name, f"ddp_{name}")
    for name in (
        "average_in_collective",
        "bucket_size",
        "num_buckets",
        "pad_buckets_for_high_nccl_busbw",
        "param_name_patterns_for_fp32_local_accumulation",
        "reduce_scatter_with_fp32_accumulation",
    )
}


class Settings:
    """Settings by name, out of several objects that have them as attributes.

    Args:
        sources: Parsed arguments or config objects; None is skipped.
    """

    def __init__(self, *sources: Any) -> None:
        self._sources = [source for source in sources if source is not None]

    def __getitem__(self, name: str) -> Any:
        for source in self._sources:
            for alias in ALIASES.get(name, (name,)):
                if hasattr(source, alias):
                    return getattr(source, alias)
        return None

    def set(self, name: str, value: Any) -> None:
        """Change a setting wherever it is."""
        for source in self._sources:
            for alias in ALIASES.get(name, (name,)):
                if hasattr(source, alias):
                    setattr(source, alias, value)


@dataclass(frozen=True)
class Limit:
    """Settings that do not fit together with our FSDP.

    Attributes:
        setting: Name of the setting, with the value that is refused where it is not any.
        applies: Whether the settings are so.
        error: ValueError for what can never fit, NotImplementedError for what does not fit yet.
        message: What does not fit.
        remedy: What to do.
    """

    setting: str
    applies: Callable[[Settings], bool]
    error: type[Exception]
    message: str
    remedy: str


@dataclass(frozen=True)
class Adjustment:
    """A setting that is changed, and said so once.

    Attributes:
        setting: Its name.
        applies: Whether it is changed.
        value: What to.
        reason: Why.
    """

    setting: str
    applies: Callable[[Settings], bool]
    value: Any
    reason: str


@dataclass(frozen=True)
class Ignored:
    """A setting that changes nothing, and is said so once.

    Attributes:
        setting: Its name.
        applies: Whether it asks for something.
        reason: Why that is not done.
    """

    setting: str
    applies: Callable[[Settings], bool]
    reason: str


def _larger_than_one(name: str) -> Callable[[Settings], bool]:
    return lambda s: (s[name] or 1) > 1


def _is_set(name: str) -> Callable[[Settings], bool]:
    return lambda s: bool(s[name])


def _expandable_segments() -> bool:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return any("expandable_segments:true" in os.environ.get(name, "").lower() for name in names)


def _parallelism(setting: str, what: str) -> Limit:
    return Limit(
        f"{setting} > 1",
        _larger_than_one(setting),
        NotImplementedError,
        f"{what} does not work with this FSDP yet: data parallelism only.",
        f"Leave {setting} at 1, or train with Megatron's DistributedDataParallel.",
    )


def _not_yet(setting: str, what: str, remedy: str = "Leave it off.") -> Limit:
    return Limit(setting, _is_set(setting), NotImplementedError, f"{what} does not work with this FSDP yet.", remedy)


LIMITS: tuple[Limit, ...] = (
    Limit(
        "use_torch_fsdp2",
        _is_set("use_torch_fsdp2"),
        ValueError,
        "use_torch_fsdp2 and use_megatron_fsdp both ask to be the wrapper.",
        "Choose one.",
    ),
    Limit(
        "use_tp_pp_dp_mapping",
        _is_set("use_tp_pp_dp_mapping"),
        ValueError,
        "use_tp_pp_dp_mapping numbers ranks so that data-parallel ranks of one model replica are far apart; FSDP "
        "communicates between them in every layer and expects the order tp-cp-ep-dp-pp.",
        "Leave it off.",
    ),
    Limit(
        "reuse_grad_buf_for_mxfp8_param_ag",
        _is_set("reuse_grad_buf_for_mxfp8_param_ag"),
        ValueError,
        "reuse_grad_buf_for_mxfp8_param_ag gathers weights into DDP's gradient buffer, which FSDP does not have.",
        "Leave it off.",
    ),
    Limit(
        "ckpt_format other than fsdp_dtensor",
        lambda s: s["ckpt_format"] not in (None, "fsdp_dtensor"),
        ValueError,
        "Sharded parameters are saved and loaded in the checkpoint format fsdp_dtensor only.",
        "Set ckpt_format (--ckpt-format) to fsdp_dtensor.",
    ),
    Limit(
        "nccl_ub with expandable segments",
        lambda s: bool(s["nccl_ub"]) and _expandable_segments(),
        ValueError,
        "nccl_ub registers memory with NCCL, which it cannot do for the allocator's expandable segments.",
        "Remove expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF, or leave nccl_ub off.",
    ),
    _parallelism("gtp_weight_remat_size", "Generalized tensor parallelism"),
    _not_yet("nccl_ub", "Registering buffers with NCCL"),
    _not_yet("fp8_param_gather", "Gathering weights in FP8"),
    _not_yet("fp4_param_gather", "Gathering weights in FP4"),
    _not_yet("keep_fp8_transpose_cache", "An FP8 transpose cache"),
    _not_yet("optimizer_cpu_offload", "Offloading the optimizer to the CPU"),
    _not_yet("delay_wgrad_compute", "Delaying weight gradients"),
    _not_yet("defer_embedding_wgrad_compute", "Deferring the embedding's weight gradient"),
    _not_yet("overlap_moe_expert_parallel_comm", "The 1F1B overlap of expert communication"),
    _not_yet("overlap_param_gather_with_optimizer_step", "Gathering weights during the optimizer's step"),
    _not_yet("param_name_patterns_for_fp32_local_accumulation", "fp32 accumulation of some parameters only"),
    _not_yet("save_wgrads_interval", "Saving whole weight gradients"),
    _not_yet("optimizer_cuda_graph", "Capturing the optimizer's step in a CUDA graph"),
    _not_yet("megatron_fsdp_cuda_graph_mode", "Capture in CUDA graphs"),
    Limit(
        "create_all_gather_group with several optimizer instances",
        lambda s: bool(s["create_all_gather_group"]) and (s["num_distributed_optimizer_instances"] or 1) > 1,
        NotImplementedError,
        "Megatron makes that group of all data-parallel ranks; weights are gathered inside an instance.",
        "Leave create_all_gather_group off.",
    ),
    Limit(
        "cuda_graph_impl other than none",
        lambda s: s["cuda_graph_impl"] not in (None, "none"),
        NotImplementedError,
        "CUDA graphs do not work with this FSDP yet.",
        "Set cuda_graph_impl (--cuda-graph-impl) to none.",
    ),
)


def _transformer_engine_fits() -> bool:
    from megatron.core.utils import is_te_min_version

    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        return False
    return is_te_min_version("2.10")


def _shards(*kinds: str) -> Callable[[Settings], bool]:
    def applies(settings: Settings) -> bool:
        from megatron.fsdp.sharding.strategy import INNER

        placements = INNER.get(settings["data_parallel_sharding_strategy"])
        return placements is not None and any(getattr(placements, f"shards_{kind}") for kind in kinds)

    return applies


def _off_though(name: str, condition: Callable[[Settings], bool]) -> Callable[[Settings], bool]:
    return lambda s: s[name] is False and condition(s)


ADJUSTMENTS: tuple[Adjustment, ...] = (
    Adjustment(
        "average_in_collective",
        _is_set("average_in_collective"),
        False,
        "gradients are summed over ranks and a rank divides its shard only: no element is touched twice",
    ),
    Adjustment(
        "gradient_accumulation_fusion",
        lambda s: bool(s["gradient_accumulation_fusion"]) and not _transformer_engine_fits(),
        False,
        "it needs Transformer Engine 2.10 or later to write gradients of another dtype than the weights'",
    ),
    Adjustment(
        "fsdp_double_buffer",
        lambda s: bool(s["nccl_ub"]) and s["fsdp_double_buffer"] is False,
        True,
        "nccl_ub registers buffers with NCCL once, so they have to stay where they are",
    ),
    Adjustment(
        "overlap_grad_reduce",
        _off_though("overlap_grad_reduce", _shards("gradients")),
        True,
        "sharded gradients are reduced during backward, and there is no reason to wait for each",
    ),
    Adjustment(
        "overlap_param_gather",
        _off_though("overlap_param_gather", _shards("parameters")),
        True,
        "sharded weights are gathered for each unit, and there is no reason to begin late",
    ),
)


_UNITS = "a unit is what is gathered or reduced together, and the next one is gathered ahead"
_REGISTERED = "it says how nccl_ub registers buffers, which is off"
# What Megatron's loop gives a run that asks for nothing: at least this many parameters, in steps of a million.
_DEFAULT_BUCKET, _BUCKET_STEP = 40_000_000, 1_000_000


def _asks_for_buckets(settings: Settings) -> bool:
    if settings["num_buckets"] is not None:  # Megatron's loop computes a size of it
        return False
    size = settings["bucket_size"]
    by_default = size is None or (size >= _DEFAULT_BUCKET and size % _BUCKET_STEP == 0)
    return settings["ddp_bucket_size"] is not None or not by_default


IGNORED: tuple[Ignored, ...] = (
    Ignored("suggested_communication_unit_size", lambda s: s["suggested_communication_unit_size"] is not None, _UNITS),
    Ignored("num_buckets", lambda s: s["num_buckets"] is not None, _UNITS),
    Ignored("bucket_size", _asks_for_buckets, _UNITS),
    Ignored(
        "pad_buckets_for_high_nccl_busbw",
        _is_set("pad_buckets_for_high_nccl_busbw"),
        "shards have as little padding as the layout allows",
    ),
    Ignored(
        "gradient_reduce_div_fusion",
        lambda s: s["gradient_reduce_div_fusion"] is False and torch.cuda.is_available(),
        "a rank divides its shard only, after the reduction",
    ),
    Ignored(
        "outer_dp_sharding_strategy",
        lambda s: (
            s["outer_dp_sharding_strategy"] not in (None, "no_shard") and s["num_distributed_optimizer_instances"] == 1
        ),
        "it is about several optimizer instances (num_distributed_optimizer_instances), and there is one",
    ),
    Ignored(
        "enable_full_sharding_in_hsdp",
        _is_set("enable_full_sharding_in_hsdp"),
        "outer_dp_sharding_strategy optim is what asks for that",
    ),
    Ignored("disable_symmetric_registration", _is_set("disable_symmetric_registration"), _REGISTERED),
    Ignored("fsdp_manual_registration", _is_set("fsdp_manual_registration"), _REGISTERED),
    Ignored(
        "torch_fsdp2_reshard_after_forward",
        lambda s: s["torch_fsdp2_reshard_after_forward"] is False,
        "it is a setting of torch's FSDP2; data_parallel_sharding_strategy optim_grads keeps weights after forward",
    ),
)


def broken(settings: Settings) -> list[Limit]:
    """What does not fit."""
    return [limit for limit in LIMITS if limit.applies(settings)]


def check(settings: Settings) -> None:
    """Raise if the settings do not fit; one error names all that is wrong.

    Raises:
        ValueError: Something can never fit.
        NotImplementedError: Everything that is wrong does not fit yet.
    """
    found = broken(settings)
    if found:
        lines = [f"{limit.setting}: {limit.message} {limit.remedy}" for limit in found]
        error = ValueError if any(limit.error is ValueError for limit in found) else NotImplementedError
        raise error("\n".join(lines))


def adjust(settings: Settings) -> None:
    """Change what ``ADJUSTMENTS`` says, and log each change once, and each setting that is ignored."""
    for ignored in IGNORED:
        if ignored.applies(settings):
            _log_once(f"{ignored.setting} has no effect: {ignored.reason}.")
    for adjustment in ADJUSTMENTS:
        if adjustment.applies(settings):
            settings.set(adjustment.setting, adjustment.value)
            _log_once(f"{adjustment.setting} is set to {adjustment.value}: {adjustment.reason}.")


@functools.cache
def _log_once(message: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        logger.warning("Megatron-FSDP: %s", message)


def validate_args(original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Check and adjust the command line's settings before Megatron's ``validate_args`` sees them, if FSDP is on."""
    if getattr(args, "use_megatron_fsdp", False):
        settings = Settings(args)
        check(settings)
        adjust(settings)
    return original(args, *rest, **kwargs)


def as_markdown() -> str:
    """The tables, as docs/limits.md has them."""
    lines = ["| setting | what happens | why | what to do |", "|---|---|---|---|"]
    for limit in LIMITS:
        lines.append(f"| `{limit.setting}` | {limit.error.__name__} | {limit.message} | {limit.remedy} |")
    lines += ["", "| setting | is set to | why |", "|---|---|---|"]
    for adjustment in ADJUSTMENTS:
        lines.append(f"| `{adjustment.setting}` | `{adjustment.value}` | {adjustment.reason} |")
    lines += ["", "| setting | has no effect, since |", "|---|---|"]
    lines += [f"| `{ignored.setting}` | {ignored.reason} |" for ignored in IGNORED]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
