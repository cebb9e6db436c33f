"""Decides whether tensors of a vocabulary differ from a checkpoint's in their padding only.

Megatron pads a vocabulary to a multiple of ``--make-vocab-size-divisible-by`` times the tensor-parallel size, so both
change the number of rows. Megatron's DDP then loads the rows that both have, and sets further ones to zero.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core import parallel_state
from megatron.fsdp.checkpoint.matching import Padding, Shape

# The tensors that Megatron's DDP loads with a different number of rows, and the optimizer's state of them.
_VOCABULARY = re.compile(r".*\b(?:embedding\.word_embeddings\.weight|output_layer\.(?:weight|bias))(?:\.\w+)?")
# Arguments that are equal in runs that have the same tokenizer in the same place.
_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "vocab_size")
_PADDING = ("make_vocab_size_divisible_by", "tensor_model_parallel_size")

Arguments = Mapping[str, Any]


def padding_of(own: Arguments, saved: Callable[[], Arguments]) -> Padding:
    """Accept the padding that this run and a checkpoint's run give to one vocabulary.

    Args:
        own: The arguments of this run; empty if there are none, as in Megatron-Bridge.
        saved: Returns the arguments of the checkpoint's run; empty if it does not say. Called if shapes differ.
    """

    def why_not(key: str, shape: Shape, stored: Shape) -> str | None:
        if not _VOCABULARY.fullmatch(key) or shape[1:] != stored[1:]:
            return ""
        before, true = saved(), _true_size(own)
        same = all(own.get(name) == before.get(name) for name in _TOKENIZER)
        if true and _is_padded(true, shape[0], own, True) and _is_padded(true, stored[0], before, same):
            return None
        return f". {_reason(true, stored[0], before)} {_remedy(stored[0])}"

    return why_not


def _reason(true: int | None, rows: int, saved: Arguments) -> str:
    if not true:
        return "The number of tokens without padding is unknown, because this run has no tokenizer."
    if not saved:
        return "The checkpoint does not say how its vocabulary was padded."
    how = ", ".join(f"--{name.replace('_', '-')} {saved.get(name)}" for name in _PADDING)
    return f"A run with {how} does not pad {true} tokens to {rows} rows."


def _remedy(rows: int) -> str:
    multiple, rest = divmod(rows, parallel_state.get_tensor_model_parallel_world_size())
    if rest:
        return f"If it is the same vocabulary, use a tensor-parallel size that divides {rows}."
    return f"If it is the same vocabulary, --make-vocab-size-divisible-by {multiple} pads it to {rows} rows here, too."


def _is_padded(true: int, rows: int, arguments: Arguments, explicit: bool) -> bool:
    """Whether a run with these arguments pads ``true`` tokens to ``rows`` rows, or was told this number."""
    multiple = math.prod(arguments.get(name) or 0 for name in _PADDING)
    by_rule = multiple > 0 and rows == -(-true // multiple) * multiple
    return by_rule or (explicit and true <= rows == arguments.get("padded_vocab_size"))


def _true_size(own: Arguments) -> int | None:
    """The number of tokens without padding, by this run's tokenizer or arguments; None if neither says."""
    from megatron.training import get_tokenizer

    try:
        return int(get_tokenizer().vocab_size)
    except AssertionError:
        return own.get("vocab_size")
