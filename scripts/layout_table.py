"""Prints how much of a unit's flat buffer is padding, for the shapes of real models: the table in docs/layout.md.

    python scripts/layout_table.py [shapes.json]

A cell holds our padding in percent, the number of parameters that are cut inside a row, and that of NVIDIA's engine.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.fsdp.sharding.packing import SMALL_SHARD, plan_layout  # noqa: E402

SHAPES = ROOT / "tests" / "unit_tests" / "layout_shapes.json"


def cell(unit: dict[str, Any], dp_size: int) -> str:
    """Return the cell of one unit at one data-parallel size.

    Args:
        unit: ``shapes``, ``elements`` and ``original_padding_percent`` by data-parallel size.
        dp_size: Number of ranks that shard the unit.
    """
    layout = plan_layout([tuple(shape) for shape in unit["shapes"]], dp_size)
    small = "\\*" if unit["elements"] < SMALL_SHARD * dp_size else ""
    cut = f" ({len(layout.cut_rows)} cut)" if layout.cut_rows else ""
    ours = 100 * layout.padding / unit["elements"]
    return f"{ours:.2f}{small}{cut} / {unit['original_padding_percent'][str(dp_size)]:.2f}"


def table(path: Path = SHAPES) -> str:
    """Return the table in Markdown: a row for each unit, a column for each data-parallel size.

    Args:
        path: JSON file with ``dp_sizes`` and ``units``.
    """
    data = json.loads(path.read_text())
    sizes: list[int] = data["dp_sizes"]
    lines = [
        f"| unit (parameters) | {' | '.join(f'DP {size}' for size in sizes)} |",
        f"|---|{'---|' * len(sizes)}",
    ]
    for name, unit in data["units"].items():
        cells = " | ".join(cell(unit, size) for size in sizes)
        lines.append(f"| {name} ({len(unit['shapes'])}) | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="?", type=Path, default=SHAPES, help="JSON file with dp_sizes and units")
    print(table(parser.parse_args().shapes))
