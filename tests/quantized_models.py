"""A small model with weights in 8-bit floats, and the unsharded training that sharded runs must equal bit by bit."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp.quantized.float8 import Float8Tensor
from megatron.fsdp.quantized.storage import storage_of
from megatron_fsdp import MegatronFSDP, fully_shard
from tests.models import DEVICE, STRATEGIES, Block, TinyModel, device, loss_of

BLOCKS: dict[str, tuple[int, int] | None] = {"tensor": None, "128x128": (128, 128), "1x128": (1, 128), "5x7": (5, 7)}
# The last two have two outer and two inner ranks.
KINDS = (*STRATEGIES, "hsdp", "hybrid")


def exact(parameters: Any) -> torch.optim.Optimizer:
    """Momentum with powers of 2: products are exact, so it does not matter how kernels fuse them with sums."""
    return torch.optim.SGD(parameters, lr=0.25, momentum=0.5)


def quantized_model(
    block: tuple[int, int] | None = None, dtype: torch.dtype = torch.float32, keep_initial: bool = True
) -> TinyModel:
    """A model whose blocks have quantized matrices, with the same values at every call. The head's is quantized too."""
    torch.manual_seed(5)
    model = TinyModel().to(device(), dtype)
    for module in [*(layer for block_ in model.blocks for layer in (block_.up, block_.down)), model.head]:
        weight = module.weight.detach()
        module.weight = nn.Parameter(Float8Tensor.quantize(weight, block, keep_initial=keep_initial))
    return model


def arguments(kind: str) -> dict[str, Any]:
    """How to shard; HSDP and hybrid FSDP take two outer ranks."""
    if kind in STRATEGIES:
        return {"zero_dp_strategy": kind}
    mesh = init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    outer = "no_shard" if kind == "hsdp" else "optim"
    return {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer", "outer_dp_sharding_strategy": outer}


def sharded_model(kind: str, model: nn.Module, **more: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """The sharded model and its optimizer."""
    return fully_shard(model, exact(model.parameters()), fsdp_unit_modules=[Block], **arguments(kind), **more)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> list[float]:
    """Train on this rank's micro-batch of every step, [steps, ranks, ...]; return the losses."""
    losses = []
    for step in data:
        loss = loss_of(model, step[dist.get_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Reference:
    """Unsharded training: float32 main weights, from which all weights are quantized after every step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.params = list(model.parameters())
        self.main = [nn.Parameter(self._initial(p).float().clone()) for p in self.params]
        self.optimizer = exact(self.main)
        self._quantize()

    @staticmethod
    def _initial(parameter: torch.Tensor) -> torch.Tensor:
        storage = storage_of(parameter)
        return parameter.detach() if storage is None else storage.initial(parameter)

    def step(self, micro_batches: torch.Tensor) -> list[float]:
        """Train one step; return the loss of each micro-batch."""
        losses, grads = [], []
        for tokens in micro_batches:
            loss = loss_of(self.model, tokens)
            grads.append(torch.autograd.grad(loss, self.params))
            losses.append(loss.item())
        for main, *each in zip(self.main, *grads, strict=True):
            main.grad = mean([grad.to(main.dtype) for grad in each])
        self.optimizer.step()
        self._quantize()
        return losses

    def _quantize(self) -> None:
        with torch.no_grad():
            for parameter, main in zip(self.params, self.main, strict=True):
                if isinstance(parameter, Float8Tensor):
                    made = Float8Tensor.quantize(main, parameter.block)
                    parameter.raw.copy_(made.raw)
                    parameter.inverse_scale.copy_(made.inverse_scale)
                else:
                    parameter.copy_(main)


def mean(grads: list[torch.Tensor]) -> torch.Tensor:
    """The mean, summed first within pairs, as two axes of two ranks do."""
    count = len(grads)
    while len(grads) > 1:
        grads = [grads[i] + grads[i + 1] for i in range(0, len(grads), 2)]
    return grads[0] / count
