"""Programs as commands take them with ``--model``: a model, and what else it takes to train it.

``file.py:build`` and ``module:build`` name a function that returns a model, or a model with more of what
:class:`Program` lists, as a tuple in that order or as a dict by name::

    def build():
        model = MyModel()
        batches = [torch.randint(0, 1000, (2, 64)) for _ in range(8)]
        return {"model": model, "batches": batches, "loss": lambda model, tokens: model(tokens).mean()}

A Hugging Face ``config.json`` or its folder stands for that model without weights. Nothing is downloaded.
"""

import importlib
import itertools
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.fsdp.helpers.spelling import did_you_mean
from megatron.fsdp.runtime.partition import resolve_unit_classes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def output_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Call the model with a batch: a mapping by name, a tuple or list by position, anything else as the one argument.

    Returns:
        The output's ``loss``, as models of Hugging Face have, else the output if it is a number, else the mean of its
        squares. Of several outputs, the first.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    output = next(iter(output.values())) if isinstance(output, Mapping) else output
    output = output[0] if isinstance(output, tuple | list) else output
    return output if output.dim() == 0 else output.float().square().mean()


@dataclass
class Program:
    """A model and how it is trained.

    Attributes:
        model: The model, not sharded.
        batches: Batches in the order of training. Ranks take turns: each batch goes to one of them. A short list starts
            again at its end. None: random input for the model's first layer, if that is an embedding or a linear layer.
        loss: Called with the model and a batch. Returns the loss to call ``backward`` on.
        optimizer: An optimizer of the model's parameters. None: AdamW.
        shard: Called with model and optimizer. Returns both, sharded. None: as the command's options say.
    """

    model: nn.Module
    batches: Iterable[Any] | None = None
    loss: Callable[[nn.Module, Any], torch.Tensor] = output_loss
    optimizer: torch.optim.Optimizer | None = None
    shard: Callable[..., tuple[nn.Module, torch.optim.Optimizer]] | None = None

    def first_batches(self, count: int, tokens: tuple[int, int] = (2, 16)) -> list[Any]:
        """The first ``count`` batches.

        Args:
            count: Their number.
            tokens: Shape of random tokens: sequences, and tokens of each.

        Raises:
            ValueError: There are none, and none can be made.
        """
        batches = (_random_batch(self.model, tokens) for _ in range(count)) if self.batches is None else self.batches
        found = list(itertools.islice(iter(batches), count))
        if not found:
            raise ValueError("expected at least one batch; got none")
        return [found[number % len(found)] for number in range(count)]


def load(target: str) -> Program:
    """Call the function that ``--model`` names.

    Args:
        target: ``module:function`` or ``file.py:function``, or a Hugging Face ``config.json`` or its folder.

    Raises:
        ValueError: The target cannot be found or returns something else.
    """
    if target.endswith(".py"):
        raise ValueError(f"expected a function, as in {target}:build; got {target!r}")
    found = _huggingface(Path(target)) if Path(target).exists() else _call(target)
    if isinstance(found, Mapping):
        names = [field.name for field in fields(Program)]
        unknown = [name for name in found if name not in names]
        if unknown or "model" not in found:
            hint = did_you_mean(unknown[0], names) if unknown else ""
            raise ValueError(f"expected {target} to return a dict with {', '.join(names)}; got {list(found)}.{hint}")
        program = Program(**found)
    else:
        program = Program(*found) if isinstance(found, tuple) and 0 < len(found) <= 5 else Program(found)  # type: ignore[arg-type]
    if not isinstance(program.model, nn.Module):
        raise ValueError(
            f"expected {target} to return an nn.Module, or a tuple or dict with one; got {type(program.model).__name__}"
        )
    return program


def _call(target: str) -> Any:
    module, colon, name = target.partition(":")
    if not colon:
        raise ValueError(
            f"expected module:function, or a config.json that exists (nothing is downloaded); got {target!r}"
        )
    file = Path(module)
    sys.path.insert(0, str(file.parent.resolve()))
    module = file.stem if file.suffix == ".py" else module
    try:
        return getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"cannot call {target!r}: {error}") from error
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"at {place.filename}:{place.lineno}"
        raise ValueError(f"cannot call {target!r}: {type(error).__name__}: {error}, {where}") from error


def _huggingface(path: Path) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError("a config.json needs transformers: pip install transformers") from error
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return model


def _random_batch(model: nn.Module, shape: tuple[int, int]) -> Any:
    """Random input for the first layer with parameters; token ids with labels for a model of Hugging Face."""
    first = next((module for module in model.modules() if list(module.parameters(recurse=False))), None)
    if isinstance(first, nn.Embedding):
        tokens = torch.randint(0, first.num_embeddings, shape)
        return {"input_ids": tokens, "labels": tokens} if hasattr(model, "generate") else tokens
    if isinstance(first, nn.Linear):
        return torch.randn(4, first.in_features)
    raise ValueError(
        "the model's first layer is neither an embedding nor a linear layer, so its input cannot be made up: "
        'return batches as well, as in {"model": model, "batches": [batch, ...]}'
    )


def unit_classes(model: nn.Module, names: Sequence[str]) -> tuple[type[nn.Module], ...]:
    """Classes of the units: those named, else the most frequent class in the model's longest ``nn.ModuleList``.

    Raises:
        ValueError: The model has none of these.
    """
    if names:
        return tuple(cls for cls in resolve_unit_classes(model, list(names)) if isinstance(cls, type))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError("the model has no nn.ModuleList of layers: name the classes of its units with --units")
    return (Counter(type(layer) for layer in max(lists, key=len)).most_common(1)[0][0],)
