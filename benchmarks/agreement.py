"""Checks that the losses of all peers agree, so that the benchmarks compare the same training."""

import math
from collections.abc import Mapping, Sequence

# Relative differences of losses. In bf16, peers may differ in the order of sums and in the places of casts.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}


class LossesDisagree(RuntimeError):
    """The losses of a peer differ from those of the others."""


def check(losses: Mapping[str, Sequence[float]], dtype: str, first_only: Sequence[str] = ()) -> float:
    """Compare the losses of all peers with those of the first.

    Args:
        losses: The loss of each step, by peer.
        dtype: A key of ``TOLERANCE``.
        first_only: Peers whose ranks train separately, so that only their first loss is compared.

    Returns:
        The largest relative difference.

    Raises:
        LossesDisagree: Losses differ. The message contains the peer, the step and both losses.
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
                    f"they differ by {difference:.1e}, more than {TOLERANCE[dtype]:.0e}"
                )
    return worst
