"""Samples that were converted, and converted back, go on with the losses that megatron-core reached from them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.convert.run import read_state, write_state
from tests.checkpoints import ITERATION, TORCH_DIST, meta, sample
from tests.ranks import DEVICE, RankPool
from tests.unit_tests.mcore import test_samples

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="Megatron runs on the CPU here")


def converted(name: str, folder: Path, *formats: str) -> Path:
    """A folder with a sample in another format, as samples are kept."""
    source = sample(name) / ITERATION
    for number, format in enumerate(formats):
        target = folder / str(number) / name
        write_state(read_state(source), target / ITERATION, format)
        source = target / ITERATION
    shutil.copy(sample(name) / "meta.json", source.parent)
    return source.parent.parent


def assert_reached(found: list[Any], name: str) -> None:
    known = meta(name)
    # With tensor parallelism, bfloat16 rounds other sums; there is none here.
    tolerance = 1e-6 if known["tp"] == 1 else 2e-5
    for evaluated, losses, iteration in found:
        assert iteration == 3
        assert evaluated == pytest.approx(known["eval_loss"], rel=tolerance)
        assert losses == pytest.approx(known["next2_train_losses"], rel=2e-4)


def _with_fsdp(folder: Path, name: str) -> Any:
    test_samples.SAMPLES = folder
    return test_samples._go_on(name, "optim_grads_params")


@pytest.mark.parametrize("name", TORCH_DIST)
def test_fsdp_goes_on_from_torch_dist(ranks: RankPool, tmp_path: Path, name: str) -> None:
    folder = converted(name, tmp_path, "fsdp_dtensor")
    assert_reached(ranks.run(2, _with_fsdp, folder, name), name)


def _model(known: dict[str, Any]) -> torch.nn.Module:
    """The sample's model with other weights, in Megatron's DDP, on ranks that share experts as the sample's did."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from tests.megatron_models import ddp_config

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=known["ep"])
    tensor_parallel.model_parallel_cuda_manual_seed(99)
    config = test_samples._config({**known, "model": {**known["model"], "tensor_model_parallel_size": "1"}})
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm"),
        vocab_size=known["vocab"],
        max_sequence_length=known["seq"],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return DistributedDataParallel(config, ddp_config(None, grad_reduce_in_fp32=True), Float16Module(config, gpt))


def _load(model: Any, optimizer: Any, scheduler: Any, path: Path) -> int:
    """Load strictly, as Megatron's training script does; the iteration."""
    from megatron.core import dist_checkpointing

    content = dist_checkpointing.load_content_metadata(str(path))
    state = {"model": model.module.sharded_state_dict(metadata=content)}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=True, metadata=content)
    loaded = dist_checkpointing.load(state, str(path))
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    return int(loaded["iteration"])


def _with_ddp(folder: Path, name: str) -> tuple[float, list[float], int]:
    """The same with Megatron's DDP and distributed optimizer, and its own way to load."""
    from tests.megatron_models import OptimizerConfig, get_megatron_optimizer, megatron

    known = meta(name)
    with megatron(plugin=False):
        model = _model(known)
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
        scheduler = test_samples._scheduler(optimizer)
        iteration = _load(model, optimizer, scheduler, folder / name / ITERATION)
        with torch.no_grad():
            evaluated = float(test_samples._loss(model.eval(), test_samples._batch(7, known["vocab"], known["seq"])))
        model.train()
        losses = []
        for step in (3, 4):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            batch = test_samples._batch(1000 * step + dist.get_rank(), known["vocab"], known["seq"])
            loss = test_samples._loss(model, batch)
            loss.backward()
            model.finish_grad_sync()
            assert optimizer.step()[0]
            scheduler.step(increment=4)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / dist.get_world_size())
        return evaluated, losses, iteration


@pytest.mark.parametrize("name", TORCH_DIST)
def test_megatron_goes_on_from_what_came_back(ranks: RankPool, tmp_path: Path, name: str) -> None:
    folder = converted(name, tmp_path, "fsdp_dtensor", "torch_dist")
    assert_reached(ranks.run(2, _with_ddp, folder, name), name)
