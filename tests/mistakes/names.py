"""The names that the code of mistakes may use, as a user's script would have imported or defined them."""
# ruff: noqa: F401 - the code of README.md uses what is imported here

import copy
import io
import math
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import megatron_fsdp
from megatron_fsdp import (
    MegatronFSDP,
    MixedPrecisionPolicy,
    deferred_init,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    register_forward_method,
    register_optimizer,
)
from tests.models import Block, adamw, assert_same_weights, batches, loss_of, main_weights
from tests.models import TinyModel as Model

DATA = batches(steps=6, per_step=2)


def tokens_of(step: int = 0) -> torch.Tensor:
    """This rank's batch of a step."""
    return DATA[step, dist.get_rank()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Train for some steps."""
    for step in range(steps):
        loss_of(model, tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def unsharded(steps: int = 2, zero_grad: bool = True, start: dict[str, torch.Tensor] | None = None) -> nn.Module:
    """The same model, trained in the same way by an unsharded run on the batches of both ranks."""
    torch.manual_seed(0)
    model = Model()
    model.load_state_dict(start or model.state_dict())
    optimizer = adamw(model.parameters())
    for step in range(steps):
        (sum(loss_of(model, tokens) for tokens in DATA[step]) / 2).backward()
        optimizer.step()
        if zero_grad:
            optimizer.zero_grad()
    return model


def largest_gradient() -> torch.Tensor:
    """The largest element of the gradients of the first step, by an unsharded run."""
    torch.manual_seed(0)
    model = Model()
    (sum(loss_of(model, tokens) for tokens in DATA[0]) / 2).backward()
    return torch.stack([parameter.grad.abs().max() for parameter in model.parameters()]).max()


def assert_trains(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> None:
    """Training, from the first step on, gives the weights of an unsharded run."""
    train(model, optimizer)
    assert_same_weights(model, unsharded())
