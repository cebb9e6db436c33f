"""The mistakes of README.md: each row has what a user writes, and the error that it must end in."""

import html
import re
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).with_name("README.md")
WORKS = "Works: "
# The end of a cell that shows one line of a longer message.
MORE = " …"

_SETUP = re.compile(r"```python\n(.*?)\n```", re.DOTALL)
_ROW = re.compile(r"^\| \*\*(.*?)\*\*<br><code>(.*?)</code> \| (.*?) \|$", re.MULTILINE)


class Mistake(NamedTuple):
    """A row of a table.

    Attributes:
        title: What is wrong, in words.
        theme: The heading that it is below.
        setup: What runs before it.
        code: What the user writes.
        said: What the table says: the error's class and a line of its message, or ``WORKS`` and an explanation.
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
        """The line of the message that the table has."""
        return self.said.removeprefix(f"{self.error}: ").removesuffix(MORE)


def mistakes() -> list[Mistake]:
    """All rows."""
    found = []
    for section in PATH.read_text().split("\n## ")[1:]:
        setup = _SETUP.search(section)
        for row in _ROW.findall(section):
            title, code, said = (_text(cell) for cell in row)
            found.append(Mistake(title, section.partition("\n")[0], setup[1] if setup else "", code, said))
    return found


def _text(cell: str) -> str:
    plain = re.sub(r"</?code>", "", cell).replace("<br>", "\n")
    return html.unescape(plain).replace("\xa0", " ")
