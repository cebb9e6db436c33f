"""Which tests are quick (``make test``), and which ones CI adds after those (marked ``merge``).

A test marked ``slow`` is left to ``make test-all``. Of the others, all that start no ranks are quick. Of a test's cases
with ranks, quick ones train with ZeRO-3 where the test has strategies, exchange buffers by gloo's sends where it has
exchanges, and of what remains they are one case for each value of each parameter. The tables name what takes long and
reaches little that quick tests do not reach: ``make evidence`` prints what the tests marked ``merge`` alone reach.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

from tests.exchanges import COLLECTIVES
from tests.slow import LATER_STRATEGIES

ZERO_3 = "optim_grads_params"
# Beginnings of names below tests/. The longest one that fits counts.
QUICK = (
    "functional_tests/test_checkpoints.py::test_resumed_training_is_the_same",
    "functional_tests/test_checkpoint_survival.py::test_killed_over_a_checkpoint_without_checksums[os.fsync-none]",
    "functional_tests/test_docs_code.py::test_every_block_is_marked",
    "functional_tests/test_doctor.py::test_bytes_of_a_command_line",
    "functional_tests/test_packaging.py::test_wheel_holds_the_packages_and_nothing_else",
    "functional_tests/test_readme.py",
    "functional_tests/test_training_loop.py::test_the_launcher_runs_an_unmodified_script_with_this_project",
)
MERGE = (
    "functional_tests/",
    "unit_tests/test_mistakes.py",
)


def strategy_of(item: pytest.Item) -> str:
    """The strategy that a case trains with, if it is one of its parameters."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    strategy = parameters.get("strategy", parameters.get("kind"))
    is_named = "strategy" in parameters or strategy in ("optim", ZERO_3, *LATER_STRATEGIES)
    return str(strategy) if is_named else ""


def function_of(item: pytest.Item) -> str:
    """What the cases of one test have in common."""
    return item.nodeid.split("[")[0]


def other_strategies(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases with other strategies, of tests that take ZeRO-3, too."""
    items = list(items)
    has_zero_3 = {function_of(item) for item in items if strategy_of(item) == ZERO_3}
    return (item for item in items if function_of(item) in has_zero_3 and strategy_of(item) not in ("", ZERO_3))


def mark_merge(items: list[pytest.Item]) -> None:
    """Mark the tests that are not quick."""
    others = set(other_strategies(items))
    seen: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for item in items:
        if item.get_closest_marker("slow") is None and not _is_quick(item, others, seen[function_of(item)]):
            item.add_marker(pytest.mark.merge)


def _is_quick(item: pytest.Item, others: set[pytest.Item], seen: set[tuple[str, int]]) -> bool:
    name = item.nodeid.removeprefix("tests/")
    listed = max((rule for rule in (*QUICK, *MERGE) if name.startswith(rule)), key=len, default=None)
    if listed is not None:
        return listed in QUICK
    call = getattr(item, "callspec", None)
    if call is None or "ranks" not in getattr(item, "fixturenames", ()):
        return True
    if item in others or call.params.get("exchange") == COLLECTIVES:
        return False
    values = set(call.indices.items())
    is_new = not values <= seen
    seen |= values
    return is_new
