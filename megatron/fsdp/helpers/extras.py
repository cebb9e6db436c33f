"""The packages that a command needs in addition to torch, and its message where they are missing."""

import sys
from importlib.util import find_spec

_PACKAGES = {"mcore": ("megatron.core", "megatron.training", "psutil"), "convert": ("click", "rich")}


def too_old_for_megatron() -> str:
    """Why Megatron-Core cannot run on this version of Python; empty if it can."""
    if sys.version_info < (3, 12):
        return f"megatron-core needs Python 3.12 or later, and this is Python {sys.version.split()[0]}"
    return ""


def require(extra: str) -> None:
    """Unless the packages of an extra are installed, print what to install and exit with status 2."""
    problem = too_old_for_megatron() if extra == "mcore" else ""
    missing = [name for name in _PACKAGES[extra] if find_spec(name) is None]
    if not problem and missing:
        problem = f"{', '.join(missing)} not found: run pip install '.[{extra}]' in the checkout"
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
