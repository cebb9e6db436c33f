"""Megatron's loop saves on object storage and resumes from there, also after a kill during an upload."""

import os
import shlex
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.fsdp.checkpoint.storage import as_path
from scripts import real_loop
from tests.object_storage import BUCKET, s3_server

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo; Megatron runs on CUDA here")

MODEL = (
    "--num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --seq-length 16 --hidden-dropout 0 "
    "--attention-dropout 0 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2 --mock-data "
    "--lr 1e-3 --lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size 127 "
    "--eval-iters 0 --log-interval 1 --use-megatron-fsdp --ckpt-format fsdp_dtensor --save-interval 2"
)
_rank = real_loop._rank


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """An S3 server."""
    with s3_server() as variables:
        yield variables


def _rank_until_killed(name: str, *rest: Any) -> None:
    """A rank that ends like a killed process before a request that writes an object of such a name."""
    from aiobotocore.client import AioBaseClient

    original = AioBaseClient._make_api_call

    async def call(self: Any, operation: str, arguments: Any) -> Any:
        if not operation.startswith(("Head", "List", "Get")) and name in str(arguments.get("Key")):
            os.kill(os.getpid(), signal.SIGKILL)
        return await original(self, operation, arguments)

    with patch.object(AioBaseClient, "_make_api_call", call):
        _rank(*rest)


def _train(s3: dict[str, str], arguments: str) -> list[real_loop.Iteration]:
    return real_loop.run(shlex.split(f"{MODEL} {arguments}"), 2, 200, s3).iterations


def _names(folder: str) -> list[str]:
    return sorted(path.name for path in as_path(folder).iterdir())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_resumes_after_a_kill_during_an_upload(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _train(s3, f"--train-iters 4 --save {BUCKET}/whole --save-retain-interval 4")
    assert _names(f"{BUCKET}/whole") == ["iter_0000004", "latest_checkpointed_iteration.txt", "outcome.txt"]
    killed = f"{BUCKET}/killed"
    for name in ("iter_0000004/__1_", "iter_0000004/.metadata"):
        with monkeypatch.context() as patched, pytest.raises(real_loop.RunFailure, match=f"-{signal.SIGKILL}"):
            patched.setattr(real_loop, "_rank", partial(_rank_until_killed, name))
            _train(s3, f"--train-iters 4 --save {killed} --load {killed}")
        assert as_path(f"{killed}/latest_checkpointed_iteration.txt").read_text() == "2"
        assert ".metadata" not in _names(f"{killed}/iter_0000004")
    assert _train(s3, f"--train-iters 4 --save {killed} --load {killed}") == whole[2:]
    # A checkpoint itself, of a run that has ended as the other one did.
    further = "--train-iters 5 --override-opt-param-scheduler"
    last = [_train(s3, f"{further} --load {each}/iter_0000004") for each in (killed, f"{BUCKET}/whole")]
    assert len(last[0]) == 1 and last[0] == last[1]
