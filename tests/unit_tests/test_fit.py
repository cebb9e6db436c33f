"""Sizes of devices, the formula of activations, and the verdict whether a model fits."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.tools.activations import Workload, activation_bytes, layer_bytes
from megatron.fsdp.tools.devices import GIB, gpu_memory, parse_memory
from megatron.fsdp.tools.estimate import AxisSizes, outline
from megatron.fsdp.tools.fit import CONTEXT, NCCL, Situation, verdict
from tests.models import FP32_GRADS, Block, TinyModel

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80", 80 * 10**9), ("80GB", 80 * 10**9), ("79.5 GiB", 79.5 * GIB), ("81559mib", 81559 * MIB), ("1tb", 10**12)],
)
def test_sizes(text: str, expected: float) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "80XB", "-1", "0", "1e3"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="80GB.*got"):
        parse_memory(text)


def test_gpus_by_name() -> None:
    assert gpu_memory("H100") == 81559 * MIB and gpu_memory("A100 80") == gpu_memory("a100_80") == 80 * GIB
    with pytest.raises(ValueError, match=r"got 'h10'. Did you mean 'h100'\?"):
        gpu_memory("h10")


# Activations ------------------------------------------------------------------------------------------------------

S, B, H, A = 2048, 2, 1024, 16
CONFIG = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "num_attention_heads": A,
    "num_query_groups": A,
    "kv_channels": H // A,
    "hidden_size": H,
    "ffn_hidden_size": 4 * H,
    "gated_linear_unit": False,
    "hidden_dropout": 0.1,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def workload(config: dict[str, Any] | None = None, **changes: Any) -> Workload:
    """Of 8 layers of the model of arXiv:2205.05198, without fused attention."""
    of_config = SimpleNamespace(**{**CONFIG, **(config or {})})
    defaults: dict[str, Any] = {
        "config": of_config,
        "micro_batch": B,
        "sequence": S,
        "vocabulary": 0,
        "dense": 8,
        "experts": 0,
        "scores": True,
        "stage": 0,
        "stages": 1,
        "chunks": 1,
        "micro_batches": 8,
        "recompute": None,
        "modules": frozenset(),
        "sequence_parallel": False,
    }
    return Workload(**{**defaults, **changes})


def test_a_layer_keeps_what_the_paper_says() -> None:
    sbh, scores = S * B * H, 5 * A * S * S * B
    assert layer_bytes(workload(), False) == (34 * sbh + scores, 0)
    tensor = {"tensor_model_parallel_size": 4}
    assert layer_bytes(workload(tensor), False)[0] == 10 * sbh + (24 * sbh + scores) / 4
    assert layer_bytes(workload(tensor, sequence_parallel=True), False)[0] == (34 * sbh + scores) / 4
    selective = workload(recompute="selective", modules=frozenset({"core_attn"}))
    assert layer_bytes(selective, False) == (34 * sbh, scores)
    assert layer_bytes(workload(recompute="full"), False) == (2 * sbh, 32 * sbh + scores)
    assert layer_bytes(workload(scores=False), False)[0] == 34 * sbh + 4 * A * S * B


def test_modern_layers() -> None:
    tokens = S * B
    llama = {"gated_linear_unit": True, "hidden_dropout": 0.0, "num_query_groups": 4, "ffn_hidden_size": 3584}
    flash = tokens * (2 * 4 * H + 2 * 64 * (16 + 2 * 4) + 2 * H + 4 * A)
    assert layer_bytes(workload(llama, scores=False), False)[0] == flash + tokens * 2 * 3 * 3584
    experts = {
        **llama,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 512,
        "num_moe_experts": 8,
        "expert_tensor_parallel_size": 1,
        "moe_shared_expert_intermediate_size": None,
    }
    routed = 2 * tokens
    found = layer_bytes(workload(experts, scores=False, dense=0, experts=8), True)[0]
    assert found == flash + routed * (2 * 2 * H + 2 * 3 * 512) + 8 * 8 * tokens


def test_pipeline_stages_keep_several_micro_batches() -> None:
    one = workload(stages=4, stage=3)
    assert [workload(stages=4, stage=stage).in_flight for stage in range(4)] == [4, 3, 2, 1]
    assert workload(stages=4, micro_batches=2).in_flight == 2
    # Interleaved, with L / (p v) layers per chunk: the paper's 1 + (p - 1) / (p v) of p micro-batches.
    assert workload(stages=4, chunks=2).in_flight == 4 * (1 + 3 / 8)
    assert activation_bytes(workload(stages=4)) > 3 * activation_bytes(one)


def test_logits_and_full_recomputation() -> None:
    kept = functools.partial(workload, recompute="full", micro_batches=1)
    layer, extra = layer_bytes(kept(), False)
    base = activation_bytes(kept())
    assert base > 8 * layer + extra
    large = activation_bytes(kept(vocabulary=128_000))
    assert large == 8 * layer + extra + 6 * 128_000 * S * B
    block = activation_bytes(kept({"recompute_method": "block", "recompute_num_layers": 6}))
    assert block == base + 2 * extra


# The verdict ------------------------------------------------------------------------------------------------------


def situation(strategy: str, ranks: int, **changes: Any) -> Situation:
    with torch.device("meta"):
        model = TinyModel(width=1024, depth=8, vocabulary=128).bfloat16()
    config = FSDPConfig(zero_dp_strategy=strategy, mixed_precision_policy=FP32_GRADS)
    found = Situation([outline(model, (Block,), config)], config, AxisSizes(ranks), AxisSizes(ranks))
    return replace(found, **changes)


def test_what_fits_is_not_changed() -> None:
    needs = situation("optim_grads_params", 8).memory().total
    found = verdict(situation("optim_grads_params", 8), needs, 8)
    assert found.fits and found.text.startswith("fits: ") and not found.suggestions
    assert found.fewest_ranks == 8
    less = verdict(situation("optim_grads_params", 8), needs - 1, 8)
    assert not less.fits and less.text.startswith("does not fit by ") and less.fewest_ranks == 16


def test_suggestions_are_those_that_fit() -> None:
    present = situation("no_shard", 8)
    strategies = ("optim", "optim_grads", "optim_grads_params")
    totals = {name: situation(name, 8).memory().total for name in strategies}
    assert totals["optim"] > totals["optim_grads"] > totals["optim_grads_params"]
    found = verdict(present, totals["optim_grads"], 8)
    assert {s.change: s.total for s in found.suggestions if "strategy" in s.change} == {
        f"--data-parallel-sharding-strategy {name}": totals[name] for name in strategies[1:]
    }
    assert all(s.total <= found.capacity for s in found.suggestions)
    assert not any("micro-batch" in s.change for s in found.suggestions), "activations are unknown"


def test_changes_are_combined_if_none_suffices() -> None:
    work = workload({"tensor_model_parallel_size": 1}, micro_batch=4)
    present = situation("optim_grads_params", 8, workload=work)
    single = verdict(present, present.memory().total - 1, 8)
    smallest = min(s.total for s in single.suggestions)
    assert {"--micro-batch-size 2", "--micro-batch-size 1"} < {s.change for s in single.suggestions}
    (both,) = verdict(present, smallest - 1, 8).suggestions
    assert both.change.startswith("--micro-batch-size 1 --recompute-granularity ") and both.total < smallest
    assert verdict(present, CONTEXT + NCCL, 8).suggestions == ()
    (every,) = verdict(present, both.total - 1, 8).suggestions
    assert "--optimizer-cpu-offload" in every.change and "ranks" not in every.change
    (wider,) = verdict(present, every.total - 15 * MIB, 8).suggestions
    assert wider.change == f"{every.change} on 32 ranks" and wider.total <= every.total - 15 * MIB


def test_more_ranks_need_less_and_are_suggested() -> None:
    present = situation("optim_grads_params", 2)
    wide = situation("optim_grads_params", 8).memory().total
    found = verdict(present, wide, 2)
    assert "8 ranks" in {s.change for s in found.suggestions} and found.fewest_ranks == 8
    assert "4 ranks" not in {s.change for s in found.suggestions}
    # Expert parallelism leaves 3 ranks that share experts: they cannot be halved.
    assert situation("optim", 6, experts=AxisSizes(3)).on(0.5) is None
