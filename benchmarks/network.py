"""A slow network within this machine: one network namespace per rank, connected by a bridge, with limited rates.

A token bucket limits the rate of every rank in both directions. Large packets and bursts keep the CPU time per packet
small compared to the effect of the limit. A latency is a queue of netfilter that latency.c empties in time: it works on
kernels without netem.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks import quiet
from benchmarks.compiled import compiled
from benchmarks.options import Skipped

MTU = 32000
BURST = "512kb"
# How long a packet may wait for tokens, before it is dropped.
QUEUE = "200ms"
# What a packet takes without a delay: the wake-ups of latency.c and of the receiver.
UNDELAYED = 50e-6
DELAYER = Path(__file__).with_name("latency.c")
FIREWALLS = ("iptables-legacy", "iptables")
# The name of the network interface in every namespace, which gloo is configured to use.
INTERFACE = "eth0"


class Network:
    """Namespaces ``<name>0``, ``<name>1``, ... that exist between :meth:`up` and :meth:`down`.

    Args:
        ranks: Number of namespaces.
        rate: Rate limit of a rank per direction, in tc's syntax, such as "1gbit".
        latency: Seconds that every packet takes; 0: no delay is added.
        name: Prefix of the names of namespaces and interfaces; at most ten characters.
    """

    def __init__(self, ranks: int, rate: str, latency: float = 0.0, name: str = "") -> None:
        self.ranks = ranks
        self.rate = rate
        self.latency = latency
        self.name = name or f"fsb{os.getpid() % 10**6}"
        self._delayer: subprocess.Popen[str] | None = None

    def prefix(self, rank: int) -> list[str]:
        """The command prefix that runs a command in a rank's namespace."""
        return ["ip", "netns", "exec", f"{self.name}{rank}"]

    def up(self) -> None:
        """Create the network.

        Raises:
            Skipped: A command failed, for example because it is not permitted.
        """
        try:
            _run("ip", "link", "add", f"{self.name}b", "mtu", str(MTU), "type", "bridge")
            _run("ip", "link", "set", f"{self.name}b", "up")
            for rank in range(self.ranks):
                self._join(rank)
            if self.latency:
                self._delay()
        except subprocess.CalledProcessError as error:
            self.down()
            raise Skipped(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error

    def _join(self, rank: int) -> None:
        inside, outside = f"{self.name}{rank}", f"{self.name}v{rank}"
        _run("ip", "netns", "add", inside)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", inside)
        _run("ip", "link", "set", outside, "mtu", str(MTU), "master", f"{self.name}b", "up")
        _run("ip", "-n", inside, "address", "add", f"10.213.0.{rank + 1}/24", "dev", INTERFACE)
        _run("ip", "-n", inside, "link", "set", INTERFACE, "mtu", str(MTU), "up")
        _run("ip", "-n", inside, "link", "set", "lo", "up")
        bucket = ["root", "tbf", "rate", self.rate, "burst", BURST, "latency", QUEUE]
        _run("tc", "-n", inside, "qdisc", "add", "dev", INTERFACE, *bucket)  # limits sending
        _run("tc", "qdisc", "add", "dev", outside, *bucket)  # limits receiving

    def _delay(self) -> None:
        """Queue what every rank receives, and start the process that lets it pass later."""
        firewall = next(name for name in FIREWALLS if shutil.which(name))
        program = compiled(DELAYER)
        for rank in range(self.ranks):
            queue = ["-A", "INPUT", "-i", INTERFACE, "-j", "NFQUEUE", "--queue-num", "0", "--queue-bypass"]
            _run(*self.prefix(rank), firewall, *queue)
        delay = max(0, round(1e9 * (self.latency - UNDELAYED)))
        command = [str(program), str(delay), *(f"{self.name}{rank}" for rank in range(self.ranks))]
        self._delayer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._delayer.stdout is not None
        assert self._delayer.stderr is not None
        if not self._delayer.stdout.readline():
            raise subprocess.CalledProcessError(1, command, stderr=self._delayer.stderr.read())

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the process that delays packets."""
        return quiet.cpu_seconds(self._delayer.pid) if self._delayer is not None else 0.0

    def sent_bytes(self, rank: int) -> int:
        """Bytes that a rank has sent, headers included."""
        # What the namespace sends, the other end of its link receives.
        return int(Path(f"/sys/class/net/{self.name}v{rank}/statistics/rx_bytes").read_text())

    def down(self) -> None:
        """Remove the network, even if only part of it was created."""
        if self._delayer is not None:
            self._delayer.kill()
            self._delayer.communicate()
            self._delayer = None
        for rank in range(self.ranks):
            for command in (("netns", "del", f"{self.name}{rank}"), ("link", "del", f"{self.name}v{rank}")):
                subprocess.run(["ip", *command], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.name}b"], capture_output=True)


def why_not(latency: float = 0.0) -> str:
    """The reason why the network cannot be created here; empty if it can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"needs iproute2: {' and '.join(missing)} not found"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if latency and not any(map(shutil.which, FIREWALLS)):
        return "a latency needs iptables, to queue packets"
    return ""


@contextlib.contextmanager
def network(ranks: int, rate: str, latency: float = 0.0) -> Iterator[Network]:
    """Create a network for the duration of the context.

    Raises:
        Skipped: It cannot be created here.
    """
    reason = why_not(latency)
    if reason:
        raise Skipped(reason)
    made = Network(ranks, rate, latency)
    made.up()
    try:
        yield made
    finally:
        made.down()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
