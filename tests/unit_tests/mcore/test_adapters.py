"""Low-rank adapters on a frozen Megatron model: training, memory, adapter-only checkpoints, merging."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tests.megatron_models as mm
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from tests.models import STRATEGIES
from tests.ranks import RankPool, on_ranks

RANK = 4


def adapted(config: Any) -> torch.nn.Module:
    """A frozen GPT with an adapter at every linear layer."""

    class Adapted(torch.nn.Module):
        """A linear layer and its adapter, which tensor-parallel ranks split as they split the layer."""

        def __init__(self, base: Any) -> None:
            super().__init__()
            by_rows = isinstance(base, RowParallelLinear)
            options = {"config": config, "bias": False, "init_method": config.init_method}
            self.base = base
            if by_rows:
                self.down = RowParallelLinear(
                    base.input_size, RANK, input_is_parallel=True, skip_bias_add=True, **options
                )
            else:
                self.down = ColumnParallelLinear(base.input_size, RANK, gather_output=True, **options)
            self.up = ColumnParallelLinear(RANK, base.output_size, gather_output=by_rows, **options)

        def forward(self, x: torch.Tensor) -> Any:
            output, bias = self.base(x)
            return output + self.up(self.down(x)[0])[0], bias

    torch.manual_seed(7)
    model = mm.GPTModel(config, mm.get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=mm.SEQUENCE)
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        for owner, name in (
            (layer.self_attention, "linear_qkv"),
            (layer.self_attention, "linear_proj"),
            (layer.mlp, "linear_fc1"),
            (layer.mlp, "linear_fc2"),
        ):
            setattr(owner, name, Adapted(getattr(owner, name)))
    return model


def _sizes(tp: int) -> dict[str, Any]:
    # Initial weights then do not depend on the number of tensor-parallel ranks.
    return {"tensor_model_parallel_size": tp, "use_cpu_initialization": True}


def _replicated(strategy: str, tp: int = 1) -> torch.nn.Module:
    """The model, of whose adapters every rank holds all."""
    config = mm.transformer_config(finalize_model_grads_func=mm.finalize, **_sizes(tp))
    module = adapted(config)
    weights = [weight for name, weight in module.named_parameters() if name.endswith((".up.weight", ".down.weight"))]
    return mm.FullyShardedDataParallel(config, mm.ddp_config(strategy), module, replicated_params=weights)


def _trains(strategy: str, tp: int, replicated: bool = False) -> None:
    with mm.megatron(tensor_model_parallel_size=tp):
        expected = mm.train(None, 4, build=adapted, **_sizes(tp))
        model = _replicated(strategy, tp) if replicated else mm.wrapped(strategy, adapted, **_sizes(tp))
        optimizer = mm.optimizer_of(model)
        found = mm.run_steps(model, optimizer, 4)
        assert found.norms == pytest.approx(expected.norms, rel=1e-6)
        if tp == 1:
            found.weights = mm.weights_of(model)
            mm.assert_same(found, expected, rtol=1e-6, atol=1e-6)

        params = list(model.module.engine.params())
        for param in params:
            assert param.trained == (param.main.grad is not None) == (".up." in param.name or ".down." in param.name)
        state = [t for of_param in optimizer.optimizer.state.values() for t in of_param.values() if t.numel() > 1]
        adapters = sum(local_shard(param.main).nbytes for param in params if param.trained)
        full = sum(param.main.nbytes for param in params if param.trained)
        assert (adapters == full // tp) is (replicated or strategy == "no_shard")
        assert sum(local_shard(t).nbytes for t in state) == 2 * adapters


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _trains, strategy, 1)


@pytest.mark.parametrize("replicated", [False, True])
def test_tensor_parallel_training(ranks: RankPool, replicated: bool) -> None:
    ranks.run(4, _trains, "optim_grads_params", 2, replicated)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_replicated_adapters(ranks: RankPool, strategy: str) -> None:
    """Every rank holds them in full, and norms count them once."""
    ranks.run(2, _trains, strategy, 1, True)


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return mm.gpt_losses(model, mm.tokens(9, 1)[0]).clone()


def _adapters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: weight for n, weight in model.state_dict().items() if n.endswith((".up.weight", ".down.weight"))}


def _saves(folder: Path, replicated: bool) -> None:
    """Save adapters that are not those of :func:`adapted`, and what the model computes with them."""
    with mm.megatron():
        model = _replicated(STRATEGIES[-1]) if replicated else mm.wrapped(STRATEGIES[-1], adapted)
        for weight in _adapters(model.module).values():
            local_shard(weight).mul_(3)
        model.module.install_optimized_model_weights()
        dcp.save(_adapters(model.module), checkpoint_id=folder)
        if dist.get_rank() == 0:
            torch.save(_logits(model), folder / "expected.pt")
        else:
            _logits(model)


def _merges(folder: Path, tp: int) -> None:
    with mm.megatron(tensor_model_parallel_size=tp):
        model = mm.wrapped("optim_grads_params", adapted, **_sizes(tp))
        sharded = model.module
        state = _adapters(sharded)
        dcp.load(state, checkpoint_id=folder)
        sharded.load_state_dict(state, strict=False)
        first = mm.parallel_state.get_data_parallel_rank() == 0
        expected = torch.load(folder / "expected.pt")
        loaded = _logits(model)
        if first:
            torch.testing.assert_close(loaded, expected)

        state = sharded.state_dict()
        for name in [name for name in state if name.endswith(".up.weight")]:
            layer = name.removesuffix("up.weight")
            up, down, base = (state[layer + part].full_tensor() for part in ("up.weight", "down.weight", "base.weight"))
            merged = {f"{layer}base.weight": base + up @ down, name: torch.zeros_like(up)}
            sharded.load_state_dict(merged, strict=False)
        assert not any(state[name].full_tensor().any() for name in state if name.endswith(".up.weight"))
        torch.testing.assert_close(_logits(model), loaded)


@pytest.mark.parametrize("replicated", [False, True])
def test_adapters_are_saved_alone_and_merged(ranks: RankPool, tmp_path: Path, replicated: bool) -> None:
    """On different numbers of ranks than they were saved on."""
    ranks.run(2, _saves, tmp_path, replicated)
    ranks.run(1, _merges, tmp_path, 1)
    ranks.run(4, _merges, tmp_path, 2)


def _frozen_positions(config: Any) -> torch.nn.Module:
    model = mm.gpt(config)
    model.embedding.position_embeddings.weight.requires_grad_(False)
    return model


@on_ranks(4)
def test_settings_that_megatron_has_no_flag_for() -> None:
    with mm.megatron():
        expected = mm.train(None, 2, build=_frozen_positions)
        config = mm.transformer_config(finalize_model_grads_func=mm.finalize)
        module = _frozen_positions(config)
        left = module.embedding.position_embeddings.weight
        model = mm.FullyShardedDataParallel(
            config, mm.ddp_config(), module, reshard_after_forward=2, ignored_params=[left]
        )
        found = mm.run_steps(model, mm.optimizer_of(model), 2)
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)
        assert found.norms == pytest.approx(expected.norms, rel=1e-6)
        params = {param.name: param for param in model.module.engine.params()}
        assert "embedding.position_embeddings.weight" not in params
        assert module.embedding.position_embeddings.weight is left
        assert model.module.fsdp_config.reshard_after_forward == 2
        with pytest.raises(TypeError, match="reshard_after_backward"):
            mm.FullyShardedDataParallel(config, mm.ddp_config(), mm.gpt(config), reshard_after_backward=True)
