"""More programs that plain PyTorch allows: orders of layers, hooks of the step, memory that parameters share, forks."""

import functools
import os
import select
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard_model
from tests.models import device, logged
from tests.ranks import DEVICE, RankFailure, RankPool, on_ranks
from tests.unit_tests.test_same_answer import Block, Model, Side, batch, same, train


def _in_turns(program: int, settings: list[str]) -> None:
    """Ranks run blocks that no rank has run before, or in orders of their own."""
    steps = iter(range(100))

    def run(side: Side) -> torch.Tensor:
        step, rank, model = next(steps) // 2 % 3, dist.get_rank(), side.inner
        orders = {0: ((0, 1), (0, 1)), 1: ((0, 1), (0, 1, 2)), 2: ((2,), (0,))}
        turn = {1: step + rank, 2: step + rank if step else 0, 3: step}.get(program, 0)
        order = orders[step][rank] if program == 0 else ((0, 1, 2), (2, 0, 1))[turn % 2]
        model.forward = functools.partial(_forward_of, model, order)
        loss = side.model(batch()).pow(2).mean()
        loss.backward()
        # Where only some ranks have a gradient, the others' are zero.
        for parameter in model.parameters() if side.model is model else ():
            has = torch.tensor(float(parameter.grad is not None))
            dist.all_reduce(has)
            if has and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        side.step()
        return loss

    same(run, Model, settings)


def _forward_of(model: Any, order: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    x = model.first(x)
    for index in order:
        x = model.blocks[index](x)
    return model.head(x)


EVERY = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def _evaluations_in_turns() -> None:
    """Blocks have one size, and ranks gather equally many: no collective waits for another rank's forever."""

    def run(side: Side) -> torch.Tensor:
        model, orders = side.inner, ((1, 0, 2), (0, 2, 1))
        train(side)
        model.forward = functools.partial(_forward_of, model, orders[dist.get_rank()])
        with torch.no_grad():
            side.model(batch())
        model.forward = functools.partial(_forward_of, model, (0, 1, 2))
        return train(side)

    same(run, Model, ["optim_grads_params"])


def test_a_block_that_no_rank_has_run_before(ranks: RankPool) -> None:
    ranks.run(2, _in_turns, 0, EVERY)


def test_blocks_in_an_order_of_each_rank(ranks: RankPool) -> None:
    for program in (1, 2):  # from the first iteration on, or later
        ranks.run(2, _in_turns, program, EVERY[:3])
        with pytest.raises(RankFailure, match=r"CollectiveMismatch|ranks run units in different orders"):
            ranks.run(2, _in_turns, program, EVERY[3:])
    with pytest.raises(RankFailure, match=r"CollectiveMismatch(.|\n)*They first differ at number"):
        ranks.run(2, _evaluations_in_turns)


@on_ranks(2)
def test_blocks_in_a_new_order_of_all_ranks() -> None:
    with logged(by="megatron.fsdp.runtime.plan") as warned:
        _in_turns(3, EVERY)
    assert ["All ranks have to do the same" in each for each in warned] == [True], "ZeRO-3, once"


def _hooked(side: Side) -> torch.Tensor:
    """Hooks of the step clip gradients and read weights, registered before and after sharding."""
    seen = []
    parameters = [p for group in side.optimizer.param_groups for p in group["params"]]

    hooks = [
        side.optimizer.register_step_pre_hook(functools.partial(_clip, 0.01)),
        side.optimizer.register_step_post_hook(lambda optimizer, *unused: seen.append(_norm_of(optimizer))),
    ]
    loss = train(side)
    for hook in hooks:
        hook.remove()
    assert parameters[0].grad is None
    return torch.tensor([*seen, loss.item()])


def _with_hooks(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters, 0.01, eps=1e-3)
    optimizer.register_step_post_hook(lambda *_: optimizer.param_groups[0].update(lr=_norm_of(optimizer) / 100))
    optimizer.register_step_pre_hook(functools.partial(_clip, 0.02))
    return optimizer


def _clip(largest: float, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], largest)


def _norm_of(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["params"][0].norm())


def test_hooks_of_the_step(ranks: RankPool) -> None:
    ranks.run(2, same, _hooked, Model, ["optim_grads_params", "optim"], _with_hooks)


class Parts(nn.Module):
    """Parameters and a buffer that are parts of other tensors."""

    def __init__(self, shared: str = "") -> None:
        super().__init__()
        whole = torch.linspace(-1, 1, 96)
        self.up, self.down = nn.Parameter(whole[:48].view(8, 6)), nn.Parameter(whole[48:].view(6, 8))
        self.scale = nn.Parameter(torch.linspace(1, 2, 12)[::2])
        self.register_buffer("slopes", torch.arange(12.0)[::2])
        self.register_buffer("shift", torch.ones(1).expand(6))
        if shared == "tied":
            self.up.data = self.down.data.view(8, 6)
        elif shared:
            self.down.data = whole[40:88].view(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.up.T).tanh() @ self.down.T * self.scale + self.shift * self.slopes


def test_parameters_that_are_parts_of_one_tensor(ranks: RankPool) -> None:
    ranks.run(2, same, train, Parts, ["without units"])


def _shard_parts(shared: str) -> None:
    fully_shard_model(Parts(shared).to(device()), fsdp_unit_modules=[])


@pytest.mark.parametrize("shared", ["tied", "overlapping"])
def test_parameters_that_share_memory_raise(ranks: RankPool, shared: str) -> None:
    with pytest.raises(RankFailure, match=r"The parameters \w+ and \w+ share memory"):
        ranks.run(1, _shard_parts, shared)


IN_A_FORK: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda model: model(batch()),
    "full_tensor": lambda model: next(model.parameters()).full_tensor(),
    "norm": lambda model: torch.nn.utils.get_total_norm(model.parameters()),
}


def _in_a_fork(call: str) -> str:
    model = fully_shard_model(Model().to(device()), fsdp_unit_modules=[Block])
    model(batch())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            IN_A_FORK[call](model)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    said = os.read(read, 1000).decode() if select.select([read], [], [], 20)[0] else "nothing"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(DEVICE == "cuda", reason="CUDA itself refuses forks")
@pytest.mark.parametrize("call", IN_A_FORK)
def test_a_forked_process_is_refused(ranks: RankPool, call: str) -> None:
    assert all("forked from a rank" in said for said in ranks.run(2, _in_a_fork, call))


def _read_inside() -> list[bool]:
    model = fully_shard_model(Model().to(device()), fsdp_unit_modules=[Block])
    unit = next(module for module in model.modules() if isinstance(module, Block))
    with model.no_sync():
        model(batch()).sum().backward()
    missing: list[bool] = []
    unit.norm.register_forward_pre_hook(lambda *unused: missing.append(next(unit.parameters()).grad is None))
    unit(torch.ones(2, 8, device=device()))
    return missing


def test_gradients_wait_while_a_unit_runs_alone(ranks: RankPool) -> None:
    assert ranks.run(2, _read_inside) == [[True]] * 2
