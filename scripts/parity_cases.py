"""The cases of scripts/parity.py, with Megatron's DDP and with our FSDP: topologies, models, options of the loop."""

import json
from dataclasses import dataclass

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SHARDED = STRATEGIES[1:]

ROPE = "--position-embedding-type rope --kv-channels 16"
LLAMA = (
    f"{ROPE} --group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)
MOE = (
    "--swiglu --disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
    "--moe-router-load-balancing-type aux_loss"
)
# With tensor-parallel experts, the alltoall dispatcher gathers tensors of different sizes, which gloo does not support.
ALLGATHER = f"{MOE} --moe-token-dispatcher-type allgather"
ALLTOALL = f"{MOE} --moe-token-dispatcher-type alltoall"
MLA = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 8 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--rope-type rope"
)

MTP = f"{ROPE} --mtp-num-layers 1"
SHARED_EXPERT = f"{ALLTOALL} --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate"
GATED_ATTENTION = f"{LLAMA} --attention-output-gate"
# As in gpt-oss: biases, clamped gates, and a softmax with a learned further term.
SINKS = (
    f"{ROPE} --group-query-attention --num-query-groups 2 --normalization RMSNorm --softmax-type learnable "
    "--untie-embeddings-and-output-weights --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 "
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall "
    "--expert-tensor-parallel-size 1"
)
# As in DeepSeek-V3: a dense layer, then one with experts, and a layer that predicts a further token.
DEEPSEEK = (
    f"{MLA} --qk-layernorm --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none "
    "--moe-token-dispatcher-type alltoall --moe-layer-freq [0,1] --moe-shared-expert-intermediate-size 32 "
    "--mtp-num-layers 1 --untie-embeddings-and-output-weights"
)
# Layers without attention, without an MLP, and with a linear layer in place of either.
KEPT, NO_OP = {"no_op": False, "replace_with_linear": False}, {"no_op": True, "replace_with_linear": False}
LINEAR = {"no_op": False, "replace_with_linear": True}
ATTENTION = {**KEPT, "n_heads_in_group": 2}
BLOCKS = {
    "block_configs": [
        {"attention": ATTENTION, "ffn": {**KEPT, "ffn_mult": 2.0}},
        {"attention": {**NO_OP, "n_heads_in_group": None}, "ffn": {**KEPT, "ffn_mult": 1.0}},
        {"attention": {**LINEAR, "n_heads_in_group": None}, "ffn": {**NO_OP, "ffn_mult": None}},
        {"attention": ATTENTION, "ffn": {**LINEAR, "ffn_mult": None}},
    ],
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "hidden_size": 60,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
    "rope_scaling": {"factor": 8.0},
}
HETEROGENEOUS = (
    f"{LLAMA} --use-rotary-position-embeddings --use-rope-scaling --rope-scaling-factor 8.0 "
    f"--heterogeneous-layers-config-encoded-json {json.dumps(BLOCKS, separators=(',', ':'))}"
)
# The tests' specification has references in plain torch in place of the CUDA kernels of these layers.
HYBRID = (
    "--spec tests.hybrid_models stack --position-embedding-type none --kv-channels 16 --group-query-attention "
    "--num-query-groups 2 --normalization RMSNorm --swiglu --disable-bias-linear --mamba-state-dim 8 "
    "--mamba-head-dim 10 --mamba-num-groups 2 --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4"
)
HYBRID_MOE = (
    f"{HYBRID} --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none "
    "--moe-token-dispatcher-type alltoall"
)


@dataclass(frozen=True)
class Case:
    """A topology, model or option to train with DDP and with FSDP.

    Attributes:
        kind: Section of the table.
        name: Name in the table.
        ranks: Number of processes.
        arguments: Megatron's arguments, for DDP and for FSDP.
        strategies: Sharding strategies of FSDP.
        layers: Number of layers of the model.
        batch: Sequences per step.
        bf16: Compute in bf16.
        only_fsdp: Further arguments for FSDP.
        overlaps: Whether FSDP overlaps communication with compute.
        has_norm: Whether both compute a gradient norm. Without clipping, Megatron computes it only with DDP.
        orders: Further arguments of DDP, in which it adds gradients in a different order. On average, losses must
            then be as close to one of DDP's runs as these are to each other.
    """

    kind: str
    name: str
    ranks: int
    arguments: str
    strategies: tuple[str, ...] = STRATEGIES
    layers: int = 2
    batch: int = 8
    bf16: bool = False
    only_fsdp: str = ""
    overlaps: bool = True
    has_norm: bool = True
    orders: tuple[str, ...] = ()


def _topology(name: str, ranks: int, arguments: str, **others: object) -> Case:
    return Case("topology", name, ranks, arguments, **others)  # type: ignore[arg-type]


def _parallel(name: str, arguments: str, *parallel: str, **others: object) -> tuple[Case, ...]:
    """The case of a model with ZeRO-3 and 4 ranks, once with each kind of further parallelism."""
    cases = []
    for flags in parallel:
        # Experts need sequence parallelism if there is tensor parallelism.
        more = f"{flags} --sequence-parallel" if flags == TP else flags
        cases.append(Case("model", f"{name}, {SHORT[flags]}", 4, f"{arguments} {more}", ONE, **others))  # type: ignore[arg-type]
    return tuple(cases)


def _data_parallel() -> tuple[Case, ...]:
    """Numbers of ranks and micro-batches, with dropout, and sizes that no number of ranks divides.

    bf16 without clipping: the gradient norm, whose terms we add in a different order, then has no effect.
    """
    dropout = "--attention-dropout 0.1 --hidden-dropout 0.1"
    cases = []
    for ranks in (2, 3, 4):
        for batches in (1, 4):
            name = f"{ranks} ranks, {batches} micro-batch{'es' * (batches > 1)}"
            common = {"layers": 3, "batch": ranks * batches}
            cases += [
                Case("data parallel", f"{name}, fp32", ranks, dropout, **common),  # type: ignore[arg-type]
                Case("data parallel", f"{name}, bf16", ranks, dropout, **common, bf16=True, orders=DDP_ORDERS),  # type: ignore[arg-type]
                Case(
                    "data parallel",
                    f"{name}, bf16, not clipped",
                    ranks,
                    f"{dropout} --clip-grad 1000",
                    **common,  # type: ignore[arg-type]
                    bf16=True,
                    orders=DDP_ORDERS,
                ),
            ]
    return tuple(cases)


# The same sums in a different order: with smaller buckets, dividing after the sum instead of before it, and reducing
# full gradients instead of shards.
DDP_ORDERS = (
    "--use-distributed-optimizer --ddp-bucket-size 20000 --overlap-grad-reduce",
    "--use-distributed-optimizer --ddp-average-in-collective",
    "",
)
ONE = ("optim_grads_params",)
TP, PP, EP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--expert-model-parallel-size 2"
SHORT = {TP: "TP 2", PP: "PP 2", EP: "EP 2"}
CP = "--context-parallel-size 2"
INTERLEAVED = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
# An untied embedding has rows of tokens that do not occur, whose gradients are zero.
OVERLAPPED = f"{ALLTOALL} {EP} --overlap-moe-expert-parallel-comm"
ZEROS = "--untie-embeddings-and-output-weights --log-num-zeros-in-grad"
OFFLOAD = "--optimizer-cpu-offload --use-precision-aware-optimizer"
META = "--init-model-with-meta-device"
INSTANCES = "--num-distributed-optimizer-instances 2"
OF_EXPERTS = "--expert-num-distributed-optimizer-instances 2 --expert-data-parallel-sharding-strategy optim"
# Without this flag, DDP sums gradients in fp16.
FP16 = "--fp16 --clip-grad 1000 --accumulate-allreduce-grads-in-fp32"
DYNAMIC_SCALE = "--initial-loss-scale 65536 --min-loss-scale 16 --loss-scale-window 3 --hysteresis 1"
IN_FP32 = "--accumulate-allreduce-grads-in-fp32"
FSDP_DTYPES = " ".join(
    f"--megatron-fsdp-{name}-dtype {dtype}"
    for name, dtype in [("main-params", "fp32"), ("main-grads", "fp32"), ("grad-comm", "fp32")]
)

CASES = (
    *_data_parallel(),
    _topology("TP 2", 4, TP),
    _topology("TP 2, sequence parallel", 4, f"{TP} --sequence-parallel"),
    _topology("TP 2, sequence parallel, query and key norms", 4, f"{TP} --sequence-parallel --qk-layernorm"),
    _topology("TP 2 without data parallelism", 2, TP),
    _topology("PP 2, tied embeddings", 4, PP),
    _topology("PP 2, untied embeddings", 4, f"{PP} --untie-embeddings-and-output-weights"),
    _topology("PP 2, interleaved", 4, INTERLEAVED, layers=4),
    _topology("PP 2, tied embeddings, without data parallelism", 2, PP),
    _topology("TP 2 x PP 2 x DP 2", 8, f"{TP} {PP} --sequence-parallel"),
    _topology("CP 2", 4, CP),
    _topology("CP 2, per token loss", 4, f"{CP} --calculate-per-token-loss"),
    _topology("CP 2 x TP 2", 8, f"{CP} {TP} --sequence-parallel", strategies=ONE),
    _topology("EP 2", 4, f"{ALLTOALL} {EP}"),
    _topology("EP 2, all-gather of tokens", 4, f"{ALLGATHER} {EP}"),
    _topology("EP 4, one rank per expert group", 4, f"{ALLTOALL} --expert-model-parallel-size 4"),
    _topology(
        "EP 2 x TP 2, ETP 1",
        4,
        f"{ALLTOALL} {EP} {TP} --sequence-parallel --expert-tensor-parallel-size 1",
    ),
    _topology(
        "EP 2 x TP 2, ETP 2",
        4,
        f"{ALLGATHER} {EP} {TP} --sequence-parallel --expert-tensor-parallel-size 2",
    ),
    _topology(
        "EP 2 x TP 2 x PP 2",
        8,
        f"{ALLTOALL} {EP} {TP} {PP} --sequence-parallel --expert-tensor-parallel-size 1",
        strategies=ONE,
    ),
    _topology("HSDP", 4, "", only_fsdp=INSTANCES),
    _topology("HSDP, EP 2", 8, f"{ALLTOALL} {EP}", only_fsdp=INSTANCES, strategies=ONE),
    _topology("HSDP of experts, EP 2", 4, f"{ALLTOALL} {EP}", only_fsdp=OF_EXPERTS, strategies=ONE),
    _topology("HSDP, TP 2", 8, TP, only_fsdp=INSTANCES, strategies=ONE),
    _topology("hybrid FSDP", 4, "", only_fsdp=f"{INSTANCES} --outer-dp-sharding-strategy optim", strategies=ONE),
    Case("model", "Llama-like", 2, LLAMA),
    Case("model", "Llama-like, TP 2", 4, f"{LLAMA} {TP} --sequence-parallel"),
    Case("model", "mixture of experts", 2, ALLTOALL),
    Case("model", "mixture of experts, shared expert", 2, f"{ALLTOALL} --moe-shared-expert-intermediate-size 32", ONE),
    Case(
        "model",
        "mixture of experts, EP 2, expert bias",
        4,
        f"{ALLTOALL} {EP} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        ONE,
    ),
    Case("model", "multi-latent attention", 2, MLA),
    *_parallel("multi-latent attention, query and key norms", f"{MLA} --qk-layernorm", TP, PP),
    Case("model", "multi-token prediction", 2, MTP),
    *_parallel("multi-token prediction", MTP, TP, PP),
    Case("model", "shared expert with a gate", 2, SHARED_EXPERT),
    *_parallel("shared expert with a gate", SHARED_EXPERT, TP, PP, EP),
    Case("model", "like DeepSeek-V3", 2, DEEPSEEK),
    *_parallel("like DeepSeek-V3", DEEPSEEK, TP, PP, EP),
    Case("model", "gated attention", 2, GATED_ATTENTION),
    *_parallel("gated attention", GATED_ATTENTION, TP, PP),
    Case("model", "softmax sinks", 2, SINKS),
    *_parallel("softmax sinks", SINKS, TP, PP, EP),
    Case("model", "heterogeneous layers", 2, HETEROGENEOUS, layers=4),
    *_parallel("heterogeneous layers", HETEROGENEOUS, TP, PP, layers=4),
    Case("model", "Mamba hybrid", 2, f"{HYBRID} --hybrid-layer-pattern M*-M"),
    *_parallel("Mamba hybrid", f"{HYBRID} --hybrid-layer-pattern M*-M", TP),
    *_parallel("Mamba hybrid", f"{HYBRID} --hybrid-layer-pattern M*|-M", PP),
    *_parallel("Mamba hybrid with experts", f"{HYBRID_MOE} --hybrid-layer-pattern M*EM/M*", EP),
    Case("model", "gated delta networks", 2, f"{HYBRID} --hybrid-layer-pattern G*-G"),
    *_parallel("gated delta networks", f"{HYBRID} --hybrid-layer-pattern G*-G", TP),
    Case("option", "per token loss", 2, "--calculate-per-token-loss"),
    Case(
        "option",
        "per token loss, TP 2, sequence parallel",
        4,
        f"{TP} --sequence-parallel --calculate-per-token-loss",
        ONE,
    ),
    Case(
        "option",
        "full recompute",
        2,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ONE,
    ),
    Case("option", "selective recompute", 2, "--recompute-granularity selective", ONE),
    Case(
        "option",
        "full recompute, TP 2, PP 2",
        4,
        f"{TP} {PP} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ONE,
    ),
    Case("option", "bf16", 2, "--clip-grad 1000", STRATEGIES, bf16=True),
    Case("option", "bf16, TP 2", 4, f"{TP} --clip-grad 1000", ONE, bf16=True),
    Case("option", "bf16, EP 2", 4, f"{ALLTOALL} {EP} --clip-grad 1000", ONE, bf16=True),
    # DDP would add the two gradients of a tied embedding in fp32 here, and in bf16 without the overlap, as FSDP always.
    Case(
        "option",
        "bf16, EP 2, overlapped micro-batches",
        4,
        f"{OVERLAPPED} --untie-embeddings-and-output-weights --clip-grad 1000",
        bf16=True,
    ),
    Case(
        "option",
        "bf16, EP 2, overlapped micro-batches, PP 2, interleaved",
        4,
        f"{OVERLAPPED} {INTERLEAVED} --clip-grad 1000",
        SHARDED,
        layers=4,
        bf16=True,
    ),
    Case("option", "built on the meta device", 2, "", SHARDED, only_fsdp=META),
    Case("option", "multi-latent attention built on the meta device", 2, MLA, ONE, only_fsdp=META),
    Case("option", "built on the meta device, TP 2", 4, f"{TP} --sequence-parallel", ONE, only_fsdp=META),
    Case("option", "built on the meta device, TP 2, PP 2", 4, f"{TP} {PP} --sequence-parallel", ONE, only_fsdp=META),
    Case("option", "built on the meta device, EP 2", 4, f"{ALLTOALL} {EP}", ONE, only_fsdp=META),
    Case(
        "option",
        "Mamba hybrid built on the meta device",
        2,
        f"{HYBRID_MOE} --hybrid-layer-pattern M*GE/M*",
        ONE,
        only_fsdp=META,
    ),
    Case("option", "built on the meta device, PP 2, interleaved", 4, INTERLEAVED, ONE, layers=4, only_fsdp=META),
    Case("option", "no clipping", 2, "--clip-grad 0", has_norm=False),
    Case("option", "no overlap", 2, "", ("no_shard", "optim"), overlaps=False),
    Case("option", "no overlap, TP 2", 4, TP, ("no_shard", "optim"), overlaps=False),
    Case("option", "hashes of weights compared", 2, "--check-weight-hash-across-dp-replicas-interval 2", SHARDED[:2]),
    Case("option", "number of zeros, norm of weights", 2, f"{ZEROS} --log-params-norm", ONE),
    Case("option", "number of zeros, norm of weights, TP 2", 4, f"{TP} {ZEROS} --log-params-norm"),
    Case("option", "number of zeros, norm of weights, PP 2", 4, f"{PP} {ZEROS} --log-params-norm", ONE),
    Case("option", "norm of weights, PP 2, tied embeddings", 4, f"{PP} --log-params-norm", ONE),
    Case("option", "number of zeros, norm of weights, EP 2", 4, f"{ALLTOALL} {EP} {ZEROS} --log-params-norm"),
    Case("option", "decoupled learning rate", 2, "--decoupled-lr 1e-3 --untie-embeddings-and-output-weights", ONE),
    Case("option", "evaluation during training", 2, "--eval-interval 3 --eval-iters 2", ONE),
    Case(
        "option",
        "Adam's settings, minimum learning rates",
        2,
        "--adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-6 --min-lr 1e-4 --decoupled-lr 1e-3 --decoupled-min-lr 2e-4 "
        "--start-weight-decay 0.02 --end-weight-decay 0.2 --weight-decay-incr-style linear "
        "--untie-embeddings-and-output-weights",
        ONE,
    ),
    Case("option", "weight decay of query and key norms", 2, "--qk-layernorm --apply-wd-to-qk-layernorm", ONE),
    Case("option", "fp16, dynamic loss scale", 2, f"{FP16} {DYNAMIC_SCALE}", STRATEGIES),
    Case("option", "fp16, constant loss scale, TP 2", 4, f"{TP} {FP16} --loss-scale 512", ONE),
    # With one micro-batch per step, since the order in which gradients are rounded to bf16 and added differs.
    Case(
        "option",
        "bf16, gradients reduced in bf16",
        2,
        "--clip-grad 1000 --grad-reduce-in-bf16",
        SHARDED,
        batch=2,
        bf16=True,
    ),
    Case("option", "bf16, gradients reduced in fp32", 2, f"--clip-grad 1000 {IN_FP32}", ONE, bf16=True),
    Case(
        "option",
        "bf16, dtypes of main weights and gradients",
        2,
        "--clip-grad 1000",
        SHARDED,
        bf16=True,
        only_fsdp=FSDP_DTYPES,
    ),
    Case("option", "uneven pipeline stages", 4, f"{PP} --decoder-first-pipeline-num-layers 1", ONE, layers=3),
    Case("option", "double buffer", 2, "", SHARDED, only_fsdp="--fsdp-double-buffer"),
    Case("option", "optimizer offloaded, TP 2", 4, f"{TP} --sequence-parallel", ONE, only_fsdp=OFFLOAD),
    Case("option", "max-pool double buffer", 2, "", ONE, only_fsdp="--megatron-fsdp-max-pool-double-buffer"),
    Case("option", "no Gloo process groups", 2, "--disable-gloo-process-groups --distributed-timeout-minutes 5", ONE),
)
