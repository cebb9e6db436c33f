"""A slow network inside this machine: a network namespace per rank, joined by a bridge, with limited rates.

The rate is limited by a token bucket in both directions of every rank. Large packets and bursts keep the CPU time of
the packets themselves small against what the limit costs.
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
# Inside, every rank has this interface, and gloo is told to use it.
INTERFACE = "eth0"


class Network:
    """Namespaces ``<name>0``, ``<name>1``, ... that exist between :meth:`up` and :meth:`down`.

    Args:
        ranks: Number of namespaces.
        rate: What a rank can send and receive, as tc writes it, such as "1gbit".
        name: What everything made here is called; at most ten letters.
    """

    def __init__(self, ranks: int, rate: str, name: str = "") -> None:
        self.ranks = ranks
        self.rate = rate
        self.name = name or f"fsb{os.getpid() % 10**6}"

    def prefix(self, rank: int) -> list[str]:
        """What a command begins with to run inside a rank's namespace."""
        return ["ip", "netns", "exec", f"{self.name}{rank}"]

    def up(self) -> None:
        """Make all of it.

        Raises:
            Skipped: Something is not allowed, or not there.
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
        _run("tc", "-n", inside, "qdisc", "add", "dev", INTERFACE, *bucket)  # what the rank sends
        _run("tc", "qdisc", "add", "dev", outside, *bucket)  # what it receives

    def down(self) -> None:
        """Remove all of it, however much there is."""
        for rank in range(self.ranks):
            for command in (("netns", "del", f"{self.name}{rank}"), ("link", "del", f"{self.name}v{rank}")):
                subprocess.run(["ip", *command], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.name}b"], capture_output=True)


def why_not() -> str:
    """Why there can be no such network here; empty if nothing speaks against it."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"needs iproute2: {' and '.join(missing)} not found"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    return ""


@contextlib.contextmanager
def network(ranks: int, rate: str) -> Iterator[Network]:
    """A network that exists inside the block.

    Raises:
        Skipped: It cannot be made here.
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
