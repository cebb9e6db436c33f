"""Writes docs/mistakes.md: what users write by mistake, and the message that they get.

    python scripts/mistake_table.py --write           # makes every mistake on two ranks; a few minutes
    python scripts/mistake_table.py --write dtype     # those with a word in a title; the others keep their messages

The mistakes are those of ``tests/mistakes``. Messages are captured, not typed: ``tests/unit_tests/test_mistakes.py``
compares each of them with the page.
"""

import html
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.mistakes import THEMES  # noqa: E402
from tests.mistakes.case import Mistake, Theme, run, shown  # noqa: E402
from tests.ranks import RankPool  # noqa: E402

# The messages of torch itself are those of this version.
TORCH = "2.13"
PAGE = ROOT / "docs" / "mistakes.md"

_ROW = re.compile(r"^\| \*\*(.*?)\*\*<br>.* \| (.*) \|$", re.MULTILINE)


def as_markdown(said: dict[str, str]) -> str:
    """The page.

    Args:
        said: What is said about each mistake, by title.
    """
    lines = [(ROOT / "tests" / "mistakes" / "introduction.md").read_text()]
    for theme in THEMES:
        lines += [f"## {theme.title}\n", *_setup(theme), "| mistake | what happens |\n|---|---|"]
        lines += [_row(mistake, said.get(mistake.title, "")) for mistake in theme.mistakes]
        lines.append("")
    return "\n".join(lines)


def on_page() -> dict[str, str]:
    """What the page says about each mistake, by title."""
    text = PAGE.read_text() if PAGE.exists() else ""
    rows = ((title, re.sub(r"</?code>", "", cell)) for title, cell in _ROW.findall(text))
    return {html.unescape(title): html.unescape(cell) for title, cell in rows}


def _setup(theme: Theme) -> list[str]:
    code = textwrap.dedent(theme.setup).strip()
    return [f"After\n\n<!-- not run: the mistakes below follow it -->\n```python\n{code}\n```\n"] if code else []


def _row(mistake: Mistake, said: str) -> str:
    cell = _escaped(said) if mistake.error is None else f"<code>{_escaped(said)}</code>"
    return f"| **{_escaped(mistake.title)}**<br>{_code(mistake.code)} | {cell} |"


def _code(code: str) -> str:
    lines = textwrap.dedent(code).strip().splitlines()
    shown_lines = [_escaped(line).replace("  ", "&nbsp;&nbsp;") for line in lines]
    return "<code>" + "<br>".join(shown_lines) + "</code>"


def _escaped(text: str) -> str:
    """Text in a cell of a table: no character of it has a meaning in HTML or Markdown where it stands."""
    special = r"[|*`\\~]|\](?=[(\[])|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    return re.sub(special, lambda found: f"&#{ord(found[0])};", html.escape(text, quote=False))


def captured(word: str = "") -> dict[str, str]:
    """Make the mistakes that have a word in their title or their theme's; return what is to be said about each."""
    pool, said = RankPool(), {}
    wanted = [
        (each, mistake) for each in THEMES for mistake in each.mistakes if word in f"{each.title} {mistake.title}"
    ]
    for theme, mistake in wanted:
        outcomes = run(pool, theme, mistake)
        said[mistake.title] = shown(outcomes, mistake)
        print(f"{max(each.seconds for each in outcomes):5.1f} s  {mistake.title}: {said[mistake.title]}")
    pool.close()
    return said


if __name__ == "__main__":
    if "--write" in sys.argv:
        words = [word for word in sys.argv[1:] if word != "--write"]
        found = captured(words[0] if words else "")
        PAGE.write_text(as_markdown({**on_page(), **found}))
    else:
        print(as_markdown(on_page()), end="")
