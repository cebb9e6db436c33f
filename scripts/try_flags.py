"""Tries every flag of Megatron that touches data parallelism, one at a time, with Megatron's DDP and with FSDP.

    python scripts/try_flags.py --markdown out/flags.md             # all, about 20 minutes on two cores
    python scripts/try_flags.py --only clip-grad --only fp16

Each run is three iterations of a small model on two ranks, from one warm process. A flag's state is one of

works: FSDP's losses and norms are those of DDP with the flag, or without it if DDP does not take it;
off on a CPU: the same, but Megatron ran without what the flag asks for, for want of a GPU;
adjusted, no effect, refused: as the tables of docs/limits.md say, and seen here;
fails as DDP: both end in an error, mostly for want of a GPU or a package, which is quoted;
FSDP alone: DDP ends in an error;
DIFFERS: both train, with other numbers;
ERROR: FSDP alone ends in an error, and no table says so.

Exits with 1 if a flag is in one of the last two states.
"""

import argparse
import dataclasses
import math
import re
import shlex
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.flag_table import parser, read_for_fsdp  # noqa: E402
from scripts.real_loop import RunFailure, limits_in, reason, run  # noqa: E402

# isort: split
# After flag_table, which lets Megatron run on a CPU.
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.fsdp.mcore.limits import ADJUSTMENTS, IGNORED, LIMITS  # noqa: E402

MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32 --swiglu "
    "--disable-bias-linear --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --eval-iters 0 --log-interval 1 "
    "--hidden-dropout 0 --attention-dropout 0 --transformer-impl local --no-persist-layer-norm "
    "--no-masked-softmax-fusion --no-rope-fusion --distributed-backend gloo"
)
DDP = "--use-distributed-optimizer --ckpt-format torch_dist"
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor"
TOLERANCE = 1e-4
# Groups of Megatron's parser that belong to the list as a whole.
GROUPS = ("distributed init", "checkpointing", "mixed precision")
# Flags of other groups that decide how a model is sharded, or when its weights and gradients are used.
OTHERS = set(
    """tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    expert_tensor_parallel_size sequence_parallel recompute_granularity recompute_modules calculate_per_token_loss
    init_model_with_meta_device check_for_nan_in_loss_and_grad fp8 fp8_recipe fp8_param_gather fp4 log_params_norm
    overlap_moe_expert_parallel_comm delay_wgrad_compute cuda_graph_impl gradient_accumulation_fusion
    untie_embeddings_and_output_weights num_experts mtp_num_layers dump_param_to_param_group_map""".split()
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm"
EXPERT_PARALLEL = f"{EXPERTS} --expert-model-parallel-size 2"
FP8 = "--bf16 --fp8-format hybrid"
SAVING = "--save {folder} --save-interval 2"
LOCAL = "--non-persistent-save-interval 1 --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {folder}"
OFFLOAD = "--optimizer-cpu-offload --use-torch-optimizer-for-cpu-offload"
MUON = "--optimizer muon --muon-fp32-matmul-prec high"
# The command-line fragments to try, by the name of the setting. Others are switched on, or get each other choice.
TRIED: dict[str, list[str]] = {
    "tensor_model_parallel_size": ["--tensor-model-parallel-size 2"],
    "pipeline_model_parallel_size": ["--pipeline-model-parallel-size 2"],
    "sequence_parallel": ["--sequence-parallel --tensor-model-parallel-size 2"],
    "context_parallel_size": ["--context-parallel-size 2"],
    "expert_model_parallel_size": [EXPERT_PARALLEL],
    "expert_tensor_parallel_size": [
        f"{EXPERTS} --expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 --sequence-parallel"
    ],
    "overlap_moe_expert_parallel_comm": [f"{EXPERT_PARALLEL} --overlap-moe-expert-parallel-comm --bf16"],
    "num_experts": [EXPERTS],
    "mtp_num_layers": ["--mtp-num-layers 1 --position-embedding-type rope"],
    "recompute_granularity": [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity selective",
    ],
    "recompute_modules": ["--recompute-granularity selective --recompute-modules core_attn"],
    "fp8": [FP8],
    "fp8_recipe": [f"{FP8} --fp8-recipe {each}" for each in ("tensorwise", "delayed", "mxfp8", "blockwise")],
    "fp8_param_gather": [f"{FP8} --fp8-param-gather"],
    "fp4": ["--bf16 --fp4-format e2m1"],
    "fp4_param_gather": ["--bf16 --fp4-format e2m1 --fp4-param-gather"],
    "moe_latent_size": [f"{EXPERTS} --moe-latent-size 32"],
    "moe_single_grouped_weight": [f"{EXPERTS} --moe-single-grouped-weight"],
    "moe_single_grouped_bias": [f"{EXPERTS} --moe-single-grouped-bias"],
    "config_logger_dir": ["--config-logger-dir {folder}"],
    "muon_split_qkv": [f"{MUON} --muon-no-split-qkv"],
    "muon_nesterov": [f"{MUON} --muon-nesterov"],
    "muon_scale_mode": [f"{MUON} --muon-scale-mode {each}" for each in ("unit_rms_norm", "shape_scaling")],
    "muon_fp32_matmul_prec": ["--optimizer muon --muon-fp32-matmul-prec high"],
    "muon_coefficient_type": [f"{MUON} --muon-coefficient-type polar_express"],
    "muon_num_ns_steps": [f"{MUON} --muon-num-ns-steps 3"],
    "muon_tp_mode": [f"{MUON} --muon-tp-mode {each}" for each in ("duplicated", "distributed")],
    "muon_momentum": [f"{MUON} --muon-momentum 0.8"],
    "muon_extra_scale_factor": [f"{MUON} --muon-extra-scale-factor 0.5"],
    "muon_scalar_optimizer": [f"{MUON} --muon-scalar-optimizer lion"],
    "optimizer_cpu_offload": [OFFLOAD],
    "optimizer_offload_fraction": [f"{OFFLOAD} --optimizer-offload-fraction 0.5"],
    "overlap_cpu_optimizer_d2h_h2d": [f"{OFFLOAD} --overlap-cpu-optimizer-d2h-h2d"],
    "use_precision_aware_optimizer": ["--use-precision-aware-optimizer --bf16"],
    "main_grads_dtype": ["--use-precision-aware-optimizer --bf16 --main-grads-dtype bf16"],
    "main_params_dtype": ["--use-precision-aware-optimizer --bf16 --main-params-dtype fp16"],
    "exp_avg_dtype": ["--use-precision-aware-optimizer --bf16 --exp-avg-dtype bf16"],
    "exp_avg_sq_dtype": ["--use-precision-aware-optimizer --bf16 --exp-avg-sq-dtype bf16"],
    "dump_param_to_param_group_map": ["--dump-param-to-param-group-map {folder}/groups"],
    "lr": ["--lr 2e-3"],
    "min_lr": ["--min-lr 1e-4"],
    "decoupled_lr": ["--decoupled-lr 5e-3 --untie-embeddings-and-output-weights"],
    "decoupled_min_lr": ["--decoupled-lr 5e-3 --decoupled-min-lr 1e-4 --untie-embeddings-and-output-weights"],
    "save": [SAVING],
    "save_interval": [SAVING],
    "save_retain_interval": [f"{SAVING} --save-retain-interval 2"],
    "async_save": [f"{SAVING} --async-save"],
    "async_strategy": [f"{SAVING} --async-save --async-strategy mcore"],
    "load": ["--load {folder}"],
    "pretrained_checkpoint": ["--pretrained-checkpoint {folder}"],
    "ckpt_step": ["--ckpt-step 2"],
    "exit_on_missing_checkpoint": ["--load {folder}/none --exit-on-missing-checkpoint"],
    "non_persistent_ckpt_type": [f"{SAVING} --non-persistent-save-interval 1 --non-persistent-ckpt-type global"],
    "non_persistent_save_interval": [f"{SAVING} {LOCAL}"],
    "non_persistent_global_ckpt_dir": ["--non-persistent-global-ckpt-dir {folder}"],
    "non_persistent_local_ckpt_dir": ["--non-persistent-local-ckpt-dir {folder}"],
    "ckpt_convert_format": ["--ckpt-convert-format torch_dist --ckpt-convert-save {folder}"],
    "ckpt_convert_save": ["--ckpt-convert-save {folder}"],
    "replication": [f"{SAVING} {LOCAL} --replication --replication-jump 1"],
    "replication_jump": ["--replication-jump 1"],
    "override_ckpt_iteration": ["--override-ckpt-iteration 1"],
    "dist_ckpt_format_deprecated": ["--dist-ckpt-format torch_dist"],
    "initial_loss_scale": ["--fp16 --initial-loss-scale 1024"],
    "loss_scale": ["--fp16 --loss-scale 128"],
    "min_loss_scale": ["--fp16 --min-loss-scale 2"],
    "loss_scale_window": ["--fp16 --loss-scale-window 2"],
    "hysteresis": ["--fp16 --hysteresis 1"],
    "fp16_lm_cross_entropy": ["--fp16 --fp16-lm-cross-entropy"],
    "grad_reduce_in_bf16": ["--bf16 --grad-reduce-in-bf16"],
    "accumulate_allreduce_grads_in_fp32": ["--bf16 --accumulate-allreduce-grads-in-fp32"],
    "attention_softmax_in_fp32": ["--bf16 --attention-softmax-in-fp32"],
    "use_sharp": ["--use-sharp --sharp-enabled-group dp", "--use-sharp --sharp-enabled-group dp_replica"],
    "sharp_enabled_group": ["--use-sharp --sharp-enabled-group dp_replica"],
    "nccl_communicator_config_path": ["--nccl-communicator-config-path {folder}/none.yaml"],
    "high_priority_stream_groups": ["--high-priority-stream-groups dp_cp"],
    "flight_recorder_dump_path": ["--flight-recorder-dump-path {folder}"],
    "decoder_first_pipeline_num_layers": ["--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"],
    "decoder_last_pipeline_num_layers": ["--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1"],
    "pipeline_model_parallel_layout": ["--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tL"],
    "num_layers_per_virtual_pipeline_stage": [
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4"
    ],
    "num_virtual_stages_per_pipeline_rank": [
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"
    ],
    "overlap_p2p_comm": ["--pipeline-model-parallel-size 2 --no-overlap-p2p-communication"],
    "overlap_param_gather": ["--overlap-grad-reduce --overlap-param-gather"],
    "overlap_param_gather_with_optimizer_step": [
        "--overlap-grad-reduce --overlap-param-gather --overlap-param-gather-with-optimizer-step"
    ],
    "ddp_param_name_patterns_for_fp32_local_accumulation": [
        "--bf16 --ddp-param-name-patterns-for-fp32-local-accumulation *router*"
    ],
    "num_distributed_optimizer_instances": ["--num-distributed-optimizer-instances 2"],
    "expert_num_distributed_optimizer_instances": [f"{EXPERT_PARALLEL} --expert-num-distributed-optimizer-instances 1"],
    "expert_data_parallel_sharding_strategy": [
        f"{EXPERT_PARALLEL} --expert-data-parallel-sharding-strategy {each}"
        for each in ("no_shard", "optim", "optim_grads")
    ],
    "expert_outer_dp_sharding_strategy": [
        f"{EXPERTS} --num-distributed-optimizer-instances 2 --expert-outer-dp-sharding-strategy optim"
    ],
    "load_main_params_from_ckpt": ["--load {folder} --no-load-optim --load-main-params-from-ckpt"],
    "outer_dp_sharding_strategy": ["--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim"],
    "fsdp_buffer_count": ["--fsdp-double-buffer --fsdp-buffer-count 3"],
    "fsdp_manual_registration": ["--use-nccl-ub --fsdp-manual-registration"],
    "cp_comm_type": ["--context-parallel-size 2 --cp-comm-type p2p"],
    "ckpt_format": ["--ckpt-format torch", "--ckpt-format torch_dcp"],
    "log_num_zeros_in_grad": ["--log-num-zeros-in-grad"],
    "mamba_training_ssm_states_dtype": ["--mamba-training-ssm-states-dtype fp32"],
    "data_parallel_sharding_strategy": [
        f"--data-parallel-sharding-strategy {each}" for each in ("no_shard", "optim", "optim_grads")
    ],
}
# FSDP's own settings: DDP is run without them.
OF_FSDP = re.compile(
    r"fsdp|nccl_ub|expert_num_distributed|sharding_strategy|symmetric|suggested_communication|all_gather_group|sharding_in_hsdp"
)


class Tried(NamedTuple):
    """A flag that was tried."""

    flag: str
    fragment: str
    state: str
    detail: str = ""


def cases() -> dict[str, list[tuple[str, str]]]:
    """By flag, the names of the setting and fragments of command lines."""
    fields = {f.name for kind in (DistributedDataParallelConfig, OptimizerConfig) for f in dataclasses.fields(kind)}
    tables = {row.setting.split()[0] for table in (LIMITS, ADJUSTMENTS, IGNORED) for row in table}
    wanted = fields | read_for_fsdp() | OTHERS | tables
    wanted |= {f"ddp_{name}" for name in wanted}
    found: dict[str, list[tuple[str, str]]] = {}
    for group in parser()._action_groups:
        for action in group._group_actions:
            if action.option_strings and (group.title in GROUPS or action.dest in wanted):
                found[action.option_strings[0]] = [(action.dest, each) for each in _fragments(action)]
    return found


def _fragments(action: argparse.Action) -> list[str]:
    option = action.option_strings[0]
    if action.dest in TRIED:
        return TRIED[action.dest]
    if action.nargs == 0:
        return [option]
    if action.choices:
        return [f"{option} {each}" for each in action.choices if each != action.default]
    if action.type in (int, float):
        value = 1 if action.default in (None, argparse.SUPPRESS) else action.type(action.default)
        return [f"{option} {value / 2 if action.type is float else value + 1}"]
    return [f"{option} {{folder}}"]


class Result(NamedTuple):
    """Losses and norms of a run, the arguments that were changed for want of a GPU, and the log."""

    numbers: list[float] = []
    changed: frozenset[str] = frozenset()
    said: str = ""

    def state(self, name: str) -> str:
        """The state of a setting by what FSDP has logged of it."""
        said = {"no effect": rf"\b{name}\b[^:\n]* has no effect", "adjusted": rf"\b{name} is set to"}
        return next((state for state, pattern in said.items() if re.search(pattern, self.said)), "")


@cache
def _base(folder: str) -> tuple[Result, Result]:
    """The results of DDP and of FSDP without further flags, which save a checkpoint for those that load."""
    return _numbers(DDP, f"--save {folder}/ddp --save-interval 3"), _numbers(
        FSDP, f"--save {folder}/fsdp --save-interval 3"
    )


def _numbers(kind: str, fragment: str) -> Result:
    parallel = re.search(r"--(tensor-model|context)-parallel-size", fragment) and kind == DDP
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if parallel else {}
    found = run(shlex.split(f"{MODEL} {kind} {fragment}"), 2, timeout=90, environment=environment)
    changed = ", ".join(re.findall(r"Arguments that were changed: (.*)\.", found.log)).split(", ")
    numbers = [number for each in found.iterations for number in (each.loss, each.grad_norm)]
    return Result(numbers, frozenset(changed), found.log)


def _try(kind: str, fragment: str, folder: str) -> tuple[Result, str]:
    """The result of a run, or the last line of its error."""
    with tempfile.TemporaryDirectory() as new:
        loads = re.search(r"--(load|pretrained-checkpoint) {folder}(?!/)", fragment)
        place = f"{folder}/{'ddp' if kind == DDP else 'fsdp'}" if loads else new
        try:
            return _numbers(kind, fragment.replace("{folder}", place)), ""
        except RunFailure as failure:
            return Result(), reason(str(failure))


def try_flag(flag: str, dest: str, fragment: str, folder: str) -> Tried:
    """Train with DDP and with FSDP."""
    words = re.split(r"\s+(?=--)", fragment)
    others = [word for word in words if not OF_FSDP.search(word.split()[0].replace("-", "_"))]
    of_fsdp = OF_FSDP.search(dest) is not None and others in (words, [])
    (want, *_), of_ddp = (_base(folder)[0], "") if of_fsdp else _try(DDP, " ".join(others), folder)
    result, error = _try(FSDP, fragment, folder)
    got = result.numbers
    if error:
        state = "refused" if _refuses(error, dest, fragment) else "fails as DDP" if of_ddp else "ERROR"
        return Tried(flag, fragment, state, error)
    if of_ddp:
        return Tried(flag, fragment, "FSDP alone", of_ddp)
    near = len(want) == len(got) and all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(want, got, strict=True))
    same = "off on a CPU" if result.changed - _base(folder)[1].changed else "works"
    state = (result.state(dest.removeprefix("ddp_")) or same) if near else "DIFFERS"
    return Tried(flag, fragment, state, "" if near else f"{want} with DDP; {got} with FSDP")


def _refuses(error: str, dest: str, fragment: str) -> bool:
    """Whether an error is that of a limit that names the flag, or another one of the fragment."""
    given = {dest, *(word[2:].replace("-", "_") for word in fragment.split() if word.startswith("--"))}
    names = given | {name.removeprefix("ddp_") for name in given}
    return any(names & set(limit.setting.split()) for limit in limits_in(error))


def as_markdown(tried: list[Tried]) -> str:
    """The table, and how many flags have each state."""
    counts = Counter(each.state for each in tried)
    lines = [", ".join(f"{count} {state}" for state, count in counts.most_common()), ""]
    lines += ["| flag | tried | state | |", "|---|---|---|---|"]
    lines += [f"| `{t.flag}` | `{t.fragment}` | {t.state} | {t.detail.replace('|', '/')} |" for t in tried]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Try flags and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", action="append", default=[], help="part of a flag's name; may be repeated")
    options.add_argument("--markdown", type=Path, help="write the table to this file")
    given = options.parse_args()
    tried: list[Tried] = []
    with tempfile.TemporaryDirectory() as folder:
        for flag, fragments in cases().items():
            if given.only and not any(part in flag for part in given.only):
                continue
            for dest, fragment in fragments:
                tried.append(try_flag(flag, dest, fragment, folder))
                print(*tried[-1], sep=" | ", flush=True)
                if given.markdown:
                    given.markdown.parent.mkdir(exist_ok=True)
                    given.markdown.write_text(as_markdown(tried))
    print(Counter(each.state for each in tried))
    return int(any(each.state in ("DIFFERS", "ERROR") for each in tried))


if __name__ == "__main__":
    sys.exit(main())
