"""Experts sharded over optimizer instances and by strategies of their own train as with Megatron's DDP."""

from typing import Any

import pytest
import torch

import tests.megatron_models as mm
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.fsdp.mcore.options import EXPERT_INSTANCES
from megatron.training import training
from tests.ranks import RankFailure, RankPool

MODEL = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 2,
    "add_bias_linear": False,
    "gated_linear_unit": True,
}


def _gpt(config: Any) -> torch.nn.Module:
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(config, block, mm.VOCABULARY, mm.SEQUENCE, share_embeddings_and_output_weights=True)


def _fsdp(instances: int, changes: dict[str, Any]) -> torch.nn.Module:
    config = mm.transformer_config(**MODEL)
    settings = mm.ddp_config("optim_grads_params", num_distributed_optimizer_instances=instances)
    for name, value in changes.items():
        setattr(settings, name, value)
    config.finalize_model_grads_func = mm.finalize
    return mm.FullyShardedDataParallel(config=config, ddp_config=settings, module=_gpt(config))


def _trains_as_ddp(instances: int, changes: dict[str, Any]) -> list[tuple[bool, float]]:
    """Compare with DDP; return which groups are experts, with the share of their main weights that this rank holds."""
    with mm.megatron(expert_model_parallel_size=2):
        expected = mm.run_steps(model := mm.wrapped(None, _gpt, **MODEL), mm.optimizer_of(model))
    sizes = {"expert_model_parallel_size": 2, "num_distributed_optimizer_instances": instances}
    with mm.megatron(**sizes), pytest.MonkeyPatch.context() as monkeypatch:
        model = _fsdp(instances, changes)
        monkeypatch.setattr(mm, "get_megatron_optimizer", training.get_megatron_optimizer)  # with our statistics
        found = mm.run_steps(model, mm.optimizer_of(model))
        groups = model.module.engine.groups
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)
        assert found.norms == pytest.approx(expected.norms, rel=1e-6)
        assert found.zeros == expected.zeros
        shares = {group.params[0].key.expert: group.weights.main.numel() / group.layout.numel for group in groups}
        return sorted(shares.items())


# Four data-parallel ranks for dense parameters, and two for each expert.
CASES = {
    "experts in two instances": (1, {EXPERT_INSTANCES: 2}, [(False, 1 / 4), (True, 1.0)]),
    "experts in one instance": (2, {EXPERT_INSTANCES: 1}, [(False, 1 / 2), (True, 1 / 2)]),
    "hybrid experts": (
        1,
        {EXPERT_INSTANCES: 2, "expert_outer_dp_sharding_strategy": "optim"},
        [(False, 1 / 4), (True, 1 / 2)],
    ),
    "ZeRO-1 for experts": (1, {"expert_data_parallel_sharding_strategy": "optim"}, [(False, 1 / 4), (True, 1 / 2)]),
    "replicated experts": (1, {"expert_data_parallel_sharding_strategy": "no_shard"}, [(False, 1 / 4), (True, 1.0)]),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_with_ddp(ranks: RankPool, name: str) -> None:
    instances, changes, expected = CASES[name]
    assert ranks.run(4, _trains_as_ddp, instances, changes) == [expected] * 4


def test_instances_that_do_not_divide_the_ranks_raise(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=f"{EXPERT_INSTANCES}: expected a divisor of 2, .* got 3"):
        ranks.run(4, _trains_as_ddp, 1, {EXPERT_INSTANCES: 3})
