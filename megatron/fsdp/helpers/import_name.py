"""Finds out whether NVIDIA's distribution ``megatron-fsdp`` shares the import name ``megatron_fsdp`` with this one."""

import functools
import importlib.metadata
import importlib.util
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

THEIRS = "megatron-fsdp"
_INIT = Path("megatron_fsdp", "__init__.py")


def conflict() -> str | None:
    """A sentence about another ``megatron_fsdp``, with what to do; None if ``import megatron_fsdp`` is this project's.

    Both distributions may be installed in one folder. Then the files of the one that was installed last are imported,
    next to those that only the other one has, and removing either removes files of both.
    """
    ours = Path(__file__).resolve().parents[3] / _INIT
    try:
        distribution = importlib.metadata.distribution(THEIRS)
    except importlib.metadata.PackageNotFoundError:
        distribution = None
    if distribution is not None and Path(str(distribution.locate_file(_INIT))).resolve() == ours:
        return (
            f"{THEIRS} {distribution.version} is installed in {ours.parents[1]}, where it and this project overwrite "
            f"each other's files of megatron_fsdp. Run: pip uninstall {THEIRS} && pip install --force-reinstall "
            "--no-deps . (in the checkout)"
        )
    spec = importlib.util.find_spec("megatron_fsdp")
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() != ours:
        return f"import megatron_fsdp finds {spec.origin}, not this project's {ours}. Run: pip uninstall {THEIRS}"
    return None


@functools.cache  # warn once
def warn_of_conflict() -> None:
    """Log a warning if another distribution shares the import name."""
    if (problem := conflict()) is not None:
        logger.warning("%s", problem)
