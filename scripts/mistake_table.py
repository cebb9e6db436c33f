"""Writes the messages of docs/mistakes.md: makes the mistakes that the page has, on two ranks.

    python scripts/mistake_table.py --write           # makes every mistake on two ranks; a few minutes
    python scripts/mistake_table.py --write dtype     # those with a word in a title; the others keep their messages

To add a mistake, add a row with its title, its code and an empty ``<code></code>``, and run this.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.mistakes.case import run, shown  # noqa: E402
from tests.mistakes.page import PAGE, mistakes, with_messages  # noqa: E402
from tests.ranks import RankPool  # noqa: E402


def captured(word: str = "") -> dict[str, str]:
    """Make the mistakes that have a word in their title or their heading; return what is to be said about each."""
    pool, said = RankPool(), {}
    for mistake in mistakes():
        if word in f"{mistake.theme} {mistake.title}":
            outcomes = run(pool, mistake)
            said[mistake.title] = shown(mistake, outcomes)
            print(f"{max(each.seconds for each in outcomes):5.1f} s  {mistake.title}: {said[mistake.title]}")
    pool.close()
    return said


if __name__ == "__main__":
    text = with_messages(captured(*[word for word in sys.argv[1:] if word != "--write"][:1]))
    if "--write" in sys.argv:
        PAGE.write_text(text)
    else:
        print(text, end="")
