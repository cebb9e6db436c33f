"""A slow network within this machine: one network namespace per rank, connected by a bridge, with limited rates.

A token bucket limits the rate of every rank in both directions. Large packets and bursts keep the CPU time per packet
small compared to the effect of the limit.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

from benchmarks.options import Skipped

MTU = 32000
BURST = "512kb"
LATENCY = "200ms"
# The name of the network interface in every namespace, which gloo is configured to use.
INTERFACE = "eth0"


class Network:
    """Namespaces ``<name>0``, ``<name>1``, ... that exist between :meth:`up` and :meth:`down`.

    Args:
        ranks: Number of namespaces.
        rate: Rate limit of a rank per direction, in tc's syntax, such as "1gbit".
        name: Prefix of the names of namespaces and interfaces; at most ten characters.
    """

    def __init__(self, ranks: int, rate: str, name: str = "") -> None:
        self.ranks = ranks
        self.rate = rate
        self.name = name or f"fsb{os.getpid() % 10**6}"

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
        bucket = ["root", "tbf", "rate", self.rate, "burst", BURST, "latency", LATENCY]
        _run("tc", "-n", inside, "qdisc", "add", "dev", INTERFACE, *bucket)  # limits sending
        _run("tc", "qdisc", "add", "dev", outside, *bucket)  # limits receiving

    def down(self) -> None:
        """Remove the network, even if only part of it was created."""
        for rank in range(self.ranks):
            for command in (("netns", "del", f"{self.name}{rank}"), ("link", "del", f"{self.name}v{rank}")):
                subprocess.run(["ip", *command], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.name}b"], capture_output=True)


def why_not() -> str:
    """The reason why the network cannot be created here; empty if it can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"needs iproute2: {' and '.join(missing)} not found"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    return ""


@contextlib.contextmanager
def network(ranks: int, rate: str) -> Iterator[Network]:
    """Create a network for the duration of the context.

    Raises:
        Skipped: It cannot be created here.
    """
    reason = why_not()
    if reason:
        raise Skipped(reason)
    made = Network(ranks, rate)
    made.up()
    try:
        yield made
    finally:
        made.down()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
