"""What a mistake is, and how one is made on a rank."""

import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from tests.ranks import RankPool

# The longest that a user may wait for the message, in seconds. Another rank may then wait for one that has ended.
LIMIT = 10.0
LIMIT_OF_OTHERS = 16.0
# Messages of ranks that have waited for each other take longer than this.
PAUSE = 2.0


class Mistake(NamedTuple):
    """One mistake.

    Attributes:
        title: What is wrong, in words.
        code: What the user writes, after the theme's ``setup``.
        error: The class of the error, or several if ranks differ; None: it works.
        says: Parts of the message. Where it works, what the page says about that.
        check: Where it works, code that asserts it, run after ``code``.
        on: The ranks that raise the error; the others end without one.
    """

    title: str
    code: str
    error: type[BaseException] | tuple[type[BaseException], ...] | None
    says: tuple[str, ...] | str
    check: str = ""
    on: tuple[int, ...] = (0, 1)

    @property
    def errors(self) -> list[str]:
        """The names of the classes that the error may have."""
        kinds = self.error if isinstance(self.error, tuple) else [self.error] if self.error else []
        return [kind.__name__ for kind in kinds]


# Code that several themes begin with.
BUILT_MODEL = """
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    """
SHARDED_MODEL = """
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[Block])
    """


class Theme(NamedTuple):
    """Mistakes that begin with the same code.

    Attributes:
        title: Heading on the page.
        setup: What runs before each mistake. The page shows it.
        mistakes: The mistakes.
        names: Module with the names that code uses.
    """

    title: str
    setup: str
    mistakes: tuple[Mistake, ...]
    names: str = "tests.mistakes.names"


class Outcome(NamedTuple):
    """What happened on one rank.

    Attributes:
        kinds: The names of the error's class and its bases; empty without an error.
        text: The message.
        seconds: How long it took.
    """

    kinds: list[str]
    text: str
    seconds: float


def make(theme: Theme, mistake: Mistake) -> Outcome:
    """Make the mistake on this rank. The names of ``theme.names`` are defined, ``rank`` and ``folder``."""
    shared: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    names: dict[str, Any] = {"rank": dist.get_rank(), "folder": shared[0]}
    exec(f"from {theme.names} import *", names)
    with names.get("context", nullcontext)(), _restored(names.get("Model", nn.Module)):
        exec(textwrap.dedent(theme.setup), names)
        begin = time.monotonic()
        try:
            exec(compile(textwrap.dedent(mistake.code), "<your code>", "exec"), names)
        except BaseException as error:  # noqa: BLE001 - this is the test
            text = str(error).replace(shared[0], "folder")
            return Outcome([kind.__name__ for kind in type(error).__mro__], text, time.monotonic() - begin)
        seconds = time.monotonic() - begin
        exec(textwrap.dedent(mistake.check), names)
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


def run(pool: RankPool, theme: Theme, mistake: Mistake) -> list[Outcome]:
    """Make a mistake on two ranks, and return what happened on each of them."""
    outcomes: list[Outcome] = pool.run(2, make, theme, mistake)
    if max(each.seconds for each in outcomes) > PAUSE:
        pool.close()  # they have waited for each other, and collectives may still be in progress
    return outcomes


def shown(outcomes: list[Outcome], mistake: Mistake) -> str:
    """What the page says about a mistake: of the first rank's message, the line that counts."""
    if mistake.error is None:
        return f"Works: {mistake.says}"
    first = next(each for each in outcomes if each.kinds)
    line = next((line for line in first.text.splitlines() if mistake.says[0] in line), "")
    return f"{first.kinds[0]}: {line}{' …' if line != first.text else ''}"
