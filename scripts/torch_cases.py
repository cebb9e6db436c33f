"""Runs torch's own tests of FSDP2 with this engine's interface in place of torch's, on CPUs over gloo.

    python scripts/torch_cases.py pytorch/test/distributed/_composable/fsdp -k frozen

FOLDER is that folder of a checkout of PyTorch of the installed version; its files are not part of this repository.
Every test method is one case, in a process of its own whose ranks are forked: where torch runs ranks as threads, they
are processes here. A case passes if all of its assertions hold as they are written. It is skipped if the test skips
itself, for instance without a GPU. Names that are private to torch's implementation stay torch's: cases of these fail.
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import re
import signal
import sys
import tempfile
import time
import types
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.distributed.fsdp as torch_fsdp  # noqa: E402

from megatron.fsdp import fsdp2  # noqa: E402
from megatron.fsdp.comm.backends import Backend  # noqa: E402

RANKS, MOST_RANKS = 4, 8  # of tests that take as many as there are devices, and of any


class Result(NamedTuple):
    """How a case ended: passed, failed or skipped, and the last line of its error."""

    name: str
    state: str
    why: str


def install(whole: bool = False, control: bool = False) -> None:
    """Put the engine's interface in the place of torch's, and run the ranks of torch's test classes on CPUs.

    Args:
        whole: Whether torch's helper for parity compares full tensors, instead of the rows that torch gives a rank.
        control: Whether to keep torch's implementation.
    """
    # torch's tests need this package for the texts of a few other tests.
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal import common_distributed, common_fsdp

    for module in () if control else (torch_fsdp, common_fsdp):
        for name in fsdp2.__all__:
            if hasattr(module, name):
                setattr(module, name, getattr(fsdp2, name))
    Backend.prefers_sends = False  # type: ignore[assignment,method-assign]  # tests count collectives
    tests: Any = common_fsdp

    def fork(self: Any) -> None:
        if self.world_size > MOST_RANKS:
            raise unittest.SkipTest(f"needs {self.world_size} ranks")
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    class Threads(tests.FSDPTest):
        def run_test(self, *args: Any) -> None:
            self.perThreadSetUp()
            super().run_test(*args)

        def perThreadSetUp(self) -> None:  # noqa: N802
            """Do nothing in a thread before its test begins."""

    tests.FSDPTestMultiThread = Threads
    if whole:
        tests.check_sharded_parity = _compare_whole
    common_distributed.MultiProcessTestCase._spawn_processes = fork  # type: ignore[method-assign]
    torch.accelerator.device_count = lambda: MOST_RANKS
    torch.cpu.device_count = lambda: RANKS
    torch.set_num_threads(1)
    # A fork leaves torch's pool of threads unusable, and the two threads that a first backward starts would replace it
    # at once: at times, "Invalid thread pool!" ends a rank, and the others lose their connections.
    os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))


def _compare_whole(case: Any, plain: torch.nn.Module, sharded: Any, prefixes_to_ignore: Any = ()) -> None:
    """Take the place of torch's ``check_sharded_parity``: every parameter and gradient is equal as a full tensor."""
    for (name, ours), (other, reference) in zip(sharded.named_parameters(), plain.named_parameters(), strict=True):
        case.assertEqual(functools.reduce(lambda n, each: n.replace(each, ""), prefixes_to_ignore, name), other)
        case.assertEqual(ours.full_tensor(), reference)
        case.assertEqual(ours.grad is None, reference.grad is None)
        if reference.grad is not None:
            case.assertEqual(ours.grad.full_tensor(), reference.grad)


def cases(folder: Path, selected: str) -> Iterator[tuple[Path, str]]:
    """Yield the file and ``Class.method`` of the cases whose names contain ``selected``."""
    for path in sorted(folder.glob("test_*.py")):
        module = _load(path)
        for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
            for test in suite if isinstance(suite, unittest.TestSuite) else []:
                assert isinstance(test, unittest.TestCase)
                name = test.id().removeprefix(f"{module.__name__}.")
                if selected in f"{path.stem}.{name}":
                    yield path, name


def _load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(path: Path, name: str, seconds: float, log: Path) -> Result:
    """Run a case in a process of its own. ``log`` receives what it prints, with complete errors."""
    shown = f"{path.stem}.{name}"
    if (child := os.fork()) == 0:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os._exit(_case(path, name))
    ends = time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < ends:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # ranks that wait for one that has failed
    if ended[0] == 0:
        os.waitpid(child, 0)
        return Result(shown, "failed", f"took over {seconds:.0f} s")
    state = {0: "passed", 2: "skipped"}.get(os.waitstatus_to_exitcode(ended[1]), "failed")
    return Result(shown, state, "" if state == "passed" else _reason(log.read_text()))


def _case(path: Path, name: str) -> int:
    result = unittest.TestResult()
    try:
        unittest.defaultTestLoader.loadTestsFromName(name, _load(path)).run(result)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1
    for _, text in (*result.failures, *result.errors, *result.skipped):
        print(text, flush=True)
    return 1 if result.failures or result.errors else 2 if result.skipped or not result.testsRun else 0


def _reason(log: str) -> str:
    """The line with the first error of a rank, and what follows it; or the last line."""
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith(("RuntimeError: Process", "["))]
    errors = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Misused|NotCopied|Unsupported)\b", line)]
    shown = lines[errors[0] : errors[0] + 2] if errors else lines[-1:]
    return " ".join(shown)[:200]


def main() -> int:
    """Run the cases, and print how each ended and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", default="", help="only cases whose file, class and method contain this")
    parser.add_argument("--seconds", type=float, default=120, help="a case that takes longer fails")
    parser.add_argument("--logs", type=Path, help="folder for what each case prints")
    parser.add_argument("--whole", action="store_true", help="parity is that of full tensors, not of torch's rows")
    parser.add_argument("--control", action="store_true", help="run torch's own implementation instead")
    options = parser.parse_args()
    if not any(options.folder.glob("test_*.py")):
        parser.error(
            f"{options.folder} has no test_*.py: give test/distributed/_composable/fsdp of a checkout of PyTorch."
        )
    install(options.whole, options.control)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        logs = options.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        for path, name in list(cases(options.folder, options.k)):
            result = run(path, name, options.seconds, logs / f"{path.stem}.{name}.log")
            counts[result.state] += 1
            print(f"{result.state:8}{result.name}  {result.why}".rstrip(), flush=True)
    listed = ", ".join(f"{counts[state]} {state}" for state in ("passed", "failed", "skipped"))
    print(f"torch {torch.__version__}: {listed}, of {counts.total()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
