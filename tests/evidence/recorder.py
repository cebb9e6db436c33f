"""Records the lines and branches of megatron/ that run, each once between two calls of :func:`write`."""

import functools
import gzip
import inspect
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = str(Path(__file__).resolve().parents[2]) + os.sep
PRODUCT = (f"{ROOT}megatron{os.sep}", f"{ROOT}megatron_fsdp{os.sep}")
FOLDER = "FSDP_TEST_EVIDENCE"
TOOL = 4
# Files have at most 600 lines: an arc is FROM * WIDTH + TO, and FROM is 0 for a line.
WIDTH = 1000

_arcs: dict[str, set[int]] = defaultdict(set)
_taken: dict[tuple[CodeType, int], int] = {}
_began = 0.0


def start() -> None:
    """Record from now on, in all threads of this process."""
    global _began  # noqa: PLW0603
    _began = time.process_time()
    monitor = sys.monitoring
    if monitor.get_tool(TOOL) is None:
        monitor.use_tool_id(TOOL, "evidence")
        for event, call in (("PY_START", _enter), ("LINE", _line), ("BRANCH", _branch)):
            monitor.register_callback(TOOL, getattr(monitor.events, event), call)
        monitor.set_events(TOOL, monitor.events.PY_START)
    monitor.restart_events()


def _enter(code: CodeType, offset: int) -> Any:
    # Not modules and bodies of classes, which run when the first test imports them.
    if code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(PRODUCT):
        sys.monitoring.set_local_events(TOOL, code, sys.monitoring.events.LINE | sys.monitoring.events.BRANCH)
    return sys.monitoring.DISABLE


def _line(code: CodeType, line: int) -> Any:
    _arcs[code.co_filename].add(line)
    return sys.monitoring.DISABLE


@functools.cache
def _lines(code: CodeType) -> dict[int, int]:
    return {offset: line or 0 for begin, end, line in code.co_lines() for offset in range(begin, end, 2)}


def _branch(code: CodeType, offset: int, to: int) -> Any:
    lines = _lines(code)
    _arcs[code.co_filename].add(lines.get(offset, 0) * WIDTH + lines.get(to, 0))
    return sys.monitoring.DISABLE if _taken.setdefault((code, offset), to) != to else None


def write(test: str, **facts: Any) -> None:
    """Add what ran, and the processor time that it took, to this process's file. Then reset."""
    facts |= {"test": test.rsplit(" (", 1)[0], "seconds": time.process_time() - _began}
    facts["arcs"] = {name.removeprefix(ROOT): sorted(found) for name, found in _arcs.copy().items()}
    _arcs.clear()
    _taken.clear()
    with gzip.open(Path(os.environ[FOLDER]) / f"{os.getpid()}.gz", "at") as file:
        file.write(json.dumps(facts) + "\n")
    start()


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does the same on a rank, and records it there for the test that runs here."""
    return functools.partial(_record, os.environ["PYTEST_CURRENT_TEST"], function) if FOLDER in os.environ else function


def _record(test: str, function: Callable[..., Any], *args: Any) -> Any:
    start()
    try:
        return function(*args)
    finally:
        write(test)


class Recorder:
    """Records tests of this process. Processes that they start record themselves, by ``sitecustomize``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[FOLDER] = str(folder.resolve())
        path = [str(Path(__file__).parent / "site"), ROOT, os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record one test, and its tier."""
        result = yield
        tier = next((name for name in ("slow", "merge") if item.get_closest_marker(name)), "quick")
        write(item.nodeid, tier=tier)
        return result
