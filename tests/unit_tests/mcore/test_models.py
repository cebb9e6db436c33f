"""Models of Megatron-Core other than GPT train as with Megatron's DDP, including with frozen modules."""

import functools
from collections.abc import Callable

import pytest
import torch

from tests.ranks import DEVICE, RankPool

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="Megatron runs on the CPU here")

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
IMAGE, PATCH = 8, 4  # pixels


def bert(config: object) -> torch.nn.Module:
    """BERT with both of its heads."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from tests.megatron_models import SEQUENCE, VOCABULARY

    torch.manual_seed(7)
    return BertModel(config, 2, bert_layer_local_spec, VOCABULARY, SEQUENCE, share_embeddings_and_output_weights=True)


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
    from tests.megatron_models import SEQUENCE, VOCABULARY, transformer_config

    vision = transformer_config(hidden_size=12, ffn_hidden_size=20)
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
        language_vocab_size=VOCABULARY,
        language_max_sequence_length=2 * SEQUENCE,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=False,
        vision_projection_config=transformer_config(ffn_hidden_size=28),
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


MODELS: dict[str, tuple[Callable, Callable]] = {
    "BERT": (bert, bert_losses),
    "LLaVA": (llava, llava_losses),
    "LLaVA, vision frozen": (llava_with_frozen_vision, llava_losses),
}


def _equals_ddp(strategy: str, model: str) -> None:
    from tests.megatron_models import megatron, train, train_ddp

    build, losses_of = MODELS[model]
    with megatron():
        expected = train_ddp(build=build, losses_of=losses_of)
        found = train(strategy, build=build, losses_of=losses_of)
    assert expected.norms[0] > 0
    torch.testing.assert_close(found.norms, expected.norms, rtol=2e-6, atol=0)
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        ours = found.weights[name]
        if name.endswith("linear_qkv.bias"):
            # The keys' bias shifts all scores alike: its gradient is rounding, of which Adam makes whole steps.
            heads = (2, 3, -1)
            weight, ours = weight.view(heads)[:, ::2], ours.view(heads)[:, ::2]
        torch.testing.assert_close(ours, weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
def test_trains_as_with_ddp(ranks: RankPool, model: str, strategy: str) -> None:
    ranks.run(2, _equals_ddp, strategy, model)
