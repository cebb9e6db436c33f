#!/usr/bin/env bash
# Llama-3-8B on one machine with 8 GPUs: ZeRO-3 over all of them, FP8 compute and FP8 weights, fp32 main weights.
#
#   train_llama3_8b_fsdp_h100_fp8.sh [CHECKPOINTS [DATA [TOKENIZER [PROFILE [TENSORBOARD]]]]]
#
# CHECKPOINTS, PROFILE and TENSORBOARD are paths to write, DATA is a data prefix and TOKENIZER the path of a tokenizer.
# Without the last two, or with MOCK for one of them, it trains on synthetic tokens. The variables below can be set in
# the environment. NSYS_PROFILE=1 records a profile with Nsight Systems, USE_UV=1 starts Python with uv, and DRY_RUN=1
# prints the command. USE_MEGATRON_FSDP=0 trains with Megatron's DDP, which needs another folder of checkpoints.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

CHECKPOINTS=${1:-checkpoints/llama3_8b_fsdp_fp8}
DATA=${2:-MOCK}
TOKENIZER=${3:-MOCK}
PROFILE=${4:-nsys_profiles/llama3_8b_fsdp_fp8}
TENSORBOARD=${5:-tensorboard_logs/llama3_8b_fsdp_fp8}

USE_MEGATRON_FSDP=${USE_MEGATRON_FSDP:-1}
SHARDING_STRATEGY=${SHARDING_STRATEGY:-optim_grads_params}
OUTER_SHARDING_STRATEGY=${OUTER_SHARDING_STRATEGY:-no_shard}
INSTANCES=${INSTANCES:-1} # more than 1: HSDP, or hybrid FSDP with OUTER_SHARDING_STRATEGY=optim
GPUS=${GPUS:-8}
NODES=${NODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}
PYTHON=${PYTHON:-python}
USE_UV=${USE_UV:-0}
NSYS_PROFILE=${NSYS_PROFILE:-0}
FP8=${FP8:-1}
EXTRA=${EXTRA:-}

MODEL=(
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
  --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
  --normalization RMSNorm --apply-layernorm-1p --swiglu --disable-bias-linear
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.0134
  --attention-backend fused --transformer-impl transformer_engine
)
TRAINING=(
  --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000
  --lr 1.5e-4 --min-lr 1e-5 --decoupled-lr 5e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine
  --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --weight-decay 0.1 --clip-grad 1.0
  --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --cross-entropy-loss-fusion --no-check-for-nan-in-loss-and-grad
  --manual-gc --empty-unused-memory-level 1 --exit-signal-handler --exit-duration-in-mins 235
  --distributed-timeout-minutes 60
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --log-interval 1 --log-throughput --logging-level 20 --eval-iters 32 --eval-interval 100 --save-interval 1000
  --save "$CHECKPOINTS" --load "$CHECKPOINTS" --tensorboard-dir "$TENSORBOARD"
  --data-cache-path "$PWD/benchmark_cache_llama3_8b_fsdp_fp8" --split "99,1,0"
  --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1
)
if [[ $USE_MEGATRON_FSDP == 1 ]]; then
  TRAINING+=(
    --use-megatron-fsdp --data-parallel-sharding-strategy "$SHARDING_STRATEGY" --ckpt-format fsdp_dtensor
    --init-model-with-meta-device --calculate-per-token-loss --megatron-fsdp-main-grads-dtype fp32
    --megatron-fsdp-grad-comm-dtype bf16
    --use-nccl-ub --fsdp-double-buffer --fsdp-manual-registration
  )
  if ((INSTANCES > 1)); then
    TRAINING+=(
      --num-distributed-optimizer-instances "$INSTANCES" --outer-dp-sharding-strategy "$OUTER_SHARDING_STRATEGY"
    )
  fi
  # With a single hardware queue, FSDP's collectives could not overlap with compute.
  unset CUDA_DEVICE_MAX_CONNECTIONS
fi
if [[ $FP8 == 1 ]]; then
  TRAINING+=(--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather)
fi
if [[ $DATA == MOCK || $TOKENIZER == MOCK ]]; then
  INPUT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 128256)
else
  # shellcheck disable=SC2206 # DATA may be several prefixes with weights
  INPUT=(--data-path $DATA --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
fi

PROFILER=()
# Without --no-sync, uv would replace the environment by this project's dependencies, which Megatron is not among.
[[ $USE_UV != 1 ]] || PROFILER+=(uv run --no-sync)
if [[ $NSYS_PROFILE == 1 ]]; then
  TRAINING+=(--profile --profile-step-start 8 --profile-step-end 12 --profile-ranks 0 --record-memory-history)
  PROFILER+=(
    nsys profile --sample=none --cpuctxsw=none "--trace=cuda,nvtx,cublas,cudnn" --cuda-graph-trace=node
    --cuda-memory-usage=true --capture-range=cudaProfilerApi --capture-range-end=stop -f true -x true -o "$PROFILE"
  )
fi

# shellcheck disable=SC2206 # EXTRA is split into words
ARGUMENTS=("${MODEL[@]}" "${TRAINING[@]}" "${INPUT[@]}" $EXTRA)
if [[ -z ${DRY_RUN:-} ]]; then
  mkdir -p "$(dirname "$CHECKPOINTS")" "$(dirname "$PROFILE")" "$(dirname "$TENSORBOARD")"
fi
NAME=$(basename "$CHECKPOINTS") LOGS=$CHECKPOINTS/logs SAVE=$CHECKPOINTS SCRIPT=$(dirname "$(dirname "$HERE")")/pretrain_gpt.py
ENTRY=() FILES=() THEN=() CONTAINER=() SBATCH=()
[[ $DATA != /* || $DATA == *" "* ]] || FILES+=("$DATA.bin" "$DATA.idx")
[[ $TOKENIZER != /* ]] || FILES+=("$TOKENIZER")
RENDEZVOUS=(--nnodes "$NODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
# shellcheck source=job.bash
source "$HERE/job.bash"
