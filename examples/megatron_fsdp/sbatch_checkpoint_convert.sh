#!/usr/bin/env bash
#SBATCH --nodes=4 --ntasks-per-node=1 --exclusive --signal=TERM@600 --requeue --open-mode=append
# Converts a large checkpoint of Megatron's DDP (torch_dist) for training with FSDP (fsdp_dtensor), on several machines.
# Uses no GPU. A job that was interrupted resumes when it is submitted again.
#
#   CHECKPOINT=/checkpoints/run/iter_0001000 OUT=/checkpoints/fsdp/iter_0001000 bash sbatch_checkpoint_convert.sh
#   DRY_RUN=1 ... bash sbatch_checkpoint_convert.sh                      prints the command
#
# Submits a Slurm job; sbatch does, too. Slurm's own variables (SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_TIMELIMIT)
# choose the rest of it. BACK=1 converts in the other direction. PARAM_GROUP_MAP names the JSON file with the optimizer
# group of each parameter.
set -euo pipefail
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file; Slurm knows where the original is.
[[ -f $HERE/job.bash ]] || HERE=$(dirname "$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')")
ROOT=$(cd "$HERE/../.." && pwd)

CHECKPOINT=$(realpath -m "${CHECKPOINT:?folder of the checkpoint, such as /checkpoints/run/iter_0001000}")
TARGET=$(realpath -m "${OUT:?folder to write, such as /checkpoints/fsdp/iter_0001000}")
CONTAINER_IMAGE=${CONTAINER_IMAGE:-} # needs Pyxis
OUTPUT_PATH=$(realpath -m "${OUTPUT_PATH:-runs/convert}") # for logs
FROM=$(dirname "$CHECKPOINT")
TO=$(dirname "$TARGET")
CONTAINER_MOUNTS=${CONTAINER_MOUNTS:-$ROOT:$ROOT,$FROM:$FROM,$TO:$TO}
NODES=${SLURM_NNODES:-${NODES:-4}}
PROCESSES=${PROCESSES:-8}
PYTHON=${PYTHON:-python}
PARAM_GROUP_MAP=${PARAM_GROUP_MAP:-}
BACK=${BACK:-}
EXTRA=${EXTRA:-}

COMMAND=convert-torch-dist-to-fsdp-dtensor
[[ -z $BACK ]] || COMMAND=convert-fsdp-dtensor-to-torch-dist
INSPECTOR=$ROOT/tools/checkpoint/checkpoint_inspector.py
# shellcheck disable=SC2206 # EXTRA is split into words
ARGUMENTS=("$COMMAND" "$CHECKPOINT" "$TARGET" $EXTRA)
[[ -z $PARAM_GROUP_MAP ]] || ARGUMENTS+=(--param-to-param-group-map-json "$(realpath -m "$PARAM_GROUP_MAP")")
export PYTHONPATH=$ROOT:${PYTHONPATH:-}
LOGS=$OUTPUT_PATH/slurm_logs SCRIPT=$INSPECTOR
NAME=convert-$(basename "$TARGET") SAVE='' GPUS=$PROCESSES ENTRY=() PROFILER=() RENDEZVOUS=() SBATCH=()
FILES=("$CHECKPOINT") THEN=("$PYTHON" "$INSPECTOR" verify "$TARGET")
CONTAINER=()
[[ -z $CONTAINER_IMAGE ]] || CONTAINER=(
  --container-image "$CONTAINER_IMAGE" --container-mounts "$CONTAINER_MOUNTS" --container-workdir "$ROOT"
)
# shellcheck source=job.bash
source "$HERE/job.bash"
