"""Medians, spreads and ratios of rounds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Summary:
    """Statistics of one quantity over several rounds.

    Attributes:
        median: Median.
        low: First quartile.
        high: Third quartile.
        rounds: The values of all rounds, in order.
    """

    median: float
    low: float
    high: float
    rounds: tuple[float, ...]

    @staticmethod
    def of(rounds: Sequence[float]) -> "Summary":
        """Summarize one or more rounds.

        Raises:
            ValueError: There are no rounds.
        """
        if not rounds:
            raise ValueError("nothing to summarize: no round was measured")
        if len(rounds) == 1:
            return Summary(rounds[0], rounds[0], rounds[0], tuple(rounds))
        low, median, high = statistics.quantiles(rounds, n=4, method="inclusive")
        return Summary(median, low, high, tuple(rounds))

    def as_json(self) -> dict[str, Any]:
        """Plain values for :meth:`from_json`."""
        return {"median": self.median, "low": self.low, "high": self.high, "rounds": list(self.rounds)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Summary":
        """The inverse of :meth:`as_json`."""
        return Summary(values["median"], values["low"], values["high"], tuple(values["rounds"]))


def ratio(numerator: Summary, denominator: Summary) -> Summary:
    """Ratios round by round if both have the same number of rounds, else ratios to the median of the denominator."""
    if len(numerator.rounds) == len(denominator.rounds):
        return Summary.of([a / b for a, b in zip(numerator.rounds, denominator.rounds, strict=True)])
    return Summary.of([a / denominator.median for a in numerator.rounds])


@dataclass(frozen=True)
class Slope:
    """A straight line through a series.

    Attributes:
        per_step: Its slope.
        error: The slope's standard error.
        mean: The mean of the series.
        steps: The length of the series in steps.
    """

    per_step: float
    error: float
    mean: float
    steps: float

    @staticmethod
    def of(steps: Sequence[float], values: Sequence[float]) -> "Slope":
        """Fit by least squares, through three points or more."""
        if len(steps) < 3:
            raise ValueError(f"a slope with an error needs three points or more; got {len(steps)}")
        fit = statistics.linear_regression(steps, values)
        residual = sum((y - fit.intercept - fit.slope * x) ** 2 for x, y in zip(steps, values, strict=True))
        around = sum((x - statistics.fmean(steps)) ** 2 for x in steps)
        error = math.sqrt(residual / (len(steps) - 2) / around)
        return Slope(fit.slope, error, statistics.fmean(values), steps[-1] - steps[0])

    @property
    def growth(self) -> float:
        """The rise of the line over the whole series, as a fraction of the mean."""
        return self.per_step * self.steps / self.mean if self.mean else 0.0

    def is_flat(self, tolerance: float) -> bool:
        """Whether the slope is at most two standard errors, or the growth at most ``tolerance``."""
        return self.per_step <= 2 * self.error or self.growth <= tolerance
