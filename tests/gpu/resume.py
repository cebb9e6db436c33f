"""A plugin of pytest for long suites in parts.

It leaves out the tests that an earlier part has finished, and begins none after some seconds. (With pytest-xdist,
--session-timeout of pytest-timeout does not end the session.)

pytest -p tests.gpu.resume --finished FILE --seconds 500
"""

import time
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    parser.addoption("--finished", type=Path, help="file with the tests that have passed or were skipped")
    parser.addoption("--seconds", type=float, help="begin no test later")


def pytest_configure(config: pytest.Config) -> None:
    """Count what the last part has finished. Processes of pytest-xdist, which all collect, must read the same."""
    seconds: float | None = config.getoption("--seconds")
    if seconds is not None:
        config.pluginmanager.register(_Limit(seconds))
    file = config.getoption("--finished")
    if file is not None and not hasattr(config, "workerinput"):
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        if new.exists():
            with file.open("a") as finished:
                finished.write(new.read_text())
            new.unlink()
        file.with_suffix(".failed").unlink(missing_ok=True)
        config.pluginmanager.register(_Parts(new))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is finished."""
    file = config.getoption("--finished")
    finished = set(file.read_text().splitlines()) if file is not None and file.exists() else set()
    left_out = [item for item in items if item.nodeid in finished]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in finished]


class _Limit:
    """Leaves out tests, without a result, once the time is up."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        return True if time.monotonic() > self._end else None


class _Parts:
    """Writes down what this part finishes, at once: it may be killed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
            with self._file.with_suffix(".failed").open("a") as failed:
                failed.write(f"{'=' * 20} {report.nodeid}\n{report.longreprtext}\n")
        if report.when == "teardown" and report.nodeid not in self._failed:
            with self._file.open("a") as finished:
                finished.write(f"{report.nodeid}\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(
            f"Run the command again to go on; delete {self._file.with_suffix('')}.* to begin again."
        )
