#!/usr/bin/env bash
# Converts a checkpoint of Megatron's DDP (torch_dist) for training with FSDP (fsdp_dtensor), on one machine.
#
#   CHECKPOINT=/checkpoints/run/iter_0001000 OUT=/checkpoints/fsdp/iter_0001000 bash convert_checkpoint.sh
#   BACK=1 CHECKPOINT=/checkpoints/fsdp/iter_0002000 OUT=/checkpoints/ddp/iter_0002000 bash convert_checkpoint.sh
#   DRY_RUN=1 ...                                                        prints the command
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$(dirname "$HERE")")

CHECKPOINT=${CHECKPOINT:?folder of the checkpoint, such as /checkpoints/run/iter_0001000}
OUT=${OUT:?folder to write, such as /checkpoints/fsdp/iter_0001000}
PROCESSES=${PROCESSES:-4}
PYTHON=${PYTHON:-python}
BACK=${BACK:-}
EXTRA=${EXTRA:-}

COMMAND=convert-torch-dist-to-fsdp-dtensor
[[ -z $BACK ]] || COMMAND=convert-fsdp-dtensor-to-torch-dist
INSPECTOR=$ROOT/tools/checkpoint/checkpoint_inspector.py
# shellcheck disable=SC2206 # EXTRA is split into words
ARGUMENTS=("$COMMAND" "$CHECKPOINT" "$OUT" $EXTRA)
NAME=convert-$(basename "$OUT") LOGS=${LOGS:-$(dirname "$OUT")/logs} SAVE='' NODES=1 GPUS=$PROCESSES
SCRIPT=$INSPECTOR ENTRY=() PROFILER=() CONTAINER=() SBATCH=() RENDEZVOUS=(--standalone)
FILES=("$CHECKPOINT") THEN=("$PYTHON" "$INSPECTOR" verify "$OUT")
# shellcheck source=job.bash
source "$HERE/job.bash"
