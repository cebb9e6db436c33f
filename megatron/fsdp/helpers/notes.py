"""Notes on errors, on every version of Python."""

import sys


def add_note(error: BaseException, text: str) -> None:
    """Add a line below an error's message, as ``BaseException.add_note`` does from Python 3.11 on."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        error.args = (f"{error}\n{text}", *error.args[1:])
