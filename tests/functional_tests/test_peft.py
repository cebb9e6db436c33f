"""Adapters of Hugging Face's peft on a model that is sharded with ``fully_shard``."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import on_ranks

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft is not installed: pip install --no-deps peft")


def _adapted(storage: torch.dtype | None = None) -> Any:
    """A model with adapters; with ``storage``, on 4-bit weights that are kept in memory of this dtype."""
    import peft
    import transformers

    width = 24 if storage is None else 64
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    if storage is not None:
        _quantize(model, storage)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def _quantize(model: Any, storage: torch.dtype) -> None:
    import bitsandbytes

    for part in [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)]:
        for name, linear in [each for each in part.named_children() if isinstance(each[1], torch.nn.Linear)]:
            sizes = linear.in_features, linear.out_features
            made = bitsandbytes.nn.Linear4bit(
                *sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4", quant_storage=storage
            )
            made.load_state_dict(linear.state_dict())
            part._modules[name] = made.to("cpu")
            # In evaluation, it would pack codes in a different order.
            made.support_avx512bf16_for_cpu = False


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


@on_ranks(2)
@pytest.mark.parametrize("interface", ["own", "fsdp2"])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_adapters_on_4_bit_weights(storage: torch.dtype, interface: str) -> None:
    """As QLoRA trains. The codes are sharded, whatever the dtype of their memory."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from megatron.fsdp.dtensor.ragged_dtensor import local_shard
    from megatron_fsdp import fully_shard_model

    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    plain, model = _adapted(storage), _adapted(storage)
    names = [name for name, p in plain.named_parameters() if getattr(p, "bnb_quantized", False)]
    assert len(names) == 14
    own = interface == "own"
    model = fully_shard_model(model, fsdp_unit_modules=["LlamaDecoderLayer"]) if own else _sharded(model)
    assert _train(model, slice(None)) == _train(plain, slice(None))
    found = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    for name, expected in plain.named_parameters():
        full = found[name].full_tensor()
        if name in names:
            assert torch.equal(full.view(torch.uint8), expected.view(torch.uint8))
        else:
            torch.testing.assert_close(full, expected, rtol=1e-5, atol=1e-6)
    held = torch.tensor(sum(local_shard(found[name]).nbytes for name in names))
    dist.all_reduce(held)
    assert held == sum(plain.get_parameter(name).nbytes for name in names)
    # With the scales, which torch looks up by their keys.
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert {name.removeprefix("module.") for name in state} >= plain.state_dict().keys()
    tokens = torch.arange(16).view(2, 8)
    for each in (model, plain):
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens).logits, plain(input_ids=tokens).logits, rtol=1e-4, atol=1e-5)
