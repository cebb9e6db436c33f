"""Hybrid models, of Mamba and gated delta networks beside attention, train as with Megatron's DDP."""

import pytest
import torch

from tests.ranks import DEVICE, RankPool

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="Megatron runs on the CPU here")

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SIZES = {
    "hidden_size": 20,
    "num_layers": 5,
    "add_bias_linear": False,
    "is_hybrid_model": True,
    "mamba_state_dim": 4,
    "mamba_head_dim": 10,
    "mamba_num_groups": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "activation_func": torch.nn.functional.silu,
    # Otherwise Megatron builds the layers on the CPU, whatever the default device is.
    "use_cpu_initialization": False,
}


def hybrid(config: object) -> torch.nn.Module:
    """A layer of every kind."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from tests.hybrid_models import stack
    from tests.megatron_models import SEQUENCE, VOCABULARY

    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    return HybridModel(
        config,
        stack,
        VOCABULARY,
        SEQUENCE,
        hybrid_layer_pattern="M*G-E",
        share_embeddings_and_output_weights=True,
    )


def _equals_ddp(strategy: str) -> None:
    from tests.megatron_models import megatron, train, train_ddp

    with megatron():
        expected = train_ddp(build=hybrid, **SIZES)
        found = train(strategy, build=hybrid, **SIZES)
    torch.testing.assert_close(found.norms, expected.norms, rtol=2e-6, atol=0)
    assert found.zeros == expected.zeros
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_as_with_ddp(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _equals_ddp, strategy)


def _on_meta(config: object) -> torch.nn.Module:
    from megatron.fsdp.mcore.initialization import build_recorded

    with torch.device("meta"):
        return build_recorded(lambda build: build(), lambda: hybrid(config))


def _equals_itself_from_meta() -> None:
    from tests.megatron_models import forward_backward, megatron, tokens, weights_of, wrapped

    with megatron():
        expected = wrapped("optim_grads_params", hybrid, **SIZES)
        found = wrapped("optim_grads_params", _on_meta, init_model_with_meta_device=True, **SIZES)
        ours = weights_of(found)
        for name, weight in weights_of(expected).items():
            torch.testing.assert_close(ours[name], weight, rtol=0, atol=0, msg=name)
        for model in (expected, found):
            forward_backward(model, tokens(0, 1))
            model.finish_grad_sync()
        for one, other in zip(expected.module.engine.params(), found.module.engine.params(), strict=True):
            assert torch.equal(one.main.grad.to_local(), other.main.grad.to_local()), one.name


def test_the_meta_device_changes_nothing(ranks: RankPool) -> None:
    ranks.run(2, _equals_itself_from_meta)
