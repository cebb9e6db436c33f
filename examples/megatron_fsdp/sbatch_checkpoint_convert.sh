#!/usr/bin/env bash
# Converts a large checkpoint of Megatron's DDP (torch_dist) for training with FSDP (fsdp_dtensor), on several machines.
# Uses no GPU. A job that was interrupted resumes when it is submitted again.
#
#   CHECKPOINT=/checkpoints/run/iter_0001000 OUT=/checkpoints/fsdp/iter_0001000 bash sbatch_checkpoint_convert.sh
#   DRY_RUN=1 ... bash sbatch_checkpoint_convert.sh                      prints the command
#
# Submits a Slurm job. Slurm's own variables (SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_TIMELIMIT) choose the rest of it.
# BACK=1 converts in the other direction. PARAM_GROUP_MAP names the JSON file with the optimizer group of each parameter.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

CHECKPOINT=$(realpath -m "${CHECKPOINT:?folder of the checkpoint, such as /checkpoints/run/iter_0001000}")
OUT=$(realpath -m "${OUT:?folder to write, such as /checkpoints/fsdp/iter_0001000}")
CONTAINER_IMAGE=${CONTAINER_IMAGE:-}
OUTPUT_PATH=$(realpath -m "${OUTPUT_PATH:-runs/convert}") # for logs
FROM=$(dirname "$CHECKPOINT")
TO=$(dirname "$OUT")
CONTAINER_MOUNTS=${CONTAINER_MOUNTS:-$ROOT:$ROOT,$FROM:$FROM,$TO:$TO}
NODES=${NODES:-4}
PROCESSES=${PROCESSES:-8}
PYTHON=${PYTHON:-python}
PARAM_GROUP_MAP=${PARAM_GROUP_MAP:-}
BACK=${BACK:-}
EXTRA=${EXTRA:-}

COMMAND=convert-torch-dist-to-fsdp-dtensor
[[ -z $BACK ]] || COMMAND=convert-fsdp-dtensor-to-torch-dist
INSPECTOR=$ROOT/tools/checkpoint/checkpoint_inspector.py
# shellcheck disable=SC2206 # EXTRA is split into words
ARGUMENTS=("$INSPECTOR" "$COMMAND" "$CHECKPOINT" "$OUT" $EXTRA)
[[ -z $PARAM_GROUP_MAP ]] || ARGUMENTS+=(--param-to-param-group-map-json "$(realpath -m "$PARAM_GROUP_MAP")")
if [[ -n ${DRY_RUN:-} ]]; then
  printf '%s\n' "$((NODES * PROCESSES))" "${ARGUMENTS[@]}"
  exit
fi
mkdir -p "$OUTPUT_PATH/slurm_logs"
export PYTHONPATH=$ROOT:${PYTHONPATH:-}
CONTAINER=()
[[ -z $CONTAINER_IMAGE ]] || CONTAINER=(
  --container-image "$CONTAINER_IMAGE" --container-mounts "$CONTAINER_MOUNTS" --container-workdir "$ROOT"
)
sbatch --job-name convert-checkpoint --nodes "$NODES" --ntasks-per-node 1 --exclusive --dependency singleton \
  --output "$OUTPUT_PATH/slurm_logs/%j.log" --export ALL <<END
#!/usr/bin/env bash
set -e
cd $(printf '%q' "$ROOT")
HEAD=\$(scontrol show hostnames "\$SLURM_JOB_NODELIST" | head -n 1)
srun --label $(printf '%q ' "${CONTAINER[@]}" "$PYTHON") -m torch.distributed.run --nnodes $NODES \\
  --nproc-per-node $PROCESSES --rdzv-backend c10d --rdzv-endpoint "\$HEAD:${PORT:-29500}" \\
  --rdzv-id "\$SLURM_JOB_ID" $(printf '%q ' "${ARGUMENTS[@]}")
srun --nodes 1 --ntasks 1 $(printf '%q ' "${CONTAINER[@]}" "$PYTHON" "$INSPECTOR" verify "$OUT")
END
