"""Models on the simulated device."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import fully_shard
from tests.models import FP32_GRADS, Block, TinyModel
from tests.quantized_models import quantized_model, recompute
from tests.simulated.device import DEVICE, SimulatedDevice

BF16: dict[str, Any] = {"dtype": torch.bfloat16, "mixed_precision_policy": FP32_GRADS}


class Skips(TinyModel):
    """The first block can be left out."""

    skips = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks[self.skips :]:
            x = block(x)
        return self.head(self.norm(x))


def two_axes() -> dict[str, Any]:
    """Settings of 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    return {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW as torch chooses it on CUDA."""
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


def on_device(
    kind: Any = TinyModel, dtype: torch.dtype = torch.float32, format: str = "", recomputed: str = ""
) -> nn.Module:
    """A model of four blocks, or a model with quantized weights of a format, which may recompute parts of itself."""
    if format:
        return recompute(quantized_model(format, dtype, place=DEVICE), recomputed)
    return kind(depth=4).to(DEVICE, dtype)


def sharded(
    kind: Any = TinyModel,
    make: Any = adamw,
    dtype: torch.dtype = torch.float32,
    format: str = "",
    recomputed: str = "",
    **settings: Any,
) -> tuple[Any, torch.optim.Optimizer]:
    """Shard such a model, and an optimizer of the parameters that are trained."""
    model = on_device(kind, dtype, format, recomputed)
    model.blocks.requires_grad_(not settings.pop("frozen", False))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return fully_shard(model, make(trained), **{"fsdp_unit_modules": [Block], "device": DEVICE, **settings})


def assert_clean(sim: SimulatedDevice) -> None:
    """There was no unordered access, and the engine ran on streams of its own."""
    assert not sim.races, f"{len(sim.races)} races\n" + "\n".join(map(str, sim.races[:3]))
    assert len(sim.timeline.streams) > 1
