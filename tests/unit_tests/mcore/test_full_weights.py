"""Full weights of Megatron's models: tensor- and expert-parallel ranks' tensors, under the names of the whole model."""

import argparse
import zlib
from typing import Any

import pytest
import torch.distributed as dist

import tests.megatron_models as mm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.fsdp.helpers.spelling import bare_name
from megatron.fsdp.mcore import adapter
from megatron.fsdp.mcore.parameter_names import global_name
from tests.ranks import RankPool, on_ranks

LAYERS, EXPERTS, HIDDEN, FFN, VOCABULARY = 2, 4, 20, 36, 32
MODEL = {
    "num_moe_experts": EXPERTS,
    "moe_ffn_hidden_size": FFN,
    "moe_router_topk": 2,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "num_query_groups": 2,
}


def _value(name: str) -> float:
    return float(zlib.crc32(name.encode()) % 1000)


def _gpt(config: Any) -> Any:
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, qk_layernorm=True, normalization="RMSNorm")
    return mm.GPTModel(
        config, spec, VOCABULARY, mm.SEQUENCE, position_embedding_type="rope", share_embeddings_and_output_weights=False
    )


def _filled(**sizes: Any) -> Any:
    """A model of which every element is a number that only its parameter in the whole model has."""
    model = mm.wrapped("optim_grads_params", build=_gpt, **MODEL, **sizes)
    for param in model.module.engine.params():
        param.main.data.fill_(_value(global_name(model.module.module, bare_name(param.name))))
    return model


def _gathers(sizes: dict[str, int]) -> None:
    with mm.megatron(**sizes):
        model = _filled(**sizes, sequence_parallel=True)
        for bucket_bytes, to_rank in ((4000, None), (1 << 20, dist.get_world_size() - 1)):
            found: dict[str, Any] = {}
            for bucket in model.full_weights(bucket_bytes, to_rank=to_rank):
                found |= {name: tensor.clone() for name, tensor in bucket.items()}
            if to_rank not in (None, dist.get_rank()):
                assert not found
                continue
            assert all((tensor == _value(name)).all() for name, tensor in found.items())
            names = [name for name in found if "experts" in name]
            assert len(names) == LAYERS * EXPERTS * 2
            for name in names:
                assert found[name].shape == ((2 * FFN, HIDDEN) if "fc1" in name else (HIDDEN, FFN))
            assert found["output_layer.weight"].shape == (VOCABULARY, HIDDEN)


def test_expert_and_tensor_parallel_models(ranks: RankPool) -> None:
    ranks.run(4, _gathers, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2})


@on_ranks(2)
def test_hugging_faces_names() -> None:
    arguments = argparse.Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        moe_ffn_hidden_size=FFN,
        ffn_hidden_size=FFN,
        num_attention_heads=2,
        num_query_groups=2,
        group_query_attention=True,
        num_experts=EXPERTS,
        moe_router_topk=2,
        qk_layernorm=True,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        padded_vocab_size=VOCABULARY,
        vocab_size=VOCABULARY - 2,
        seq_length=mm.SEQUENCE,
    )
    with mm.megatron(expert_model_parallel_size=2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "megatron_arguments", lambda: arguments)
        model = _filled(expert_model_parallel_size=2)
        found = {k: v.clone() for bucket in model.full_weights(huggingface=True) for k, v in bucket.items()}
        assert found["model.embed_tokens.weight"].shape == (VOCABULARY - 2, HIDDEN)
        name = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
        for half in ("gate_proj", "up_proj"):
            tensor = found[f"model.layers.1.mlp.experts.3.{half}.weight"]
            assert tensor.shape == (FFN, HIDDEN) and (tensor == _value(name)).all()
        arguments.normalization = "LayerNorm"
        with pytest.raises(NotImplementedError, match="normalization"):
            model.full_weights(huggingface=True)
