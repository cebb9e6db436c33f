"""No copies around communication: forward reads the all-gathered buffer, and a gradient is copied once. Few calls."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp import FSDPConfig, MegatronFSDP, MixedPrecisionPolicy, fully_shard_model
from tests.exchanges import both_exchanges
from tests.models import STRATEGIES, Block, TinyModel, batches, loss_of
from tests.ranks import ROOT, RankPool, on_ranks

COPIES = {
    "aten.copy_.default",
    "aten._foreach_copy_.default",
    "aten.clone.default",
    "aten.cat.default",
    "aten._to_copy.default",
}


class _CountCopies(TorchDispatchMode):
    """Counts elements that copying operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        if str(func) in COPIES:
            targets = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.written[str(func)] = self.written.get(str(func), 0) + sum(t.numel() for t in targets)
        return out


@on_ranks(2)
@both_exchanges("strategy", STRATEGIES)
def test_parameters_are_views_of_the_gathered_buffer(strategy: str) -> None:
    model = MegatronFSDP(TinyModel(), config=FSDPConfig(zero_dp_strategy=strategy), fsdp_unit_modules=[Block])
    groups = {id(e.compute): (g, i) for g in model.engine.groups for i, e in enumerate(g.params)}
    seen: dict[int, int] = {}

    def look(module: torch.nn.Module, args: object) -> None:
        for parameter in module.parameters(recurse=False):
            group, i = groups[id(parameter)]
            flat = group.weights.compute.flat
            expected = flat.data_ptr() + group.layout.slots[i].offset * flat.element_size()
            assert parameter.data_ptr() == expected
            assert parameter.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1

    for module in model.module.modules():
        module.register_forward_pre_hook(look)
    loss_of(model, batches(1, 1)[0, 0]).backward()
    assert len(seen) == len(groups)


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_holds_one_copy_of_its_weights(strategy: str) -> None:
    model = MegatronFSDP(TinyModel(), config=FSDPConfig(zero_dp_strategy=strategy), fsdp_unit_modules=[Block])
    for group in model.engine.groups:
        whole = group.weights.compute.flat.untyped_storage()
        shared = group.weights.main.untyped_storage()._cdata == whole._cdata
        assert shared == (strategy != "optim_grads_params")
        assert (whole.nbytes() == 0) == (strategy == "optim_grads_params")


def _nothing(*args: object) -> None:
    pass


def _copied(dtype: torch.dtype, strategy: str) -> tuple[dict[str, int], int, int]:
    """Elements that one unshard and one reduction of a group copy, and the sizes of the group and the shard."""
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    config = FSDPConfig(zero_dp_strategy=strategy, mixed_precision_policy=policy)
    model = MegatronFSDP(TinyModel().to(dtype), config=config, fsdp_unit_modules=[Block])
    group = model.engine.groups[-1]
    # Only copies around a collective count, not those that gloo makes inside it.
    group.use_collectives(all_gather=_nothing, reduce_scatter=_nothing)
    group.weights.invalidate()
    with _CountCopies() as gather:
        group.weights._unshard(group.weights.planes, 1, 0)
    with _CountCopies() as reduce:
        grads: list[torch.Tensor | None] = [torch.ones_like(e.compute, dtype=dtype) for e in group.params]
        group.gradients.reduce(grads, last=True)
        group.gradients.take(group.dtypes.main_params)
    return (
        {
            "gather": sum(gather.written.values()),
            "reduce": sum(reduce.written.values()),
        },
        sum(slot.numel for slot in group.layout.slots),
        group.layout.shard_numel,
    )


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_fp32_gathers_without_copying_and_places_each_gradient_once(ranks: RankPool, strategy: str) -> None:
    for written, numel, _ in ranks.run(2, _copied, torch.float32, strategy):
        assert written == {"gather": 0, "reduce": numel}


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_bf16_casts_its_shard_only(ranks: RankPool, strategy: str) -> None:
    for written, numel, shard in ranks.run(2, _copied, torch.bfloat16, strategy):
        assert written == {"gather": shard, "reduce": numel}


# A wait that is not over at once makes more calls, so no data moves.
COUNT = """
from megatron.fsdp.tools.predict.record import fake_ranks
from tests.unit_tests.test_zero_copy import _calls
with fake_ranks(2):
    print(_calls(4), _calls(12))
"""


def _calls(depth: int) -> int:
    """Count the calls of Python functions in a forward and backward, once the plan is known."""
    model, data = fully_shard_model(TinyModel(depth=depth), fsdp_unit_modules=[Block]), batches(1, 1)[0, 0]
    counts: list[int] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        counts[-1] += event == "call"

    for _ in range(5):
        counts.append(0)
        sys.setprofile(count)
        loss_of(model, data).backward()
        sys.setprofile(None)
    return min(counts)


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 12) or not torch.__version__.startswith("2.13"), reason="torch has calls of its own"
)
def test_python_calls_per_unit() -> None:
    # In a process of its own: other tests have hooks and patches installed, and torch calls these.
    done = subprocess.run([sys.executable, "-c", COUNT], cwd=ROOT, capture_output=True, text=True, timeout=250)
    few, many = map(int, done.stdout.split())
    assert (many - few) / 8 <= 631  # 619 on 28 November 2026; 23 of these are the model's own
