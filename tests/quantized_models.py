"""A small model with quantized weights, and the unsharded training that sharded runs must equal bit by bit."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from megatron.fsdp.quantized.reference.base import ReferenceTensor
from megatron.fsdp.quantized.reference.float8 import Float8Tensor
from megatron.fsdp.quantized.reference.mx import MXTensor
from megatron.fsdp.quantized.reference.nvfp4 import NVFP4Tensor
from megatron.fsdp.quantized.storage import WeightShard, storage_of
from megatron_fsdp import MegatronFSDP, fully_shard
from tests.models import DEVICE, STRATEGIES, Block, TinyModel, device, loss_of

BLOCKS: dict[str, tuple[int, int] | None] = {"tensor": None, "128x128": (128, 128), "1x128": (1, 128), "5x7": (5, 7)}
# Formats of any shape: ranks may split blocks.
ANYWHERE: dict[str, Callable[..., torch.Tensor]] = {
    **{name: partial(Float8Tensor.quantize, block=block) for name, block in BLOCKS.items()},
    "delayed": partial(Float8Tensor.quantize, history=3),
}
# Formats of whole blocks. Blocks of 32 x 32 and 1 x 32 stand for larger ones.
IN_BLOCKS: dict[str, Callable[..., torch.Tensor]] = {
    "32x32": partial(Float8Tensor.quantize, block=(32, 32)),
    "1x32": partial(Float8Tensor.quantize, block=(1, 32)),
    "mx": MXTensor.quantize,
    "nvfp4": NVFP4Tensor.quantize,
    "nvfp4 1x16": partial(NVFP4Tensor.quantize, rows=1),
}
FORMATS = {**ANYWHERE, **IN_BLOCKS}
# torchao converts layers, not weights; it may be missing.
OF_TORCHAO = ("torchao",) if find_spec("torchao") else ()
ALL_FORMATS = (*FORMATS, *OF_TORCHAO)

# The last two have two outer and two inner ranks.
KINDS = (*STRATEGIES, "hsdp", "hybrid")


# The layers of Megatron's models whose weights it quantizes. Embeddings, norms and biases stay as they are.
_LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that Megatron would build with quantized weights, by name."""
    return {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in _LAYERS}


def quantize_layers(model: nn.Module, format: str) -> nn.Module:
    """Do what ``fp8_model_init`` does in Megatron, with a reference format: keep initial values and marks."""
    for layer in layers_of(model).values():
        weight = layer.weight
        layer.weight = nn.Parameter(FORMATS[format](weight, keep_initial=True))
        vars(layer.weight).update(vars(weight))
    return model


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, format: str) -> torch.Tensor:
        return FORMATS[format](weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Rounded(nn.Module):
    def __init__(self, format: str) -> None:
        super().__init__()
        self.format = format

    def forward(self, weight: torch.Tensor) -> Any:
        return _Round.apply(weight, self.format)


def round_layers(model: nn.Module, format: str) -> nn.Module:
    """Keep plain weights, and quantize them for every forward and backward."""
    for layer in layers_of(model).values():
        parametrize.register_parametrization(layer, "weight", _Rounded(format))
    return model


class Recomputed(nn.Module):
    """Recomputes a module in backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.module, *args, use_reentrant=False)


def recompute(model: nn.Module, what: str) -> nn.Module:
    """Let the model recompute whole blocks (``unit``), one layer of each (``layer``), or nothing (empty)."""
    for number, block in enumerate(model.blocks):
        if what == "layer":
            block.up = Recomputed(block.up)
        elif what == "unit":
            model.blocks[number] = Recomputed(block)
    return model


def exact(parameters: Any) -> torch.optim.Optimizer:
    """Momentum with powers of 2: products are exact, so it does not matter how kernels fuse them with sums."""
    return torch.optim.SGD(parameters, lr=0.25, momentum=0.5)


def quantized_model(
    format: str = "tensor",
    dtype: torch.dtype = torch.float32,
    keep_initial: bool = True,
    place: torch.device | None = None,
    like: str = "",
) -> TinyModel:
    """A model whose blocks have quantized matrices, with the same values at every call. The head's is quantized too.

    Args:
        format: A name in ``FORMATS``, "torchao", or empty: weights stay as they are.
        dtype: Dtype of the other weights, and the one that quantized weights appear to have.
        keep_initial: Main weights start from the values before quantization.
        place: Another device than that of the tests.
        like: The format whose shapes a model without one has.
    """
    torch.manual_seed(5)
    model = TinyModel()
    if (format or like) in IN_BLOCKS:
        model = TinyModel(width=32, vocabulary=64)
        for block in model.blocks:
            block.up, block.down = nn.Linear(32, 96), nn.Linear(96, 32, bias=False)
    model = model.to(dtype) if model.head.weight.is_meta else model.to(place or device(), dtype)
    if format == "torchao":
        return float8(model)
    for module in [*(layer for block in model.blocks for layer in (block.up, block.down)), model.head]:
        if not format:
            break
        weight = module.weight.detach()
        module.weight = nn.Parameter(FORMATS[format](weight, keep_initial=keep_initial))
    return model


def float8(model: nn.Module, gather: bool = True) -> Any:
    """Convert a model's linear layers with torchao; ``gather`` all-gathers their weights as bytes."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gather, emulate=True)
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: not isinstance(module, Float8Linear)
    )


def ranks_of(kind: str) -> int:
    """How many ranks a way to shard needs."""
    return 4 if kind in ("hsdp", "hybrid") else 2


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


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor, rank: int | None = None
) -> list[float]:
    """Train on a rank's micro-batch of every step, [steps, ranks, ...], and return the losses. None: on this rank's."""
    losses, rank = [], dist.get_rank() if rank is None else rank
    for step in data:
        loss = loss_of(model, step[rank])
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
        for parameter in self.params:
            if hasattr(parameter, "_tensor"):  # torchao's, cast from float32
                parameter._tensor = parameter._tensor.detach().float()
        self.main = [nn.Parameter(self._initial(p).float().clone()) for p in self.params]
        self.optimizer = exact(self.main)
        self.forget()
        self.quantize()

    @staticmethod
    def _initial(parameter: torch.Tensor) -> torch.Tensor:
        storage = storage_of(parameter)
        if storage is None:
            return parameter.detach()
        return storage.initial(parameter)

    def forget(self) -> None:
        """Drop the magnitudes of earlier quantizations, as a new process does."""
        for parameter in self.params:
            if isinstance(parameter, ReferenceTensor) and "history" in parameter.state:
                parameter.state["history"].zero_()

    def step(self, micro_batches: torch.Tensor) -> list[float]:
        """Train one step; return the loss of each micro-batch."""
        losses, grads = [], []
        for tokens in micro_batches:
            loss = loss_of(self.model, tokens)
            grads.append(torch.autograd.grad(loss, self.params, materialize_grads=True))
            losses.append(loss.item())
        for main, *each in zip(self.main, *grads, strict=True):
            main.grad = mean([grad.to(main.dtype) for grad in each])
        self.optimizer.step()
        self.quantize()
        return losses

    def quantize(self) -> None:
        """Make compute weights of the main weights."""
        with torch.no_grad():
            for parameter, main in zip(self.params, self.main, strict=True):
                if isinstance(parameter, ReferenceTensor):
                    whole = WeightShard(parameter, main.flatten(), 0, parameter.planes)
                    parameter.stored_as.quantize([whole], lambda values: None)
                else:
                    parameter.copy_(main)


def mean(grads: list[torch.Tensor]) -> torch.Tensor:
    """The mean, summed first within pairs, as two axes of two ranks do."""
    count = len(grads)
    while len(grads) > 1:
        grads = [grads[i] + grads[i + 1] for i in range(0, len(grads), 2)]
    return grads[0] / count
