"""Megatron's wrapper on the simulated device, in Megatron's schedule and with its optimizer."""

import contextlib
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.models import STRATEGIES
from tests.ranks import DEVICE as REAL_DEVICE
from tests.ranks import RankPool
from tests.simulated.device import DEVICE, simulated_device

pytestmark = pytest.mark.skipif(REAL_DEVICE == "cuda", reason="computes on CPU tensors")


def _train(settings: dict[str, Any]) -> None:
    from megatron.fsdp.mcore.cpu import cuda_stand_in, torch_view
    from tests import megatron_models as mm

    def losses(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(mm.SEQUENCE, device=DEVICE).unsqueeze(0)
        mask = torch.ones(1, 1, mm.SEQUENCE, mm.SEQUENCE, device=DEVICE).tril() < 0.5
        return module(rows[:, :-1], positions, mask, labels=rows[:, 1:])

    with contextlib.ExitStack() as stack:
        sim = stack.enter_context(simulated_device(2.0))
        for module in (cuda_stand_in, torch_view):
            stack.enter_context(patch.object(module, "CPU", DEVICE))
        stack.enter_context(mm.megatron())
        model = mm.wrapped(build=lambda config: mm.gpt(config).to(DEVICE), check_for_nan_in_grad=False, **settings)
        optimizer = mm.optimizer_of(model)
        for step in range(3):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            data = mm.tokens(step, 2).to(DEVICE)
            # The wrapper must not wait once the ranks have agreed on an order, which they do in the first step.
            # Megatron's optimizer waits for the norm of the gradients.
            with sim.no_host_wait() if step else contextlib.nullcontext():
                mm.forward_backward(model, data, losses)
            optimizer.step()
        assert not sim.races, "\n".join(map(str, sim.races[:3]))
        assert len(sim.timeline.streams) > 1


@pytest.mark.every_strategy
@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(ranks: RankPool, strategy: str, bf16: bool) -> None:
    ranks.run(2, _train, {"strategy": strategy, "bf16": bf16})
