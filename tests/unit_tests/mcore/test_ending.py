"""The file that says how a run of Megatron's loop ended."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fsdp.checkpoint.stopping import OUTCOME

# What ends the script, what Megatron knows of the iteration, and the outcome.
ENDS: dict[str, tuple[BaseException | None, dict[str, Any], str]] = {
    "all iterations": (None, {"curr_iteration": 9}, "finished"),
    "exit after the last": (SystemExit(0), {"curr_iteration": 9}, "finished"),
    "early": (SystemExit(0), {"curr_iteration": 4}, "stopped"),
    "to run again": (SystemExit(16), {"curr_iteration": 4}, "stopped"),
    # It would end in the same way each time that it is queued again.
    "no checkpoint": (SystemExit(0), {}, "failed ended with exit code 0 before the first iteration"),
    "another exit": (SystemExit(3), {"curr_iteration": 4}, "failed"),
    "an error": (ValueError("no data"), {"curr_iteration": 4}, "failed rank 0 on "),
}


@pytest.mark.parametrize("end", ENDS)
def test_outcomes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str) -> None:
    from megatron.fsdp.mcore import ending

    raised, known, expected = ENDS[end]
    args = SimpleNamespace(save=str(tmp_path), train_iters=10, **known)
    monkeypatch.setattr(ending, "megatron_arguments", lambda: args)
    try:
        with ending.leaving_outcome():
            if raised is not None:
                raise raised
    except (SystemExit, ValueError) as error:
        assert error is raised
    assert (tmp_path / OUTCOME).read_text().startswith(expected)
