"""Code written for torch's fully_shard trains as with torch's fully_shard, and as without sharding."""

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from megatron.fsdp import fsdp2
from megatron.fsdp.fsdp2.marked import model_of
from megatron.fsdp.runtime.unit import WeightState
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy as EnginePolicy
from megatron_fsdp import fully_shard_model
from tests.exchanges import seen
from tests.models import (
    DEVICE,
    STRATEGIES,
    Block,
    TinyModel,
    adamw,
    assert_same_weights,
    batches,
    device,
    loss_of,
    main_weights,
    sgd,
    shard,
)
from tests.ranks import RankFailure, RankPool, on_ranks

FSDP2 = torch_fsdp
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@dataclass
class Run:
    """The results of a training run on this rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def assert_same(a: Run, b: Run, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a.losses, b.losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(a.norms, b.norms, rtol=tolerance, atol=tolerance)
    assert a.weights.keys() == b.weights.keys()
    for name, weight in a.weights.items():
        torch.testing.assert_close(b.weights[name], weight, rtol=tolerance, atol=tolerance, msg=name)


def build(library: types.ModuleType, start: nn.Module, policy: dict | None = None, **arguments: Any) -> nn.Module:
    """A copy of ``start``, sharded block by block as in code for FSDP2."""
    model = copy.deepcopy(start)
    for block in model.blocks:
        library.fully_shard(block, mp_policy=library.MixedPrecisionPolicy(**policy or {}), **arguments)
    root = {**arguments, "reshard_after_forward": None}
    assert library.fully_shard(model, mp_policy=library.MixedPrecisionPolicy(**policy or {}), **root) is model
    return model


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights as full tensors, gathered as in code for FSDP2."""
    return {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}


def train(
    model: nn.Module,
    data: torch.Tensor,
    before_backward: Callable[[nn.Module, bool], None] = lambda model, last: None,
    clip: bool = True,
    make_optimizer: Callable[..., torch.optim.Optimizer] = adamw,
) -> Run:
    """Train a sharded model. Rank r takes the micro-batches r, r + ranks, ... of each step."""
    optimizer, run = make_optimizer(model.parameters()), Run()
    for step in data:
        mine = step[dist.get_rank() :: dist.get_world_size()]
        for number, tokens in enumerate(mine):
            before_backward(model, number == len(mine) - 1)
            loss = loss_of(model, tokens) / len(mine)
            loss.backward()
            run.losses.append(loss.item())
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            run.norms.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    run.weights = full_weights(model)
    return run


def train_unsharded(start: nn.Module, data: torch.Tensor, dtype: torch.dtype = torch.float32) -> Run:
    """Train a copy of ``start`` on all ranks' micro-batches, computing in ``dtype``, and clip."""
    model = copy.deepcopy(start)
    optimizer, run = adamw(model.parameters()), Run()

    class Cast(nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, {n: p.to(dtype) for n, p in model.named_parameters()}, tokens)

    for step in data:
        for number, tokens in enumerate(step):
            loss = loss_of(Cast(), tokens) * dist.get_world_size() / len(step)
            loss.backward()
            if number % dist.get_world_size() == dist.get_rank():
                run.losses.append(loss.item())
        for parameter in model.parameters():
            parameter.grad /= dist.get_world_size()
        run.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    run.weights = {name: value.cpu() for name, value in model.state_dict().items()}
    return run


def _parity(policy: dict, reshard: bool | None, micro_batches: int, sync_last_only: bool) -> None:
    start = TinyModel().to(device())
    data = batches(4, micro_batches * dist.get_world_size())

    def before_backward(model: nn.Module, last: bool) -> None:
        if sync_last_only:
            model.set_requires_gradient_sync(last)

    ours = train(build(fsdp2, start, policy, reshard_after_forward=reshard), data, before_backward)
    theirs = train(build(FSDP2, start, policy, reshard_after_forward=reshard), data, before_backward)
    assert_same(ours, theirs)
    assert_same(ours, train_unsharded(start, data, policy.get("param_dtype", torch.float32)), tolerance=1e-4)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("policy", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("reshard", [True, False, None])
def test_trains_as_torch_and_as_unsharded(ranks: RankPool, world: int, policy: dict, reshard: bool | None) -> None:
    ranks.run(world, _parity, policy, reshard, 1, False)


@pytest.mark.parametrize("policy", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("sync_last_only", [True, False])
def test_accumulates_gradients(ranks: RankPool, policy: dict, reshard: bool, sync_last_only: bool) -> None:
    ranks.run(2, _parity, policy, reshard, 3, sync_last_only)


def _hybrid(setting: str) -> None:
    start = TinyModel().to(device())
    data = batches(3, 2 * dist.get_world_size())
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))

    def before_backward(model: nn.Module, last: bool) -> None:
        if setting:
            getattr(model, setting)(last)

    ours = train(build(fsdp2, start, BF16, mesh=mesh), data, before_backward)
    assert_same(ours, train(build(FSDP2, start, BF16, mesh=mesh), data, before_backward))
    assert_same(ours, train_unsharded(start, data, torch.bfloat16), tolerance=1e-4)


@pytest.mark.parametrize("setting", ["", "set_requires_gradient_sync", "set_requires_all_reduce"])
def test_hybrid_mesh(ranks: RankPool, setting: str) -> None:
    ranks.run(4, _hybrid, setting)


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compute_dtype_of_a_model_on_the_meta_device(strategy: str) -> None:
    """Values are made in the dtype of main weights, and were never rounded to the dtype of compute."""
    with torch.device("meta"):
        model = TinyModel()
    model, _ = shard(
        model,
        strategy,
        mixed_precision_policy=EnginePolicy(main_params_dtype=None, compute_dtype=torch.bfloat16),
        init_model_with_meta_device=True,
    )
    assert any(not torch.equal(w.bfloat16().float(), w) for w in main_weights(model).values())


class Precise(nn.Module):
    """Layers of different dtypes, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, scale: dict | None = None) -> dict:
        self.seen = [x.dtype]
        for block in self.blocks:
            x = block(x)
            self.seen.append(x.dtype)
        return {"out": x, "scale": scale}


def _casts(library: types.ModuleType, start: Precise) -> tuple[list, list]:
    model = copy.deepcopy(start)
    policies = [
        library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        library.MixedPrecisionPolicy(output_dtype=torch.float64, cast_forward_inputs=False, param_dtype=torch.bfloat16),
        library.MixedPrecisionPolicy(param_dtype=torch.float32),
    ]
    for block, policy in zip(model.blocks, policies, strict=True):
        library.fully_shard(block, mp_policy=policy)
    library.fully_shard(model, mp_policy=library.MixedPrecisionPolicy(output_dtype=torch.float64))
    model.register_forward_hook(lambda module, args, output: module.seen.append(output["out"].dtype))
    optimizer = sgd(model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    values = []
    for _ in range(3):
        x = torch.randn(4, 13, generator=generator).to(device())
        result = model(x, {"a": [x.double()], "b": 1})
        assert result["out"].dtype is torch.float64 and result["scale"]["a"][0].dtype is torch.float64
        result["out"].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(result["out"].detach().cpu())
    return model.seen, values


@on_ranks(2)
def test_policies_of_parts_and_casts() -> None:
    start = Precise().to(device())
    ours, theirs = _casts(fsdp2, start), _casts(FSDP2, start)
    assert ours[0] == theirs[0] == [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float64]
    torch.testing.assert_close(ours[1], theirs[1])


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_activation_checkpointing(reshard: bool) -> None:
    start = TinyModel().to(device())
    for number, block in enumerate(start.blocks):
        start.blocks[number] = checkpoint_wrapper(block)
    data = batches(3, 2)
    model = build(fsdp2, start, BF16, reshard_after_forward=reshard)
    ours = train(model, data)
    assert_same(ours, train(build(FSDP2, start, BF16, reshard_after_forward=reshard), data))
    assert "blocks.0.up.weight" in ours.weights
    model.load_state_dict(ours.weights)


def _divide(library: types.ModuleType, start: nn.Module, early: bool) -> Run:
    model = build(library, start, BF16)
    if not early:
        loss_of(model, batches(1, 1)[0, 0]).backward()
        model.zero_grad()
    for module in model.modules():
        if isinstance(module, library.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo, which torch's needs it for
    model.blocks[0].set_gradient_divide_factor(5.0)
    return train(model, batches(3, 3), make_optimizer=sgd)


@on_ranks(3)
def test_gradient_divide_factor() -> None:
    start = TinyModel().to(device())
    expected = _divide(FSDP2, start, True)
    assert_same(_divide(fsdp2, start, True), expected)
    assert_same(_divide(fsdp2, start, False), expected)


def _divide_what_waits(mesh: tuple[int, ...], policy: dict) -> None:
    start, data = TinyModel().to(device()), batches(1, 2)[0]
    axes = init_device_mesh(DEVICE, mesh, mesh_dim_names=("outer", "inner")[-len(mesh) :])
    found = []
    for library in (FSDP2, fsdp2):
        model = build(library, start, policy, mesh=axes)
        for module in model.modules():
            if isinstance(module, library.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo, which torch's needs it for
        model.set_requires_gradient_sync(False)
        loss_of(model, data[0]).backward()
        model.set_requires_gradient_sync(True)
        model.blocks[0].set_gradient_divide_factor(5.0)
        loss_of(model, data[1]).backward()
        gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        found.append(Run(weights=gradients))
    assert_same(*found, tolerance=2e-3 if policy else 1e-5)


@pytest.mark.parametrize("policy", [{}, {"reduce_dtype": torch.float16}], ids=["fp32", "fp16"])
@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_the_divide_factor_applies_to_gradients_that_wait(ranks: RankPool, mesh: tuple[int, ...], policy: dict) -> None:
    ranks.run(2 * len(mesh), _divide_what_waits, mesh, policy)


class TwoHeads(TinyModel):
    """A model with a second method that reads parameters."""

    def features(self, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.embedding(tokens) * scale
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(tokens, scale=2.0))


@on_ranks(2)
def test_forward_method() -> None:
    start = TwoHeads().to(device())
    runs = []
    for library in (fsdp2, FSDP2):
        model = build(library, start, BF16)
        library.register_fsdp_forward_method(model, "features")
        library.register_fsdp_forward_method(model.norm, "not marked, ignored")
        optimizer, losses = adamw(model.parameters()), []
        for step in batches(3, 2):
            features = model.features(step[dist.get_rank()], scale=3.0)
            assert features.dtype is torch.bfloat16
            features.square().sum().backward()
            losses.append(features.detach().cpu())
            optimizer.step()
            optimizer.zero_grad()
            loss = loss_of(model, step[dist.get_rank()])
            loss.backward()
            losses.append(loss.detach().cpu())
            optimizer.zero_grad()
        runs.append(losses)
    torch.testing.assert_close(*runs)
    with pytest.raises(ValueError, match="TwoHeads has no method 'missing'"):
        fsdp2.register_fsdp_forward_method(build(fsdp2, start), "missing")


def _several_losses(library: types.ModuleType, start: nn.Module) -> Run:
    model = build(library, start)
    optimizer, run = sgd(model.parameters()), Run()
    for step in batches(3, 2):
        out = model(step[dist.get_rank()])
        for number, loss in enumerate((out.square().mean(), out.abs().mean(), out[0].mean())):
            model.set_is_last_backward(number == 2)
            loss.backward(retain_graph=True)
            run.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    run.weights = full_weights(model)
    return run


@on_ranks(2)
def test_several_backwards_of_one_forward() -> None:
    start = TinyModel().to(device())
    assert_same(_several_losses(fsdp2, start), _several_losses(FSDP2, start))


def _count_unshards(reshard: bool | int | None, later: bool) -> list[int]:
    """Number of unshards of a block in each of three steps."""
    model = build(fsdp2, TinyModel().to(device()), reshard_after_forward=None if later else reshard)
    if later:
        model.set_reshard_after_forward(reshard)
    loss_of(model, batches(1, 1)[0, 0])
    size = max(group.layout.numel for group in model_of(model).engine.groups)
    counts = []
    with seen("all_gather") as gathers:
        for tokens in batches(1, 3)[0]:
            loss_of(model, tokens).backward()
            model.unshard(async_op=True).wait()  # wait for all-gathers in flight before counting
            counts.append(sum(output.numel() == size for output, *_ in gathers))
            gathers.clear()
    return counts


@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize(("reshard", "expected"), [(True, 5), (False, 3)])
def test_weights_are_gathered_again_for_backward_or_kept(
    ranks: RankPool, reshard: bool, expected: int, later: bool
) -> None:
    # Three blocks; the last one is kept for backward in any case.
    for counts in ranks.run(2, _count_unshards, reshard, later):
        assert counts[1:] == [expected, expected]


def _number_of_ranks(number: int, mesh_shape: tuple[int, ...]) -> None:
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh(DEVICE, mesh_shape, mesh_dim_names=names)
    start, data = TinyModel().to(device()), batches(3, dist.get_world_size())
    ours = train(build(fsdp2, start, BF16, mesh=mesh, reshard_after_forward=number), data)
    assert_same(ours, train(build(FSDP2, start, BF16, mesh=mesh, reshard_after_forward=number), data))
    assert_same(ours, train_unsharded(start, data, torch.bfloat16), tolerance=1e-4)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_resharding_to_a_number_of_ranks(ranks: RankPool, number: int) -> None:
    ranks.run(4, _number_of_ranks, number, (4,))


@pytest.mark.parametrize("number", [1, 2])
def test_resharding_to_a_number_of_ranks_of_a_hybrid_mesh(ranks: RankPool, number: int) -> None:
    ranks.run(4, _number_of_ranks, number, (2, 2))


@on_ranks(3)
def test_resharding_to_a_number_that_is_not_a_divisor_raises() -> None:
    for number in (0, -1, 2, 6):
        for library in (fsdp2, FSDP2):
            model = nn.Linear(3, 3)
            with pytest.raises(ValueError, match="reshard_after_forward"):
                library.fully_shard(model, reshard_after_forward=number)
            assert type(model) is nn.Linear
    with pytest.raises(ValueError, match="expected a bool or a number of ranks; got '2'"):
        fsdp2.fully_shard(nn.Linear(3, 3), reshard_after_forward="2")


def _count_ranks(interface: str, number: int) -> list[list[int]]:
    """Of every iteration, the number of ranks of each all-gather of a block."""
    model, counts = TinyModel().to(device()), []
    if interface == "own":
        model = fully_shard_model(model, fsdp_unit_modules=[Block], reshard_after_forward=number)
    else:
        model = build(fsdp2, model, reshard_after_forward=number)
    units = model_of(model).engine.units if interface == "fsdp2" else model.engine.units
    size = units[1].groups[0].layout.numel
    for tokens in batches(3, 1)[:, 0]:
        with seen("all_gather") as gathers:
            loss_of(model, tokens)  # the next forward replaces what this one has kept
            loss = loss_of(model, tokens)
            gathers.clear()
            loss.backward()
            counts.append([group.size() for output, _, group in gathers if output.numel() == size])
        with torch.no_grad():
            units[1].groups[0].params[0].main.mul_(0.5)
    return counts


@pytest.mark.parametrize("interface", ["own", "fsdp2"])
@pytest.mark.parametrize(("number", "expected"), [(1, []), (2, [2, 2]), (4, [4, 4])])
def test_backward_gathers_within_a_number_of_ranks(
    ranks: RankPool, interface: str, number: int, expected: list[int]
) -> None:
    for counts in ranks.run(4, _count_ranks, interface, number):
        assert counts[1:] == [expected, expected]


def _skipping(reshard: int, write: bool, recomputes: bool) -> None:
    """Ranks that skip units, units that run twice, and writes between two forwards of one backward."""
    torch.manual_seed(0)
    start = TinyModel().to(device())
    reference = copy.deepcopy(start)
    model = fully_shard_model(start, fsdp_unit_modules=[Block], reshard_after_forward=reshard)
    pairs = [(model, sgd(model.parameters())), (reference, sgd(reference.parameters()))]
    rank, orders = dist.get_rank(), [[0, 1, 2], [0, 2], [1], [2]]
    if recomputes:  # only the last unit, whose gathers other ranks start after all forwards
        orders = [[0, 1, 2], [0, 1, 2], [0, 1], [0, 1, 2]]

    def order(step: int, rank: int) -> list[int]:
        return orders[(rank + step) % 4] if step else [0, 1, *([] if recomputes else [1]), 2]

    def loss(each: nn.Module, tokens: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        inner = getattr(each, "module", each)
        inner.order = chosen
        return loss_of(each, tokens)

    def forward(self: TinyModel, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number in self.order:
            block = self.blocks[number]
            # Runs the block's forward without gradients, which a rank that skips the block does not know.
            x = checkpoint(block, x, use_reentrant=True) if recomputes else block(x)
        return self.head(self.norm(x))

    with patch.object(TinyModel, "forward", forward):
        for step, data in enumerate(batches(4, 4)):
            first = loss(model, data[rank], order(step, rank))
            if write:
                with torch.no_grad():
                    model.module.norm.weight.mul_(1.5)
                    reference.norm.weight.mul_(1.5)
                first = loss(model, data[rank], order(step, rank))
            first.backward()
            for other in range(4):
                (loss(reference, data[other], order(step, other)) / 4).backward()
            for _, optimizer in pairs:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_weights(model, reference)


@pytest.mark.parametrize(("write", "recomputes"), [(False, False), (True, False), (False, True)])
def test_resharding_to_a_number_of_ranks_that_skip_units(ranks: RankPool, write: bool, recomputes: bool) -> None:
    ranks.run(4, _skipping, 2, write, recomputes)


class Ordered(nn.Module):
    """Layers of one size, in an order that may change. Nothing tells when the backward of the first one ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.layers[number](x).tanh()
        return x


def _orders_of_each_rank(reshard: bool) -> None:
    torch.manual_seed(0)
    model = Ordered()
    reference = copy.deepcopy(model)
    for module in [*model.layers, model]:
        fsdp2.fully_shard(module, reshard_after_forward=reshard)
    pairs = [(model, sgd(model.parameters())), (reference, sgd(reference.parameters()))]
    for step, data in enumerate(torch.randn(4, 2, 8, 8)):
        orders = ((1, 0, 2), (0, 2, 1)) if step else ((0, 1, 2), (0, 1, 2))
        model.order = orders[dist.get_rank()]
        model(data[dist.get_rank()]).pow(2).mean().backward()
        for rank, reference.order in enumerate(orders):
            (reference(data[rank]).pow(2).mean() / 2).backward()
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model_of(model), reference)


def test_ranks_run_units_in_orders_of_their_own(ranks: RankPool) -> None:
    ranks.run(2, _orders_of_each_rank, False)
    with pytest.raises(RankFailure, match="CollectiveMismatch"):
        ranks.run(2, _orders_of_each_rank, True)


def _root_reshards(number: bool | int | None) -> WeightState:
    model = TinyModel().to(device())
    fsdp2.fully_shard(model.blocks[0])
    fsdp2.fully_shard(model, reshard_after_forward=number)
    loss = loss_of(model, batches(1, 1)[0, 0])
    state = model_of(model).engine.units[0].state
    loss.backward()
    return state


@pytest.mark.parametrize(("given", "kept"), [(None, True), (False, True), (True, False), (2, False)])
def test_the_root_is_resharded_after_forward_if_its_call_says_so(
    ranks: RankPool, given: bool | int | None, kept: bool
) -> None:
    expected = WeightState.UNSHARDED if kept else WeightState.SHARDED
    assert ranks.run(2, _root_reshards, given) == [expected, expected]


@on_ranks(2)
def test_settings_that_change_no_result() -> None:
    start = TinyModel().to(device())
    data = batches(3, 2)

    def before_backward(model: nn.Module, last: bool) -> None:
        blocks = list(model.blocks)
        for before, after in zip(blocks, blocks[1:], strict=False):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        model.set_reshard_after_backward(True)
        if hasattr(model, "set_reduce_scatter_unused_params"):  # torch 2.11 lacks it
            model.set_reduce_scatter_unused_params(True)
        model.set_force_sum_reduction_for_comms(True)
        # The calls of code that prefetches by hand.
        model.unshard(async_op=True)
        blocks[0].unshard(async_op=True)
        blocks[2].unshard()
        assert not isinstance(blocks[2].up.weight, DTensor)
        blocks[2].reshard()
        assert isinstance(blocks[2].up.weight, DTensor)

    assert_same(train(build(fsdp2, start), data, before_backward), train(build(FSDP2, start), data, before_backward))
