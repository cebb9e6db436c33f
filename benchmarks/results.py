"""The record of a benchmark: cases with figures per peer, where and how they were measured, and the file it is
kept in.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Summary
from benchmarks.rounds import Rounds, as_json
from scripts import status

FOLDER = status.OUT / "benchmarks"
PACKAGES = ("torch", "megatron-core", "numpy", "psutil")


@dataclass
class Case:
    """One comparison of peers under one load.

    Attributes:
        tags: What distinguishes it, such as ranks, dtype and tokens.
        figures: For each peer, the summary of each quantity.
        rounds: The raw values of all rounds, including discarded ones, if it was measured in rounds.
        notes: Remarks for the reader, such as crashed peers.
    """

    tags: dict[str, Any]
    figures: dict[str, dict[str, Summary]] = field(default_factory=dict)
    rounds: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, peer: str, **quantities: float) -> None:
        """Add figures that were measured once, such as bytes."""
        for name, value in quantities.items():
            self.figures.setdefault(peer, {})[name] = Summary.of([value])

    def put_rounds(self, measured: Rounds) -> None:
        """Add all that was measured in rounds."""
        for peer in {name: None for sample in measured.kept for name in sample}:
            quantities = {name for sample in measured.kept for name in sample.get(peer, {})} - {"others"}
            for name in sorted(quantities):
                self.figures.setdefault(peer, {})[name] = Summary.of(measured.of(peer, name))
        self.rounds = as_json(measured)
        for peer, reason in measured.crashed.items():
            self.notes.append(f"{peer} crashed: {reason.splitlines()[0] if reason else 'no reason given'}")
        for peer, times in measured.restarted.items():
            if peer not in measured.crashed:
                self.notes.append(f"{peer} crashed and was restarted: {times}")
        if measured.noisy:
            self.notes.append("noisy: other processes were computing during some of these rounds")
        elif measured.thrown_away:
            self.notes.append(f"rounds discarded because other processes were computing: {len(measured.thrown_away)}")

    def as_json(self) -> dict[str, Any]:
        """Values that :meth:`from_json` takes."""
        figures = {peer: {name: s.as_json() for name, s in own.items()} for peer, own in self.figures.items()}
        return {"tags": self.tags, "figures": figures, "rounds": self.rounds, "notes": self.notes}

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Case":
        """Rebuild what :meth:`as_json` gave."""
        figures = {
            peer: {name: Summary.from_json(s) for name, s in own.items()} for peer, own in values["figures"].items()
        }
        return Case(values["tags"], figures, values["rounds"], values["notes"])


@dataclass
class Result:
    """All cases of one benchmark.

    Attributes:
        benchmark: Its name.
        cases: All cases.
        skipped: Why nothing was measured, if so.
        quick: Whether it ran with loads and rounds that only show that it works.
        about: Date, versions, command and machine.
        targets: Verdicts on targets, as printed.
    """

    benchmark: str
    cases: list[Case] = field(default_factory=list)
    skipped: str = ""
    quick: bool = False
    about: dict[str, Any] = field(default_factory=dict)
    targets: list[dict[str, Any]] = field(default_factory=list)

    def save(self, folder: Path = FOLDER) -> Path:
        """Write the file; returns its path."""
        path = folder / f"{self.benchmark}.json"
        folder.mkdir(parents=True, exist_ok=True)
        cases = [case.as_json() for case in self.cases]
        values = {**{k: v for k, v in vars(self).items() if k != "cases"}, "cases": cases}
        path.write_text(json.dumps(values, indent=1) + "\n")
        return path

    def add_earlier(self, earlier: "Result") -> None:
        """Add the cases of an earlier run that this one has not measured, with a note of when that was."""
        tags = [case.tags for case in self.cases]
        kept = [case for case in earlier.cases if case.tags not in tags]
        about = earlier.about
        for case in kept:
            if not any(note.startswith("measured ") for note in case.notes):
                case.notes.append(f"measured {about.get('date', '')}, commit {about.get('commit', '')}")
        self.cases = kept + self.cases

    @staticmethod
    def load(path: Path) -> "Result":
        """Read what :meth:`save` wrote."""
        values = json.loads(path.read_text())
        return Result(**{**values, "cases": [Case.from_json(case) for case in values["cases"]]})


def load_all(folder: Path = FOLDER) -> dict[str, Result]:
    """All results of a folder, by benchmark."""
    return {path.stem: Result.load(path) for path in sorted(folder.glob("*.json"))}


def about() -> dict[str, Any]:
    """When, with what, how and where this process measures."""
    original = (Path(__file__).parent / "original.txt").read_text().split()[0]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": re.sub(r" --results[ =]\S+", "", "python -m benchmarks " + " ".join(sys.argv[1:])),
        "commit": status.commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: version for name in PACKAGES if (version := _installed(name)) is not None},
            "original": original,
        },
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """The machine: cores, memory, kernel, and what matters for the dtypes."""
    name = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    capabilities = torch.cpu.get_capabilities()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": name,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "native_bf16": bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")),
        "gpus": devices,
    }


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []
