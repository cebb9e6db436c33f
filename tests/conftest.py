"""Fixtures that all tests share, and the record of results that docs/compatibility.md is made of."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.exchanges import COLLECTIVES
from tests.needs import left_out
from tests.ranks import DEVICE, RankPool
from tests.slow import LATER_STRATEGIES

LEFT_OUT = left_out(Path(__file__).parent)
collect_ignore = list(LEFT_OUT)
RESULTS = pytest.StashKey[dict[str, dict[str, list[str]]]]()
WORST_LAST = ("skipped", "passed", "failed")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of rank processes."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def exchange(request: pytest.FixtureRequest, ranks: RankPool) -> Iterator[None]:
    """How ranks exchange flat buffers in this test. Its parameters are those of ``tests.exchanges``."""
    if DEVICE == "cuda" and request.param == COLLECTIVES:
        pytest.skip("CUDA tensors always take the collectives that NCCL runs")
    ranks.collectives_of_nccl = request.param == COLLECTIVES
    yield
    ranks.collectives_of_nccl = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that asks for the record."""
    parser.addoption("--results", type=Path, help="JSON file to add this run's results to: device, test, strategy")


def pytest_configure(config: pytest.Config) -> None:
    """Begin the record."""
    config.stash[RESULTS] = {}


def pytest_report_header() -> list[str]:
    """Say which tests cannot be collected here."""
    root = Path(__file__).parents[1]
    return [f"left out: {path.relative_to(root)}, needs {', '.join(names)}" for path, names in LEFT_OUT.items()]


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave ZeRO-0 and ZeRO-2 to ``make test-slow``, except in tests marked ``every_strategy``."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        strategy = parameters.get("strategy", parameters.get("kind"))
        if strategy in LATER_STRATEGIES and item.get_closest_marker("every_strategy") is None:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Note the outcome of each test for the strategy it ran with."""
    report = yield
    if report.when == "call" or report.outcome != "passed":
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        strategy = str(parameters.get("strategy", ""))
        name = item.nodeid.split("[")[0]
        item.config.stash[RESULTS].setdefault(name, {}).setdefault(strategy, []).append(report.outcome)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the record."""
    path: Path | None = session.config.getoption("--results")
    if path is None:
        return
    everything = json.loads(path.read_text()) if path.exists() else {}
    mine = everything.setdefault(DEVICE, {})
    for name, outcomes in session.config.stash[RESULTS].items():
        mine[name] = {strategy: max(found, key=WORST_LAST.index) for strategy, found in sorted(outcomes.items())}
    path.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
