"""A run stops at the end of the same step on all ranks, and leaves a file that says how it ended."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from megatron.fsdp.checkpoint.stopping import OUTCOME, STOP_FILE, StopSignals, describe, leave_outcome
from tests.launch import ROOT, tree_of
from tests.ranks import RankFailure, RankPool

WAITING = """
import sys, time
from megatron.fsdp.checkpoint.stopping import StopSignals

with StopSignals(sys.argv[1]) as signals:
    print("ready", flush=True)
    while not signals.stop_requested():
        time.sleep(0.01)
    print("stopping", flush=True)
    time.sleep(float(sys.argv[2]))  # a save
"""

# The main thread waits where it handles no signal, as in a collective.
STUCK = """
import ctypes, sys
from megatron.fsdp.checkpoint.stopping import StopSignals

with StopSignals(sys.argv[1]):
    print("ready", flush=True)
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)
"""

LOADING = """
import os, signal, sys, time
from torch.utils.data import DataLoader
from megatron.fsdp.checkpoint.stopping import StopSignals, ignore_stop_signals

loader = DataLoader(range(100), num_workers=2, worker_init_fn=ignore_stop_signals)
with StopSignals(sys.argv[1]) as signals:
    for step, _ in enumerate(loader):
        if step == 3:
            children = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()
            assert len(children) >= 2
            for process in (*map(int, children), os.getpid()):  # as a scheduler does
                os.kill(process, getattr(signal, sys.argv[2]))
        time.sleep(0.05)
        if step > 10 and signals.stop_requested():
            break
"""

# A script that ends in the examples' tail, without Slurm.
LAUNCH = """
NAME=early LOGS=$1/logs SAVE=$1 NODES=1 GPUS=1 PYTHON=$2 SCRIPT=$1/train.py ARGUMENTS=("$1" 0) RENDEZVOUS=(--standalone)
ENTRY=() PROFILER=() FILES=() THEN=()
source examples/megatron_fsdp/job.bash
"""


def said(folder: Path) -> str:
    return (folder / OUTCOME).read_text() if (folder / OUTCOME).exists() else ""


def steps_until_signal(folder: str, signalled: int) -> int:
    with StopSignals(folder) as signals:
        for step in range(10):
            if step == 3 and dist.get_rank() == signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            if signals.stop_requested():
                return step
    return 10


def test_all_ranks_stop_after_the_same_step(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(3, steps_until_signal, str(tmp_path), 1) == [3, 3, 3]
    assert said(tmp_path) == "stopped another rank\n"
    assert ranks.run(2, steps_until_signal, str(tmp_path), 0) == [3, 3]
    assert said(tmp_path) == "stopped SIGTERM\n"


def steps_until_told(folder: str) -> int:
    told = Path(folder, f"node {dist.get_rank()}")
    os.environ[STOP_FILE] = str(told)
    try:
        with StopSignals(folder) as signals:
            for step in range(10):
                if step == 2 and dist.get_rank() == 1:
                    told.touch()
                if signals.stop_requested():
                    return step
        return 10
    finally:
        del os.environ[STOP_FILE]


def test_the_launcher_of_one_node_tells_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, steps_until_told, str(tmp_path)) == [2, 2]
    (tmp_path / "node 0").touch()
    assert ranks.run(1, steps_until_told, str(tmp_path)) == [0]
    assert said(tmp_path) == "stopped SIGTERM\n"


@pytest.mark.merge
def test_a_signal_before_the_handler_exists_is_not_lost(tmp_path: Path) -> None:
    waits = 'import time\nprint("starting", flush=True)\ntime.sleep(2)\n'
    (tmp_path / "train.py").write_text(waits + WAITING)
    (tmp_path / "files").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "files")}
    command = ["bash", "-c", LAUNCH, "launch", str(tmp_path), sys.executable]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as run:
        assert run.stdout is not None
        try:
            assert any("starting" in line for line in run.stdout)
            for process in tree_of(run.pid):  # as Slurm does
                os.kill(process, signal.SIGTERM)
            assert run.wait(60) == 75
        except subprocess.TimeoutExpired:
            for process in tree_of(run.pid):
                os.kill(process, signal.SIGKILL)
            raise
    assert said(tmp_path) == "stopped SIGTERM\n"
    time.sleep(2)
    assert not list((tmp_path / "files").iterdir())


def test_the_second_interrupt_ends_a_process_that_waits_in_a_collective(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK, str(tmp_path)], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None and run.stdout.readline() == "ready\n"
            time.sleep(0.5)
            run.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                run.wait(2.5)
            run.send_signal(signal.SIGINT)
            assert run.wait(20) == 128 + signal.SIGINT
        finally:
            run.kill()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_process_tells_the_training_nothing() -> None:
    with StopSignals() as signals:
        child = os.fork()
        if child == 0:
            os._exit(signal.set_wakeup_fd(-1) != -1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert signal.set_wakeup_fd(signals._pipe) == signals._pipe


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_workers_that_load_data_outlive_the_signal(tmp_path: Path, name: str) -> None:
    run = subprocess.run([sys.executable, "-c", LOADING, str(tmp_path), name], capture_output=True, text=True)
    assert (run.returncode, said(tmp_path)) == (0, f"stopped {name}\n"), run.stderr


def test_a_rank_that_fails_before_there_is_a_process_group_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / OUTCOME).write_text("failed rank 0: the cause\n")
    monkeypatch.setenv("RANK", "3")
    with StopSignals(tmp_path):
        pass  # only rank 0 removes and writes the file
    assert said(tmp_path) == "failed rank 0: the cause\n"
    (tmp_path / OUTCOME).unlink()
    with pytest.raises(OSError, match="no address"), StopSignals(tmp_path):
        raise OSError("no address")
    assert said(tmp_path).startswith("failed rank 3 on ")


def test_a_full_disk_leaves_no_empty_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel's full disk: every write to it fails.
    full = open("/dev/full", "w")
    monkeypatch.setattr("builtins.open", lambda path, _: (Path(path).touch(), full)[1])
    leave_outcome(tmp_path, "stopped")
    assert "No space left" in caplog.text and not (tmp_path / OUTCOME).exists()


def test_a_run_that_ends_by_itself_has_finished(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / OUTCOME).write_text("stopped\n")
    assert ranks.run(2, steps_until_signal, str(tmp_path), -1) == [10, 10]
    assert said(tmp_path) == "finished\n"


def fail_on_rank(folder: str, failing: int) -> None:
    with StopSignals(folder):
        dist.barrier()
        if dist.get_rank() == failing:
            raise ValueError("no more\ndata")
        time.sleep(0.5)
        raise RuntimeError("a peer is gone")


def test_the_first_error_is_the_reason(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        ranks.run(2, fail_on_rank, str(tmp_path), 1)
    assert said(tmp_path).startswith("failed rank 1 on ") and "ValueError: no more data\n" in said(tmp_path)


def test_the_error_of_a_checkpoint_in_one_line() -> None:
    full = OSError(28, "No space left on device", "/runs/iter_0000002/__0_0.distcp")
    line = describe(CheckpointException("CheckpointException", {1: _wrap_exception(full)}))
    assert line.endswith("OSError: [Errno 28] No space left on device: '/runs/iter_0000002/__0_0.distcp'")


@pytest.mark.parametrize(("code", "outcome"), [(0, "finished"), (None, "finished"), (3, "failed")])
def test_exit_codes_of_the_loop(tmp_path: Path, code: int | None, outcome: str) -> None:
    with pytest.raises(SystemExit), StopSignals(tmp_path):
        sys.exit(code)
    assert said(tmp_path).split()[0] == outcome


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with StopSignals(tmp_path, [signal.SIGUSR1]) as signals:
        assert not signals.stop_requested()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.stop_requested()
        assert signal.getsignal(signal.SIGTERM) == before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_another_thread_cannot_handle_signals(tmp_path: Path) -> None:
    found: list[str] = []

    def enter() -> None:
        try:
            StopSignals(tmp_path).__enter__()
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == ["StopSignals: expected the main thread of a process; got another thread."]


def test_an_unwritable_folder_does_not_hide_how_the_run_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    leave_outcome(tmp_path / "file", "stopped")
    assert f"{tmp_path / 'file' / OUTCOME}: cannot write" in caplog.text


@pytest.mark.parametrize(
    ("signals", "saved"),
    [
        ([signal.SIGINT], True),
        ([signal.SIGINT, signal.SIGINT], False),
        ([signal.SIGINT, signal.SIGTERM], False),  # what torchrun makes of a second Ctrl-C
        ([signal.SIGTERM, signal.SIGTERM], True),
    ],
    ids=lambda found: "-".join(x.name for x in found) if isinstance(found, list) else "",
)
def test_a_second_interrupt_ends_the_process(tmp_path: Path, signals: list[signal.Signals], saved: bool) -> None:
    command = [sys.executable, "-c", WAITING, str(tmp_path), "3" if saved else "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "ready\n"
        run.send_signal(signals[0])
        assert run.stdout.readline() == "stopping\n"
        for number in signals[1:]:
            run.send_signal(number)  # at once: the scheduler and torchrun both send it
            time.sleep(1.2)
            run.send_signal(number)
        assert run.wait(60) == (0 if saved else -signals[-1])
    assert said(tmp_path) == (f"stopped {signals[0].name}\n" if saved else "")
