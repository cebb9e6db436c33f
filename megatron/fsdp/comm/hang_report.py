"""Writes the report about ranks that wait for each other: its conclusion, and where every rank is."""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

# The most positions, different operations, and hosts of one position, in a report; the rest is counted.
MAX_POSITIONS, MAX_DIFFERENT = 30, 4
MAX_HOSTS = 4

REMEDY = (
    "Every rank must run the same forwards, backwards and steps, including in evaluation, when saving, after an "
    "exception that is caught, and at the end of the data, and write the same parameters, with or without elements "
    "there: else call mark_weights_changed() on all."
)
_NEXT = (
    "This report sees only the collectives of Megatron-FSDP. To look further, before the process group's timeout (NCCL "
    "timeout) ends the job: py-spy dump --pid PID, and torch's Flight Recorder; see docs/hangs.md."
)


def describe(answers: dict[int, dict], size: int, hosts: Mapping[int, str] | None = None) -> tuple[str, bool]:
    """Write the report. Returns it, and whether it proves that ranks have issued different operations.

    Args:
        answers: The answers of :meth:`Journal.as_json` by rank. Some may be missing.
        size: Number of ranks.
        hosts: Names of machines by rank. Some may be missing.
    """
    name = functools.partial(name_ranks, hosts=hosts)
    conclusion, proven = _compare(answers, name)
    silent = sorted(set(range(size)) - set(answers))
    look = f" Look at the output of {name(silent)}." if silent else ""
    groups: dict[str, list[int]] = {}
    for rank in range(size):
        text = _describe_rank(answers[rank]) if rank in answers else "no answer; ended, or busy in native code"
        groups.setdefault(text, []).append(rank)
    by_size = sorted(groups, key=lambda text: len(groups[text]))
    # Small groups differ from the rest, and the largest is the rest.
    kept = {*by_size[: MAX_POSITIONS - 1], by_size[-1]}
    lines = [f"  {name(ranks)}: {text}" for text, ranks in groups.items() if text in kept]
    if others := [rank for text, ranks in groups.items() if text not in kept for rank in ranks]:
        lines.append(f"  {name(others)}: {len(groups) - len(kept)} more positions")
    return "\n".join([conclusion + look, "Positions of the ranks:", *lines, _NEXT]), proven


def _describe_rank(answer: dict) -> str:
    place = one_line(answer["ended"] or f"at {answer['at']}")
    log = next((log for log in answer["logs"] if log["open"]), answer["logs"][-1] if answer["logs"] else None)
    if log is None or not log["issued"]:
        return f"{place}; issued nothing"
    issued = _operations(log)
    waits = [issued[number] for number in log["open"] if number in issued]
    more = f" and {len(waits) - 4} more" if len(waits) > 4 else ""
    waiting = f"; waits for: {'; '.join(waits[:4])}{more}" if waits else ""
    last = max(issued)
    return f"last issued {issued[last]} (number {last}); {place}{waiting}"


def _compare(answers: dict[int, dict], name: Callable[[Sequence[int]], str]) -> tuple[str, bool]:
    """Describe the first difference between ranks, or the ranks that are behind. Returns whether they differ."""
    logs: dict[tuple[int, ...], dict[int, dict]] = {}
    for rank, answer in sorted(answers.items()):
        for log in answer["logs"]:
            logs.setdefault(tuple(log["peers"]), {})[rank] = log
    for of_rank in logs.values():
        if differ := _first_difference(of_rank, name):
            return f"Desync (collective mismatch). They first differ {differ}. {REMEDY}", True
    agree = "The operations issued so far agree (no desync)"
    # A rank that is late also delays those that it communicates with in other ways, such as tensor-parallel ones.
    behind: set[int] = set()
    for of_rank in logs.values():
        reached = {rank: max(_operations(log), default=-1) for rank, log in of_rank.items()}
        most = max(reached.values())
        behind.update(rank for rank, number in reached.items() if number < most)
    if behind:
        return f"{agree}, but {name(sorted(behind))} issued fewer. {REMEDY}", False
    return f"{agree}.", False


def _operations(log: dict) -> dict[int, str]:
    """The operations of a log by number."""
    return dict(enumerate(log["issued"].split("\n"), log["first"])) if log["issued"] else {}


def _first_difference(logs: dict[int, dict], name: Callable[[Sequence[int]], str]) -> str:
    # Most ranks have issued the same.
    alike: dict[tuple[int, str, int], list[int]] = {}
    for rank, log in logs.items():
        alike.setdefault((log["first"], log["issued"], log["before"]), []).append(rank)
    distinct = [(_operations(logs[ranks[0]]), logs[ranks[0]]["before"], ranks) for ranks in alike.values()]
    numbers = sorted(set.intersection(*(set(issued) for issued, _, _ in distinct)))
    if numbers and len({_checksum_before(numbers[0], issued, before) for issued, before, _ in distinct}) > 1:
        return f"before number {numbers[0]}"
    for number in numbers:
        whats: dict[str, list[int]] = {}
        for issued, _, ranks in distinct:
            whats.setdefault(issued[number], []).extend(ranks)
        if len(whats) > 1:
            groups = sorted(whats.items(), key=lambda item: -len(item[1]))
            each = [f"{name(ranks)}: {what}" for what, ranks in groups[:MAX_DIFFERENT]]
            if more := len(groups) - len(each):
                each.append(f"and {more} more operations")
            return f"at number {number}: {'; '.join(each)}"
    return ""


def _checksum_before(end: int, issued: dict[int, str], before: int) -> int:
    return functools.reduce(add_to, (what for number, what in issued.items() if number < end), before)


def add_to(checksum: int, what: str) -> int:
    """The checksum of one more operation."""
    return zlib.crc32(what.encode(), checksum)


def one_line(text: str) -> str:
    """A text in one line: errors of CUDA have several."""
    return " ".join(text.split())


def name_ranks(ranks: Sequence[int], hosts: Mapping[int, str] | None = None) -> str:
    """Format rank numbers, such as ``"rank 3"`` or ``"ranks 0-2, 7"``; after 16 ranges only the number of ranks.

    Args:
        ranks: The ranks.
        hosts: Names of machines by rank, which are added (``"rank 3 on node1"``) if there are several machines.
    """
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:16])
    more = f" and {sum(map(len, runs[16:]))} more" if runs[16:] else ""
    on = ""
    if hosts and len(set(hosts.values())) > 1:
        names = list(dict.fromkeys(hosts.get(rank, "an unknown host") for rank in sorted(ranks)))
        on = f" on {', '.join(names) if len(names) <= MAX_HOSTS else f'{len(names)} hosts'}"
    return f"rank{'s' if len(ranks) > 1 else ''} {text}{more}{on}"
