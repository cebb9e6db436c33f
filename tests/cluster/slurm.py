"""A Slurm cluster of two nodes on this machine, for tests. Each node has its own network, host name and processes.

Needs root, and Slurm's and munge's programs. Everything that it starts ends with it, by process id.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "munged", "ip", "tc", "unshare", "nsenter")
PACKAGES = "slurmctld slurmd slurm-client munge iproute2 util-linux"
NODES = ("node0", "node1")
BRIDGE = "fsdp-test"
NETWORK = "10.77.34"
CONFIG = """
ClusterName=test
SlurmctldHost=localhost({network}.1)
SlurmctldParameters=idle_on_node_suspend
SlurmUser=root
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
KillWait=30
MinJobAge=3600
SchedulerParameters=sched_interval=5,bf_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node0 NodeAddr={network}.10 NodeHostname=node0 CPUs=2 RealMemory=4000 Gres=gpu:2
NodeName=node1 NodeAddr={network}.11 NodeHostname=node1 CPUs=2 RealMemory=4000 Gres=gpu:2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120 State=UP
PartitionName=high Nodes=ALL PriorityTier=2 State=UP
"""


def missing() -> list[str]:
    """Programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]


def install() -> None:
    """Install Debian's or Ubuntu's packages, as root."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-q"], check=True, env=environment)
    command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *PACKAGES.split()]
    subprocess.run(command, check=True, env=environment)


class Node:
    """A node: one process whose namespaces all others of the node are in. When it ends, they end."""

    def __init__(self, folder: Path, number: int) -> None:
        self.name, self.address, self.link = NODES[number], f"{NETWORK}.{10 + number}", f"{BRIDGE}{number}"
        self.folder = folder
        own = ["unshare", "--net", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child", "sleep", "infinity"]
        self._process = subprocess.Popen(own, start_new_session=True)
        time.sleep(0.5)
        self.pid = int(Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text())
        call("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        call("ip", "link", "set", self.link, "master", BRIDGE, "up")
        self.run("hostname", self.name)
        self.run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self.run("ip", "link", "set", device, "up")

    def command(self, *words: str) -> list[str]:
        """A command that runs on this node."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--pid", "--mount", *words]

    def run(self, *words: str) -> None:
        """Run a command on this node."""
        call(*self.command(*words))

    def start_slurmd(self) -> None:
        """Start Slurm's daemon."""
        with open(self.folder / f"{self.name}.out", "a") as out:
            words = self.command("slurmd", "-D", "-N", self.name)
            subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True)

    def end(self) -> None:
        """Lose power."""
        self._process.kill()
        self._process.wait()
        # Its network lives as long as any of its processes takes to end.
        subprocess.run(["ip", "link", "del", self.link], stderr=subprocess.DEVNULL)


class Cluster:
    """The running cluster.

    Attributes:
        nodes: Its nodes.
        folder: Its configuration, logs and state.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        self._daemons: list[subprocess.Popen] = []

    def start(self) -> None:
        """Start the network, the controller and the nodes, and wait until they are idle."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "state").mkdir(exist_ok=True)
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder, network=NETWORK))
        # Slurm wants a file for each GPU.
        gpus = [f"Name=gpu File=/dev/{name}" for name in ("null", "zero")]
        (self.folder / "gres.conf").write_text("\n".join(gpus) + "\n")
        names = "".join(f"{NETWORK}.{10 + number} {name}\n" for number, name in enumerate(NODES))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        os.environ["PATH"] += ":/usr/sbin:/sbin"
        call("ip", "link", "add", BRIDGE, "type", "bridge")
        call("ip", "address", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        call("ip", "link", "set", BRIDGE, "up")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        paths = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        options = [f"--{name}={self.folder / path}" for name, path in paths.items()]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self._daemon("slurmctld", "-D")
        for number in range(len(NODES)):
            self.nodes.append(Node(self.folder, number))
            self.nodes[-1].start_slurmd()
        self.wait_for(self.is_idle, 60, "two idle nodes")

    def is_idle(self) -> bool:
        """Whether both nodes are up and have nothing to do."""
        return set(output("sinfo", "-h", "-N", "-o", "%N %T").splitlines()) == {f"{name} idle" for name in NODES}

    def state_of(self, job: str) -> str:
        """Slurm's word for the state of a job."""
        shown = re.search(r"JobState=(\w+)", output("scontrol", "show", "job", job))
        return shown[1] if shown else ""

    def cancel_all(self) -> None:
        """End all jobs."""
        call("scancel", "--full", "--user", "root")
        self.wait_for(self.is_idle, 90, "idle nodes")

    def _daemon(self, *words: str) -> None:
        with open(self.folder / f"{words[0]}.out", "a") as out:
            self._daemons.append(subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True))
        time.sleep(1)

    def wait_for(self, condition: Callable[[], object], seconds: float, what: str) -> float:
        """Wait until a condition holds; return the seconds that it took."""
        begin = time.monotonic()
        while not condition():
            if time.monotonic() - begin > seconds:
                raise TimeoutError(f"expected {what} within {seconds:.0f} s; see {self.folder}")
            time.sleep(0.5)
        return time.monotonic() - begin

    def end(self) -> None:
        """End all processes, and remove the network."""
        for node in self.nodes:
            node.end()
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()
        subprocess.run(["ip", "link", "del", BRIDGE], stderr=subprocess.DEVNULL)


def call(*words: str) -> None:
    """Run a command that has to succeed."""
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def output(*words: str, environment: dict[str, str] | None = None) -> str:
    """Return the output of a command. It runs in a folder that has nothing to do with the repository."""
    run = subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{words}: exit code {run.returncode}: {run.stderr}")
    return run.stdout.strip()


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Context with a running cluster."""
    running = Cluster(folder)
    try:
        running.start()
        yield running
    finally:
        running.end()
