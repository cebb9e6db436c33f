#!/usr/bin/env bash
#SBATCH --nodes=64 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
#SBATCH --time=4:00:00 --signal=TERM@600 --requeue --open-mode=append
# DeepSeek-V3 (671 B parameters, 37 B active) on 512 GPUs: ZeRO-3, expert parallelism, no pipeline parallelism.
#
#   OUTPUT_PATH=/runs/v3 DATA_PATH=/data/corpus CONTAINER_IMAGE=/images/x.sqsh bash sbatch_mfsdp_deepseek_v3.sh
#   DRY_RUN=1 bash sbatch_mfsdp_deepseek_v3.sh                         prints the command
#
# Submits a Slurm job; sbatch does, too. Slurm's own variables (SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_TIMELIMIT)
# choose the rest of it. The variables below can be set in the environment. Without DATA_PATH it trains on synthetic
# tokens; without CONTAINER_IMAGE, which needs Pyxis, it runs in the cluster's environment. MEGATRON_PATH may be a
# checkout of Megatron-LM, whose pretrain_gpt.py is then used.
set -euo pipefail
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file; Slurm knows where the original is.
[[ -f $HERE/job.bash ]] || HERE=$(dirname "$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')")
ROOT=$(cd "$HERE/../.." && pwd)

MEGATRON_PATH=$(realpath -m "${MEGATRON_PATH:-$ROOT}")
CONTAINER_IMAGE=${CONTAINER_IMAGE:-}
OUTPUT_PATH=$(realpath -m "${OUTPUT_PATH:-runs/deepseek_v3}")
DATA_PATH=${DATA_PATH:-}
MOUNTS=$ROOT:$ROOT,$MEGATRON_PATH:$MEGATRON_PATH,$OUTPUT_PATH:$OUTPUT_PATH
DATA_FOLDER=$(dirname "$DATA_PATH")
[[ $DATA_FOLDER != /* ]] || MOUNTS+=,$DATA_FOLDER:$DATA_FOLDER
CONTAINER_MOUNTS=${CONTAINER_MOUNTS:-$MOUNTS}
NODES=${SLURM_NNODES:-${NODES:-64}}
GPUS=${GPUS:-8}
PYTHON=${PYTHON:-python}
USE_MEGATRON_FSDP=${USE_MEGATRON_FSDP:-1}
SHARDING_STRATEGY=${SHARDING_STRATEGY:-optim_grads_params}
TP=${TP:-1}
EP=${EP:-8}
MBS=${MBS:-1} # more does not fit into 80 GB
GBS=${GBS:-2048}
PROFILE=${PROFILE:-0}
WANDB=${WANDB:-${WANDB_API_KEY:+1}} # on if there is a key
WANDB_PROJECT=${WANDB_PROJECT:-deepseek-v3}
COMMENT=${COMMENT:-}
EXTRA=${EXTRA:-}
NAME=DeepSeek-V3-TP${TP}EP${EP}-MBS${MBS}GBS${GBS}${COMMENT:+-$COMMENT}

MODEL=(
  --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
  --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000
  --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --qk-layernorm
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
  --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
  --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
  --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --make-vocab-size-divisible-by 3232
  --transformer-impl transformer_engine --use-flash-attn --enable-experimental
)
EXPERTS=(
  --num-experts 256 --moe-layer-freq "[0]*3+[1]*58" --moe-ffn-hidden-size 2048
  --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 8
  --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid
  --moe-router-pre-softmax --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
  --moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
  --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-grouped-gemm --moe-permute-fusion
)
PARALLELISM=(
  --tensor-model-parallel-size "$TP" --sequence-parallel --expert-model-parallel-size "$EP"
  --expert-tensor-parallel-size 1 --context-parallel-size 1
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
TRAINING=(
  --micro-batch-size "$MBS" --global-batch-size "$GBS" --train-samples 585937500
  --lr 3.9e-6 --min-lr 3.9e-7 --lr-decay-style cosine --lr-decay-samples 584765624 --lr-warmup-samples 1536000
  --lr-warmup-init 3.9e-7 --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
  --recompute-granularity selective --recompute-modules mlp moe mla_up_proj layernorm
  --manual-gc --manual-gc-interval 10 --no-check-for-nan-in-loss-and-grad
  --eval-iters 32 --eval-interval 100 --save-interval 100 --save "$OUTPUT_PATH/checkpoints"
  --load "$OUTPUT_PATH/checkpoints" --auto-detect-ckpt-format --dist-ckpt-strictness log_all
  --log-interval 1 --log-throughput --log-num-zeros-in-grad --log-params-norm --log-timers-to-tensorboard
  --log-memory-to-tensorboard --log-validation-ppl-to-tensorboard --logging-level 40
  --tensorboard-dir "$OUTPUT_PATH/tensorboard" --distributed-timeout-minutes 60
  --exit-signal-handler
  --data-cache-path "$OUTPUT_PATH/cache" --split "99,1,0" --no-mmap-bin-files
  --no-create-attention-mask-in-dataloader --num-workers 6
)
if [[ $USE_MEGATRON_FSDP == 1 ]]; then
  PARALLELISM+=(
    --use-megatron-fsdp --data-parallel-sharding-strategy "$SHARDING_STRATEGY" --ckpt-format fsdp_dtensor
    --init-model-with-meta-device --calculate-per-token-loss
    --megatron-fsdp-grad-comm-dtype bf16 --megatron-fsdp-main-grads-dtype fp32
    --use-nccl-ub --fsdp-double-buffer
  )
  # With a single hardware queue, FSDP's collectives could not overlap with compute.
  unset CUDA_DEVICE_MAX_CONNECTIONS
fi
if [[ -n $DATA_PATH ]]; then
  # shellcheck disable=SC2206 # DATA_PATH may be several prefixes with weights
  INPUT=(--data-path $DATA_PATH --tokenizer-type HuggingFaceTokenizer)
  INPUT+=(--tokenizer-model "${TOKENIZER:-deepseek-ai/DeepSeek-V3}")
else # the router learns nothing from synthetic tokens
  INPUT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 129280 --moe-router-force-load-balancing)
fi
PROFILER=()
if [[ $PROFILE == 1 ]]; then
  TRAINING+=(--profile --profile-step-start 10 --profile-step-end 12 --profile-ranks 0)
  PROFILER=(
    nsys profile --sample=none --cpuctxsw=none "--trace=cuda,nvtx,cublas,cudnn" --cuda-graph-trace=node
    --cuda-memory-usage=true --capture-range=cudaProfilerApi --capture-range-end=stop -f true -x true
    -o "$OUTPUT_PATH/nsys/$NAME-%q{SLURM_NODEID}"
  )
fi
if [[ $WANDB == 1 ]]; then
  export WANDB_API_KEY=${WANDB_API_KEY:?needed for WANDB=1}
  TRAINING+=(--wandb-project "$WANDB_PROJECT" --wandb-exp-name "$NAME")
fi

# shellcheck disable=SC2206 # EXTRA is split into words
ARGUMENTS=("${MODEL[@]}" "${EXPERTS[@]}" "${PARALLELISM[@]}" "${TRAINING[@]}" "${INPUT[@]}" $EXTRA)
SCRIPT=$MEGATRON_PATH/pretrain_gpt.py ENTRY=()
[[ $MEGATRON_PATH -ef $ROOT ]] || ENTRY=(-m megatron.fsdp.launch)
export PYTHONPATH=$ROOT:$MEGATRON_PATH:${PYTHONPATH:-}
export TORCH_NCCL_AVOID_RECORD_STREAMS=1 NVTE_FWD_LAYERNORM_SM_MARGIN=16 NVTE_BWD_LAYERNORM_SM_MARGIN=16
export NCCL_IB_SL=${NCCL_IB_SL:-1} NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-19}
export NCCL_P2P_NET_CHUNKSIZE=${NCCL_P2P_NET_CHUNKSIZE:-2097152}
[[ $PROFILE != 1 || -n ${DRY_RUN:-} ]] || mkdir -p "$OUTPUT_PATH/nsys"
LOGS=$OUTPUT_PATH/slurm_logs SAVE=$OUTPUT_PATH/checkpoints RENDEZVOUS=() THEN=() FILES=() SBATCH=(--gpus-per-node "$GPUS")
[[ $DATA_PATH != /* || $DATA_PATH == *" "* ]] || FILES+=("$DATA_PATH.bin" "$DATA_PATH.idx")
[[ ${TOKENIZER:-} != /* || -n $CONTAINER_IMAGE ]] || FILES+=("$TOKENIZER") # a container has its own paths
CONTAINER=()
[[ -z $CONTAINER_IMAGE ]] || CONTAINER=(
  --container-image "$CONTAINER_IMAGE" --container-mounts "$CONTAINER_MOUNTS" --container-workdir "$MEGATRON_PATH"
)
# shellcheck source=job.bash
source "$HERE/job.bash"
