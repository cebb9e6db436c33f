"""Which of Megatron's settings work with this FSDP. Three tables are checked before memory is allocated.

``LIMITS`` are settings that raise an error, ``ADJUSTMENTS`` are settings that are changed, and ``IGNORED`` are settings
without effect. Settings are read by their names in Megatron, from a parsed command line or from the configs that a
wrapper is given.

``scripts/limit_table.py`` prints the tables of docs/limits.md.
"""

import functools
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.fsdp.api.ddp_config import NOTHING_SHARDED
from megatron.fsdp.checkpoint.storage import REMOTE, problem_of
from megatron.fsdp.mcore.options import EXPERT_INSTANCES, EXPERTS, added
from megatron.fsdp.sharding.strategy import INNER

logger = logging.getLogger(__name__)

# Megatron's command line puts a prefix before these fields of its configs.
_PREFIXED = {
    "average_in_collective",
    "num_buckets",
    "pad_buckets_for_high_nccl_busbw",
    "param_name_patterns_for_fp32_local_accumulation",
    "reduce_scatter_with_fp32_accumulation",
}


class Settings:
    """Settings by name, read from several objects that have them as attributes.

    Args:
        sources: Parsed arguments or config objects; None is skipped.
    """

    def __init__(self, *sources: Any) -> None:
        self._sources = [source for source in sources if source is not None]

    def __getitem__(self, name: str) -> Any:
        """The first source's value; None if no source has the setting."""
        return next((getattr(source, attribute) for source, attribute in self._places(name)), None)

    def __contains__(self, name: str) -> bool:
        """Whether a source has the setting."""
        return bool(self._places(name))

    def set(self, name: str, value: Any) -> None:
        """Change a setting in every source that has it."""
        for source, attribute in self._places(name):
            setattr(source, attribute, value)

    def _places(self, name: str) -> list[tuple[Any, str]]:
        names = (name, f"ddp_{name}") if name in _PREFIXED else (name,)
        return [(source, each) for source in self._sources for each in names if hasattr(source, each)]


Condition = Callable[[Settings], bool]


@dataclass(frozen=True)
class Rule:
    """A setting that is ignored; subclasses say what else happens to it.

    Attributes:
        setting: The setting's name, followed by when the rule applies unless it does for every value.
        reason: Why.
        condition: Whether it applies. None: if the setting is set, or as ``setting`` says in the form "name with other"
            or "name without other".
    """

    setting: str
    reason: str
    condition: Condition | None = field(default=None, kw_only=True)

    def applies(self, settings: Settings) -> bool:
        """Whether the rule applies to the settings."""
        if self.condition is not None:
            return self.condition(settings)
        name, *also = self.setting.split()
        return bool(settings[name]) and (not also or bool(settings[also[1]]) is (also[0] == "with"))


@dataclass(frozen=True)
class Limit(Rule):
    """A setting that does not work with this FSDP.

    Attributes:
        remedy: What the user can do.
        error: ValueError for what can never work, NotImplementedError for what is not supported yet.
    """

    remedy: str = "Leave it off."
    error: type[Exception] = ValueError


@dataclass(frozen=True)
class Adjustment(Rule):
    """A setting that is changed; the change is logged once.

    Attributes:
        value: The new value.
    """

    value: Any


def _several_instances(settings: Settings) -> bool:
    return any((settings[name] or 1) > 1 for name in ("num_distributed_optimizer_instances", EXPERT_INSTANCES))


def _lacks_buffers(settings: Settings) -> bool:
    pools = ("fsdp_double_buffer", "nccl_ub", "megatron_fsdp_max_pool_double_buffer")
    count = settings["fsdp_buffer_count"]
    return count not in (None, 2) and (count < 2 or not any(settings[name] for name in pools))


def _makes_gtp_groups() -> bool:
    from megatron.core import parallel_state

    return hasattr(parallel_state, "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT")


def _lacks_group_of_sharp(settings: Settings) -> bool:
    replicas = settings["sharp_enabled_group"] == "dp_replica"
    return bool(settings["use_sharp"]) and (not _several_instances(settings) if replicas else _makes_gtp_groups())


def _saves_without_a_type(settings: Settings) -> bool:
    return bool(settings["non_persistent_save_interval"]) and settings["non_persistent_ckpt_type"] is None


def _is_given(name: str, condition: Condition) -> Condition:
    return lambda s: s[name] is not None and condition(s)


def _is_false(name: str, condition: Condition = lambda s: True) -> Condition:
    return lambda s: s[name] is False and condition(s)


NOT_YET = "Not supported by this FSDP yet: "


def _not_yet(setting: str, what: str, remedy: str = "Leave it off.", condition: Condition | None = None) -> Limit:
    reason = f"{NOT_YET}{what}."
    return Limit(setting, reason, remedy, NotImplementedError, condition=condition)


# Names of Muon; the second is deprecated.
MUON = ("muon", "dist_muon")


def _narrows(settings: Settings) -> bool:
    """Whether Megatron clips gradients that are not fp32, which have the dtype of the main weights."""
    if "megatron_fsdp_main_params_dtype" not in settings:
        return False
    dtype = settings["megatron_fsdp_main_params_dtype"]
    if dtype in (None, "auto"):
        dtype = "bf16" if settings["bf16"] or settings["fp16"] else "fp32"
    clips = bool(settings["clip_grad"]) and not settings["use_precision_aware_optimizer"]
    return clips and dtype not in ("fp32", torch.float32)


def _warms_up_too_long(settings: Settings) -> bool:
    """Whether the learning rate would not reach its maximum before the end of its decay."""

    def too_long(unit: str) -> bool:
        steps = settings[f"lr_decay_{unit}"] or settings[f"train_{unit}"]
        return bool(steps) and (settings[f"lr_warmup_{unit}"] or 0) >= steps

    return too_long("iters") or too_long("samples")


# What makes Megatron write into the folder of --save with functions of file systems.
_TO_FILES = (
    "async_save",
    "log_progress",
    "save_activations_interval",
    "save_dgrads_interval",
    "save_tokens_per_expert_interval",
    "wandb_project",
    "enable_ft_package",
)
_NOT_WITH_MUON = ("fp16", "use_precision_aware_optimizer", "optimizer_cpu_offload")

LIMITS: tuple[Limit, ...] = (
    Limit(
        "use_tp_pp_dp_mapping",
        "use_tp_pp_dp_mapping is not supported with Megatron FSDP: it numbers ranks so that data-parallel ranks of one "
        "model replica are far apart. FSDP communicates between them in every layer, and expects the order "
        "tp-cp-ep-dp-pp.",
    ),
    _not_yet(
        "gtp_weight_remat_size > 1",
        "generalized tensor parallelism",
        "Leave gtp_weight_remat_size at 1, or train with Megatron's DistributedDataParallel.",
        lambda s: (s["gtp_weight_remat_size"] or 1) > 1,
    ),
    _not_yet(
        "optimizer other than adam and muon",
        "SOAP and adaptive Muon, which keep statistics of full matrices, Lion and SGD",
        "Set optimizer (--optimizer) to adam or muon.",
        lambda s: s["optimizer"] not in (None, "adam", *MUON),
    ),
    Limit(
        "lr_warmup_iters or lr_warmup_samples not below the end of the decay",
        "Megatron expects the warm-up of the learning rate to end before its decay, by default the end of the run.",
        "Shorten the warm-up, or set --lr-decay-iters (--lr-decay-samples) to the length of the full run.",
        condition=_warms_up_too_long,
    ),
    Limit(
        "optimizer_offload_fraction below 0 or above 1",
        "It is the share of the parameters whose optimizer state is in host memory.",
        "Set optimizer_offload_fraction (--optimizer-offload-fraction) to a number from 0 to 1.",
        condition=lambda s: not 0 <= (s["optimizer_offload_fraction"] or 0) <= 1,
    ),
    _not_yet(
        "optimizer muon with fp16, use_precision_aware_optimizer or optimizer_cpu_offload",
        "loss scaling, gradients and moments of low precision, and matrices in host memory with Muon",
        "Train in bf16 without them, or set optimizer (--optimizer) to adam.",
        lambda s: s["optimizer"] in MUON and any(s[name] for name in _NOT_WITH_MUON),
    ),
    _not_yet(
        "muon_scalar_optimizer lion",
        "Lion for the parameters that Muon does not update",
        "Set muon_scalar_optimizer (--muon-scalar-optimizer) to adam.",
        lambda s: s["optimizer"] in MUON and s["muon_scalar_optimizer"] == "lion",
    ),
    Limit(
        "defer_embedding_wgrad_compute",
        "The output layer's weight gradient would be computed after its unit's gradients were reduced, and be lost.",
    ),
    Limit(
        "fsdp_buffer_count below 2 or without fsdp_double_buffer",
        "It is the number of buffers that units use in turn.",
        "Set it to 2 or more, with fsdp_double_buffer (--fsdp-double-buffer).",
        condition=_lacks_buffers,
    ),
    _not_yet(
        "cuda_graph_impl full_iteration with overlap_moe_expert_parallel_comm",
        "a graph of an iteration, which needs the double buffer, with a forward and a backward that overlap",
        "Leave one of them off.",
        lambda s: bool(s["overlap_moe_expert_parallel_comm"]) and s["cuda_graph_impl"] == "full_iteration",
    ),
    _not_yet(
        "moe_latent_size with overlap_moe_expert_parallel_comm",
        "an expert's latent projection in the stream of the all-to-all",
        "Leave overlap_moe_expert_parallel_comm off.",
    ),
    _not_yet("overlap_param_gather_with_optimizer_step", "all-gathering weights during the optimizer's step"),
    Limit(
        "param_name_patterns_for_fp32_local_accumulation",
        "The gradients of a unit are accumulated in one dtype.",
        "Set megatron_fsdp_main_grads_dtype (--megatron-fsdp-main-grads-dtype) to fp32, for all gradients.",
    ),
    Limit(
        "save_wgrads_interval",
        "Sharded gradients have no main_grad, as in Megatron-Core's FSDP, so the files would have none.",
        "Train with Megatron's DistributedDataParallel to save them.",
    ),
    Limit(
        "save_params_interval",
        "The files would have one rank's DTensors.",
        "Save checkpoints (--save-interval).",
    ),
    Limit(
        "check_weight_hash_across_dp_replicas_interval with optim_grads_params",
        "No rank has a replica of another's weights.",
        "Leave it off, or set data_parallel_sharding_strategy (--data-parallel-sharding-strategy) to optim_grads.",
        condition=lambda s: (
            s["check_weight_hash_across_dp_replicas_interval"] is not None
            and s["data_parallel_sharding_strategy"] == "optim_grads_params"
        ),
    ),
    _not_yet(
        f"save on object storage with {', '.join(_TO_FILES[:-1])} or {_TO_FILES[-1]}",
        "files there that are no checkpoints, and saves in the background",
        "Leave them off, or mount the storage.",
        lambda s: bool(REMOTE.match(str(s["save"]))) and any(s[name] for name in _TO_FILES),
    ),
    _not_yet(
        "non_persistent_ckpt_type global, or none with non_persistent_save_interval",
        "resuming from such checkpoints",
        "Use --save-interval and --save-retain-interval.",
        lambda s: s["non_persistent_ckpt_type"] == "global" or _saves_without_a_type(s),
    ),
    Limit(
        "ckpt_format torch or torch_dcp",
        "A run with FSDP saves fsdp_dtensor only.",
        "Set ckpt_format (--ckpt-format) to fsdp_dtensor.",
        condition=lambda s: s["ckpt_format"] in ("torch", "torch_dcp"),
    ),
    Limit(
        "fake_process_group",
        "Its collectives move nothing, and shards would have no values.",
        condition=lambda s: s["fake_process_group"] is True,  # dry runs give a different value
    ),
    Limit("use_torch_fsdp2", "It is PyTorch's FSDP, in place of this one."),
    Limit(
        "ckpt_convert_format",
        "A run with FSDP saves fsdp_dtensor only.",
        "Use megatron-fsdp-inspector convert.",
    ),
    Limit(
        "megatron_fsdp_main_params_dtype other than fp32 with clip_grad",
        "Megatron clips fp32 gradients only, and theirs have the main weights' dtype.",
        "Set it to fp32, or clip_grad (--clip-grad) to 0.",
        condition=_narrows,
    ),
    _not_yet(
        "moe_single_grouped_weight or moe_single_grouped_bias",
        "Transformer Engine's grouped tensors",
        condition=lambda s: bool(s["moe_single_grouped_weight"] or s["moe_single_grouped_bias"]),
    ),
    Limit(
        "use_sharp for the group dp, or with one optimizer instance",
        "Megatron-Core 0.19 reads the group dp before it creates it.",
        "Set sharp_enabled_group (--sharp-enabled-group) to dp_replica, with several optimizer instances.",
        condition=_lacks_group_of_sharp,
    ),
    _not_yet(
        "skip_train with load or pretrained_checkpoint",
        "evaluation alone, for which Megatron does not wrap the model",
        "Convert the checkpoint to torch_dist, and evaluate without use_megatron_fsdp.",
        lambda s: bool(s["skip_train"] and (s["load"] or s["pretrained_checkpoint"])),
    ),
    _not_yet(
        "qk_clip or log_max_attention_logit",
        "clipping sharded attention weights",
        "Leave both off.",
        lambda s: bool(s["qk_clip"] or s["log_max_attention_logit"]),
    ),
    _not_yet(
        "has_cond_embedder or flextron with pipeline_model_parallel_size",
        "weights that pipeline stages share, other than embeddings",
        "Leave pipeline_model_parallel_size at 1.",
        lambda s: bool(s["has_cond_embedder"] or s["flextron"]) and (s["pipeline_model_parallel_size"] or 1) > 1,
    ),
    _not_yet("freeze_all_layers", "runs that train nothing", "Leave use_megatron_fsdp off."),
    _not_yet("optimizer_cuda_graph", "capturing the optimizer's step in a CUDA graph"),
    _not_yet(
        "create_all_gather_group with several optimizer instances",
        "a second group for all-gathers",
        "Leave create_all_gather_group off.",
        lambda s: bool(s["create_all_gather_group"]) and _several_instances(s),
    ),
    _not_yet(
        "cuda_graph_impl other than none or full_iteration",
        "graphs of single layers, whose replay neither unshards nor reduces",
        "Set cuda_graph_impl (--cuda-graph-impl) to full_iteration or none.",
        lambda s: s["cuda_graph_impl"] not in (None, "none", "full_iteration"),
    ),
)


def _transformer_engine_fits() -> bool:
    from megatron.core.utils import is_te_min_version

    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        return False
    return is_te_min_version("2.10")


def _shards(kind: str) -> Condition:
    names = ("data_parallel_sharding_strategy", "expert_data_parallel_sharding_strategy")
    return lambda s: any(getattr(INNER.get(s[name]), f"shards_{kind}", False) for name in names)


def _quantizes(settings: Settings) -> bool:
    return any(settings[name] for name in ("fp8", "fp4", "quant_recipe"))


_REGISTERED = "it selects how nccl_ub registers buffers"

ADJUSTMENTS: tuple[Adjustment, ...] = (
    Adjustment(
        "average_in_collective",
        "gradients are summed over ranks and each rank divides its shard, so every element is scaled only once",
        False,
    ),
    Adjustment(
        "gradient_accumulation_fusion",
        "Transformer Engine writes gradients of a different dtype than the weights' from version 2.10 on",
        False,
        condition=lambda s: bool(s["gradient_accumulation_fusion"]) and not _transformer_engine_fits(),
    ),
    Adjustment(
        "disable_parameter_transpose_cache",
        "Transformer Engine would keep quantized copies of full weights on every rank between micro-batches",
        True,
        condition=_is_false("disable_parameter_transpose_cache", lambda s: _quantizes(s) and _shards("parameters")(s)),
    ),
    # Megatron's validate_args() clears it without a message, after this table was applied.
    Adjustment(
        "reuse_grad_buf_for_mxfp8_param_ag",
        "weights are all-gathered into buffers of their own, and each pass gathers only the MXFP8 bytes that it reads",
        False,
    ),
    Adjustment(
        "fsdp_double_buffer",
        "nccl_ub registers buffers with NCCL once, so their addresses must not change",
        True,
        condition=_is_false("fsdp_double_buffer", lambda s: bool(s["nccl_ub"])),
    ),
    Adjustment(
        "fsdp_manual_registration",
        f"{_REGISTERED}, which is off",
        False,
        condition=lambda s: bool(s["fsdp_manual_registration"]) and not s["nccl_ub"],
    ),
    Adjustment(
        "megatron_fsdp_cuda_graph_mode",
        "a graph of a whole iteration needs buffers and gradients at fixed addresses",
        True,
        condition=_is_false("megatron_fsdp_cuda_graph_mode", lambda s: s["cuda_graph_impl"] == "full_iteration"),
    ),
    Adjustment(
        "ckpt_format",
        "torch_dist, Megatron's default, has no place for shards",
        "fsdp_dtensor",
        condition=lambda s: s["ckpt_format"] == "torch_dist",
    ),
    Adjustment("verify_integrity", "checkpoints are always compared with their checksums", False),
    Adjustment(
        "megatron_fsdp_version",
        "it chooses one of Megatron-Core's two engines, and this one takes the place of both",
        1,
        condition=lambda s: s["megatron_fsdp_version"] not in (None, 1),
    ),
    Adjustment(
        "overlap_grad_reduce",
        "reducing sharded gradients late has no advantage",
        True,
        condition=_is_false("overlap_grad_reduce", _shards("gradients")),
    ),
    Adjustment(
        "overlap_param_gather",
        "unsharding late has no advantage",
        True,
        condition=_is_false("overlap_param_gather", _shards("parameters")),
    ),
)

_UNITS = "all parameters of a unit are unsharded or reduced together"


def _offloads_and_narrows(name: str) -> Condition:
    return lambda s: bool(s["optimizer_cpu_offload"]) and s[name] not in (None, "fp32", torch.float32)


IGNORED: tuple[Rule, ...] = (
    Rule("suggested_communication_unit_size with fsdp_double_buffer", "two units have buffers, as in Megatron-Core"),
    Rule("num_buckets", _UNITS),
    # Only on the command line: Megatron's loop computes the config's, with or without it.
    Rule("bucket_size", _UNITS, condition=lambda s: s["ddp_bucket_size"] is not None),
    Rule("pad_buckets_for_high_nccl_busbw", "shards have as little padding as the layout allows"),
    Rule(
        "gradient_reduce_div_fusion",
        "a rank divides only its shard, after the reduction",
        condition=_is_false("gradient_reduce_div_fusion", lambda s: torch.cuda.is_available()),
    ),
    Rule(
        "outer_dp_sharding_strategy with one optimizer instance",
        "it applies to several optimizer instances (num_distributed_optimizer_instances)",
        condition=lambda s: s["outer_dp_sharding_strategy"] not in (None, "no_shard") and not _several_instances(s),
    ),
    *(
        Rule(
            f"{name} with one expert-parallel rank",
            "Megatron marks experts only with expert parallelism (expert_model_parallel_size)",
            condition=_is_given(name, lambda s: s["expert_model_parallel_size"] == 1),  # not that of an optimizer alone
        )
        for name in EXPERTS
    ),
    Rule("enable_full_sharding_in_hsdp", "the setting for that is outer_dp_sharding_strategy optim"),
    Rule(
        "overlap_cpu_optimizer_d2h_h2d with optimizer_cpu_offload",
        "all gradients are copied to the host before its step, and each unit's weights are copied back when they are "
        "unsharded, while others compute",
    ),
    *(
        Rule(
            name,
            "copies from pageable memory block the host",
            condition=_is_false(name, lambda s: bool(s["optimizer_cpu_offload"])),
        )
        for name in ("pin_cpu_grads", "pin_cpu_params")
    ),
    Rule(
        "use_torch_optimizer_for_cpu_offload with optimizer_cpu_offload",
        "torch's optimizer also updates weights on the device",
    ),
    *(
        Rule(
            f"{name} with optimizer_cpu_offload",
            "moments have the main weights' dtype, as in Megatron-Core",
            condition=_offloads_and_narrows(name),
        )
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype")
    ),
    Rule("ckpt_drop_redundant_extra_state", "checkpoints of the format fsdp_dtensor have no extra state"),
    Rule("disable_symmetric_registration without nccl_ub", _REGISTERED),
    Rule(
        "torch_fsdp2_reshard_after_forward",
        "it is a setting of PyTorch's FSDP2; data_parallel_sharding_strategy optim_grads keeps weights after forward",
        condition=_is_false("torch_fsdp2_reshard_after_forward"),
    ),
)


def broken(settings: Settings) -> list[Limit]:
    """The limits that the settings exceed."""
    return [limit for limit in LIMITS if limit.applies(settings)]


def check(settings: Settings) -> None:
    """Raise an error if settings do not work with this FSDP. One error names all of them.

    Raises:
        ValueError: At least one setting can never work.
        NotImplementedError: All of them are not supported yet.
    """
    found = broken(settings)
    if found:
        lines = [f"{limit.setting}: {limit.reason} {limit.remedy}" for limit in found]
        error = ValueError if any(limit.error is ValueError for limit in found) else NotImplementedError
        raise error("\n".join(lines))


def adjust(settings: Settings) -> None:
    """Change the settings in ``ADJUSTMENTS``. Log each change, and each setting that is ignored, once.

    A strategy that shards nothing is the default of Megatron's configs, so that is logged as well.
    """
    if settings["data_parallel_sharding_strategy"] == "no_shard":
        _log_once(NOTHING_SHARDED)
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
    """Check and adjust the command line's settings before Megatron's ``validate_args`` sees them, if FSDP is on.

    Megatron rejects Muon with FSDP, and turns the distributed optimizer off. It validates Adam instead, which needs all
    that Muon needs.
    """
    if not getattr(args, "use_megatron_fsdp", False):
        given = [f"--{name.replace('_', '-')}" for name in sorted(added) if getattr(args, name, None)]
        if given:
            raise ValueError(f"{', '.join(given)}: expected --use-megatron-fsdp, which alone reads it here; got DDP.")
        return original(args, *rest, **kwargs)
    settings = Settings(args)
    check(settings)
    for name in ("save", "load", "pretrained_checkpoint"):
        if problem := problem_of(settings[name]):
            raise ImportError(f"--{name.replace('_', '-')}: {problem}")
    adjust(settings)
    is_muon = args.optimizer in MUON
    if is_muon:
        args.optimizer = "adam"
    result = original(args, *rest, **kwargs)
    if is_muon:
        args.optimizer = "muon"
    return result


def train(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse, before the first step, a function for which Megatron evaluates on the last rank alone."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    settings = Settings(getattr(given["model"][0], "ddp_config", None))
    alone = given["process_non_loss_data_func"] is not None and given.get("non_loss_data_func") is None
    if alone and settings["use_megatron_fsdp"] and _shards("parameters")(settings):
        raise NotImplementedError(
            "pretrain(process_non_loss_data_func=...): Megatron runs forwards for it on the last rank alone, which "
            "would wait for the other ranks' shards. Pass non_loss_data_func, which is called with the model on all "
            "ranks, or set data_parallel_sharding_strategy (--data-parallel-sharding-strategy) to optim_grads."
        )
    return original(*args, **kwargs)
