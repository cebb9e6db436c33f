"""Any optimizer of torch.optim that works element by element, on DTensor main weights."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_fsdp import fully_shard, fully_shard_model, fully_shard_optimizer, register_optimizer
from tests.models import (
    STRATEGIES,
    Block,
    Pair,
    TinyModel,
    assert_same_weights,
    batches,
    device,
    load_from,
    loss_of,
    main_weights,
    save_to,
    train_step,
)
from tests.ranks import on_ranks


@on_ranks(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_first_step_equals_the_unsharded_optimizers(strategy: str) -> None:
    """The first update is that of the unsharded optimizer: no step is taken to create state."""
    pair = Pair(TinyModel(), lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.5), zero_dp_strategy=strategy)
    assert not pair.optimizer.state
    pair.backward(batches(1, 1)[0].expand(dist.get_world_size(), -1, -1))
    pair.update()
    pair.assert_same_weights(1e-5)
    assert {float(state["step"]) for state in pair.optimizer.state.values()} == {1.0}


@on_ranks(2)
def test_step_with_a_closure() -> None:
    """A closure that computes loss and gradients sees DTensors, whatever the optimizer sees."""
    model = TinyModel().to(device())
    reference = copy.deepcopy(model)
    sharded, optimizer = fully_shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), fsdp_unit_modules=[Block])
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for tokens in batches(3, 1)[:, 0]:

        def closure(each: torch.nn.Module, each_optimizer: torch.optim.Optimizer, data: torch.Tensor) -> torch.Tensor:
            each_optimizer.zero_grad()
            loss = loss_of(each, data)
            loss.backward()
            return loss

        got = optimizer.step(lambda data=tokens: closure(sharded, optimizer, data))
        want = expected.step(lambda data=tokens: closure(reference, expected, data))
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert_same_weights(sharded, reference)

    def fails() -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(fails)
    # What is saved now is not this rank's shards as if they were full tensors.
    state = optimizer.state_dict()["state"].values()
    assert all(isinstance(each["exp_avg"], DTensor) for each in state)
    assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


class Interrupted(torch.optim.SGD):
    """Raises in the middle of its next step, if ``failed`` is False."""

    failed = True

    def step(self, closure: Callable | None = None) -> None:  # type: ignore[override]
        if not self.failed:
            self.failed = True
            raise KeyboardInterrupt
        super().step(closure)


register_optimizer(Interrupted, "element")


@on_ranks(2)
def test_methods_after_a_step_that_raised() -> None:
    plain = TinyModel().to(device())
    model = copy.deepcopy(plain)
    sharded, optimizer = fully_shard(model, Interrupted(model.parameters(), lr=0.1), fsdp_unit_modules=[Block])
    reference = Interrupted(plain.parameters(), lr=0.1)
    for each, update in ((plain, reference), (sharded, optimizer)):
        loss_of(each, batches(1, 1)[0, 0]).backward()
        update.failed = False  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            update.step()
        update.zero_grad()
        assert all(parameter.grad is None for parameter in each.parameters())
        state = update.state_dict()
        update.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, device=device()))], "lr": 0.2})
        loss_of(each, batches(1, 1)[0, 0]).backward()
        update.step()
        assert [len(group["params"]) for group in state["param_groups"]] == [len(list(each.parameters()))]
    assert_same_weights(sharded, plain)
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])


@on_ranks(2)
def test_step_after_one_that_raised() -> None:
    model = TinyModel()
    sharded, optimizer = fully_shard(model, Interrupted(model.parameters(), lr=0.1), fsdp_unit_modules=[Block])
    loss_of(sharded, batches(1, 1)[0, 0]).backward()
    optimizer.failed = False  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    before = main_weights(sharded)
    optimizer.step()
    after = main_weights(sharded)
    assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    assert all(not torch.equal(before[name], after[name]) for name in before)


@on_ranks(2)
def test_step_of_an_optimizer_whose_parameters_were_not_used() -> None:
    plain = torch.nn.ModuleDict({name: torch.nn.Linear(5, 5) for name in "ab"}).to(device())
    plain.forward = plain["a"].forward
    model = fully_shard_model(copy.deepcopy(plain))
    x = torch.ones(2, 5, device=device())
    for module in (plain, model):
        optimizers = [torch.optim.AdamW(module.get_submodule(name).parameters(), lr=0.1) for name in "ab"]
        for optimizer in optimizers if module is model else ():
            fully_shard_optimizer(optimizer)
        module(x).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert not optimizers[1].state
    assert_same_weights(model, plain)


class Counting(torch.optim.Optimizer):
    """Takes smaller steps with time. Its count of steps is an int, as in optimizers of Hugging Face."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state.setdefault("step", 0)
                state.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                state["step"] += 1
                p.sub_(state["sum"], alpha=group["lr"] / state["step"])


register_optimizer(Counting, "element")


@on_ranks(2)
def test_state_with_numbers_is_loaded_by_torch(tmp_path: Path) -> None:
    runs = []
    for loads in (False, True):
        whole = TinyModel()
        model, optimizer = fully_shard(whole, Counting(whole.parameters()), fsdp_unit_modules=[Block])
        if loads:
            load_from(tmp_path, model, optimizer)
        for number, tokens in list(enumerate(batches(3, 1)[:, 0]))[2 * loads :]:
            if number == 2 and not loads:
                save_to(tmp_path, model, optimizer)
            train_step(model, optimizer, tokens)
        assert {each["step"] for each in optimizer.state_dict()["state"].values()} == {3}
        runs.append(main_weights(model))
    assert all(torch.equal(runs[1][name], value) for name, value in runs[0].items())


@on_ranks(3)
def test_state_of_the_whole_model_is_sharded_along() -> None:
    """An optimizer that has stepped on the unsharded model continues after sharding."""
    model = TinyModel().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first, second = batches(2, 1)[:, 0]
    train_step(model, optimizer, first)
    reference = copy.deepcopy(model)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    sharded, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[Block])
    loss_of(sharded, second).backward()
    loss_of(reference, second).backward()
    optimizer.step()
    expected.step()
    assert_same_weights(sharded, reference, 5e-6)
