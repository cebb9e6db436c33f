"""Checkpoints of Megatron-Core's own FSDP are loaded, and training goes on with the losses that it reached."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import DEVICE, RankPool

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "samples"

pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda", reason="Megatron runs on the CPU here"),
    pytest.mark.skipif(not SAMPLES.exists(), reason="the sample checkpoints are not beside the repository"),
]


def meta_of(name: str) -> dict[str, Any]:
    """What is known of a sample; the converted one is of the model of another."""
    meta: dict[str, Any] = json.loads((SAMPLES / name / "meta.json").read_text())
    if "model" in meta:
        return meta
    losses = {"eval_loss": meta["eval_loss_after_load"], "next2_train_losses": meta["next2_train_losses_after_load"]}
    return {**json.loads((SAMPLES / "fsdp_dtensor_dp2" / "meta.json").read_text()), **losses}


def _config(meta: dict[str, Any]) -> Any:
    from megatron.core.transformer import TransformerConfig

    given = {key: value for key, value in meta["model"].items() if key not in ("activation_func", "params_dtype")}
    known = {key: _value(text) for key, text in given.items()}
    return TransformerConfig(
        **{**known, "activation_func": torch.nn.functional.silu, "params_dtype": torch.bfloat16},
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def _model(config: Any, strategy: str, vocabulary: int, length: int) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from tests.megatron_models import FullyShardedDataParallel, ddp_config, finalize

    torch.manual_seed(99)  # other weights than those that were trained
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm"),
        vocab_size=vocabulary,
        max_sequence_length=length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    settings = ddp_config(strategy, grad_reduce_in_fp32=True)
    config.finalize_model_grads_func = finalize
    return FullyShardedDataParallel(config=config, ddp_config=settings, module=Float16Module(config, model))


def _load(model: Any, optimizer: Any, scheduler: Any, folder: Path) -> dict[str, Any]:
    from megatron.fsdp.checkpoint.loading import load
    from megatron.fsdp.mcore.checkpoint import preprocess_fsdp_dtensor_state_dict
    from megatron.fsdp.mcore.checkpointing import other_names, strictness_of

    metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    raw = {
        "model": model.module.state_dict_for_save_checkpoint(),
        "optimizer": optimizer.sharded_state_dict({}, metadata=metadata, is_loading=True),
        "opt_param_scheduler": scheduler.state_dict(),
        "iteration": 0,
    }
    prepared = preprocess_fsdp_dtensor_state_dict(None, raw, model.module)
    load(prepared, folder, other_names, strictness_of(None))
    prepared.restore()
    model.load_state_dict(prepared["model"])
    optimizer.load_state_dict(prepared["optimizer"])
    scheduler.load_state_dict(prepared["opt_param_scheduler"])
    return prepared


def _batch(seed: int, vocabulary: int, length: int) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(length).unsqueeze(0).expand(2, -1)
    mask = torch.triu(torch.ones(length, length), 1).bool().view(1, 1, length, length)
    return tokens, positions, mask, torch.roll(tokens, -1, 1)


def _loss(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    tokens, positions, mask, labels = batch
    return model(tokens, positions, mask, labels=labels).float().mean()


def _scheduler(optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=5e-3,
        min_lr=1e-4,
        lr_warmup_steps=0,
        lr_decay_steps=400,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=400,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=True,
    )


def _go_on(name: str, strategy: str) -> tuple[float, list[float], int]:
    """Evaluation loss, losses of two more steps, and the iteration, from a sample."""
    from tests.megatron_models import OptimizerConfig, get_megatron_optimizer, megatron

    folder, meta = SAMPLES / name, meta_of(name)
    with megatron():
        config = _config(meta | {"model": {**meta["model"], "expert_model_parallel_size": "1"}})
        model = _model(config, strategy, meta["vocab"], meta["seq"])
        settings = OptimizerConfig(
            optimizer="adam",
            lr=5e-3,
            min_lr=1e-4,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-8,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        )
        optimizer = get_megatron_optimizer(settings, [model])
        scheduler = _scheduler(optimizer)
        # What was gathered before must not be used after.
        with torch.no_grad():
            _loss(model.eval(), _batch(7, meta["vocab"], meta["seq"]))
        prepared = _load(model, optimizer, scheduler, folder / f"iter_{3:07d}")
        with torch.no_grad():
            evaluated = float(_loss(model.eval(), _batch(7, meta["vocab"], meta["seq"])))
        model.train()
        losses = []
        for step in (3, 4):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            loss = _loss(model, _batch(1000 * step + dist.get_rank(), meta["vocab"], meta["seq"]))
            loss.backward()
            model.finish_grad_sync()
            assert optimizer.step()[0]
            scheduler.step(increment=4)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / dist.get_world_size())
        return evaluated, losses, prepared["iteration"]


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize(
    "name", ["fsdp_dtensor_dp2", "fsdp_dtensor_moe_ep2", "converted_repaired_strict_loadable_from_tp2dp2"]
)
def test_training_goes_on(ranks: RankPool, name: str, strategy: str) -> None:
    meta = meta_of(name)
    for evaluated, losses, iteration in ranks.run(2, _go_on, name, strategy):
        assert iteration == 3
        assert evaluated == pytest.approx(meta["eval_loss"], rel=1e-6)
        assert losses == pytest.approx(meta["next2_train_losses"], rel=2e-4)
