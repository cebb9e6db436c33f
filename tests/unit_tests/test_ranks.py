"""The rank processes of the tests: reports of failures, isolation of later tests, and exchange of buffers."""

import os
import sys
import time
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron.fsdp.comm import collectives
from megatron_fsdp import fully_shard_model
from tests.exchanges import COLLECTIVES, SENDS
from tests.models import Block, TinyModel, batches, loss_of
from tests.ranks import DEVICE, RankFailure, RankPool


def _one_rank_raises(culprit: int) -> None:
    print(f"rank {dist.get_rank()} prints this")
    os.write(2, f"C++ of rank {dist.get_rank()} writes that\n".encode())
    if dist.get_rank() == culprit:
        raise KeyError("injected")
    dist.barrier()


def test_a_failure_names_the_rank_with_its_traceback_and_its_output(ranks: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks.run(3, _one_rank_raises, 1)
    first, *others = str(caught.value).split("\nrank ")
    # The other ranks wait for the one that raised, and lose the connection to it.
    assert first.startswith("rank 1: Traceback")
    assert "in _one_rank_raises" in first and first.endswith("KeyError: 'injected'")
    assert others[0] == "1's last output:\n    rank 1 prints this\n    C++ of rank 1 writes that"
    assert {text[0] for text in others[1:]} == {"0", "2"}


def _one_rank_dies() -> None:
    print("a last word", file=sys.stderr)
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


def test_a_lost_process_is_reported_with_its_exit_code_and_its_output(ranks: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, _one_rank_dies)
    report = str(caught.value)
    assert "rank 0: the process ended with exit code 3\nrank 0's last output:\n    a last word" in report


def _hang() -> None:
    time.sleep(60)


def test_a_rank_that_hangs_reports_where(ranks: RankPool) -> None:
    ranks.run(1, _speak)
    with patch.object(ranks, "timeout", 3.0), pytest.raises(RankFailure) as caught:
        ranks.run(1, _hang)
    assert "rank 0: no reply within 3 s" in str(caught.value)
    assert "in _hang" in str(caught.value)


def test_output_of_every_rank_is_shown_with_its_number(ranks: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run(2, _speak)
    assert capsys.readouterr().out == "[rank 0] I am 0\n[rank 1] I am 1\n"


def _speak() -> None:
    print(f"I am {dist.get_rank()}")


def _change_the_process() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    raise ValueError


def _see_the_change() -> str | None:
    return os.environ.get("LEFT_BEHIND")


def test_state_left_by_a_failed_test_does_not_reach_the_next(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="ValueError"):
        ranks.run(1, _change_the_process)
    assert ranks.run(1, _see_the_change) == [None]


def _sends_of_gloo() -> int:
    with patch.object(collectives.SENDS, "reduce_scatter", side_effect=collectives.SENDS.reduce_scatter) as sends:
        model = fully_shard_model(TinyModel(), fsdp_unit_modules=[Block])
        loss_of(model, batches(1, 1)[0, 0]).backward()
    return sends.call_count


@pytest.mark.skipif(DEVICE == "cuda", reason="CUDA tensors always take the collectives that NCCL runs")
@pytest.mark.parametrize("exchange", [SENDS, COLLECTIVES], indirect=True)
@pytest.mark.usefixtures("exchange")
def test_exchanges_differ(ranks: RankPool, request: pytest.FixtureRequest) -> None:
    counts = ranks.run(2, _sends_of_gloo)
    assert all((count > 0) == (request.node.callspec.params["exchange"] == SENDS) for count in counts)
