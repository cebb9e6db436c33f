#!/usr/bin/env bash
# Trains train.py on two nodes. OUT is the folder of the experiment, EXTRA has arguments.
set -euo pipefail
HERE=$(dirname "${BASH_SOURCE[0]}")
[[ -f $HERE/train.py ]] || HERE=$(dirname "$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')")
NODES=2 GPUS=1 NAME=$(basename "$OUT") LOGS=$OUT/logs SAVE=$OUT/checkpoints SCRIPT=$HERE/train.py
# shellcheck disable=SC2206 # EXTRA is split into words
ARGUMENTS=("$SAVE" ${EXTRA:-})
ENTRY=() PROFILER=() CONTAINER=() RENDEZVOUS=() THEN=() FILES=() SBATCH=(--gpus-per-node "$GPUS")
# shellcheck source=../../examples/megatron_fsdp/job.bash
source "$HERE/../../examples/megatron_fsdp/job.bash"
