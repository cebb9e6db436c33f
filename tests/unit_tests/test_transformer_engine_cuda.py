"""Modules of Transformer Engine with quantized weights on a GPU: sharded training is as unsharded training."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.quantized_models import exact
from tests.ranks import DEVICE, RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE != "cuda" or not torch.cuda.is_available(), reason="needs FSDP_TEST_DEVICE=cuda"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]

# The class of each recipe, what it is made with, and the lowest compute capability.
RECIPES: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "delayed": ("DelayedScaling", {}, (8, 9)),
    "current": ("Float8CurrentScaling", {}, (8, 9)),
    "blockwise": ("Float8BlockScaling", {}, (9, 0)),
    "MXFP8": ("MXFP8BlockScaling", {}, (10, 0)),
    "NVFP4": ("NVFP4BlockScaling", {"disable_rht": True, "disable_stochastic_rounding": True}, (10, 0)),
}
WIDTH, HIDDEN, STEPS = 256, 640, 6


class Model(nn.Module):
    """Two layers whose products and weights are quantized."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        import transformer_engine.common.recipe as recipes
        import transformer_engine.pytorch as te

        name, options, _ = RECIPES[recipe]
        self.recipe = getattr(recipes, name)(**options)
        torch.manual_seed(5)
        build = te.quantized_model_init if hasattr(te, "quantized_model_init") else te.fp8_model_init
        with build(enabled=True, recipe=self.recipe, preserve_high_precision_init_val=True):
            self.up = te.Linear(WIDTH, HIDDEN, bias=False, params_dtype=torch.bfloat16)
            self.down = te.Linear(HIDDEN, WIDTH, bias=False, params_dtype=torch.bfloat16)
        self.seen: dict[str, torch.Tensor] = {}

    def watch(self) -> None:
        """Keep the weights that layers use from now on. Hooks of sharding have to be there: they run first."""
        for place in ("up", "down"):

            def see(module: Any, args: Any, place: str = place) -> None:
                with torch.no_grad():
                    self.seen[place] = module.weight.dequantize().clone()

            getattr(self, place).register_forward_pre_hook(see)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        import transformer_engine.pytorch as te

        if hasattr(te, "autocast"):
            context = te.autocast(enabled=True, recipe=self.recipe)
        else:
            context = te.fp8_autocast(enabled=True, fp8_recipe=self.recipe)
        with context:
            return self.down(torch.nn.functional.gelu(self.up(x))).float().square().mean()


def _unsharded(recipe: str, data: torch.Tensor) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """The loss and the weights of every step."""
    model: Any = Model(recipe)
    model.watch()
    params = list(model.parameters())
    main = [nn.Parameter(p.get_high_precision_init_val().to(p.device, torch.float32)) for p in params]
    optimizer = exact(main)
    result = []
    for x in data:
        with torch.no_grad():
            for parameter, value in zip(params, main, strict=True):
                parameter.quantize_(value.to(torch.bfloat16))
        loss = model(x)
        for value, grad in zip(main, torch.autograd.grad(loss, params), strict=True):
            value.grad = grad.float()
        optimizer.step()
        result.append((loss.item(), dict(model.seen)))
    return result


def _trains(recipe: str, strategy: str) -> None:
    import transformer_engine.pytorch as te

    # The same on every rank, so that delayed scaling sees the same magnitudes as unsharded training.
    data = torch.randn(STEPS, 64, WIDTH, generator=torch.Generator().manual_seed(7)).to("cuda", torch.bfloat16)
    expected = _unsharded(recipe, data)
    model = Model(recipe)
    sharded, optimizer = fully_shard(
        model,
        exact(model.parameters()),
        fsdp_unit_modules=[te.Linear],
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32),
    )
    model.watch()
    for number, (x, (expected_loss, weights)) in enumerate(zip(data, expected, strict=True)):
        loss = sharded(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(expected_loss, rel=1e-3)
        for place, weight in weights.items():
            # Before the first step, nothing has been computed in a different order.
            same = torch.equal if number == 0 else torch.allclose
            assert same(model.seen[place], weight), (number, place)
    assert not torch.equal(expected[0][1]["up"], expected[-1][1]["up"])


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [1, 2])
def test_trains_as_unsharded(ranks: RankPool, recipe: str, strategy: str, size: int) -> None:
    needed = RECIPES[recipe][2]
    if torch.cuda.get_device_capability() < needed:
        pytest.skip(f"needs compute capability {'.'.join(map(str, needed))}")
    ranks.run(size, _trains, recipe, strategy)
