"""The engine on the simulated device: no unordered accesses to memory, and no wait of the host in a step."""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from megatron.fsdp import fsdp2
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.runtime.unit import Unit
from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.models import STRATEGIES, Block, TinyModel, adamw, batches, loss_of, main_weights
from tests.ranks import DEVICE as REAL_DEVICE
from tests.ranks import RankPool, on_ranks
from tests.simulated.device import DEVICE, SimulatedDevice, simulated_device
from tests.simulated.models import BF16, assert_clean, sharded, two_axes
from tests.simulated.pairs import pairwise, parametrize_pairs
from tests.simulated.ranks import fake_ranks
from tests.unit_tests.simulated.test_faults import FAULTS

pytestmark = pytest.mark.skipif(REAL_DEVICE == "cuda", reason="computes on CPU tensors")
# As on CUDA, where torch chooses these implementations itself.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


# Gradients are taken to the host when the step asks for them, so that no backward waits.
OFFLOAD: dict[str, Any] = {"offload_optimizer": True, "sync_model_each_microbatch": False, **BF16}


class Norm(nn.LayerNorm):
    """Has parameters of a different dtype than the model's, which make units of two groups."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Model(TinyModel):
    """Recomputes blocks if asked to, and can fail in the middle of a pass."""

    def __init__(self, recompute: bool = False, two_groups: bool = False, depth: int = 4) -> None:
        super().__init__(depth=depth)
        self.recompute = recompute
        self.two_groups = two_groups
        self.fails_in = ""

    def to(self, place: torch.device, dtype: torch.dtype = torch.float32) -> "Model":  # type: ignore[override]
        super().to(place, dtype)
        for block in self.blocks if self.two_groups else ():
            other = torch.bfloat16 if dtype == torch.float32 else torch.float32
            block.norm = Norm(13).to(place, other)
        return self

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            if number == 1 and self.fails_in == "backward":
                x.register_hook(self._fail)
            if number == 1 and self.fails_in == "forward":
                self._fail(x)
        return self.head(self.norm(x))

    def _fail(self, tensor: torch.Tensor) -> None:
        raise ArithmeticError


def _backward(model: nn.Module, step: torch.Tensor, no_sync: Callable[[], Any]) -> None:
    for number, tokens in enumerate(step):
        with no_sync() if number + 1 < len(step) else contextlib.nullcontext():
            (loss_of(model, tokens) / len(step)).backward()


def _steps(
    sim: SimulatedDevice,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: int,
    no_sync: Callable[[], Any] = contextlib.nullcontext,
    clip: Callable[[], Any] = lambda: None,
    may_wait: bool = False,
) -> None:
    """Train three steps, in which the host may not wait, and look for unordered accesses.

    Args:
        sim: The device.
        model: The model.
        optimizer: Its optimizer.
        micro_batches: Of each step.
        no_sync: Context of all but the last of them.
        clip: Called before the optimizer's step.
        may_wait: The host may wait after the last backward: it updates weights.
    """
    data = batches(3, micro_batches).to(DEVICE)
    for step in data:
        with sim.no_host_wait():
            _backward(model, step, no_sync)
        with contextlib.nullcontext() if may_wait else sim.no_host_wait():
            clip()
            optimizer.step()
            optimizer.zero_grad()
    assert_clean(sim)


def _sharded(
    optimizer: str = "AdamW", recompute: bool = False, two_groups: bool = False, **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    return sharded(partial(Model, recompute, two_groups), OPTIMIZERS[optimizer], **settings)


@contextlib.contextmanager
def _simulation(kernel_time: float = 1.0) -> Iterator[SimulatedDevice]:
    with fake_ranks(4), simulated_device(kernel_time) as sim:
        yield sim


def _train(micro_batches: int, optimizer: str, use_no_sync: bool, may_wait: bool, settings: dict[str, Any]) -> None:
    settings = dict(settings)
    on_side = settings.pop("side_stream", False)
    with _simulation() as sim, torch.cuda.stream(torch.cuda.Stream() if on_side else None):
        model, wrapped = _sharded(optimizer, **_with_groups(settings))
        no_sync = model.no_sync if use_no_sync else contextlib.nullcontext
        clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)  # noqa: E731
        _steps(sim, model, wrapped, micro_batches, no_sync, clip, may_wait)


def _with_groups(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with a mesh, which only exists on the ranks."""
    settings = dict(settings)
    if settings.pop("two_axes", False):
        settings |= two_axes()
    if settings.pop("apart", False):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        settings |= {"device_mesh": mesh, "dp_shard_dim": "dp", "fsdp_group_ag": dist.new_group(range(4))}
    return settings


BF16_SUMS: dict[str, Any] = {"dtype": torch.bfloat16, "mixed_precision_policy": MixedPrecisionPolicy(torch.float32)}
# The first value of each is the default.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "strategy": {strategy: {"zero_dp_strategy": strategy} for strategy in reversed(STRATEGIES)},
    "axes": {
        "one axis": {},
        "HSDP": {"two_axes": True},
        "hybrid": {"two_axes": True, "outer_dp_sharding_strategy": "optim"},
        "gather group": {"apart": True},
    },
    "precision": {
        "fp32": {},
        "bf16": BF16,
        "narrow gradients": {**BF16, "exchange_gradients": True},
        "bf16 sums": BF16_SUMS,
    },
    "units": {"one group": {}, "two groups": {"two_groups": True}, "recomputed": {"recompute": True}},
    "overlap": {
        "prefetch": {},
        "no prefetch": {"overlap_param_gather": False, "overlap_grad_reduce": False},
        "more in flight": {"max_unsharded_units": 3, "max_reducing_units": 3},
    },
    "optimizer": {name: {"optimizer": name} for name in ("AdamW", "SGD", "fused AdamW")},
    "buffers": {"new": {}, "double buffer": {"fsdp_double_buffer": True}},
    "stream": {"default": {}, "side stream": {"side_stream": True}},
    "accumulation": {"no_sync": {"use_no_sync": True}, "each reduced": {"use_no_sync": False}},
    "unused": {"None": {}, "zeros": {"zero_unused_gradients": True}},
}
UNDEFINED = {frozenset({("strategy", "no_shard"), ("axes", "hybrid")})}
CASES = pairwise(OPTIONS, UNDEFINED)
SELECTED = [(case["strategy"], ", ".join(v for n, v in case.items() if n != "strategy")) for case in CASES]


def _settings_of(strategy: str, case: str) -> tuple[str, bool, dict[str, Any]]:
    """The optimizer of a case, whether it accumulates in no_sync(), and its other settings."""
    settings: dict[str, Any] = {}
    for values, name in zip(OPTIONS.values(), (strategy, *case.split(", ")), strict=True):
        settings |= values[name]
    return settings.pop("optimizer"), settings.pop("use_no_sync"), settings


def test_cases_have_all_pairs_of_values() -> None:
    found = {pair for case in CASES for pair in itertools.combinations(case.items(), 2)}
    sides = itertools.combinations(OPTIONS.items(), 2)
    wanted = {((a, x), (b, y)) for (a, first), (b, second) in sides for x in first for y in second}
    assert {frozenset(pair) for pair in wanted - found} == UNDEFINED
    assert len(CASES) <= 22


@pytest.mark.every_strategy
@pytest.mark.parametrize(("strategy", "case"), SELECTED)
def test_settings(ranks: RankPool, strategy: str, case: str) -> None:
    optimizer, use_no_sync, settings = _settings_of(strategy, case)
    ranks.run(1, _train, 2, optimizer, use_no_sync, False, settings)


@on_ranks(1)
@pytest.mark.every_strategy
@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("two groups", "only the first group of a unit is waited for"),
        ("side stream", "tasks wait for the default stream"),
    ],
)
def test_a_fault_is_found_in_the_case_of_a_value(value: str, what: str) -> None:
    strategy, case = next(each for each in SELECTED if each[0] == "optim_grads_params" and value in each[1].split(", "))
    optimizer, use_no_sync, settings = _settings_of(strategy, case)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="races"):
        FAULTS[what].plant(patch)
        _train(2, optimizer, use_no_sync, False, settings)


def _streams_of_axes(outer: str) -> dict[tuple[str, int], set[int]]:
    """The streams of collectives, by their names and the sizes of what they send."""
    found: dict[tuple[str, int], set[int]] = defaultdict(set)

    def note(stream: int, function: Any, args: tuple, *unused: Any) -> None:
        if function.namespace == "c10d" and stream:
            sent = args[0][0] if isinstance(args[0], list) else args[0]
            found[function._schema.name, sent.numel()].add(stream)

    with _simulation() as sim:
        model, optimizer = _sharded(**_with_groups({"two_axes": True, "outer_dp_sharding_strategy": outer}))
        sim.on_kernel = note
        _steps(sim, model, optimizer, 1)
    return found


def test_each_axis_has_a_stream(ranks: RankPool) -> None:
    """So that a unit's reduction over the slower link does not delay the next unit's over the faster one."""
    reduced, unsharded, outer = {1}, {2}, {3}
    (found,) = ranks.run(1, _streams_of_axes, "no_shard")
    scatters = [streams for (name, _), streams in found.items() if name == "c10d::_reduce_scatter_base_"]
    reductions = [streams for (name, numel), streams in found.items() if name == "c10d::allreduce_" and numel > 100]
    assert scatters and reductions and all(s == reduced for s in scatters) and all(s == outer for s in reductions)
    (found,) = ranks.run(1, _streams_of_axes, "optim")
    gathers = [streams for (name, _), streams in found.items() if name == "c10d::_allgather_base_"]
    assert unsharded in gathers and outer in gathers and set().union(*gathers) == unsharded | outer


@on_ranks(1)
def test_compute_waits_for_an_outer_reduction_one_unit_later() -> None:
    """Else it would wait for both links in turn."""
    reduce, wait = Unit.reduce_gradients, Unit.wait_for_gradients
    reduced: list[Unit] = []
    waited: dict[str, int] = {}

    def noted_reduce(unit: Unit, last: bool) -> bool:
        reduced.append(unit)
        return reduce(unit, last)

    def noted_wait(unit: Unit, outer: bool = True) -> None:
        if outer and unit in reduced:
            waited.setdefault(unit.name, len(reduced) - reduced.index(unit))
        wait(unit, outer)

    with _simulation(), pytest.MonkeyPatch.context() as patch:
        model, _ = _sharded(**two_axes())
        patch.setattr(Unit, "reduce_gradients", noted_reduce)
        patch.setattr(Unit, "wait_for_gradients", noted_wait)
        loss_of(model, batches(1, 1).to(DEVICE)[0, 0]).backward()
    assert list(waited.values())[:2] == [2, 2], waited


@pytest.mark.parametrize("overlap", [True, False], ids=["gathered during the step", "gathered after it"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_offload(ranks: RankPool, strategy: str, overlap: bool) -> None:
    settings = {"zero_dp_strategy": strategy, "overlap_param_gather": overlap, **OFFLOAD}
    # The optimizer's step is on the host, which waits for gradients.
    ranks.run(1, _train, 2, "AdamW", True, True, settings)


@on_ranks(1)
def test_offload_of_some_units() -> None:
    settings = {"offload_fraction": 0.5, **OFFLOAD}
    with _simulation() as sim:
        model, _ = _sharded(**settings)
        sizes = {unit.label: sum(group.layout.numel for group in unit.groups) for unit in model.engine.units}
        offloaded = {unit.label for unit in model.engine.units if unit.is_offloaded}
        assert 0 < sum(sizes[label] for label in offloaded) <= 0.5 * sum(sizes.values()) and len(offloaded) < len(sizes)
        for unit in model.engine.units:
            assert all(sim.is_here(group.weights.main) != unit.is_offloaded for group in unit.groups)
        loss_of(model, batches(1, 1)[0, 0].to(DEVICE)).backward()
        model.finish_grad_sync()
        # Gradients of both kinds have one norm, and are scaled alike.
        grads = {param.name: local_shard(param.main.grad) for param in model.engine.params()}
        before = {name: grad.to("cpu").clone() for name, grad in grads.items()}
        assert len({sim.is_here(grad) for grad in grads.values()}) == 2
        model.scale_gradients(torch.tensor(0.5, device=DEVICE))
        assert all(torch.equal(grad.to("cpu"), before[name] / 2) for name, grad in grads.items())
    for strategy in ("optim", "optim_grads_params"):
        _train(2, "AdamW", True, True, {"zero_dp_strategy": strategy, **settings})


def _fail(where: str, settings: dict[str, Any]) -> None:
    with _simulation() as sim:
        model, optimizer = _sharded(**settings)
        for _ in range(2):
            model.module.fails_in = where
            with pytest.raises(ArithmeticError):
                loss_of(model, batches(1, 1)[0, 0].to(DEVICE)).backward()
            model.module.fails_in = ""
            optimizer.zero_grad()
            _steps(sim, model, optimizer, 2)


@parametrize_pairs(strategy=STRATEGIES, where=["forward", "backward"], double_buffer=[True, False])
def test_exceptions(ranks: RankPool, strategy: str, where: str, double_buffer: bool) -> None:
    ranks.run(1, _fail, where, {"zero_dp_strategy": strategy, "fsdp_double_buffer": double_buffer})


def _fsdp2(reshard: bool | int, settings: dict[str, Any]) -> None:
    with _simulation() as sim:
        model = Model().to(DEVICE)
        for block in model.blocks:
            fsdp2.fully_shard(block, reshard_after_forward=reshard, **settings)
        fsdp2.fully_shard(model, **settings)
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
        _steps(sim, model, optimizer, 2, clip=clip)


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2(ranks: RankPool, reshard: bool, bf16: bool) -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ranks.run(1, _fsdp2, reshard, {"mp_policy": policy} if bf16 else {})


@on_ranks(2)
@pytest.mark.parametrize("settings", [{}, {"fsdp_double_buffer": True}, {"offload_optimizer": True}], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values(strategy: str, settings: dict[str, Any]) -> None:
    """Two ranks over gloo, whose collectives exchange values: the simulation computes what the CPU does."""
    results = []
    for simulate in (False, True):
        torch.manual_seed(3)
        model, data = TinyModel(), batches(3, 4)[:, dist.get_rank() :: 2]
        with simulated_device(2.0) if simulate else contextlib.nullcontext() as sim:
            arguments = {"fsdp_unit_modules": [Block], "zero_dp_strategy": strategy, **settings}
            if simulate:
                model, data, arguments["device"] = model.to(DEVICE), data.to(DEVICE), DEVICE
            sharded, optimizer = fully_shard(model, adamw(model.parameters()), **arguments)
            for step in data:
                _backward(sharded, step, sharded.no_sync)
                optimizer.step()
                optimizer.zero_grad()
            results.append(main_weights(sharded))
            if simulate:
                assert_clean(sim)
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-5)
