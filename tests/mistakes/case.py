"""How a mistake is made on two ranks, and what it is compared with."""

import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tests.mistakes.expected import CHECKS, OF_TORCH, ON, PARTS
from tests.mistakes.table import MORE, Mistake
from tests.ranks import RankPool

# The longest that a user may wait for the message, in seconds. Another rank may then wait for one that has ended.
LIMIT = 10.0
LIMIT_OF_OTHERS = 16.0
# Messages of ranks that have waited for each other take longer than this.
PAUSE = 2.0
MEGATRON = "Megatron-Core"
# The table has torch's messages of this version.
TORCH = "2.13"
_OPERATION = re.compile(r"\b(aten|c10d)\.\S+")


class Outcome(NamedTuple):
    """The result on one rank.

    Attributes:
        kinds: The names of the error's class and its bases; empty without an error.
        text: The message.
        seconds: How long it took.
    """

    kinds: list[str]
    text: str
    seconds: float


def make(mistake: Mistake) -> Outcome:
    """Make the mistake on this rank. The names of a module of this package are defined, ``rank`` and ``folder``."""
    shared: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    names: dict[str, Any] = {"rank": dist.get_rank(), "folder": shared[0]}
    exec(f"from tests.mistakes.{'megatron_names' if mistake.theme == MEGATRON else 'names'} import *", names)
    with names.get("context", nullcontext)(), _restored(names.get("Model", nn.Module)):
        exec(mistake.setup, names)
        begin = time.monotonic()
        try:
            exec(compile(mistake.code, "<your code>", "exec"), names)
        except BaseException as error:  # noqa: BLE001 - this is the test
            text = str(error).replace(shared[0], "folder")
            return Outcome([kind.__name__ for kind in type(error).__mro__], text, time.monotonic() - begin)
        seconds = time.monotonic() - begin
        if not mistake.error:
            exec(CHECKS.get(mistake.title, "assert_trains(model, optimizer)"), names)
    return Outcome([], "", seconds)


@contextmanager
def _restored(cls: type) -> Iterator[None]:
    """Context after which a class has no methods that a mistake has added: later ones run in the same process."""
    before = set(vars(cls))
    try:
        yield
    finally:
        for name in set(vars(cls)) - before:
            delattr(cls, name)


def run(pool: RankPool, mistake: Mistake) -> list[Outcome]:
    """Make a mistake on two ranks, and return what happened on each of them."""
    outcomes: list[Outcome] = pool.run(2, make, mistake)
    if max(each.seconds for each in outcomes) > PAUSE:
        pool.close()  # they have waited for each other, and collectives may still be in progress
    return outcomes


def check(mistake: Mistake, outcomes: list[Outcome]) -> None:
    """Compare what happened with the table, and with ``expected``."""
    raising = ON.get(mistake.title, (0, 1)) if mistake.error else ()
    assert min(each.seconds for each in outcomes if each.kinds or not mistake.error) < LIMIT, outcomes
    assert max(each.seconds for each in outcomes) < LIMIT_OF_OTHERS, outcomes
    assert tuple(rank for rank, each in enumerate(outcomes) if each.kinds) == raising, outcomes
    for rank in raising:
        outcome, parts = outcomes[rank], PARTS.get(mistake.title, ())
        assert [part for part in parts if part not in outcome.text] == [], outcome.text
        if rank == raising[0] or not parts:
            assert mistake.error in outcome.kinds, outcomes
            assert _same_line(mistake, outcome), f"the table has {mistake.said!r}; the message is {outcome.text!r}"


def _same_line(mistake: Mistake, outcome: Outcome) -> bool:
    lines, line = outcome.text.splitlines(), mistake.line
    if torch.__version__.startswith(TORCH):
        return line in lines and mistake.said.endswith(MORE) == (line != outcome.text)
    plain = [_OPERATION.sub("", each) for each in lines]
    return mistake.title in OF_TORCH or _OPERATION.sub("", line) in plain
