"""Stops, kills and cuts off jobs on a Slurm cluster of two nodes: what is lost, and when does training go on?

    python -m tests.cluster [--install] [--only NAMES] [--out FOLDER]

Without Slurm's programs it says how to install them, and passes.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from tests.checkpoints import DECAYED, optimizer_of, random_tensors, with_optimizer, write_torch_dist
from tests.cluster import slurm
from tests.cluster.slurm import Cluster, Node, call, cluster, output
from tests.launch import tree_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STEPS = 8
# CONTRIBUTING.md promises it.
MOST_SECONDS = 900
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
# The first step after a job was started again.
AGAIN = r"(?s)rank 0 is process.*rank 0 is process.*?step \d+: "
LOSS = re.compile(r"step (\d+): loss (\S+)")
HEAD = ("| done to the job | steps computed twice | seconds to the next step | end |", "|---|--:|--:|---|")
Row = tuple[str, str, str, str]


class Job:
    """A job that trains, and what it has printed.

    Args:
        on: The cluster.
        name: Name of the experiment.
        extra: Arguments of the training script.
        script: A script for sbatch; without one, a launch script submits itself.
        variables: Of the environment.
    """

    def __init__(self, on: Cluster, name: str, extra: str = "", script: Path | None = None, **variables: str) -> None:
        self.on, self.out = on, on.folder / "runs" / name
        environment = {**environment_of(on), "OUT": str(self.out), "EXTRA": extra, **variables}
        words = ["bash", str(HERE / "train.bash")]
        if script is not None:
            (self.out / "logs").mkdir(parents=True)
            words = ["sbatch", "--output", f"{self.out}/logs/%j.log", str(script)]
        # From a folder that has nothing to do with the repository.
        self.number = output(*words, environment=environment).split()[-1]

    @property
    def log(self) -> str:
        """All that the job has printed, in all of its runs."""
        path = self.out / "logs" / f"{self.number}.log"
        return path.read_text() if path.exists() else ""

    @property
    def state(self) -> str:
        """Slurm's word for it."""
        return self.on.state_of(self.number)

    def wait_for(self, text: str, seconds: float = 120) -> float:
        """Wait until a text has been printed."""
        what = f"{text!r} in the log of {self.out.name}"
        seconds = self.on.wait_for(lambda: re.search(text, self.log) or self.state in ENDED, seconds, what)
        assert re.search(text, self.log), f"expected {what}; the job has ended: {self.state}"
        return seconds

    def wait_for_end(self, seconds: float = 200) -> None:
        """Wait until the job is over for good."""
        self.on.wait_for(lambda: self.state in ENDED, seconds, f"an end of job {self.number}, which is {self.state}")

    def row(self, done: str, seconds: float, expected: str = "COMPLETED") -> Row:
        """Its row of the table. Checks that all steps have the losses of an undisturbed run."""
        return row_of(self.log, done, seconds, self.state, expected)


def row_of(log: str, done: str, seconds: float, state: str, expected: str = "COMPLETED") -> Row:
    """A row of the table. Checks that all steps have the losses of an undisturbed run."""
    found = [(int(step), loss) for step, loss in LOSS.findall(log)]
    REFERENCE.update(found if not REFERENCE else ())
    wrong = [pair for pair in found if REFERENCE[pair[0]] != pair[1]]
    assert state == expected, f"expected {expected}; got {state}"
    assert not wrong, f"losses differ: {wrong}"
    assert expected != "COMPLETED" or {step for step, _ in found} == set(range(STEPS)), found
    return done, str(len(found) - len(dict(found))), f"{seconds:.0f}" if seconds else "", state


REFERENCE: dict[int, str] = {}


def environment_of(on: Cluster) -> dict[str, str]:
    """The environment of jobs."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "INTERFACE": "eth0",
        "OMP_NUM_THREADS": "1", "OUTPUT_PATH": str(on.folder / "runs" / "convert"),
    }  # fmt: skip


def start(on: Cluster) -> Row:
    """A run that nobody disturbs, from any folder."""
    job = Job(on, "start")
    job.wait_for_end()
    assert re.search(r"\[node1 rank 1\] rank 1 is process", job.log), "rank and host on each line"
    return job.row("nothing", 0)


def requeue(on: Cluster) -> Row:
    """Killed by `scontrol requeue`, after the checkpoint of step 3."""
    job = Job(on, "requeue")
    job.wait_for("step 4: ")
    call("scontrol", "requeue", job.number)
    seconds = job.wait_for(AGAIN, 200)
    job.wait_for_end()
    return job.row("`scontrol requeue`", seconds)


def srun_alone(on: Cluster) -> Row:
    """SIGTERM for a job of the documentation's script, which starts ranks with srun and without torchrun."""
    page = (ROOT / "docs" / "guide" / "multi_node.md").read_text()
    found = re.search(r'(?s)title="train.sbatch"\n(.*?)```', page)
    assert found is not None
    text = found[1]
    for before, after in {
        "--nodes=8 --ntasks-per-node=8 --gpus-per-node=8": "--nodes=2 --ntasks-per-node=1 --gpus-per-node=1",
        "run/outcome.txt": "$OUT/checkpoints/outcome.txt",
        "python train.py": f"$PYTHON {HERE / 'train.py'} $OUT/checkpoints --every 100",
    }.items():
        assert before in text, before
        text = text.replace(before, after)
    script = on.folder / "train.sbatch"
    script.write_text(text)
    job = Job(on, "srun_alone", script=script)
    job.wait_for("step 3: ")
    call("scancel", "--signal", "TERM", job.number)
    seconds = job.wait_for(AGAIN, 200)
    job.wait_for_end()
    outcome = (job.out / "checkpoints" / "outcome.txt").read_text()
    assert outcome.startswith("finished"), outcome
    return job.row("`srun` without torchrun: SIGTERM, no other save", seconds)


def cancelled(on: Cluster) -> Row:
    """`scancel`: the job saves before Slurm kills it, and is not queued again."""
    job = Job(on, "cancelled", "--every 100")
    job.wait_for("step 3: ")
    call("scancel", job.number)
    job.wait_for("exit code .*stopped SIGTERM", 60)
    job.wait_for_end(60)  # it is COMPLETING as long as its script may queue it again
    time.sleep(5)
    return job.row("`scancel`: not queued again", 0, "CANCELLED")


def preemption(on: Cluster) -> Row:
    """SIGTERM in a step of 40 s, which torchrun would not wait for; another job then takes the nodes."""
    job = Job(on, "preemption", "--slow 4 --every 100")
    job.wait_for("step 3: ")
    call("sbatch", "--partition", "high", "--nodes", "2", "--exclusive", "--output", "/dev/null", "--wrap", "sleep 1")
    job.wait_for("stopped SIGTERM", 120)
    begin = time.monotonic()
    job.wait_for("step 5: ", 200)
    seconds = time.monotonic() - begin
    job.wait_for_end()
    return job.row("preempted in a step of 40 s, grace of 120 s, no other save", seconds)


def time_limit(on: Cluster) -> Row:
    """The signal before the time limit, which Slurm sends up to a minute early; nothing but that saves."""
    job = Job(on, "time_limit", "--seconds 20 --every 100", SBATCH_TIMELIMIT="3", GRACE="30")
    job.wait_for("stopped SIGTERM", 200)
    last, begin = max(int(step) for step, _ in LOSS.findall(job.log)), time.monotonic()
    job.wait_for(f"step {last + 1}: ", 200)
    seconds = time.monotonic() - begin
    job.wait_for_end(300)
    return job.row("time limit of 3 minutes, no other save", seconds)


def killed_rank(on: Cluster) -> Row:
    """SIGKILL for a rank: the job fails at once, and is not queued again."""
    job = Job(on, "killed_rank")
    job.wait_for("step 4: ")
    process = re.search(r"rank 1 is process (\d+)", job.log)
    assert process is not None
    on.nodes[1].run("kill", "-9", process[1])
    begin = time.monotonic()
    job.wait_for_end()
    print(f"failed {time.monotonic() - begin:.0f} s after the rank")
    first, begin = job, time.monotonic()
    job = Job(on, "killed_rank")  # by hand
    seconds = job.wait_for("step 5: ")
    job.wait_for_end()
    assert first.state == "FAILED"
    return row_of(first.log + job.log, "a rank killed; submitted again", seconds, job.state)


def killed_node(on: Cluster) -> Row:
    """A node that is off: Slurm queues the job again, and it goes on when there are two nodes."""
    job = Job(on, "killed_node")
    job.wait_for("step 4: ")
    on.nodes[1].end()
    begin = time.monotonic()
    on.wait_for(lambda: "down" in output("sinfo", "-h", "-N", "-o", "%T"), 90, "a node that is down")
    on.nodes[1] = Node(on.folder, 1)
    on.nodes[1].start_slurmd()
    job.wait_for(AGAIN, 200)
    seconds = time.monotonic() - begin
    job.wait_for_end()
    return job.row("a node lost, and back after Slurm noticed", seconds)


def conversion(on: Cluster) -> Row:
    """The conversion job of the examples."""
    runs = on.folder / "runs"
    target = runs / "converted" / "iter_0000007"
    tensors = with_optimizer(random_tensors({f"decoder.layers.{i}.mlp.linear_fc2.weight": (64, 64) for i in range(4)}))
    common = {"args": argparse.Namespace(transformer_impl="local", bf16=True), "optimizer": optimizer_of(DECAYED)}
    source = write_torch_dist(runs / "torch_dist", tensors, common)
    variables = {"CHECKPOINT": str(source), "OUT": str(target), "NODES": "2", "PROCESSES": "1"}
    command = ["bash", str(ROOT / "examples" / "megatron_fsdp" / "sbatch_checkpoint_convert.sh")]
    number = output(*command, environment={**environment_of(on), **variables}).split()[-1]
    seconds = on.wait_for(lambda: on.state_of(number) in ENDED, 200, "an end of the conversion")
    state = on.state_of(number)
    assert state == "COMPLETED" and (target / ".metadata").exists(), state
    return "nothing; a conversion", "", f"{seconds:.0f}", state


class Agents:
    """Two torchrun agents, one on each node, without Slurm.

    Args:
        on: The cluster.
        name: Name of the experiment.
        extra: Arguments of the training script.
    """

    started: ClassVar[list[subprocess.Popen]] = []

    def __init__(self, on: Cluster, name: str, extra: str = "") -> None:
        self.on, self.out, self.extra = on, on.folder / "runs" / name, extra
        self.out.mkdir(parents=True, exist_ok=True)
        self._processes = [self._start(node) for node in on.nodes]

    def _start(self, node: Node) -> subprocess.Popen:
        # fmt: off
        words = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
            "--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29600",
            str(HERE / "train.py"), str(self.out / "checkpoints"), *self.extra.split(),
        ]
        # fmt: on
        more = {
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with open(self.out / "log", "a") as log:
            environment = {**environment_of(self.on), **more}
            self.started.append(
                subprocess.Popen(node.command(*words), stdout=log, stderr=log, env=environment, cwd="/")
            )
        return self.started[-1]

    @property
    def log(self) -> str:
        """All that they have printed, also in earlier runs."""
        return (self.out / "log").read_text()

    def wait_for(self, text: str, seconds: float = 120) -> float:
        """Wait until a text has been printed."""
        return self.on.wait_for(lambda: re.search(text, self.log), seconds, f"{text!r} in {self.out / 'log'}")

    def signal(self, number: int) -> None:
        """Send a signal to both agents: nsenter passes on nothing."""
        for process in self._processes:
            inside = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(inside[0]) if inside else process.pid, number)

    def restart(self, number: int) -> None:
        """Kill an agent with its rank, and start it again."""
        kill_all(self._processes[number])
        self._processes[number] = self._start(self.on.nodes[number])

    def end(self) -> list[int]:
        """Wait for the end of both; return their exit codes."""
        return [process.wait(200) for process in self._processes]

    def row(self, done: str, seconds: float) -> Row:
        """The row of the table."""
        outcome = (self.out / "checkpoints" / "outcome.txt").read_text().split()[0]
        return row_of(self.log, f"two torchrun agents: {done}", seconds, outcome, "finished")


def kill_all(*agents: subprocess.Popen) -> None:
    """Kill agents that still run, with their ranks: those that a failed case leaves keep the port."""
    for agent in agents:
        if agent.poll() is None:
            for process in tree_of(agent.pid):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            agent.wait()


def agents_stopped(on: Cluster) -> Row:
    """SIGTERM for both agents in a step of 40 s; started again by hand."""
    run = Agents(on, "agents_stopped", "--slow 4 --every 100")
    run.wait_for("step 3: ")
    time.sleep(2)
    run.signal(signal.SIGTERM)
    codes = run.end()
    assert all(codes), f"torchrun exits with 1 after a signal; got {codes}"
    outcome = (run.out / "checkpoints" / "outcome.txt").read_text()
    assert outcome.startswith("stopped"), outcome
    run = Agents(on, "agents_stopped", "--every 100")
    seconds = run.wait_for("step 5: ")
    run.end()
    return run.row("SIGTERM in a step of 40 s; started again", seconds)


def agents_killed_rank(on: Cluster) -> Row:
    """SIGKILL for a rank; the agents restart all ranks."""
    run = Agents(on, "agents_killed_rank")
    run.wait_for("step 4: ")
    process = re.search(r"rank 1 is process (\d+)", run.log)
    assert process is not None
    on.nodes[1].run("kill", "-9", process[1])
    seconds = run.wait_for("step 5: ", 200)
    assert run.end() == [0, 0]
    return run.row("a rank killed, `--max-restarts 1`", seconds)


def agents_link_down(on: Cluster) -> Row:
    """A link that is down for 20 s."""
    run = Agents(on, "agents_link_down")
    run.wait_for("step 3: ")
    call("ip", "link", "set", on.nodes[1].link, "down")
    time.sleep(20)
    call("ip", "link", "set", on.nodes[1].link, "up")
    seconds = run.wait_for("step 5: ", 200)
    assert run.end() == [0, 0]
    return run.row("link down for 20 s", seconds)


def agents_killed_agent(on: Cluster) -> Row:
    """An agent killed with its rank when that has written its file of a checkpoint, and started again."""
    run = Agents(on, "agents_killed_agent", "--fsync 5")
    folder = run.out / "checkpoints" / "step_6"
    on.wait_for(lambda: list(folder.glob("__1_*")), 200, f"a save in {folder}")
    assert not (folder / ".metadata").exists()
    run.restart(1)
    seconds = run.wait_for("step 6: ", 200)
    assert "step_6 is incomplete" in run.log
    assert run.end() == [0, 0]
    return run.row("one killed in a save, and started again", seconds)


CASES: tuple[Callable[[Cluster], Row], ...] = (
    start, srun_alone, cancelled, preemption, time_limit, requeue, killed_rank, killed_node, conversion,
    agents_stopped, agents_killed_rank, agents_killed_agent, agents_link_down,
)  # fmt: skip


def main() -> int:
    """Run the cases. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="install what is missing, as root")
    parser.add_argument("--only", help="names of cases, after start, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("cluster_test"), help="logs and checkpoints")
    options = parser.parse_args()
    if options.install and slurm.missing():
        slurm.install()
    if slurm.missing() or os.geteuid():
        print(f"skipped: needs root and {', '.join(slurm.missing()) or 'nothing else'}. Run as root:")
        print("    make cluster-test INSTALL=1\nor install: " + slurm.PACKAGES)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # the cluster ends as well
    folder = options.out.resolve() / time.strftime("%Y-%m-%d_%H-%M-%S")
    rows, failed = [*HEAD], []
    began = time.monotonic()
    with cluster(folder) as running:
        for node in running.nodes:
            node.run(*"tc qdisc add dev eth0 root tbf rate 1gbit burst 256kb latency 50ms".split())
        for case in CASES:
            if case is not start and options.only and case.__name__ not in options.only.split(","):
                continue
            begin = time.monotonic()
            try:
                rows.append(f"| {' | '.join(case(running))} |")
                print(rows[-1])
            except Exception:
                failed.append(case.__name__)
                traceback.print_exc()
                running.cancel_all()
            finally:
                kill_all(*Agents.started)
            print(f"{case.__name__}: {time.monotonic() - begin:.0f} s", flush=True)
    table = "\n".join(rows) + "\n"
    (folder / "table.md").write_text(table)
    print(table + f"failed: {', '.join(failed) or 'nothing'}; logs are in {folder}")
    print(f"{time.monotonic() - began:.0f} s; expected at most {MOST_SECONDS}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
