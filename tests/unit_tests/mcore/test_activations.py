"""The estimate of activations against the tensors that a layer of Megatron saves for backward."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tests.megatron_models as mm
from megatron.fsdp.tools.activations import layer_bytes, workload
from tests.ranks import RankPool

SEQUENCE, BATCH, HIDDEN, VOCABULARY = 128, 2, 64, 96
GPT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def _measure(settings: dict[str, Any], lowest: float, highest: float) -> None:
    with mm.megatron(plugin=False):
        config = mm.transformer_config(
            num_layers=1,
            hidden_size=HIDDEN,
            ffn_hidden_size=4 * HIDDEN,
            num_attention_heads=4,
            bf16=True,
            params_dtype=torch.bfloat16,
            bias_activation_fusion=True,
            attention_softmax_in_fp32=False,
            **settings,
        )
        spec = mm.get_gpt_layer_local_spec(normalization=config.normalization)
        model = mm.GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE).bfloat16()
        args = SimpleNamespace(
            data_parallel_size=1,
            micro_batch_size=BATCH,
            global_batch_size=BATCH,
            seq_length=SEQUENCE,
            padded_vocab_size=VOCABULARY,
        )
        found = workload([mm.Float16Module(config, model)], config, args, fused=False, stage=0)
        assert found is not None and (found.dense, found.experts) == (1, 0)
        assert found.vocabulary == VOCABULARY, "the logits count in bf16, too"

        given = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        given.add(mask.untyped_storage().data_ptr())
        saved: dict[int, torch.Tensor] = {}  # tensors stay alive, so that no address is used twice

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.decoder.layers[0](hidden, attention_mask=mask)
        real = sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in given)
        ratio = real / layer_bytes(found, False)[0]
        assert lowest < ratio < highest, ratio


@pytest.mark.parametrize(("settings", "lowest", "highest"), [(GPT, 1.1, 1.3), (LLAMA, 0.8, 1.0)], ids=["gpt", "llama"])
def test_estimate_beside_what_a_layer_saves(
    ranks: RankPool, settings: dict[str, Any], lowest: float, highest: float
) -> None:
    """On a CPU, masks of dropout have 2 bytes instead of 1. Without dropout, the estimate counts masks of scores."""
    ranks.run(1, _measure, settings, lowest, highest)
