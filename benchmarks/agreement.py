"""Checks that all peers train the same thing: their losses must agree."""

import math
from collections.abc import Mapping, Sequence

# Relative differences of losses. In bf16, peers may add in other orders and cast at other places.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}


class LossesDisagree(RuntimeError):
    """A peer's loss is not the others'."""


def check(losses: Mapping[str, Sequence[float]], dtype: str, first_only: Sequence[str] = ()) -> float:
    """Compare the losses of all peers with those of the first.

    Args:
        losses: The loss of each step, by peer.
        dtype: A key of ``TOLERANCE``.
        first_only: Peers whose ranks train apart: only their first loss is compared.

    Returns:
        The largest relative difference.

    Raises:
        LossesDisagree: Names the peer, the step and both losses.
    """
    together = [peer for peer in losses if peer not in first_only]
    if not together:
        return 0.0
    reference, expected = together[0], losses[together[0]]
    worst = 0.0
    for peer, found in losses.items():
        steps = 1 if peer in first_only else len(expected)
        for step, (a, b) in enumerate(zip(expected[:steps], found[:steps], strict=True)):
            difference = abs(a - b) / abs(a) if math.isfinite(a) and math.isfinite(b) else math.inf
            worst = max(worst, difference)
            if not difference <= TOLERANCE[dtype]:
                raise LossesDisagree(
                    f"{dtype}, step {step}: the loss of {peer} is {b!r}, that of {reference} is {a!r}; "
                    f"they differ by {difference:.1e}, allowed are {TOLERANCE[dtype]:.0e}"
                )
    return worst
