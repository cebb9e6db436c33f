"""Checkpoints that earlier versions wrote are loaded bit for bit.

The folders in ``earlier`` are one save of a state dict, and one conversion by two processes, of 23 November 2026.
"""

import argparse
from pathlib import Path

import pytest
import torch

from megatron.fsdp.checkpoint.loading import load
from megatron.fsdp.checkpoint.reader import CheckpointReader, common_state
from megatron.fsdp.convert.verifying import verify
from tests.small_checkpoints import numbers, same_bits

FOLDER = Path(__file__).with_name("earlier")
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64),
    *(torch.uint16, torch.bool, torch.complex64),
)
TENSORS = {str(dtype): numbers((5, 3), dtype) for dtype in DTYPES}
TENSORS |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "view": numbers((9, 4))[2:5]}


@pytest.mark.parametrize(("name", "format"), [("saved", "fsdp_dtensor"), ("converted", "torch_dist")])
def test_every_bit(name: str, format: str) -> None:
    found = CheckpointReader(FOLDER / name)
    assert found.format == format and not verify(FOLDER / name).problems[format == "torch_dist" :]
    state = {key: torch.zeros_like(tensor) for key, tensor in TENSORS.items()}
    load(state, FOLDER / name)
    for key, tensor in TENSORS.items():
        assert same_bits(state[key], tensor) and same_bits(found.tensors[key].full_tensor(), tensor), key


def test_objects() -> None:
    args = CheckpointReader(FOLDER / "saved").read_object("args")
    assert isinstance(args, argparse.Namespace) and (args.lr, args.dtype) == (0.1, torch.bfloat16)
    assert repr(args.act) == "<torch.nn.functional.silu>"
    assert CheckpointReader(FOLDER / "converted").read_object("betas") == (0.9, 0.95)
    assert common_state(FOLDER / "converted") == {"iteration": 7}
