"""Kernels that write weight gradients into buffers: the protocol of Transformer Engine and Megatron-Core."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from megatron.fsdp.buffers.reduction import Reduction
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import FSDPConfig, MegatronFSDP, MixedPrecisionPolicy
from tests.exchanges import wrapped
from tests.models import STRATEGIES, Block, TinyModel, batches, device, loss_of
from tests.ranks import RankPool, on_ranks

FP32 = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
NAN = float("nan")
# The kernels of layers that compute weight gradients after their backward.
DELAYED: list[Callable[[], object]] = []


class _Fused(torch.autograd.Function):
    """A linear layer whose backward writes the weight's gradient into ``get_main_grad()``, in that buffer's dtype.

    ``operation`` stands for Transformer Engine's BasicLinear, which passes the buffer to autograd and sets no mark.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, operation: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.operation = weight, operation  # the parameter itself, which carries the protocol
        ctx.overwrites = getattr(weight, "overwrite_main_grad", False)  # modules look in forward
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        to_input = grad @ weight
        flat_grad, flat_x = grad.flatten(0, -2), x.flatten(0, -2)
        if not hasattr(weight, "__fsdp_param__"):
            return to_input, flat_grad.t() @ flat_x, None
        assert ctx.overwrites
        memory = weight.main_grad = weight.get_main_grad()
        kernel = lambda: torch.mm(flat_grad.to(memory.dtype).t(), flat_x.to(memory.dtype), out=memory)  # noqa: E731
        if hasattr(weight, "skip_backward_post_hook"):
            DELAYED.append(kernel)
        else:
            kernel()
        if ctx.operation:
            return to_input, weight.main_grad.detach(), None
        weight.grad_added_to_main_grad = True
        if getattr(weight, "zero_out_wgrad", False):
            return to_input, torch.zeros_like(weight), None
        return to_input, torch.full_like(weight, NAN), None  # a placeholder that must not be used


@dataclass
class Way:
    """How a model uses its fused layers, and what it is sharded with."""

    tied: bool = False
    operation: bool = False
    calls: int = 1
    recompute: bool = False
    asks_first: bool = False
    unused: bool = False
    dtype: torch.dtype = torch.float32
    settings: dict[str, Any] = field(default_factory=dict)


class FusedModel(TinyModel):
    """The blocks' second layer, and the head, write their gradients by themselves."""

    def __init__(self, way: Way) -> None:
        super().__init__(tied=way.tied)
        self.way = way
        for layer in (*(block.down for block in self.blocks), self.head):
            layer.forward = lambda x, layer=layer: self._linear(x, layer.weight)
        if way.unused:
            self.blocks[1].down.forward = lambda x: x[..., :13] * 0.5
        if way.tied:
            self.head.weight.zero_out_wgrad = True

    def _linear(self, x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        if self.way.asks_first and hasattr(weight, "__fsdp_param__"):
            weight.main_grad = weight.get_main_grad()
        return _Fused.apply(x, weight, self.way.operation)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in [*self.blocks] * self.way.calls:
            x = checkpoint(block, x, use_reentrant=False) if self.way.recompute else block(x)
        return self.head(self.norm(x))


@contextmanager
def _poison() -> Iterator[None]:
    """Context in which new buffers are full of NaN: what nobody writes must not be read."""
    new_flat, empty_like = Reduction.new_flat, torch.empty_like
    with (
        patch.object(Reduction, "new_flat", lambda *args: new_flat(*args).fill_(NAN)),
        patch.object(torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(NAN)),
    ):
        yield


def _shard(way: Way, strategy: str, fused: bool = True) -> MegatronFSDP:
    torch.manual_seed(3)
    settings = {"mixed_precision_policy": FP32, **way.settings}
    config = FSDPConfig(zero_dp_strategy=strategy, fused_weight_gradients=fused, **settings)
    return MegatronFSDP(FusedModel(way).to(device(), way.dtype), config=config, fsdp_unit_modules=[Block])


def _gradients(sharded: MegatronFSDP, micro_batches: int, accumulates: bool) -> dict[str, torch.Tensor]:
    data = batches(1, micro_batches * dist.get_world_size())[0, dist.get_rank() :: dist.get_world_size()]
    for number, tokens in enumerate(data):
        with sharded.no_sync() if accumulates and number < len(data) - 1 else nullcontext():
            loss_of(sharded, tokens).backward()
    grads = {e.name: local_shard(e.main.grad).clone() for e in sharded.engine.params() if e.main.grad is not None}
    sharded.engine.clear_gradients()
    return grads


def _nothing_is_left(sharded: MegatronFSDP) -> None:
    for group in sharded.engine.groups:
        assert group.gradients.for_kernels is None
        for entry in group.params:
            assert not entry.fused
            kept = getattr(entry.compute, "main_grad", None)
            assert kept is None or kept.untyped_storage().nbytes() == kept.element_size()
            assert not getattr(entry.compute, "grad_added_to_main_grad", False)


def _same_gradients(way: Way, strategy: str, micro_batches: int = 1, accumulates: bool = False) -> None:
    tolerance = {} if way.dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
    plain = _gradients(_shard(way, strategy, fused=False), micro_batches, accumulates)
    sharded = _shard(way, strategy)
    with _poison():
        for _ in range(2):  # buffers of a second step may be those of the first
            found = _gradients(sharded, micro_batches, accumulates)
            assert found.keys() == plain.keys()
            for name, grad in plain.items():
                torch.testing.assert_close(found[name], grad, msg=lambda m, n=name: f"{n}: {m}", **tolerance)
            _nothing_is_left(sharded)


WAYS = {
    "once": Way(),
    "tied": Way(tied=True),
    "two calls": Way(calls=2),
    "three calls recomputed": Way(calls=3, recompute=True),
    "recomputed, requested in forward": Way(calls=2, recompute=True, asks_first=True),
    "operation": Way(operation=True),
    "operation, two calls": Way(operation=True, calls=2),
    "unused": Way(unused=True),
    "unused, zeros": Way(unused=True, settings={"zero_unused_gradients": True}),
    "double buffer": Way(calls=2, settings={"fsdp_double_buffer": True}),
    "bf16": Way(dtype=torch.bfloat16),
    "bf16 operation": Way(dtype=torch.bfloat16, operation=True, calls=2),
    "bf16 on the wire": Way(
        dtype=torch.bfloat16,
        settings={
            "mixed_precision_policy": MixedPrecisionPolicy(
                main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16
            )
        },
    ),
    "reduced one by one": Way(settings={"overlap_grad_reduce": False}),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", WAYS)
def test_fused_gradients_equal_autograds(ranks: RankPool, strategy: str, way: str) -> None:
    ranks.run(2, _same_gradients, WAYS[way], strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", ["once", "tied", "two calls", "unused", "double buffer", "operation"])
@pytest.mark.parametrize("accumulates", [False, True])
def test_fused_gradients_of_micro_batches(ranks: RankPool, strategy: str, way: str, accumulates: bool) -> None:
    ranks.run(2, _same_gradients, WAYS[way], strategy, 3, accumulates)


@on_ranks(2)
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_fused_gradients_that_are_computed_after_the_backward(calls: int) -> None:
    way = Way(calls=calls)
    data = batches(1, dist.get_world_size())[0, dist.get_rank()]
    plain = _gradients(_shard(way, "optim_grads_params", fused=False), 1, False)
    sharded = _shard(way, "optim_grads_params")
    for entry in sharded.engine.params():
        if "down" in entry.name:
            entry.compute.skip_backward_post_hook = True
    with _poison():
        sharded.pre_forward()
        sharded.pre_forward_unshard_module(sharded.module)
        loss = loss_of(sharded.module, data)
        sharded.post_forward()
        sharded.pre_backward()
        sharded.pre_backward_unshard_module(sharded.module)
        loss.backward()
        assert len(DELAYED) == 3 * calls
        with torch.no_grad():
            while DELAYED:
                DELAYED.pop(0)()
        sharded.post_backward()
    for entry in sharded.engine.params():
        torch.testing.assert_close(local_shard(entry.main.grad), plain[entry.name], msg=entry.name)
    _nothing_is_left(sharded)


# Requests --------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_requests_in_backward_get_the_place_in_the_buffer(strategy: str) -> None:
    sharded = _shard(Way(dtype=torch.bfloat16), strategy)
    group = next(group for group in sharded.engine.groups for e in group.params if e.name == "head.weight")
    weight = next(e.compute for e in group.params if e.name == "head.weight")
    seen: list[torch.Tensor] = []

    def request(grad: torch.Tensor) -> None:
        first, second = weight.get_main_grad(), weight.get_main_grad()
        assert first.data_ptr() != second.data_ptr(), "a kernel that overwrites must not get what another one wrote"
        assert first.shape == weight.shape and first.dtype == torch.float32
        i = next(i for i, e in enumerate(group.params) if e.compute is weight)
        assert group.gradients.for_kernels is not None
        offset = first.data_ptr() - group.gradients.for_kernels.data_ptr()
        assert offset == group.layout.slots[i].offset * 4, "it is the parameter's place in the buffer"
        seen.append(first)
        raise InterruptedError

    hidden = sharded(batches(1, 1)[0, 0])
    hidden.register_hook(request)
    with pytest.raises(InterruptedError):
        hidden.float().sum().backward()
    sharded.engine.abandon_pass()
    assert seen
    _nothing_is_left(sharded)


@on_ranks(2)
def test_evaluation_leaves_a_placeholder_that_cannot_be_written() -> None:
    """Some layers request memory in forward, to check that there is some."""
    sharded = _shard(Way(asks_first=True, dtype=torch.bfloat16), "optim_grads_params")
    with torch.no_grad():
        sharded(batches(1, 1)[0, 0])
    _nothing_is_left(sharded)
    weights = [e.compute for e in sharded.engine.params() if "down" in e.name]
    assert len(weights) == 3
    for weight in weights:
        assert weight.main_grad.shape == weight.shape and weight.main_grad.dtype == torch.float32
        assert weight.main_grad.device == weight.device
        with pytest.raises(RuntimeError, match="more than one element"):
            weight.main_grad.add_(1)
    storages = {weight.main_grad.untyped_storage().data_ptr() for weight in weights for _ in range(2)}
    assert len(storages) == 3, "one per group, however often it is requested"


# Failures and freezing -------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_failed_backward_gives_its_buffers_back(strategy: str) -> None:
    way = Way(settings={"fsdp_double_buffer": True})
    expected = _gradients(_shard(way, strategy), 1, False)
    sharded = _shard(way, strategy)
    pool = sharded.engine.pool
    assert pool is not None

    def fail(grad: torch.Tensor) -> None:
        raise InterruptedError

    made = []
    for _ in range(3):
        handle = sharded.module.blocks[1].norm.register_forward_hook(lambda m, a, out: out.register_hook(fail) and None)
        loss = loss_of(sharded, batches(1, 1)[0, 0])
        handle.remove()
        with pytest.raises(InterruptedError):
            loss.backward()
        sharded.engine.abandon_pass()
        _nothing_is_left(sharded)
        with _poison():
            found = _gradients(sharded, 1, False)
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad)
        made.append(pool.buffers())
    assert made[1] == made[2], "what failed passes have allocated is given back"


def _freeze(strategy: str) -> None:
    torch.manual_seed(3)
    model = FusedModel(Way()).to(device())
    model.blocks[0].requires_grad_(False)
    config = FSDPConfig(zero_dp_strategy=strategy, mixed_precision_policy=FP32, fused_weight_gradients=True)
    sharded = MegatronFSDP(model, config=config, fsdp_unit_modules=[Block])
    frozen = _gradients(sharded, 1, False)
    assert frozen and not any(name.startswith("blocks.0.") for name in frozen)
    for entry in sharded.engine.params():
        entry.main.requires_grad_(True)
    written: list[str] = []
    for entry in sharded.engine.params():
        request = entry.compute.get_main_grad
        entry.compute.get_main_grad = lambda r=request, n=entry.name: (written.append(n), r())[1]
    expected = _gradients(_shard(Way(), strategy), 1, False)
    with _poison():
        found = _gradients(sharded, 1, False)
    assert "blocks.0.down.weight" in written
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, msg=lambda m, n=name: f"{n}: {m}")


def _freeze_between_passes(strategy: str) -> None:
    sharded = _shard(Way(), strategy)
    weights = {e.name: e.main for e in sharded.engine.params()}
    loss = loss_of(sharded, batches(1, 1)[0, 0])
    weights["blocks.1.down.weight"].requires_grad_(False)
    with _poison():
        loss.backward()
    assert weights["blocks.1.down.weight"].grad is None
    assert torch.isfinite(local_shard(weights["blocks.1.up.weight"].grad)).all()
    _nothing_is_left(sharded)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("freeze", [_freeze, _freeze_between_passes])
def test_freezing(ranks: RankPool, strategy: str, freeze: Callable[[str], None]) -> None:
    ranks.run(2, freeze, strategy)


# Copies ----------------------------------------------------------------------------------------------------------


class _Writes(TorchDispatchMode):
    """Records what is done to the buffers that kernels were given, in order: operation and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[int, torch.UntypedStorage] = {}
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            for tensor in tree_leaves((args[:1], (kwargs or {}).get("out"))):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() in self.buffers:
                    self.seen.append((func._schema.name, tensor.nbytes))
        return found


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_zeroed_or_copied_between_kernel_and_collective(strategy: str, dtype: torch.dtype) -> None:
    from megatron.fsdp.buffers.parameter_group import ParameterGroup

    writes = _Writes()
    new_flat, over_inner = Reduction.new_flat, Reduction.over_inner

    def buffer(*args: Any) -> torch.Tensor:
        with _disable_current_modes():
            flat = new_flat(*args).fill_(NAN)
        writes.buffers[flat.untyped_storage().data_ptr()] = flat.untyped_storage()
        return flat

    def reduce(self: Reduction, placed: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        with writes:  # tasks have their own thread
            return over_inner(self, placed, total)

    def checked(scatter: Callable[..., Any]) -> Callable[..., Any]:
        def collective(shard: torch.Tensor, flat: torch.Tensor, *args: Any) -> None:
            assert flat.untyped_storage().data_ptr() in writes.buffers, "it sends the buffer that kernels have written"
            assert shard.numel() * 2 == flat.numel()
            writes.seen.append(("collective", flat.nbytes))
            assert torch.isfinite(flat).all(), "padding is zero"
            with _disable_current_modes():
                scatter(shard, flat, *args)

        return collective

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(n, 13) / 9) for n in (39, 26))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = (_Fused.apply(x, weight, False) for weight in self.weights)
            return x + first.unflatten(-1, (3, 13)).sum(-2) + second.unflatten(-1, (2, 13)).sum(-2)

    model = nn.Sequential(Layer(), Layer()).to(device(), dtype)
    config = FSDPConfig(zero_dp_strategy=strategy, mixed_precision_policy=FP32, fused_weight_gradients=True)
    sharded = MegatronFSDP(model, config=config, fsdp_unit_modules=[Layer])
    with (
        patch.object(Reduction, "new_flat", buffer),
        patch.object(Reduction, "over_inner", reduce),
        wrapped(reduce_scatter=checked),
    ):
        for _ in range(2):
            writes.seen.clear()
            x = torch.randn(4, 13, device=device(), dtype=dtype, requires_grad=True)
            with writes:
                sharded(x).sum().backward()
            for group in sharded.engine.groups:
                assert isinstance(group, ParameterGroup)
                sizes = [4 * slot.numel for slot in group.layout.slots]
                gaps = 4 * group.layout.numel - sum(sizes)
                assert gaps > 0
                assert sum(name == "aten::mm" for name, _ in writes.seen) == 4
                copied = [size for name, size in writes.seen if name not in ("aten::mm", "collective")]
                assert sum(copied) <= 2 * gaps, writes.seen
            assert sum(name == "collective" for name, _ in writes.seen) == 2
