"""Megatron's schedule of two micro-batches at once (overlap_moe_expert_parallel_comm) trains as with Megatron's DDP."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tests.megatron_models as mm
from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import find_megatron_fsdp
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.megatron_models import FullyShardedDataParallel
from tests.nccl_recorder import Event, Recorder, assert_alike
from tests.ranks import RankPool, on_ranks

STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
SETTINGS = {
    "num_layers": 3,
    "num_moe_experts": 4,
    "moe_layer_freq": [0, 1, 1],
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_intermediate_size": 8,
    "expert_model_parallel_size": 2,
    "add_bias_linear": False,
    "gated_linear_unit": True,
}


class _WithoutWeight(torch.autograd.Function):
    """A product with a weight whose gradient is computed later, from what backward appends to ``saved``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, saved: list) -> torch.Tensor:
        ctx.saved = saved
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.saved.append((x, grad))
        return grad @ weight, None, None


@contextmanager
def _delaying_weight_gradients() -> Iterator[None]:
    """Context in which Megatron's linear layers compute weight gradients as Transformer Engine's do."""
    classes = (ColumnParallelLinear, RowParallelLinear)

    def multiply(layer: Any, input: torch.Tensor, weight: torch.Tensor, *unused: Any, **others: Any) -> torch.Tensor:
        if not layer.config.delay_wgrad_compute or layer.weight is None:  # the output layer has the embedding's
            return input @ weight.t()
        layer.__dict__.setdefault("saved", [])
        return _WithoutWeight.apply(input, weight, layer.saved)

    def backward_dw(layer: Any) -> None:
        x, grad = layer.saved.pop(0)
        assert layer.weight.grad is None
        layer.weight.grad = grad.flatten(0, -2).t() @ x.flatten(0, -2)

    with pytest.MonkeyPatch.context() as patch:
        for each in classes:
            patch.setattr(each, "_forward_impl", multiply, raising=False)
            patch.setattr(each, "backward_dw", backward_dw)
        yield


def _gpt(overlap: bool, delay: bool) -> Callable[[Any], torch.nn.Module]:
    """A model of a dense layer and two mixtures of experts, and of a layer that predicts the token after the next."""

    def build(config: Any) -> torch.nn.Module:
        # The config accepts these with bf16 only, in which a comparison would be less exact.
        config.overlap_moe_expert_parallel_comm, config.delay_wgrad_compute = overlap, delay
        torch.manual_seed(7)
        model_parallel_cuda_manual_seed(7)
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        more = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False) if config.mtp_num_layers else None
        return GPTModel(
            config,
            block,
            mm.VOCABULARY,
            mm.SEQUENCE,
            share_embeddings_and_output_weights=True,
            position_embedding_type="rope",  # which multi-token prediction needs
            mtp_block_spec=more,
        )

    return build


def _train(
    strategy: str | None, overlap: bool = True, delay: bool = False, micro_batches: int = 3, **changes: Any
) -> list[float]:
    """The losses and gradient norms of three steps."""
    model = mm.wrapped(strategy, _gpt(overlap, delay), **{**SETTINGS, **changes})
    if strategy is not None:
        assert find_megatron_fsdp(model) is model.module
    found = mm.run_steps(model, mm.optimizer_of(model), micro_batches=micro_batches)
    if strategy is not None:
        assert not any(unit.held_by for unit in model.module.engine.units)
    delayed = [layer.saved for layer in model.modules() if hasattr(layer, "saved")]
    assert bool(delayed) == delay and not any(delayed)
    return [*found.losses, *found.norms]


@on_ranks("ranks_used")
@pytest.mark.parametrize(
    ("ranks_used", "micro_batches", "delay", "changes"),
    [
        (2, 3, True, {}),
        pytest.param(4, 3, False, {}, marks=pytest.mark.slow),
        pytest.param(4, 3, True, {}, marks=pytest.mark.slow),
        pytest.param(4, 1, True, {}, marks=pytest.mark.slow),
        pytest.param(4, 3, True, {"mtp_num_layers": 1}, marks=pytest.mark.slow),
        pytest.param(4, 3, True, {"calculate_per_token_loss": True}, marks=pytest.mark.slow),
    ],
)
def test_trains_as_with_ddp(ranks_used: int, micro_batches: int, delay: bool, changes: dict[str, Any]) -> None:
    with mm.megatron(expert_model_parallel_size=2), _delaying_weight_gradients():
        expected = _train(None, overlap=False, micro_batches=micro_batches, **changes)
        for strategy in STRATEGIES:
            found = _train(strategy, delay=delay, micro_batches=micro_batches, **changes)
            assert found == pytest.approx(expected, rel=1e-6), strategy


def _layers(count: int) -> dict[str, Any]:
    return {"num_layers": count, "moe_layer_freq": [1] * count}


def _buffers(layers: int, count: int | None) -> tuple[list[int], list[float]]:
    """Train with the double buffer as without it; return how many units use each buffer, and what was computed."""
    changes = _layers(layers)
    with mm.megatron(expert_model_parallel_size=2), _delaying_weight_gradients(), pytest.MonkeyPatch.context() as patch:
        expected = _train("optim_grads_params", **changes)
        engines: list[Any] = []
        patch.setattr(mm, "FullyShardedDataParallel", _fsdp(engines, count))
        assert _train("optim_grads_params", fsdp_double_buffer=True, **changes) == expected
        units = engines[0].units[1:]
        return sorted(Counter(id(unit.slot) for unit in units).values()), expected


def _registered(layers: int, expected: list[list[float]]) -> list[Event]:
    """Train with registered buffers. Collectives of earlier models have ended: they had a different process group."""
    with mm.megatron(expert_model_parallel_size=2), Recorder().installed() as recorder:
        with _delaying_weight_gradients():
            assert _train("optim_grads_params", nccl_ub=True, **_layers(layers)) == expected[dist.get_rank()]
        gc.collect()
        assert {"window", "all_gather", "reduce_scatter"} <= {event.what for event in recorder.events}
        return recorder.events


def _fsdp(engines: list[Any], buffers: int | None) -> Callable[..., torch.nn.Module]:
    def build(config: Any, **given: Any) -> torch.nn.Module:
        # Set before the model is built: the engine reads it, and the model's config accepts it with bf16 only.
        config.overlap_moe_expert_parallel_comm = True
        given["ddp_config"].fsdp_buffer_count = buffers
        model = FullyShardedDataParallel(config=config, **given)
        engines.append(model.module.engine)
        return model

    return build


# With two buffers, the passes need different units of one buffer at the same time.
@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [(6, None, [1, 1, 2, 2]), (7, None, [1, 2, 2, 2]), (8, 3, [1, 1, 1, 1, 2, 2])],
)
def test_two_passes_have_twice_as_many_fixed_buffers(
    ranks: RankPool, layers: int, count: int | None, expected: list[int]
) -> None:
    found = ranks.run(2, _buffers, layers, count)
    assert [users for users, _ in found] == [expected] * 2
    if count is None:
        assert_alike(ranks.run(2, _registered, layers, [results for _, results in found]))
