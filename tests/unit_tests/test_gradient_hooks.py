"""Hooks of parameters get reduced gradients, no matter when they were registered; otherwise registering raises."""

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from megatron.fsdp import fsdp2
from megatron.fsdp.dtensor.ragged_dtensor import RaggedDTensor, local_shard
from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from tests.models import (
    STRATEGIES,
    Block,
    TinyModel,
    adamw,
    assert_same_weights,
    batches,
    device,
    loss_of,
    sgd,
    shard,
    shard_in_place,
    whole,
)
from tests.ranks import RankPool, on_ranks


def _both() -> tuple[TinyModel, TinyModel]:
    torch.manual_seed(3)
    model = TinyModel().to(device())
    return model, copy.deepcopy(model)


def _reference_backward(reference: nn.Module, step: torch.Tensor) -> None:
    for tokens in step:
        (loss_of(reference, tokens) / len(step)).backward()


class Seen:
    """Records the arguments of hooks: for each parameter, this rank's shard of its gradient at that time."""

    def __init__(self) -> None:
        self.gradients: dict[int, list[torch.Tensor]] = {}

    def after(self, parameter: nn.Parameter) -> None:
        assert isinstance(parameter, DTensor) and not torch.is_grad_enabled()
        self.gradients.setdefault(id(parameter), []).append(local_shard(parameter.grad).clone())

    def check(self, model: MegatronFSDP, reference: nn.Module, calls: int) -> None:
        for entry in model.engine.params():
            assert len(self.gradients[id(entry.main)]) == calls
            last = torch.empty_like(entry.main)
            local_shard(last).copy_(self.gradients[id(entry.main)][-1])
            expected = reference.get_parameter(entry.name).grad
            torch.testing.assert_close(whole(entry, last), expected.cpu(), rtol=2e-5, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_after_accumulation_see_reduced_gradients(strategy: str, when: str) -> None:
    model, reference = _both()
    seen, handles = Seen(), []
    if when == "before":
        handles = [p.register_post_accumulate_grad_hook(seen.after) for p in model.parameters()]
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    if when == "after":
        handles = [p.register_post_accumulate_grad_hook(seen.after) for p in sharded.parameters()]
    for number, step in enumerate(batches(2, dist.get_world_size())):
        _reference_backward(reference, step)
        loss_of(sharded, step[dist.get_rank()]).backward()
        seen.check(sharded, reference, number + 1)
    with sharded.no_sync():  # accumulated, not in .grad yet
        loss_of(sharded, step[dist.get_rank()]).backward()
    assert all(len(calls) == 2 for calls in seen.gradients.values())
    for handle in handles:
        handle.remove()
    loss_of(sharded, step[dist.get_rank()]).backward()
    assert all(len(calls) == 2 for calls in seen.gradients.values())


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_may_replace_reduced_gradients(strategy: str, when: str) -> None:
    """The value that a hook returns replaces the gradient of every micro-batch."""
    model, reference = _both()
    calls: list[float] = []

    def halve(grad: torch.Tensor) -> torch.Tensor:
        assert isinstance(grad, DTensor)
        calls.append(0.0)
        return grad * 0.5

    names = ("blocks.1.up.weight", "head.weight", "norm.bias")
    if when == "before":
        handles = [model.get_parameter(name).register_hook(halve) for name in names]
    sharded, optimizer = shard(model, strategy)
    if when == "after":
        handles = [sharded.module.get_parameter(name).register_hook(halve) for name in names]
    # Once for each reduced gradient: autograd's sum of what the ranks have is what they have halved together.
    for name in names:
        reference.get_parameter(name).register_hook(lambda grad: grad * 0.5)
    expected = adamw(reference.parameters())
    for step in batches(3, 2 * dist.get_world_size()):
        _reference_backward(reference, step)
        for tokens in step[dist.get_rank() :: dist.get_world_size()]:
            (loss_of(sharded, tokens) / 2).backward()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    assert_same_weights(sharded, reference)
    assert len(calls) == 3 * 2 * len(names)
    for handle in handles:
        handle.remove()
    loss_of(sharded, step[0]).backward()
    assert len(calls) == 3 * 2 * len(names)


@on_ranks(1)
def test_replacing_a_gradient_by_another_type_raises() -> None:
    sharded = fully_shard_model(_both()[0], fsdp_unit_modules=[Block])
    sharded.module.head.weight.register_hook(lambda grad: torch.zeros(3))
    with pytest.raises(ValueError, match=r"hook of head.weight returned a Tensor of shape \(3,\): expected a DTensor"):
        loss_of(sharded, batches(1, 1)[0, 0]).backward()


def _steps_in_hooks(library: types.ModuleType | None, start: nn.Module, data: torch.Tensor) -> list[float]:
    """Each parameter has a separate optimizer, which steps in the hook of its gradient."""
    model: Any = copy.deepcopy(start)
    if library is not None:
        shard_in_place(model, library)
    else:
        model = fully_shard_model(model, fsdp_unit_modules=[Block])
    optimizers = {p: torch.optim.SGD([p], lr=0.3, momentum=0.9) for p in model.parameters()}
    if library is None:
        optimizers = {p: fully_shard_optimizer(optimizer) for p, optimizer in optimizers.items()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for batch in data:
        loss = loss_of(model, batch[dist.get_rank()])
        loss.backward()
        losses.append(loss.item())
        assert all(parameter.grad is None for parameter in model.parameters())
    return losses


@on_ranks(2)
def test_optimizers_may_step_in_hooks() -> None:
    start, reference = _both()
    data = batches(4, dist.get_world_size())
    optimizer, expected = torch.optim.SGD(reference.parameters(), lr=0.3, momentum=0.9), []
    for step in data:
        expected.append(loss_of(reference, step[dist.get_rank()]).item())
        _reference_backward(reference, step)
        optimizer.step()
        optimizer.zero_grad()
    for library in (torch_fsdp, fsdp2, None):
        losses = _steps_in_hooks(library, start, data)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_hooks_of_frozen_parameters() -> None:
    """A frozen parameter's hook waits until it is trained; one that got no gradient is not called."""
    model, _ = _both()
    seen = Seen()
    for parameter in model.blocks[0].parameters():
        parameter.register_post_accumulate_grad_hook(seen.after)
        parameter.requires_grad_(False)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block])
    tokens = batches(1, 1)[0, 0]
    loss_of(sharded, tokens).backward()
    assert not seen.gradients
    assert not any(parameter.requires_grad for parameter in model.blocks[0].parameters())
    model.blocks[0].requires_grad_(True)
    loss_of(sharded, tokens).backward()
    assert len(seen.gradients) == len(list(model.blocks[0].parameters()))


def _halve(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


class _Twice(nn.Module):
    """A layer that is called twice, checkpointed each time."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_under_reentrant_checkpointing(strategy: str) -> None:
    """Reentrant checkpointing accumulates a gradient in parts, and hooks would be called with each."""
    for reentrant in False, True:
        torch.manual_seed(0)
        plain = _Twice(reentrant).to(device())
        model = fully_shard_model(copy.deepcopy(plain), fsdp_unit_modules=[nn.Linear], zero_dp_strategy=strategy)
        x = torch.randn(3, 4, device=device(), requires_grad=True)
        for each in plain, model:
            next(each.parameters()).register_post_accumulate_grad_hook(_halve)
        if reentrant:
            with pytest.raises(NotImplementedError, match="layer.weight has gradient hooks.*use_reentrant=False"):
                model(x).sum().backward()
            continue
        other = fully_shard_model(_Twice(reentrant=True).to(device()), fsdp_unit_modules=[nn.Linear])
        model(other(x).detach())
        other(x).sum().backward()  # a backward of another model
        plain(x).sum().backward()
        model(x).sum().backward()
        grad = next(model.parameters()).grad
        assert isinstance(grad, DTensor)
        torch.testing.assert_close(grad.full_tensor(), plain.layer.weight.grad)


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_of_compute_weights(strategy: str) -> None:
    """Hooks of a parameter object from before sharding are called with reduced gradients."""
    model, _ = _both()
    weight = model.head.weight
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    reduced: list[Any] = []
    weight.register_hook(lambda grad: reduced.append(grad))
    weight.register_post_accumulate_grad_hook(lambda param: reduced.append(param.grad))
    # A layer may register hooks on its compute weights in forward.
    seen: list[torch.Size] = []

    def watch(module: nn.Module, args: Any) -> None:
        module.weight.register_hook(lambda grad: seen.append(grad.shape))

    model.head.register_forward_pre_hook(watch)
    loss_of(sharded, batches(1, 1)[0, 0]).backward()
    assert seen == [(31, 13)]
    assert [type(grad) for grad in reduced] == [RaggedDTensor, RaggedDTensor]


def _materialized(make: Callable[..., torch.optim.Optimizer] = sgd) -> None:
    """Parameters from the meta device are replaced by others, which their hooks follow."""
    with torch.device("meta"):
        model = TinyModel()
    seen = Seen()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(seen.after)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block], init_model_with_meta_device=True)
    loss_of(sharded, batches(1, 1)[0, 0]).backward()
    assert len(seen.gradients) == len(list(sharded.parameters()))


def test_hooks_of_parameters_on_the_meta_device(ranks: RankPool) -> None:
    ranks.run(2, _materialized)
