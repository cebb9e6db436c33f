"""Compares the tiers of recorded tests: what those of ``merge`` alone reach, and which quick ones add nothing."""

import gzip
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

SHOWN = 40


def chosen(tests: dict[str, set[str]], seconds: Counter[str], known: set[str]) -> dict[str, set[str]]:
    """Tests that reach all that the given ones reach, with what each adds. Most new arcs per second come first."""
    left, known, found = dict(tests), set(known), {}
    while left:
        left = {name: arcs - known for name, arcs in left.items() if arcs - known}
        if left:
            best = max(left, key=lambda name: len(left[name]) / (seconds[name] + 0.05))
            found[best] = left[best]
            known |= left[best]
    return found


def main() -> None:
    """Print the comparison."""
    tests: dict[str, set[str]] = defaultdict(set)
    tiers: dict[str, str] = {}
    seconds: Counter[str] = Counter()
    for path in Path(sys.argv[1]).glob("*.gz"):
        with gzip.open(path, "rt") as lines:
            for one in map(json.loads, lines):
                tests[one["test"]] |= {f"{file}:{arc}" for file, arcs in one["arcs"].items() for arc in arcs}
                tiers |= {one["test"]: one["tier"]} if "tier" in one else {}
                seconds[one["test"]] += one["seconds"]
    quick, merge = ({name: tests[name] for name in tiers if tiers[name] == tier} for tier in ("quick", "merge"))
    for tier in (quick, merge):
        print(f"{len(tier)} tests, {sum(map(seconds.get, tier)):.0f} s, {len(set().union(*tier.values()))} arcs")
    print("\nThe second tier alone reaches, line * 1000 + next line:")
    for name, new in list(chosen(merge, seconds, set().union(*quick.values())).items())[:SHOWN]:
        print(f"{seconds[name]:6.1f} s {len(new):4}  {name}\n    {' '.join(sorted(new)[:8])}")
    spare = sorted(quick.keys() - chosen(quick, seconds, set()).keys(), key=seconds.get, reverse=True)
    print(f"\nTests of the first tier whose arcs others reach, {sum(map(seconds.get, spare)):.0f} s:")
    for name in spare[:SHOWN]:
        print(f"{seconds[name]:6.1f} s  {name}")


main()
