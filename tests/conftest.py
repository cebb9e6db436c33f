"""Fixtures that all tests share, and the record of results that docs/status.md is made of."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.evidence.recorder import Recorder
from tests.exchanges import COLLECTIVES
from tests.needs import left_out
from tests.ranks import DEVICE, RankPool
from tests.slow import LATER_STRATEGIES
from tests.tiers import mark_merge, strategy_of

LEFT_OUT = left_out(Path(__file__).parent)
collect_ignore = list(LEFT_OUT)
RESULTS = "--results"
EVIDENCE = "--evidence"
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
    """Add the options of ``make compatibility`` and ``make evidence``."""
    parser.addoption(EVIDENCE, type=Path, help="folder to record in which arcs of megatron/ each test reaches")
    parser.addoption(RESULTS, type=Path, help="JSON file to add this run's results to: device, test, strategy")


def pytest_configure(config: pytest.Config) -> None:
    """Compute on one thread, as ranks do: the bits of a product depend on the number of threads. Begin the record."""
    torch.set_num_threads(1)
    folder: Path | None = config.getoption(EVIDENCE)
    if folder is not None:
        config.pluginmanager.register(Recorder(folder))
    # With several workers, the process that starts them writes the record.
    path: Path | None = config.getoption(RESULTS)
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(path))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that ``on_ranks`` decorates on ranks."""
    mark = pyfuncitem.get_closest_marker("on_ranks")
    if mark is not None:
        given = pyfuncitem.funcargs
        arguments = [given[name] for name in inspect.signature(pyfuncitem.obj).parameters]
        (count,) = mark.args
        given["ranks"].run(given.get(count, count), pyfuncitem.obj, *arguments)
    return None if mark is None else True


def pytest_report_header() -> list[str]:
    """Say which tests cannot be collected here."""
    root = Path(__file__).parents[1]
    return [f"left out: {path.relative_to(root)}, needs {', '.join(names)}" for path, names in LEFT_OUT.items()]


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put strategies into reports, and mark tests: ZeRO-0 and ZeRO-2 are slow, but not where ``every_strategy``."""
    for item in items:
        strategy = strategy_of(item)
        item.user_properties.append(("strategy", strategy))
        if strategy in LATER_STRATEGIES and item.get_closest_marker("every_strategy") is None:
            item.add_marker(pytest.mark.slow)
    mark_merge(items)


class Record:
    """Notes the worst outcome of each test for each strategy.

    Args:
        path: JSON file that the outcomes are added to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, dict[str, list[str]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note an outcome."""
        if report.when == "call" or report.outcome != "passed":
            strategy = dict(report.user_properties).get("strategy", "")
            outcomes = self._found.setdefault(report.nodeid.split("[")[0], {})
            outcomes.setdefault(str(strategy), []).append(report.outcome)

    def pytest_sessionfinish(self) -> None:
        """Add the outcomes to the file. Earlier ones of strategies that this run has not tested stay."""
        everything = json.loads(self._path.read_text()) if self._path.exists() else {}
        mine = everything.setdefault(DEVICE, {})
        for name, outcomes in self._found.items():
            worst = {strategy: max(found, key=WORST_LAST.index) for strategy, found in outcomes.items()}
            mine[name] = dict(sorted({**mine.get(name, {}), **worst}.items()))
        self._path.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
