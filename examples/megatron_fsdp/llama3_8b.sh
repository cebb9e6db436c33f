#!/usr/bin/env bash
# Llama-3-8B on one machine with 8 GPUs: ZeRO-3 over all of them, FP8 compute, bf16 weights, fp32 main weights.
#
#   DATA=/data/corpus TOKENIZER=/models/llama3 ./llama3_8b.sh          trains
#   DRY_RUN=1 ./llama3_8b.sh                                           prints the command
#
# Without DATA it trains on synthetic tokens. All variables below can be set in the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

GPUS=${GPUS:-8}
PYTHON=${PYTHON:-python}
OUT=${OUT:-runs/llama3_8b}
DATA=${DATA:-}
TOKENIZER=${TOKENIZER:-}
FP8=${FP8:-1}
STRATEGY=${STRATEGY:-optim_grads_params}
SEQUENCE=${SEQUENCE:-8192}
MICRO_BATCH=${MICRO_BATCH:-1}
GLOBAL_BATCH=${GLOBAL_BATCH:-128}
ITERATIONS=${ITERATIONS:-1000}
EXTRA=${EXTRA:-}

MODEL=(
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length "$SEQUENCE"
  --max-position-embeddings "$SEQUENCE" --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0
  --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
FSDP=(
  --use-megatron-fsdp --data-parallel-sharding-strategy "$STRATEGY" --ckpt-format fsdp_dtensor
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --calculate-per-token-loss
)
TRAINING=(
  --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" --train-iters "$ITERATIONS"
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 100 --weight-decay 0.1 --adam-beta2 0.95
  --clip-grad 1.0 --bf16 --transformer-impl transformer_engine --cross-entropy-loss-fusion --manual-gc
  --log-interval 10 --log-throughput --eval-iters 0 --eval-interval 1000 --save-interval 500
  --save "$OUT/checkpoints" --load "$OUT/checkpoints" --tensorboard-dir "$OUT/tensorboard"
)
if [[ $FP8 == 1 ]]; then
  TRAINING+=(--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max)
fi
if [[ -n $DATA ]]; then
  INPUT=(--data-path "$DATA" --split "99,1,0" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
else
  INPUT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 128256)
fi

# With a single hardware queue, FSDP's collectives could not overlap with compute.
unset CUDA_DEVICE_MAX_CONNECTIONS

# shellcheck disable=SC2206 # EXTRA is split into words
ARGUMENTS=("${MODEL[@]}" "${FSDP[@]}" "${TRAINING[@]}" "${INPUT[@]}" $EXTRA)
if [[ -n ${DRY_RUN:-} ]]; then
  printf '%s\n' "$GPUS" pretrain_gpt.py "${ARGUMENTS[@]}"
  exit
fi
mkdir -p "$OUT"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" pretrain_gpt.py "${ARGUMENTS[@]}"
