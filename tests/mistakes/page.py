"""The mistakes of docs/mistakes.md: each row has what a user writes, and the error that it must end in."""

import html
import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mistakes.md"
WORKS = "Works: "
# The end of a cell that shows one line of a longer message.
MORE = " …"

_SETUP = re.compile(r"```python\n(.*?)\n```", re.DOTALL)
_ROW = re.compile(r"^\| \*\*(.*?)\*\*<br><code>(.*?)</code> \| (.*?) \|$", re.MULTILINE)


class Mistake(NamedTuple):
    """A row of the page.

    Attributes:
        title: What is wrong, in words.
        theme: The heading that it is below.
        setup: What runs before it.
        code: What the user writes.
        said: What the page says: the error's class and a line of its message, or ``WORKS`` and an explanation.
    """

    title: str
    theme: str
    setup: str
    code: str
    said: str

    @property
    def error(self) -> str:
        """The name of the error's class; empty if it works."""
        return "" if self.said.startswith(WORKS) else self.said.partition(":")[0]

    @property
    def line(self) -> str:
        """The line of the message that the page has."""
        return self.said.removeprefix(f"{self.error}: ").removesuffix(MORE)


def mistakes(text: str | None = None) -> list[Mistake]:
    """All rows of the page, or of a text of its form."""
    found = []
    for section in (PAGE.read_text() if text is None else text).split("\n## ")[1:]:
        setup = _SETUP.search(section)
        for row in _ROW.findall(section):
            title, code, said = (_text(cell) for cell in row)
            found.append(Mistake(title, section.partition("\n")[0], setup[1] if setup else "", code, said))
    return found


def with_messages(said: dict[str, str]) -> str:
    """The page, its rows in their one form, with other messages: by title, what is said about a mistake."""

    def row(found: re.Match[str]) -> str:
        title, code, before = (_text(cell) for cell in found.groups())
        cell = _escaped(said.get(title, before))
        lines = "<br>".join(_escaped(line).replace("  ", "&nbsp;&nbsp;") for line in code.splitlines())
        cell = cell if cell.startswith(WORKS) else f"<code>{cell}</code>"
        return f"| **{_escaped(title)}**<br><code>{lines}</code> | {cell} |"

    return _ROW.sub(row, PAGE.read_text())


def _text(cell: str) -> str:
    plain = re.sub(r"</?code>", "", cell).replace("<br>", "\n")
    return html.unescape(plain).replace("\xa0", " ")


def _escaped(text: str) -> str:
    """Text in a cell of a table: no character of it has a meaning in HTML or Markdown where it stands."""
    special = r"[|*`\\~]|\](?=[(\[])|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    return re.sub(special, lambda found: f"&#{ord(found[0])};", html.escape(text, quote=False))
