"""Predicts command lines with layers that run, and with layers that are repeated; prints JSON."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.fsdp.tools.script import prepare_megatron

MODEL = (
    "--num-layers 8 --hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 4 --seq-length 512 "
    "--micro-batch-size 1 --global-batch-size 64 --max-position-embeddings 512 --train-iters 5 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 255 --bf16 --position-embedding-type rope --use-megatron-fsdp "
    "--ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params --swiglu --disable-bias-linear"
)
EXPERTS = (
    "--num-experts 8 --expert-model-parallel-size 4 --moe-router-topk 2 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules moe layernorm"
# In this order: later ones find what earlier ones have recorded.
CASES = {
    "dense": "",
    "other strategy": "--data-parallel-sharding-strategy optim_grads",
    "HSDP": "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
    "pipeline": "--pipeline-model-parallel-size 2",
    "pipeline, more tokens": "--pipeline-model-parallel-size 2 --mtp-num-layers 1",
    "interleaved": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel",
    "tensor, full": f"--tensor-model-parallel-size 2 {FULL}",
    "context": "--context-parallel-size 2",
    "one micro-batch": "--global-batch-size 8",
    "full": FULL,
    "experts": EXPERTS,
    "experts, full": f"{EXPERTS} {FULL}",
    "experts, selective": f"{EXPERTS} {SELECTIVE}",
    "experts, selective, pipeline": f"{EXPERTS} {SELECTIVE} --pipeline-model-parallel-size 2",
    "experts, other strategy": f"{EXPERTS} --data-parallel-sharding-strategy optim_grads",
}


def main() -> None:
    """Print the steps of all cases: of layers that are run, that are recorded, and that are repeated."""
    prepare_megatron()
    from megatron.fsdp.tools.predict import replay, search
    from megatron.fsdp.tools.predict.machine import cluster_of

    script = Path(__file__).parent.parent / "pretrain_gpt.py"

    def predicted(flags: str) -> dict[str, Any]:
        words = tuple(f"{MODEL} {flags}".split())
        found = search.evaluate(script, 8, cluster_of("h100"), search.Candidate(words, {}))
        assert found.step is not None, found.refusal
        return {"seconds": found.step.seconds, "waits": found.step.waits, "peak": found.step.peak}

    results = {}
    with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):
        for name, flags in CASES.items():
            with mock.patch.object(replay.Replays, "attach"):
                run = predicted(flags)
            repeated: list[int] = []
            repeat = replay.Replays._repeat

            def count(*args: Any, repeat: Any = repeat, repeated: list[int] = repeated) -> Any:
                repeated.append(1)
                return repeat(*args)

            with mock.patch.object(replay.Replays, "_repeat", count):
                results[name] = run, predicted(flags), predicted(flags), len(repeated)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
