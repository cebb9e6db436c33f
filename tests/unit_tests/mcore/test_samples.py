"""Checkpoints of Megatron-Core's FSDP are loaded, and training continues with the same losses."""

import json
from pathlib import Path
from typing import Any

import pytest

import tests.megatron_models as mm
from megatron.fsdp.checkpoint.loading import load
from megatron.fsdp.mcore.checkpoint_state import preprocess_fsdp_dtensor_state_dict
from megatron.fsdp.mcore.load import strictness_of
from megatron.fsdp.mcore.torch_dist import view
from megatron.fsdp.naming.keys import other_names
from tests.checkpoints import ITERATION, SAMPLES, sample
from tests.models import STRATEGIES
from tests.ranks import RankPool
from tests.sample_models import config_of, go_on, gpt


def meta_of(folder: Path) -> dict[str, Any]:
    """The known facts about a sample; the converted sample has the model of another one."""
    meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
    if "model" in meta:
        return meta
    losses = {"eval_loss": meta["eval_loss_after_load"], "next2_train_losses": meta["next2_train_losses_after_load"]}
    return {**json.loads((SAMPLES / "fsdp_dtensor_dp2" / "meta.json").read_text()), **losses}


def go_on_with_fsdp(folder: Path, strategy: str) -> Any:
    """From a folder with a sample, in our FSDP on ranks that each have all experts."""
    meta = meta_of(folder)
    with mm.megatron():
        config = config_of(meta | {"model": {**meta["model"], "expert_model_parallel_size": "1"}})
        settings = mm.ddp_config(strategy, grad_reduce_in_fp32=True)
        model = mm.FullyShardedDataParallel(config=config, ddp_config=settings, module=gpt(config, meta))
        return go_on(model, meta, lambda optimizer, scheduler: _load(model, optimizer, scheduler, folder / ITERATION))


def _load(model: Any, optimizer: Any, scheduler: Any, folder: Path) -> int:
    metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    raw = {
        "model": model.module.state_dict_for_save_checkpoint(),
        "optimizer": optimizer.sharded_state_dict({}, metadata=metadata, is_loading=True),
        "opt_param_scheduler": scheduler.state_dict(),
        "iteration": 0,
    }
    prepared = preprocess_fsdp_dtensor_state_dict(None, raw, model.module)
    load(prepared, folder, other_names, strictness_of(None), view=lambda *at: view(True, *at))
    prepared.restore()
    model.load_state_dict(prepared["model"])
    optimizer.load_state_dict(prepared["optimizer"])
    scheduler.load_state_dict(prepared["opt_param_scheduler"])
    return int(prepared["iteration"])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "name", ["fsdp_dtensor_dp2", "fsdp_dtensor_moe_ep2", "converted_repaired_strict_loadable_from_tp2dp2"]
)
def test_training_resumes(ranks: RankPool, name: str, strategy: str) -> None:
    meta = meta_of(sample(name))
    for evaluated, losses, iteration in ranks.run(2, go_on_with_fsdp, sample(name), strategy):
        assert iteration == 3
        assert evaluated == pytest.approx(meta["eval_loss"], rel=1e-6)
        assert losses == pytest.approx(meta["next2_train_losses"], rel=2e-4)
