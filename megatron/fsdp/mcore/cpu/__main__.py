"""Prints the tables of docs/cpu.md: ``python -m megatron.fsdp.mcore.cpu``."""

import itertools

from megatron.fsdp.mcore.cpu import ADJUSTMENTS, CHANGES


def as_markdown() -> str:
    """The tables of changes and adjustments. Names that are changed in the same way share a row."""
    lines = ["| module | name | Megatron sees | why |", "|---|---|---|---|"]
    for (where, what, reason), rows in itertools.groupby(CHANGES, key=lambda row: (row.where, row.what, row.reason)):
        names = ", ".join(f"`{row.name}`" for row in rows)
        lines.append(f"| `{where}` | {names} | {what} | {reason} |")
    lines += ["", "| argument | is set to | why |", "|---|---|---|"]
    for adjustment in ADJUSTMENTS:
        lines.append(f"| `{adjustment.argument}` | `{adjustment.value}` | {adjustment.reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
