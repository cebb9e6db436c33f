"""Rounds of messages between ranks through the store of the process group: publish, collect, one verdict for all.

A collective would not do: ranks that have different process groups, or that run different code, would wait in it
forever. A round ends at a time limit with what has arrived by then.
"""

import os
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch.distributed as dist

from megatron.fsdp.comm.streams import at_end, watch_end

# The time that ranks have to publish what another rank collects. Their threads do so, unless the process has ended or
# does not release the GIL.
SECONDS_FOR_ANSWERS = 5.0

# The store of the current default process group.
_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.Store] = weakref.WeakKeyDictionary()
# The same without its prefix, the prefix, and where ranks agree on one.
_chosen: list[tuple[dist.Store, str]] = []
_KEY = "megatron_fsdp/group"


def _open_store() -> dist.Store:
    """The store of the default process group, with a new prefix for each such group, so that old keys are not read.

    The first rank that opens it chooses the prefix, and removes it when the group ends: all ranks have left one group
    before the next begins. A rank may open the store of some groups only, so it cannot count them.
    """
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("The process group is gone.")
    if world not in _stores:
        store = dist.distributed_c10d._get_default_store()
        with suppress(RuntimeError):  # one in Python has no ``clone``
            # A client waits for one thing at a time: torch's own may wait minutes for a communicator of NCCL.
            store = store.clone()  # type: ignore[attr-defined]
        chosen = store.compare_set(_KEY, "", f"{dist.get_rank()} {time.time_ns()}").decode()
        _stores[world] = dist.PrefixStore(f"megatron_fsdp/{chosen}", store)
        _chosen[:] = [(store, chosen)]
        at_end(_close_store)
        watch_end()
    return _stores[world]


def _close_store() -> None:
    while _chosen:
        store, chosen = _chosen.pop()
        if dist.is_initialized() and reachable_at_end():
            store.compare_set(_KEY, chosen, "")


def reachable_at_end() -> bool:
    """Whether this process can use the store at its end: else another rank's process that holds it may be gone."""
    return dist.get_rank() == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def holds_store() -> bool:
    """Whether the store may end with this process: rank 0 holds it, unless the launcher does."""
    return dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


class Round:
    """One round. Only :meth:`collect` and :meth:`verdict` wait, without blocking other users of the store.

    Args:
        name: The round's name, the same on all its ranks and unique in the process group.
    """

    def __init__(self, name: str) -> None:
        self._store = dist.PrefixStore(name, _open_store())

    def publish(self, key: object, text: str) -> None:
        """Store a text for the other ranks."""
        self._store.set(str(key), text)

    def withdraw(self, key: object) -> None:
        """Delete a text of this rank that nobody reads any more."""
        self._store.delete_key(str(key))

    def count(self, key: str, more: int = 0) -> int:
        """Increase a counter, and return it."""
        return self._store.add(key, more)

    @property
    def is_judged(self) -> bool:
        """Whether a rank has asked for the verdict."""
        return self._store.check(["judges"])

    def collect(self, keys: Iterable[object], end: float, otherwise: "Round | None" = None) -> dict[str, str]:
        """Return what was published under the keys, once there is something for each of them, or at time ``end``.

        Args:
            keys: The keys.
            end: When to stop waiting.
            otherwise: Another round, which is searched for keys that this one lacks.
        """
        stores = [self._store] if otherwise is None else [self._store, otherwise._store]
        found, missing, pause = {}, [str(key) for key in keys], 0.01
        while True:
            for key in missing:
                if (store := next((each for each in stores if each.check([key])), None)) is not None:
                    found[key] = store.get(key).decode()
            missing = [key for key in missing if key not in found]
            if not missing or time.monotonic() > end:
                return found
            time.sleep(pause)
            pause = min(2 * pause, 0.25)  # a thousand ranks may ask one store, for one verdict

    def verdict(self, judge: Callable[[float], str]) -> str | None:
        """Return the verdict, which one rank writes for all of them; None if that rank has ended.

        Args:
            judge: Writes the verdict, on the first rank that asks for it. Gets the time at which to stop collecting.
        """
        end = time.monotonic() + SECONDS_FOR_ANSWERS
        if self.count("judges", 1) == 1:
            self.publish("verdict", judge(end))
        return self.collect(["verdict"], end + 2.0).get("verdict")
