"""Replaces names of third-party modules and classes, and puts the originals back.

Every name of PyTorch, Megatron-Core or another package that this project replaces is a row of a :class:`Patches`
table. A table stands in the package that needs it, and :data:`TABLES` lists all of them. ``scripts/patch_table.py``
prints them as Markdown.
"""

import functools
import importlib
import importlib.metadata
import logging
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron.fsdp.helpers.imports import AfterImport
from megatron.fsdp.version import TRIED_MEGATRON, TRIED_TORCH

logger = logging.getLogger(__name__)

TABLES = (
    "megatron.fsdp.dtensor.torch_patches:TORCH",
    "megatron.fsdp.init.deferred:RECORDING",
    "megatron.fsdp.mcore.cpu.changes:METHODS",
    "megatron.fsdp.mcore.cpu.changes:MEGATRON",
    "megatron.fsdp.mcore.initialization:RANDOM_STATES",
    "megatron.fsdp.mcore.patches:MEGATRON",
    "megatron.fsdp.runtime.engine:GRADIENTS",
    "megatron.fsdp.tools.megatron_run:RECORDING",
)

_ABSENT = object()


class Kind(Enum):
    """How a replacement is used."""

    AROUND = "called with the original function and the caller's arguments"
    VALUE = "used in place of the original"
    FACTORY = "called once with the original; its result is used in place of the original"


@dataclass(frozen=True)
class Versions:
    """The versions of a distribution with which a patch was checked.

    Attributes:
        distribution: Name of the distribution on PyPI.
        checked: Versions or leading components of versions: "2.13" covers 2.13.1. Empty: none could be checked.
        module: A module whose ``__version__`` is the version. A checkout in the path has no metadata of its own, and
            may hide an installed distribution of another version. Empty: the distribution's metadata.
    """

    distribution: str
    checked: tuple[str, ...] = ()
    module: str = ""

    @property
    def installed(self) -> str | None:
        """The installed version; None if the distribution is not installed."""
        try:
            if self.module:
                return str(importlib.import_module(self.module).__version__)
            return importlib.metadata.version(self.distribution)
        except ImportError:
            return None

    def cover(self, version: str) -> bool:
        """Whether a patch was checked with this version. Suffixes such as "+cpu" do not matter."""
        return any(f"{version.partition('+')[0]}.".startswith(f"{checked}.") for checked in self.checked)

    def __str__(self) -> str:
        return f"{self.distribution} {', '.join(self.checked) or '(not checked)'}"


TORCH = Versions("torch", TRIED_TORCH)
MEGATRON_CORE = Versions("megatron-core", TRIED_MEGATRON, "megatron.core.package_info")


@functools.cache  # warn once
def warn_if_untried(versions: Versions, installed: str) -> None:
    """Log a warning if the tests were not run with the installed version of a distribution."""
    if not versions.cover(installed):
        logger.warning(
            "Megatron-FSDP was not tested with %s %s. It was tested with %s.",
            versions.distribution,
            installed,
            versions,
        )


@dataclass(frozen=True)
class Patch:
    """One name that is replaced.

    Attributes:
        target: The name, as ``pkgutil.resolve_name`` takes it: "package.module:function" or
            "package.module:Class.method".
        reason: Why the original does not work here.
        replacement: The replacement's name, in the same form. It is imported when the patch is installed.
        versions: The versions with which the patch was checked.
        kind: How the replacement is used.
        optional: Install the patch only if the target's module is imported, when it is.
        since: The first version that has the name. Empty: all have it.
        before: The first version that does not have the name any more. Empty: all have it.
    """

    target: str
    reason: str
    replacement: str
    versions: Versions
    kind: Kind = Kind.AROUND
    optional: bool = False
    since: str = ""
    before: str = ""

    @property
    def module(self) -> str:
        """The module that has the name, or whose class has it."""
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        """The name without its module or class."""
        return self.target.partition(":")[2].rpartition(".")[2]

    @property
    def owner(self) -> Any:
        """The module or class that has the name."""
        module, _, path = self.target.partition(":")
        return functools.reduce(getattr, path.split(".")[:-1], importlib.import_module(module))

    @property
    def applies(self) -> bool:
        """Whether the patch can be installed now, in the version that is installed."""
        return not self.waits and self._has_version()

    @property
    def waits(self) -> bool:
        """Whether the patch is to be installed only when a module is imported."""
        return self.optional and self.module not in sys.modules

    def _has_version(self) -> bool:
        installed = self.versions.installed if self.since or self.before else None
        if installed is None:
            return True
        version = _numbers(installed)
        return _numbers(self.since) <= version and not (self.before and version >= _numbers(self.before))

    def problem(self) -> str | None:
        """A sentence about why the patch cannot be installed; None if it can."""
        try:
            if hasattr(self.owner, self.attribute):
                return None
            found = f"{self.module} has no {self.target.partition(':')[2]}, which is replaced because it {self.reason}"
        except (ImportError, AttributeError) as error:
            found = f"cannot import {self.target} ({error})"
        return (
            f"{found}. It was checked with {self.versions}; installed: {self.versions.installed or 'unknown version'}."
        )

    def new_value(self) -> Any:
        """The object that replaces the one that has the name at present."""
        original, replacement = getattr(self.owner, self.attribute), pkgutil.resolve_name(self.replacement)
        if self.kind is Kind.VALUE:
            return replacement
        return replacement(original) if self.kind is Kind.FACTORY else around(original, replacement)


def _numbers(version: str) -> list[int]:
    """The numbers of a version, for comparisons; "0.20.0+d98e8a6" is a version of a checkout."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def rows_of(text: str, package: str, versions: Versions, optional: bool = False) -> Iterator[Patch]:
    """The patches of a text: for each, a line that says which name is replaced by which, then lines that say why.

    ::

        torch.nn:Module.cuda -> replacements:stay
            needs a GPU

    A :class:`Kind`, and the versions that have the name, may end the first line: ``VALUE since=0.19 before=0.20``.

    Args:
        text: The lines. Those that begin with # are comments.
        package: Of the replacements.
        versions: The versions with which the patches were checked.
        optional: See :class:`Patch`.
    """
    entries: list[list[str]] = []
    for line in (line.strip() for line in text.strip().splitlines()):
        if " -> " in line:
            entries.append([line])
        elif not line.startswith("#"):
            entries[-1].append(line)
    for names, *reason in entries:
        target, _, replacement, *more = names.split()
        kind = Kind[next(filter(str.isupper, more), Kind.AROUND.name)]
        bounds = dict(word.split("=") for word in more if "=" in word)
        yield Patch(target, " ".join(reason), f"{package}.{replacement}", versions, kind, optional, **bounds)


def around(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``replacement`` with the original and its arguments."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return call


class Patches:
    """A table of patches that are installed and removed together.

    Args:
        title: What the patches are for, for the documentation.
        rows: The patches.
    """

    def __init__(self, title: str, rows: Iterable[Patch]) -> None:
        self.title = title
        self.rows = tuple(rows)
        # The value that each replaced name had in its owner's namespace; _ABSENT if a class had inherited it.
        self._originals: dict[Patch, Any] = {}
        # Installs optional rows when their modules are imported.
        self._hook: AfterImport | None = None

    @property
    def is_installed(self) -> bool:
        """Whether any of the patches is installed, or will be when a module is imported."""
        return bool(self._originals) or self._hook is not None

    def install(self, instead: Mapping[str, Any] | None = None) -> None:
        """Replace the names. Rows that are installed already are left as they are.

        Optional rows whose modules have not been imported are installed when they are.

        Args:
            instead: Objects to use in place of replacements, by the replacement's name.

        Raises:
            ImportError: A name does not exist. Nothing has been replaced then.
        """
        self._replace(self.rows, instead or {})
        modules = frozenset(row.module for row in self.rows if row.waits)
        if modules and self._hook is None:
            self._hook = AfterImport(
                modules, lambda name: self._replace([row for row in self.rows if row.module == name], instead or {})
            )
            sys.meta_path.insert(0, self._hook)

    def _replace(self, rows: Iterable[Patch], instead: Mapping[str, Any]) -> None:
        wanted = [row for row in rows if row.applies and row not in self._originals]
        problem = next((problem for row in wanted if (problem := row.problem())), None)
        if problem is not None:
            raise ImportError(f"{self.title}: {problem}")
        # All values first: if a replacement cannot be imported, nothing has been replaced yet.
        values = [instead.get(row.replacement) or row.new_value() for row in wanted]
        for row, value in zip(wanted, values, strict=True):
            original = vars(row.owner).get(row.attribute, _ABSENT)
            if original is value:
                # A module that was imported while the patches were installed took the replacement from another one.
                installed = self._originals.items()
                original = next((old for other, old in installed if other.replacement == row.replacement), original)
            self._originals[row] = original
            setattr(row.owner, row.attribute, value)

    def uninstall(self) -> None:
        """Put the originals back, the last one that was replaced first."""
        if self._hook is not None:
            sys.meta_path.remove(self._hook)
            self._hook = None
        while self._originals:
            row, original = self._originals.popitem()
            if original is _ABSENT:
                delattr(row.owner, row.attribute)
            else:
                setattr(row.owner, row.attribute, original)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the patches for the duration of a ``with`` block, unless they are installed already."""
        if self.is_installed:
            yield
            return
        self.install()
        try:
            yield
        finally:
            self.uninstall()


def tables(imported_only: bool = False) -> list[Patches]:
    """All tables of patches.

    Args:
        imported_only: Leave out tables whose modules have not been imported: nothing of them can be installed.
    """
    return [pkgutil.resolve_name(name) for name in TABLES if not imported_only or name.partition(":")[0] in sys.modules]


def uninstall_all() -> None:
    """Put back everything that this process has replaced. Sharded models do not work any more afterwards."""
    for table in reversed(tables(imported_only=True)):
        table.uninstall()
