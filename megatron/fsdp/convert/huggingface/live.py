"""Hugging Face's names and layouts for single parameters of a Megatron model that trains."""

from collections.abc import Callable

import torch

from megatron.fsdp.checkpoint.lazy import of
from megatron.fsdp.convert.huggingface.maps import Link, links
from megatron.fsdp.convert.huggingface.model import Model
from megatron.fsdp.convert.huggingface.rules import RULES, Context
from megatron.fsdp.naming.names import without_half


def to_huggingface_names(model: Model) -> Callable[[str, torch.Tensor], list[tuple[str, torch.Tensor]]]:
    """Return a function that converts a full parameter to Hugging Face's tensors, on the parameter's device.

    The function takes the parameter's canonical name, where a gated layer's halves are one tensor. It raises ValueError
    for a name that no table has, and for a tensor of a different shape than the model's.
    """
    table: dict[str, list[Link]] = {}
    for link in links(model, "local"):
        for name in dict.fromkeys(map(without_half, link.megatron)):
            table.setdefault(name, []).append(link)
    context = Context(model, 0)

    def convert(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        if name not in table:
            raise ValueError(f"{name}: expected a parameter of a {model.architecture} model; no table has its name.")
        found: list[tuple[str, torch.Tensor]] = []
        for link, half in zip(table[name], tensor.chunk(len(table[name])), strict=True):
            parts = [part.full_tensor() for part in RULES[link.rule].to_huggingface(of(half), context)]
            wrong = [(part.shape, shape) for part, shape in zip(parts, link.shapes, strict=True) if part.shape != shape]
            if wrong:
                raise ValueError(f"{name}: expected a part of shape {wrong[0][1]}; got {tuple(wrong[0][0])}.")
            found += zip(link.huggingface, parts, strict=True)
        return found

    return convert
