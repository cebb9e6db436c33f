"""The input of a check, and its result."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """A check cannot run here. The message gives the reason."""


@dataclass(frozen=True)
class Setup:
    """How a check is run.

    Attributes:
        device: "cuda" or "cpu".
        dry_run: Use small sizes, only to run the check's own code.
        out: Folder for files.
        seconds: Time after which the check is killed.
    """

    device: str
    dry_run: bool
    out: Path
    seconds: float

    @property
    def on_cuda(self) -> bool:
        """Whether a GPU computes."""
        return self.device == "cuda"


@dataclass
class Verdict:
    """The result of a check.

    Attributes:
        outcome: "passed", "failed" or "skipped".
        line: A sentence about it.
        figures: Everything that was measured.
    """

    outcome: str
    line: str
    figures: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path, **more: Any) -> None:
        """Write it as JSON, with ``more``."""
        path.write_text(json.dumps(asdict(self) | more, indent=1, default=str) + "\n")

    @staticmethod
    def load(path: Path) -> "Verdict":
        """Read what :meth:`save` wrote."""
        values = json.loads(path.read_text())
        return Verdict(values["outcome"], values["line"], values["figures"])


def judge(problems: list[str], good: str, figures: dict[str, Any]) -> Verdict:
    """Passed with the sentence ``good`` if there are no problems; else failed with the first one."""
    if not problems:
        return Verdict("passed", good, figures)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Verdict("failed", problems[0].strip().replace("\n", " ")[:300] + more, {**figures, "problems": problems})
