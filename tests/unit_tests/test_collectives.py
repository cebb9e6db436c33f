"""Collectives of users replace the engine's: a compressed reduction, and the classes of torch's FSDP2."""

import types
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp import fsdp2
from megatron.fsdp.fsdp2.custom_collectives import hook_in
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model
from tests.models import (
    DEVICE,
    STRATEGIES,
    Block,
    TinyModel,
    adamw,
    batches,
    device,
    loss_of,
    shard_in_place,
    whole,
)
from tests.ranks import RankPool, on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo on the CPU")
SHARDED = STRATEGIES[1:]


class InBf16:
    """Sends gradients in bf16, and sums them in the shard's dtype."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, shard: torch.Tensor, flat: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
        self.sizes.append(flat.numel())
        sent = flat.to(torch.bfloat16)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, dtype=shard.dtype, out=shard)


def _model() -> TinyModel:
    torch.manual_seed(0)
    return TinyModel()


def _sizes(model: MegatronFSDP) -> list[int]:
    return sorted(group.layout.numel for group in model.engine.groups)


@on_ranks(2)
@pytest.mark.parametrize("strategy", SHARDED)
def test_a_compressed_reduce_scatter_reduces_every_unit(strategy: str) -> None:
    reference, reduce = _model(), InBf16()
    tokens = batches(1, dist.get_world_size())[0, dist.get_rank()]
    loss_of(reference, tokens).backward()
    expected = {}
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        expected[name] = parameter.grad.bfloat16().float()
        dist.all_reduce(expected[name])
    model = fully_shard_model(_model(), fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    model.use_collectives(reduce_scatter=reduce)
    loss_of(model, tokens).backward()
    assert sorted(reduce.sizes) == _sizes(model), "every unit, once"
    for entry in model.engine.params():
        torch.testing.assert_close(whole(entry, entry.main.grad), expected[entry.name] / 2, rtol=0, atol=0)


def _gets(strategy: str, wider: bool) -> set[torch.dtype]:
    """The dtypes in which the gradients of a bf16 model arrive that are summed in fp32."""
    found = set()

    def reduce(shard: torch.Tensor, flat: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
        found.add(flat.dtype)
        assert shard.dtype == torch.float32
        InBf16()(shard, flat, op, group)

    reduce.sums_wider = wider  # type: ignore[attr-defined]
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32)
    arguments: dict[str, Any] = {"zero_dp_strategy": strategy, "mixed_precision_policy": policy}
    model = fully_shard_model(TinyModel().bfloat16(), fsdp_unit_modules=[Block], **arguments)
    model.use_collectives(reduce_scatter=reduce)
    loss_of(model, batches(1, 1)[0, 0]).backward()
    return found


@pytest.mark.parametrize("wider", [False, True])
def test_gradients_arrive_in_the_dtype_of_the_sum_unless_the_function_sums_wider(ranks: RankPool, wider: bool) -> None:
    for found in ranks.run(2, _gets, "optim_grads_params", wider):
        assert found == {torch.bfloat16 if wider else torch.float32}


def _replaces_all_three(strategy: str) -> list[str]:
    """Every operation of two steps, in each unit; for one block the reduction is another one."""
    called = []

    def gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
        called.append("all_gather")
        dist.all_gather(list(output.chunk(group.size())), shard.clone(), group=group)

    def scatter(shard: torch.Tensor, flat: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
        called.append("reduce_scatter")
        dist.all_reduce(flat, op, group)
        shard.copy_(flat.view(group.size(), -1)[group.rank()])

    def reduce(flat: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
        called.append("all_reduce")
        dist.all_reduce(flat, op, group)

    models = [fully_shard_model(_model(), fsdp_unit_modules=[Block], zero_dp_strategy=strategy) for _ in range(2)]
    models[0].use_collectives(all_gather=gather, reduce_scatter=scatter, all_reduce=reduce)
    of_block = InBf16()
    if strategy != "no_shard":
        models[0].use_collectives(reduce_scatter=of_block, module=models[0].module.blocks[0].up)
        models[1].use_collectives(reduce_scatter=InBf16(), module=models[1].module.blocks[0].up)
    for model in models:
        optimizer = adamw(model.parameters())
        for tokens in batches(1, 2)[0]:
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(models[0].engine.params(), models[1].engine.params(), strict=True):
        torch.testing.assert_close(whole(ours, ours.main), whole(theirs, theirs.main), rtol=0, atol=0)
    block = models[0].engine.unit_around(models[0].module.blocks[0])
    assert strategy == "no_shard" or set(of_block.sizes) == {group.layout.numel for group in block.groups}
    return called


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_operations_can_be_replaced(ranks: RankPool, strategy: str) -> None:
    expected = {"all_reduce"} if strategy == "no_shard" else {"all_gather", "reduce_scatter"}
    for called in ranks.run(2, _replaces_all_three, strategy):
        assert set(called) == expected


@on_ranks(1)
def test_a_module_of_another_model_is_refused() -> None:
    model = fully_shard_model(TinyModel())
    with pytest.raises(ValueError, match="expected a module of the sharded model; got a Linear"):
        model.use_collectives(module=nn.Linear(1, 1))


# The classes of torch's FSDP2 -------------------------------------------------------------------------------------


class Counted:
    """Counts calls, and checks that it is given the memory that it allocated."""

    def __init__(self) -> None:
        self.calls, self.given = 0, set[int]()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        memory = torch.empty(*size, dtype=dtype, device=device)
        self.given.add(memory.untyped_storage().data_ptr())
        return memory

    def called(self, *tensors: torch.Tensor) -> None:
        self.calls += 1
        assert all(tensor.untyped_storage().data_ptr() in self.given for tensor in tensors)


class Gather(Counted):
    """An ``AllGather``."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.called(output_tensor, input_tensor)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(Counted):
    """A ``ReduceScatter`` that rounds what it sends to bf16 and averages, whatever it is asked for."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.called(output_tensor, input_tensor)
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor.bfloat16().to(input_tensor.dtype), group=group)
        torch.mean(received.view(group.size(), -1), dim=0, out=output_tensor)


def _train_with(library: types.ModuleType, late: bool) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    model = shard_in_place(_model().to(device()), library)
    if late:
        model.unshard()
        model.reshard()
    gathers, scatters = [Gather() for _ in model.blocks], [Scatter() for _ in model.blocks]
    for block, gather, scatter in zip(model.blocks, gathers, scatters, strict=True):
        block.set_custom_all_gather(gather)
        block.set_custom_reduce_scatter(scatter)
    optimizer, losses = adamw(model.parameters()), []
    for tokens in batches(3, dist.get_world_size())[:, dist.get_rank()]:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    assert all(gather.calls >= 3 for gather in gathers), "every unit, in every step"
    return losses, weights, [scatter.calls for scatter in scatters]


@on_ranks(2)
@pytest.mark.parametrize("late", [False, True], ids=["before sharding", "after sharding"])
def test_classes_for_fsdp2_work_as_with_fsdp2(late: bool) -> None:
    ours, theirs = (_train_with(library, late) for library in (fsdp2, torch_fsdp))
    assert ours[2] == theirs[2] == [3] * 3
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=1e-5)


def _train_with_hook(library: types.ModuleType, mesh: tuple[int, ...], accumulates: bool) -> tuple[Any, list[int]]:
    """The weights, and how often the hook was called in each step."""
    model, calls = _model().to(device()), list[int]()
    axes = init_device_mesh(DEVICE, mesh, mesh_dim_names=("outer", "inner")[-len(mesh) :])
    for part in (*model.blocks, model):
        library.fully_shard(part, mesh=axes)

    def hook(flat: torch.Tensor) -> None:
        assert flat.dim() == 1
        flat.clamp_(-0.003, 0.003)  # shows that it gets the mean over all ranks of the sum over micro-batches
        calls[-1] += 1

    model.blocks[0].set_all_reduce_hook(hook)
    optimizer = adamw(model.parameters())
    for step in batches(2, 2 * dist.get_world_size()):
        calls.append(0)
        for number, tokens in enumerate(step[dist.get_rank() :: dist.get_world_size()]):
            model.set_requires_gradient_sync(number == 1 or not accumulates)
            loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}, calls


def _hook_parity(mesh: tuple[int, ...], accumulates: bool) -> None:
    ours, theirs = (_train_with_hook(library, mesh, accumulates) for library in (fsdp2, torch_fsdp))
    assert ours[1] == theirs[1] == [1 if accumulates else 2] * 2
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_hook_of_reduced_gradients_works_as_with_fsdp2(
    ranks: RankPool, mesh: tuple[int, ...], accumulates: bool
) -> None:
    ranks.run(2 * len(mesh), _hook_parity, mesh, accumulates)


@on_ranks(1)
def test_a_stream_for_the_hook_of_a_mesh_of_two_axes_is_refused() -> None:
    model = fsdp2.fully_shard(nn.Linear(2, 2), mesh=init_device_mesh(DEVICE, (1, 1), mesh_dim_names=("a", "b")))
    with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
        model.set_all_reduce_hook(print, stream=object())


def test_a_hook_runs_in_its_stream_between_the_reduction_and_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Stream:
        def wait_stream(self, other: "Stream") -> None:
            seen.append((self, other))

    current, given = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(seen.append(stream)))
    hook_in(given, seen.append)(torch.zeros(1))  # type: ignore[arg-type]
    assert seen == [(given, current), given, torch.zeros(1), (current, given)]


@on_ranks(1)
def test_an_object_without_memory_is_refused() -> None:
    model = fsdp2.fully_shard(nn.Linear(2, 2))
    for method in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        with pytest.raises(ValueError, match=rf"{method}: expected an object with allocate\(\)"):
            getattr(model, method)(print)
