# shellcheck shell=bash disable=SC2016,SC2054,SC2153,SC2154 # scripts that source this set variables; nodes expand START
# The end of every launch script: checks, submits to Slurm, runs, stops in time, resumes. Sourced with the arguments.
# NAME of the job, LOGS and SAVE (folders of logs and checkpoints; SAVE may be empty), NODES, GPUS (processes per node), PYTHON,
# SCRIPT, ENTRY (how Python starts it), ARGUMENTS, PROFILER (before Python), FILES (must exist), THEN (runs at the end),
# RENDEZVOUS (torchrun's, without Slurm) or SBATCH (options) with CONTAINER (options of srun). INTERFACE is such as ib0.
[[ -z ${DRY_RUN:-} ]] || { printf '%s\n' "$((NODES * GPUS))" "$SCRIPT" "${ARGUMENTS[@]}" && exit; }
[[ ${CONTAINER_IMAGE:-} != /* ]] || FILES+=("$CONTAINER_IMAGE") # others are in a registry
refuse() { echo "$NAME: expected $1" >&2 && exit 2; }
number() { [[ " ${ARGUMENTS[*]}" =~ .*" --$1"[=\ ]([0-9]+) ]] && echo "${BASH_REMATCH[1]}"; } # the last flag counts
for FILE in "$SCRIPT" "${FILES[@]}"; do [[ -e $FILE ]] || refuse "$FILE; it does not exist"; done
for UNIT in iters samples; do # Megatron refuses it, too, when the job has left the queue
  WARMUP=$(number "lr-warmup-$UNIT" || echo -1) LAST=$(number "lr-decay-$UNIT" || number "train-$UNIT" || echo $((WARMUP + 1)))
  ((WARMUP < LAST)) || refuse "--lr-warmup-$UNIT below $LAST, the end of the decay; got $WARMUP"
done
mkdir -p "$LOGS"
GRACE=${GRACE:-600} # seconds from SIGTERM to the time limit: more than a step and two saves
if [[ ${#RENDEZVOUS[@]} == 0 && -z ${SLURM_JOB_ID:-} ]]; then
  ID=$(cksum <<<"$LOGS $SAVE ${ARGUMENTS[*]:0:3}") # jobs of the same folders wait for each other
  exec sbatch --job-name "$NAME-${ID%% *}" --nodes "$NODES" --ntasks-per-node 1 --exclusive --dependency singleton --requeue \
    --signal "TERM@$GRACE" --open-mode append --output "$LOGS/%j.log" --export ALL "${SBATCH[@]}" "${BASH_SOURCE[1]}" "$@"
fi
if [[ -n ${SLURM_JOB_ID:-} ]]; then # Megatron saves and stops by itself before the signal, less a minute for its start
  END=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*EndTime=\([0-9][^ ]*\).*/\1/p' || :) # empty: there is no limit
  MINUTES=$((($(date -d "${END:-1 year}" +%s) - $(date +%s) - GRACE) / 60 - 1)) # conversions have no SAVE, and ignore the signal
  [[ -z $SAVE || $MINUTES -gt 0 ]] || refuse "a time limit 2 minutes above GRACE=$GRACE s, or a shorter GRACE; got an end at $END"
  [[ $(number exit-duration-in-mins || echo "$MINUTES") -lt $MINUTES || " ${ARGUMENTS[*]} " != *" --exit-signal-handler "* ]] ||
    ARGUMENTS+=(--exit-duration-in-mins "$MINUTES")
fi
ON=() ONCE=()
if [[ ${#RENDEZVOUS[@]} == 0 ]]; then
  ON=(srun --label --kill-on-bad-exit=1 "${CONTAINER[@]}") ONCE=(srun --nodes 1 --ntasks 1 "${CONTAINER[@]}")
  HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  RENDEZVOUS=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "$SLURM_JOB_ID")
fi
[[ -z ${INTERFACE:-} ]] || export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE TP_SOCKET_IFNAME=$INTERFACE
# torchrun kills ranks that are saving 30 s after SIGTERM (torch 2.12 has a setting), so it ignores the signal, which Slurm sends
# to ranks as well. They ignore it until their handler exists: a process on each node then leaves a file, which that looks for.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$GRACE
START='export MEGATRON_FSDP_STOP_FILE=$(mktemp -u)
(trap ": >$MEGATRON_FSDP_STOP_FILE" TERM; while kill -0 $$; do sleep 1; done; rm -f "$MEGATRON_FSDP_STOP_FILE") &>/dev/null &
trap "" TERM; export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[$(hostname -s) rank \${rank}] "; exec "$@"'
TORCHRUN=(
  -m torch.distributed.run --nproc-per-node "$GPUS" "${RENDEZVOUS[@]}" --signals-to-handle SIGINT,SIGHUP,SIGQUIT
  --log-dir "$LOGS" --redirects 3 --tee 3 --local-ranks-filter "0,$((GPUS - 1))"
)
[[ -z $SAVE ]] || rm -f "$SAVE/outcome.txt"
trap : INT TERM && set +e # this script outlives the ranks
"${ON[@]}" bash -c "$START" launch "${PROFILER[@]}" "$PYTHON" "${TORCHRUN[@]}" "${ENTRY[@]}" "$SCRIPT" "${ARGUMENTS[@]}" 2>&1 |
  (trap "" INT TERM && while IFS= read -r LINE || [[ -n $LINE ]]; do printf '%(%F %T)T %s\n' -1 "$LINE"; done)
CODE=${PIPESTATUS[0]} OUTCOME=
[[ ! -f $SAVE/outcome.txt ]] || read -r OUTCOME REASON <"$SAVE/outcome.txt"
echo "$NAME: exit code $CODE, ${OUTCOME:-no outcome} ${REASON:-}"
if [[ $OUTCOME == stopped ]]; then # saved, and has more to do
  AGAIN='JobState=RUNNING|Reason=TimeLimit|PreemptTime=[0-9]' # none of them after scancel: the job is just COMPLETING
  [[ -z ${SLURM_JOB_ID:-} || ${REQUEUE:-1} == 0 || ! $(scontrol show job "$SLURM_JOB_ID") =~ $AGAIN ]] ||
    scontrol requeue "$SLURM_JOB_ID"
  exit 75 # EX_TEMPFAIL: try again
fi
[[ $CODE == 0 && (-z $SAVE || $OUTCOME == finished) ]] || exit 1
[[ ${#THEN[@]} == 0 ]] || "${ONCE[@]}" "${THEN[@]}"
