"""Writes the blocks of docs/status.md: a command that tests or measures replaces its own block.

Complete tables and raw results go to ``out/``, which is not in git.
"""

import datetime
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out"
PAGE = ROOT / "docs" / "status.md"
_END = "<!-- end -->"


def write(block: str, text: str, page: Path = PAGE) -> None:
    """Replace the text of a block of the page.

    Args:
        block: Its name, which is in the marker before it.
        text: The new text.
        page: The page.

    Raises:
        ValueError: The page has no such block.
    """
    before, begin, rest = page.read_text().partition(f"<!-- {block} -->\n")
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page}: expected a block that begins with '<!-- {block} -->' and ends with '{_END}'.")
    page.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{after}")


def stamp() -> str:
    """Today's date, and the commit."""
    return f"{datetime.datetime.now(datetime.timezone.utc).date()}, commit {commit()}"


def commit() -> str:
    """The commit of this repository, with a mark if files differ from it."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, capture_output=True, text=True
        )
    except FileNotFoundError:
        return "unknown"
    return run.stdout.strip() or "unknown"
