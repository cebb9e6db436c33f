"""Results do not depend on timing: with random delays in each rank's collectives and compute they are bit-identical."""

import contextlib
import random
import time

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from tests.exchanges import both_exchanges, delayed
from tests.models import FP32_GRADS, STRATEGIES, TinyModel, batches, device, loss_of, shard
from tests.ranks import DEVICE, RankPool


def _train(strategy: str, dtype: torch.dtype, seed: int | None) -> list[bytes]:
    """The bits of every rank's main weights after some steps, with delays unless ``seed`` is None."""
    generator = random.Random(f"{seed} {dist.get_rank()}")
    torch.manual_seed(3)
    model = TinyModel().to(device(), dtype)
    if seed is not None:
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: time.sleep(generator.random() * 0.001))
            module.register_full_backward_hook(lambda *_: time.sleep(generator.random() * 0.002))
    with contextlib.nullcontext() if seed is None else delayed(lambda: generator.random() * 0.004):
        sharded, optimizer = shard(model, strategy, mixed_precision_policy=FP32_GRADS)
        for step in batches(steps=3, per_step=2 * dist.get_world_size()):
            mine = step[dist.get_rank() :: dist.get_world_size()]
            with sharded.no_sync():
                loss_of(sharded, mine[0]).backward()
            loss_of(sharded, mine[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [local_shard(e.main).detach().cpu().numpy().tobytes() for e in sharded.engine.params()]


@pytest.mark.skipif(DEVICE == "cuda", reason="these delays are those of the CPU's stream")
@both_exchanges("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delays_change_no_bit(ranks: RankPool, strategy: str, dtype: torch.dtype) -> None:
    expected = ranks.run(3, _train, strategy, dtype, None)
    for seed in range(2):
        assert ranks.run(3, _train, strategy, dtype, seed) == expected
