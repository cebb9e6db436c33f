"""Results do not depend on timing: with random delays in each rank's collectives and compute they are bit-identical."""

import random
import time

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.comm.streams import CpuStream
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from tests.exchanges import both_exchanges
from tests.models import FP32_GRADS, STRATEGIES, TinyModel, batches, device, loss_of, shard
from tests.ranks import DEVICE, RankPool


def _delay_collectives(seconds: float, generator: random.Random) -> None:
    run = CpuStream.run

    def delayed(self: CpuStream, task):  # noqa: ANN001, ANN202
        pause = generator.random() * seconds

        def slow() -> None:
            time.sleep(pause)
            task()
            time.sleep(pause / 2)

        return run(self, slow)

    CpuStream.run = delayed  # type: ignore[method-assign]


def _train(strategy: str, dtype: torch.dtype, seed: int | None) -> list[bytes]:
    """The bits of every rank's main weights after some steps, with delays unless ``seed`` is None."""
    run = CpuStream.run
    generator = random.Random(f"{seed} {dist.get_rank()}")
    torch.manual_seed(3)
    model = TinyModel().to(device(), dtype)
    if seed is not None:
        _delay_collectives(0.004, generator)
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: time.sleep(generator.random() * 0.001))
            module.register_full_backward_hook(lambda *_: time.sleep(generator.random() * 0.002))
    try:
        sharded, optimizer = shard(model, strategy, mixed_precision_policy=FP32_GRADS)
        for step in batches(steps=3, per_step=2 * dist.get_world_size()):
            mine = step[dist.get_rank() :: dist.get_world_size()]
            with sharded.no_sync():
                loss_of(sharded, mine[0]).backward()
            loss_of(sharded, mine[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        CpuStream.run = run  # type: ignore[method-assign]
    return [local_shard(e.main).detach().cpu().numpy().tobytes() for e in sharded.engine.params()]


@pytest.mark.skipif(DEVICE == "cuda", reason="these delays are those of the CPU's stream")
@both_exchanges("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delays_change_no_bit(ranks: RankPool, strategy: str, dtype: torch.dtype) -> None:
    expected = ranks.run(3, _train, strategy, dtype, None)
    for seed in range(2):
        assert ranks.run(3, _train, strategy, dtype, seed) == expected
