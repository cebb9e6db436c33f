"""Finds the first number that differs between two runs of a training program: one that is trusted, and a sharded one.

A run is recorded in a folder, with a file per step and recording rank. Both runs start from the same weights and train
on the same data.
"""

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

# Names the folder of the recording, in the environment of ranks.
RECORD = "MEGATRON_FSDP_RECORD"

# Relative differences that a different order of summation may cause: of a number, and of a tensor's elements
# relative to its largest element.
TOLERANCES = {"fp64": (1e-9, 1e-8), "fp32": (5e-6, 1e-4), "bf16": (1e-2, 5e-2)}
# A tensor's gradients are judged relative to its largest one or, if that is below this fraction of the model's largest
# one, relative to this fraction: all of them may be rounding errors.
SMALL = 1e-3
# Gradients below this fraction of that are rounding errors.
NOISE = 1e-5
# Gradients that are zero in theory may be tiny, so smaller differences are ignored.
TINY = 1e-9

Tensors = dict[str, torch.Tensor]


class Step(NamedTuple):
    """One rank's record of a training step.

    Attributes:
        losses: Losses, by what they are called in messages.
        gradients: Full gradients before the optimizer's step, by name of the parameter; empty if not recorded.
        norm: Norm of all gradients; 0 if it is not recorded.
        weights: Full parameters after the optimizer's step, by name; empty if they are not recorded.
        key_shifts: Biases of attention keys, by name: a mask of their rows, and name and mask of the bias of the
            queries. A bias of the keys adds the same value to all scores of a query, and softmax ignores it, so its
            exact gradient is zero.
    """

    losses: dict[str, float]
    gradients: Tensors = {}
    norm: float = 0.0
    weights: Tensors = {}
    key_shifts: dict[str, tuple[torch.Tensor, str, torch.Tensor]] = {}

    def save(self, folder: Path, number: int, rank: int) -> None:
        """Write the file of step ``number``, which counts from 1."""
        torch.save(self._asdict(), folder / f"{number:06d}.{rank}.pt")


def run_on_ranks(
    words: Sequence[str], ranks: int, folder: Path, last: int, environment: Mapping[str, str] = os.environ
) -> str:
    """Run ``verify`` with a command line on ranks of this machine, which record into ``folder``, a new one.

    Args:
        words: The command line.
        ranks: Number of ranks.
        folder: The new folder.
        last: Number of the last step.
        environment: Environment variables of the ranks.

    Returns:
        The end of the log if the last step is not recorded, else an empty string.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [*command, "-m", "megatron.fsdp.tools.verify", *words],
        env={**environment, RECORD: str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # A process may crash while it ends, after everything is recorded.
    first, end = (sorted(file.suffixes[0] for file in folder.glob(f"{step:06d}.*.pt")) for step in (1, last))
    recorded = first and first == end
    return "" if recorded else result.stdout[-4000:] or f"exit code {result.returncode}"


@dataclass(frozen=True)
class Finding:
    """A difference between the runs.

    Attributes:
        where: The step, and the parameter or quantity.
        rank: The rank that recorded it; None if only one rank records.
        difference: The relative difference.
        got: The number of the sharded run, and its position in the tensor.
        wanted: The number of the trusted run.
    """

    where: str
    rank: int | None
    difference: float
    got: str
    wanted: str

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" (rank {self.rank})"
        return f"{self.where}{rank}: got {self.got}, expected {self.wanted}; relative difference {self.difference:.1e}"


@dataclass
class RunComparison:
    """The result of a comparison.

    Attributes:
        findings: Differences in the first step that differs, in the order in which a step computes them.
        compared: Number of compared numbers and tensors.
        largest: Largest relative difference within the tolerances.
        fingerprint: Hash of the last weights of the sharded run.
        noise: By name of weight, the number of elements that were left out because their gradient is a rounding error.
    """

    findings: list[Finding] = field(default_factory=list)
    compared: int = 0
    largest: float = 0.0
    fingerprint: str = ""
    noise: dict[str, int] = field(default_factory=dict)


def compare(trusted: Path, sharded: Path, precision: str) -> RunComparison:
    """Compare the recordings of two runs, up to the first step that differs.

    Args:
        trusted: Folder of the run with DDP or without sharding.
        sharded: Folder of the sharded run.
        precision: A key of ``TOLERANCES``.
    """
    return _Comparison(precision).run(trusted, sharded)


def relative(a: float, b: float, scale: float = 0.0) -> float:
    """The difference of two numbers relative to the largest of them and ``scale``; infinite if one is not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b), scale)


class _Comparison:
    """The state of one comparison from step to step."""

    def __init__(self, precision: str) -> None:
        self._of_numbers, self._of_elements = TOLERANCES[precision]
        self._result = RunComparison()
        # By rank: losses of the first step, to which the later ones are relative, and masks of rounding errors.
        self._losses: dict[int, dict[str, float]] = {}
        self._noise: dict[int, Tensors] = {}

    def run(self, trusted: Path, sharded: Path) -> RunComparison:
        files = sorted(file.name for file in trusted.iterdir())
        several = any(not name.endswith(".0.pt") for name in files)
        found, failed, digest = self._result, 0, hashlib.sha256()
        for name in files:
            number, rank = (int(part) for part in name.split(".")[:2])
            if failed and number > failed:
                break
            a, b = (Step(**torch.load(folder / name, weights_only=True)) for folder in (trusted, sharded))
            for what, difference, allowed, got, wanted in self._checks(rank, a, b):
                found.compared += 1
                if difference <= allowed:
                    found.largest = max(found.largest, difference)
                    continue
                failed = number
                where = f"step {number}, {what}"
                found.findings.append(Finding(where, rank if several else None, difference, got, wanted))
            if name[:6] == files[-1][:6]:
                for key, weight in sorted(b.weights.items()):
                    digest.update(key.encode() + weight.float().numpy().tobytes())
        found.fingerprint = digest.hexdigest()[:16]
        return found

    def _checks(self, rank: int, a: Step, b: Step) -> Iterator["_Check"]:
        """Compare two steps in the order of computation: losses, gradients from the last to the first, weights."""
        scales = self._losses.setdefault(rank, a.losses)
        for name, loss in a.losses.items():
            yield _number(name, loss, b.losses[name], self._of_numbers, abs(scales[name]))
        small = SMALL * max((_largest(gradient) for gradient in a.gradients.values()), default=0.0)
        if rank not in self._noise:
            self._noise[rank] = {name: self._noise_of(name, a, b, small) for name in a.gradients}
        for name in reversed(list(a.gradients | b.gradients)):
            # For biases of keys, the scale is the gradient of the bias of the queries.
            scale = small
            if name in a.key_shifts:
                _, queries, rows = a.key_shifts[name]
                scale = max(small, _largest(a.gradients[queries][rows]))
            yield self._tensor("gradient", name, a.gradients, b.gradients, scale=scale)
        yield _number("gradient norm", a.norm, b.norm, self._of_numbers)
        for name in a.weights | b.weights:
            yield self._weight(name, a, b, self._noise[rank].get(name))

    def _weight(self, name: str, a: Step, b: Step, noise: torch.Tensor | None) -> "_Check":
        """Compare a weight without elements whose gradient is a rounding error. They are reported if they differ."""
        check = self._tensor("weight", name, a.weights, b.weights, noise)
        if noise is not None and name in a.weights and name in b.weights and check.difference <= check.allowed:
            if distance(a.weights[name], b.weights[name]) > check.allowed:
                self._result.noise[name] = int(noise.sum())
        return check

    def _tensor(
        self,
        kind: str,
        name: str,
        wanted: Tensors,
        got: Tensors,
        ignored: torch.Tensor | None = None,
        scale: float = 0.0,
    ) -> "_Check":
        a, b, what = wanted.get(name), got.get(name), f"{kind} of {name}"
        if a is None or b is None:
            # A parameter without a gradient on one side may have a gradient of zeros on the other.
            difference = math.inf if kind == "weight" or _largest(b if a is None else a) else 0.0
        else:
            difference = distance(a, b, ignored, scale)
        if difference <= self._of_elements:
            return _Check(what, difference, self._of_elements)
        return _Check(what, difference, self._of_elements, *_farthest(a, b, ignored))

    def _noise_of(self, name: str, a: Step, b: Step, small: float) -> torch.Tensor:
        """A mask of elements whose gradient is only a rounding error, such as biases of attention keys.

        Optimizers that normalize gradients, such as Adam, turn these into steps of full size in a random direction.
        """
        gradient = a.gradients[name]
        noise = gradient.abs() <= NOISE * max(small, _largest(gradient))
        other = b.gradients.get(name)
        if other is not None and other.shape == gradient.shape:
            # An element without a gradient in either run does not move in either.
            noise &= (gradient != 0) | (other != 0)
            if name in a.key_shifts:
                rows, queries, of_queries = a.key_shifts[name]
                most = max(_largest(one[rows]) for one in (gradient, other))
                if most <= self._of_elements * _largest(a.gradients[queries][of_queries]):
                    noise |= rows
        return noise


class _Check(NamedTuple):
    """A compared quantity: its name, the relative difference, what is allowed, and both numbers if it is more."""

    what: str
    difference: float
    allowed: float
    got: str = ""
    wanted: str = ""


def _number(what: str, wanted: float, got: float, allowed: float, scale: float = 0.0) -> _Check:
    return _Check(what, relative(got, wanted, scale), allowed, f"{got:.6g}", f"{wanted:.6g}")


def _largest(tensor: torch.Tensor | None) -> float:
    return float(tensor.abs().max()) if tensor is not None and tensor.numel() else 0.0


def distance(a: torch.Tensor, b: torch.Tensor, ignored: torch.Tensor | None = None, scale: float = 0.0) -> float:
    """The largest difference of elements, relative to the largest element or to ``scale``, whichever is larger."""
    if a.shape != b.shape:
        return math.inf
    if ignored is not None:
        a, b = a.masked_fill(ignored, 0), b.masked_fill(ignored, 0)
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    difference = float((a - b).abs().max())
    if not math.isfinite(difference):
        return math.inf
    return 0.0 if difference < TINY else difference / max(scale, _largest(a), _largest(b))


def _farthest(a: torch.Tensor | None, b: torch.Tensor | None, ignored: torch.Tensor | None) -> tuple[str, str]:
    """The elements that differ most, as texts: that of the sharded run ``b`` with its place, and that of ``a``."""
    if a is None or b is None or a.shape != b.shape:
        first, second = ("none" if one is None else f"a tensor of shape {tuple(one.shape)}" for one in (b, a))
        return first, second
    apart = (a.double() - b.double()).abs().nan_to_num(math.inf)
    if ignored is not None:
        apart = apart.masked_fill(ignored, 0)
    place = [int(index) for index in torch.unravel_index(apart.argmax(), apart.shape)]
    return f"{float(b[tuple(place)]):.6g} at {place}", f"{float(a[tuple(place)]):.6g}"
