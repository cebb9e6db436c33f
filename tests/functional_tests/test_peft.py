"""Adapters of Hugging Face's peft on a model that is sharded with ``fully_shard``."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import on_ranks

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft is not installed: pip install --no-deps peft")


def _adapted() -> Any:
    import peft
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def _sharded(model: Any) -> Any:
    from megatron.fsdp.fsdp2 import fully_shard

    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _train(model: Any, rows: slice) -> int:
    """Take a few steps; return how many parameters have optimizer state."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-5)
    for step in range(3):
        tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(step))[rows]
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return len(optimizer.state)


@on_ranks(2)
def test_methods_that_need_full_tensors(tmp_path: Path) -> None:
    import peft

    from megatron_fsdp import fully_shard_model

    adapted = _adapted()
    expected = {name: value.clone() for name, value in peft.get_peft_model_state_dict(adapted).items()}
    model = fully_shard_model(adapted, fsdp_unit_modules=["LlamaDecoderLayer"])
    adapted.save_pretrained(tmp_path)
    assert model.module is adapted
    found = peft.load_peft_weights(str(tmp_path))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    for method in (adapted.merge_and_unload, adapted.merge_adapter):
        with pytest.raises(RuntimeError, match="Load the adapters into an unsharded one, and merge them there"):
            method()
    with pytest.raises(RuntimeError, match="resize_token_embeddings: the model is sharded. Resize embeddings before"):
        adapted.resize_token_embeddings(40)


@on_ranks(2)
def test_adapters_train_alone_are_saved_alone_and_merged() -> None:
    import peft
    import torch.distributed as dist

    rank = dist.get_rank()
    whole, model = _adapted(), _adapted()
    start = copy.deepcopy(whole)
    model = _sharded(model)
    assert _train(model, slice(rank, rank + 1)) == _train(whole, slice(None)) == 28

    expected = peft.get_peft_model_state_dict(whole)
    adapters = peft.get_peft_model_state_dict(model)
    assert adapters.keys() == expected.keys()
    for name, adapter in adapters.items():
        torch.testing.assert_close(adapter.full_tensor(), expected[name], rtol=1e-5, atol=1e-6)

    # Over another base, into another sharded model.
    loaded = _sharded(start)
    peft.set_peft_model_state_dict(loaded, adapters)
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
        torch.testing.assert_close(loaded(input_ids=tokens).logits, logits)

        state = loaded.state_dict()
        for name in [name for name in state if name.endswith(".lora_B.default.weight")]:
            layer = name.removesuffix("lora_B.default.weight")
            names = layer + "base_layer.weight", layer + "lora_A.default.weight", name
            base, a, b = (state[name].full_tensor() for name in names)
            scaling = loaded.peft_config["default"].lora_alpha / loaded.peft_config["default"].r
            loaded.load_state_dict({names[0]: base + scaling * b @ a, name: torch.zeros_like(b)}, strict=False)
        torch.testing.assert_close(loaded(input_ids=tokens).logits, logits, rtol=1e-4, atol=1e-5)
