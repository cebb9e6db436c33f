"""Prints the tables of docs/limits.md, and what Megatron sees on a CPU.

python scripts/limit_table.py limits
python scripts/limit_table.py cpu
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.fsdp.mcore import cpu, limits  # noqa: E402


def of_limits() -> str:
    """The tables of Megatron's settings that are refused, changed and ignored."""
    lines = ["| setting | why it raises an error | what to do |", "|---|---|---|"]
    for limit in limits.LIMITS:
        reason = limit.reason.replace(limits.NOT_YET, "Not supported yet: ")
        lines.append(f"| `{limit.setting}` | {reason} | {limit.remedy} |")
    lines += ["", "| setting | is set to | why |", "|---|---|---|"]
    for adjustment in limits.ADJUSTMENTS:
        lines.append(f"| `{adjustment.setting}` | `{adjustment.value}` | {adjustment.reason} |")
    lines += ["", "| setting | why it has no effect |", "|---|---|"]
    lines += [f"| `{ignored.setting}` | {ignored.reason} |" for ignored in limits.IGNORED]
    return "\n".join(lines) + "\n"


def of_cpu() -> str:
    """The tables of what Megatron sees on a CPU. Names that are changed in the same way share a row."""
    lines = ["| module | name | Megatron sees | why |", "|---|---|---|---|"]
    alike = itertools.groupby(cpu.CHANGES, key=lambda row: (row.where, row.what, row.reason))
    for (where, what, reason), rows in alike:
        names = ", ".join(f"`{row.name}`" for row in rows)
        lines.append(f"| `{where}` | {names} | {what} | {reason} |")
    lines += ["", "| argument | is set to | why |", "|---|---|---|"]
    for adjustment in cpu.ADJUSTMENTS:
        lines.append(f"| `{adjustment.argument}` | `{adjustment.value}` | {adjustment.reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print({"limits": of_limits, "cpu": of_cpu}[sys.argv[1]](), end="")
