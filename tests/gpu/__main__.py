"""Runs the checks one after the other, each in a process of its own with a time limit.

python -m tests.gpu --out FOLDER [--only memory,waits] [--minutes 9] [--again] [--device cpu --dry-run]

A run goes on where the last one with this folder stopped: it leaves out what has passed or was skipped, and begins no
check that might end after --minutes.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.verdict import Setup, Skipped, Verdict

ROOT = Path(__file__).resolve().parents[2]
DRY = "the CPU, as a dry run"


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        function: ``module:function`` in this package. It takes a Setup and returns a Verdict.
        seconds: Its time limit.
        environment: Environment variables of its process on a GPU.
    """

    function: str
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)


# Ranks that share a device reach each other through the loopback interface.
LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
# The most valuable first. Together they take 25 minutes at most.
CHECKS = {
    "unit": Check("unit_tests:of_cuda", 180),
    "sanitizer": Check("one_rank:sanitizer", 120, {"TORCH_CUDA_SANITIZER": "1"}),
    "waits": Check("one_rank:host_waits", 60),
    "memory": Check("one_rank:memory", 60),
    "rules": Check("rules:on_device", 60),
    "megatron": Check("megatron_loop:compare", 300),
    "speed": Check("megatron_loop:speed", 180),
    "gloo": Check("several_ranks:over_gloo", 120),
    "probe": Check("several_ranks:probe_nccl", 60, LOOPBACK),
    "parity": Check("unit_tests:all_of_them", 240),
    "nccl": Check("several_ranks:over_nccl", 120, LOOPBACK),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(CHECKS)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", default=",".join(CHECKS), help=f"checks, separated by commas: {names}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="small sizes, only to run the checks' own code")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no check that might end later (default: 9)")
    parser.add_argument("--again", action="store_true", help="also run what has passed or was skipped")
    parser.add_argument("--here", action="store_true", help="run one check in this process")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    unknown = [name for name in options.only if name not in CHECKS]
    if unknown:
        parser.error(f"--only: expected some of {names}; got {', '.join(unknown)}")
    if options.device == "cpu" and not options.dry_run:
        parser.error("--device cpu needs --dry-run")
    return options


def main(options: argparse.Namespace) -> int:
    """Run the checks. Returns 1 if one failed, else 3 if some are left for the next run, else 0."""
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.here:
        run_here(options.only[0], options)
        return 0
    failed, left = 0, []
    end = time.monotonic() + 60 * options.minutes
    for name in options.only:
        start = time.monotonic()
        if not options.again and (earlier := passed_before(name, options)) is not None:
            print(f"{name}: {earlier.outcome} in an earlier run: {earlier.line}", flush=True)
            continue
        if start + CHECKS[name].seconds > end:
            left.append(name)
            continue
        verdict = run_apart(name, options)
        print(f"{name}: {verdict.outcome}: {verdict.line} ({time.monotonic() - start:.0f} s)", flush=True)
        failed |= verdict.outcome == "failed"
    if left:
        print(f"not run yet: {', '.join(left)}. Run the command again to go on.", flush=True)
    return 1 if failed else 3 if left else 0


def passed_before(name: str, options: argparse.Namespace) -> Verdict | None:
    """The verdict of an earlier run on the same kind of device; None if there is none, or the check failed."""
    try:
        verdict = Verdict.load(file := options.out / f"{name}.json")
        on_cpu = json.loads(file.read_text()).get("device") == DRY
    except (OSError, ValueError, KeyError):
        return None
    return verdict if verdict.outcome != "failed" and on_cpu == (options.device == "cpu") else None


def run_apart(name: str, options: argparse.Namespace) -> Verdict:
    """Run a check in a process, which is killed with all of its children when the time is up."""
    check, file, log = CHECKS[name], options.out / f"{name}.json", options.out / f"{name}.log"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu", "--here", "--only", name, "--out", str(options.out)]
    command += ["--device", options.device, *(["--dry-run"] if options.dry_run else [])]
    # A CPU may be busy, and nothing is measured on it.
    limit = check.seconds * (5 if options.device == "cpu" else 1)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "FSDP_TEST_DEVICE": options.device}
    environment |= check.environment if options.device == "cuda" else {}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if file.exists():
        return Verdict.load(file)
    how = f"did not end within {limit:.0f} s" if code is None else f"ended with exit code {code}"
    verdict = Verdict("failed", f"{how}; see {log}")
    verdict.save(file, name=name)
    return verdict


def run_here(name: str, options: argparse.Namespace) -> None:
    """Run a check in this process, and write its verdict."""
    check, start = CHECKS[name], time.monotonic()
    module, _, function = check.function.partition(":")
    setup = Setup(options.device, options.dry_run, options.out, check.seconds)
    # Imported late: torch reads the environment, and the process that starts the checks needs neither.
    import torch

    device = DRY
    try:
        if setup.on_cuda:
            if not torch.cuda.is_available():
                raise Skipped("there is no CUDA device")
            device = torch.cuda.get_device_name()
        verdict = getattr(importlib.import_module(f"tests.gpu.{module}"), function)(setup)
    except Skipped as reason:
        verdict = Verdict("skipped", str(reason))
    except Exception as error:  # noqa: BLE001 - the verdict of the check
        traceback.print_exc()
        verdict = Verdict("failed", f"{type(error).__name__}: {str(error).strip()[:300]}".replace("\n", " "))
    seconds = round(time.monotonic() - start, 1)
    verdict.save(setup.out / f"{name}.json", name=name, device=device, torch=torch.__version__, seconds=seconds)


if __name__ == "__main__":
    sys.exit(main(parse()))
