"""Models of Megatron-Core other than GPT train as with Megatron's DDP, also with frozen modules."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tests.megatron_models as mm
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.mcore.adapter import FullyShardedDataParallel, units_of
from megatron.fsdp.mcore.initialization import build_recorded
from megatron.fsdp.mcore.options import ROOT_EMBEDDINGS
from tests.hybrid_models import stack
from tests.models import STRATEGIES
from tests.ranks import on_ranks

IMAGE, PATCH = 8, 4  # pixels


def bert(config: object) -> torch.nn.Module:
    """BERT with both of its heads."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    torch.manual_seed(7)
    return BertModel(
        config, 2, bert_layer_local_spec, mm.VOCABULARY, mm.SEQUENCE, share_embeddings_and_output_weights=True
    )


def bert_losses(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    tokens = rows[:, :-1]
    kinds = (torch.arange(tokens.shape[1]) > 2).long().unsqueeze(0)
    masked, same = module(tokens, torch.ones_like(tokens), kinds, rows[:, 1:])
    return masked + torch.nn.functional.cross_entropy(same.float(), rows[:, 0] % 2)


def llava(config: object, freeze_vision: bool = False) -> torch.nn.Module:
    """A vision transformer, a projection, and a GPT that reads pictures among its tokens."""
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.multimodal import llava_model
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    vision = mm.transformer_config(hidden_size=12, ffn_hidden_size=20)
    vision.vision_model_type = "clip"
    config.language_model_type = "gpt"
    # Without Transformer Engine, Megatron uses torch's norms, which do not accept its arguments.
    llava_model.CLIPViTModel = functools.partial(
        CLIPViTModel, ln_pre_impl=WrappedTorchNorm, ln_post_impl=WrappedTorchNorm
    )
    torch.manual_seed(7)
    model = llava_model.LLaVAModel(
        language_transformer_config=config,
        language_transformer_layer_spec=get_gpt_layer_local_spec(),
        language_vocab_size=mm.VOCABULARY,
        language_max_sequence_length=2 * mm.SEQUENCE,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=False,
        vision_projection_config=mm.transformer_config(ffn_hidden_size=28),
        vision_projection_layer_spec=MLPSubmodules(ColumnParallelLinear, RowParallelLinear),
        img_h=IMAGE,
        img_w=IMAGE,
        patch_dim=PATCH,
    )
    model.model_type = ModelType.encoder_or_decoder
    model.freeze(freeze_language_model=False, freeze_vision_model=freeze_vision, freeze_vision_projection=False)
    return model


def llava_with_frozen_vision(config: object) -> torch.nn.Module:
    return llava(config, freeze_vision=True)


def llava_losses(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX

    tokens, labels = rows[:, :-1].clone(), rows[:, 1:]
    tokens[:, 1] = DEFAULT_IMAGE_TOKEN_INDEX
    picture = torch.linspace(-1, 1, 3 * IMAGE * IMAGE).view(1, 3, IMAGE, IMAGE) * (1 + rows.sum() % 5)
    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    losses, mask = module(picture, tokens, positions, None, labels, torch.ones_like(labels, dtype=torch.float))
    return losses * mask


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
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    return HybridModel(
        config,
        stack,
        mm.VOCABULARY,
        mm.SEQUENCE,
        hybrid_layer_pattern="M*G-E",
        share_embeddings_and_output_weights=True,
    )


def untied(config: object) -> torch.nn.Module:
    return mm.gpt(config, tied=False)


MODELS: dict[str, dict[str, Any]] = {
    "untied GPT": {"build": untied},
    "BERT": {"build": bert, "losses_of": bert_losses},
    "LLaVA": {"build": llava, "losses_of": llava_losses},
    "LLaVA, vision frozen": {"build": llava_with_frozen_vision, "losses_of": llava_losses},
    "hybrid": {"build": hybrid, **SIZES},
}


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
def test_trains_as_with_ddp(strategy: str, model: str) -> None:
    with mm.megatron():
        mm.assert_same(mm.train(strategy, **MODELS[model]), mm.train_ddp(**MODELS[model]))


def _on_meta(config: object) -> torch.nn.Module:
    with torch.device("meta"):
        return build_recorded(lambda build: build(), lambda: hybrid(config))


@on_ranks(2)
def test_the_meta_device_changes_nothing() -> None:
    with mm.megatron():
        expected = mm.wrapped("optim_grads_params", hybrid, **SIZES)
        found = mm.wrapped("optim_grads_params", _on_meta, init_model_with_meta_device=True, **SIZES)
        ours = mm.weights_of(found)
        for name, weight in mm.weights_of(expected).items():
            torch.testing.assert_close(ours[name], weight, rtol=0, atol=0, msg=name)
        for model in (expected, found):
            mm.forward_backward(model, mm.tokens(0, 1))
            model.finish_grad_sync()
        for one, other in zip(expected.module.engine.params(), found.module.engine.params(), strict=True):
            assert torch.equal(one.main.grad.to_local(), other.main.grad.to_local()), one.name


ENDS = {"embedding", "output_layer"}


def _trained_with_ends(folder: Path, in_root: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train a step, load a checkpoint if there is one, else save it, and train a step. Returns the weights of both."""
    config, ddp_config = mm.transformer_config(), mm.ddp_config()
    setattr(ddp_config, ROOT_EMBEDDINGS, in_root)
    model = FullyShardedDataParallel(config, ddp_config, untied(config))
    config.finalize_model_grads_func = mm.finalize
    assert ENDS & {unit.name for unit in model.module.engine.units} == (set() if in_root else ENDS)
    optimizer = mm.optimizer_of(model)
    mm.run_steps(model, optimizer, steps=1)
    if Path(folder, ".metadata").exists():
        for param in model.module.engine.params():
            local_shard(param.main).data.zero_()
        dcp.load(mm.checkpoint_state(model, optimizer), checkpoint_id=folder)
        model.module.install_optimized_model_weights()
    else:
        dcp.save(mm.checkpoint_state(model, optimizer), checkpoint_id=folder)
    loaded = mm.weights_of(model)
    mm.run_steps(model, optimizer, steps=1, data=lambda step, number: mm.tokens(step + 1, number))
    return loaded, mm.weights_of(model)


@on_ranks(2)
def test_embedding_and_output_layer_are_units(tmp_path: Path) -> None:
    """A checkpoint of a model whose root unit had them loads with the same bits."""
    with mm.megatron():
        expected = _trained_with_ends(tmp_path, in_root=True)
        dist.barrier()
        found = _trained_with_ends(tmp_path, in_root=False)
        for name, weight in expected[0].items():
            assert torch.equal(found[0][name], weight), name
            # Shards are others, so that the norm that clips is a sum in a different order.
            torch.testing.assert_close(found[1][name], expected[1][name], rtol=1e-4, atol=1e-5)
            assert not torch.equal(expected[1][name], weight), name
        assert all(isinstance(one, type) for one in units_of(mm.gpt(mm.transformer_config()))), "tied ones in the root"
        detached = untied(config := mm.transformer_config())
        config.mtp_detach_heads = True
        assert detached.output_layer not in units_of(detached) and detached.embedding in units_of(detached)
