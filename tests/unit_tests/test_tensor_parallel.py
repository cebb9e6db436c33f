"""Models whose parameters are DTensors over a tensor-parallel axis: sharded over the data-parallel axis as well."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron.fsdp import fsdp2
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import MegatronFSDP, fully_shard
from tests.models import DEVICE, STRATEGIES, adamw, device
from tests.ranks import RankPool, on_ranks


class Mlp(nn.Module):
    """Two linear layers; sizes that the tensor-parallel ranks divide and the data-parallel ranks do not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 10)
        self.down = nn.Linear(10, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Some of them, and a layer that is not tensor-parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(3))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _mesh(dp: int) -> DeviceMesh:
    return init_device_mesh(DEVICE, (dp, 2), mesh_dim_names=("dp", "tp"))


def _shard(model: Model, mesh: DeviceMesh, strategy: str, **options: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(
        model,
        adamw(model.parameters()),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Mlp],
        zero_dp_strategy=strategy,
        **options,
    )


def _whole(model: MegatronFSDP) -> dict[str, torch.Tensor]:
    """All weights, assembled from the shards and slices that the ranks report."""
    mine = {
        e.name: (e.shard_slice, e.offset, local_shard(e.main).detach().cpu(), e.local_shape)
        for e in model.engine.params()
    }
    of_all_ranks: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all_ranks, mine)
    result = {}
    for entry in model.engine.params():
        whole = torch.full(tuple(entry.main.shape), torch.nan)
        for other in of_all_ranks:
            shard_slice, offset, local, local_shape = other[entry.name]
            part = torch.full(local_shape, torch.nan)
            part.view(-1)[shard_slice.start : shard_slice.stop] = local.flatten()
            region = whole[tuple(slice(o, o + n) for o, n in zip(offset, local_shape, strict=True))]
            region.copy_(torch.where(part.isnan(), region, part))
        result[entry.name] = whole
    return result


def _train(dp: int, strategy: str) -> None:
    torch.manual_seed(3)
    model = Model().to(device())
    reference = copy.deepcopy(model)
    reference_optimizer = adamw(reference.parameters())
    mesh = _mesh(dp)
    sharded, optimizer = _shard(model, mesh, strategy)
    data = torch.randn(4, dp, 5, 7, generator=torch.Generator().manual_seed(2)).to(device())
    for step in data:
        expected = sum(reference(x).pow(2).mean() / dp for x in step)
        expected.backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        reference_optimizer.step()
        reference_optimizer.zero_grad()
        loss = sharded(step[mesh.get_local_rank("dp")]).pow(2).mean()
        loss.backward()
        ours = nn.utils.clip_grad_norm_(sharded.parameters(), 0.1)
        ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
        torch.testing.assert_close(ours, norm, rtol=1e-5, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in _whole(sharded).items():
        torch.testing.assert_close(value, dict(reference.named_parameters())[name].detach().cpu(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dp", [1, 2])
def test_trains_as_unsharded(ranks: RankPool, dp: int, strategy: str) -> None:
    ranks.run(2 * dp, _train, dp, strategy)


@on_ranks(4)
def test_main_weights_are_dtensors_over_both_axes() -> None:
    sharded, _ = _shard(Model(), _mesh(2), "optim_grads_params")
    up = sharded.module.layers[0].up.weight
    assert tuple(up.shape) == (10, 7)
    assert up.placements[1] == Shard(0) and up.placements[0].dim == 0
    down = sharded.module.layers[0].down.weight
    assert down.placements == (Shard(0), Shard(1))


@on_ranks(2)
def test_mesh_axis_must_be_named() -> None:
    model = Model()
    parallelize_module(model.layers[0], _mesh(1)["tp"], {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match="layers.0.up.* is a DTensor over .*named by tp_dim; got tp_dim=None"):
        fully_shard(model, adamw(model.parameters()), device_mesh=_mesh(1), dp_shard_dim="dp")


@on_ranks(4)
@pytest.mark.parametrize(("interface", "strategy"), [*(("megatron", s) for s in STRATEGIES), ("fsdp2", "")])
def test_all_ranks_skip_a_step_with_an_overflow_on_one(interface: str, strategy: str) -> None:
    """One tensor-parallel rank has an infinite gradient in the first step of two, in its part of a matrix."""
    torch.manual_seed(3)
    model = Model().to(device())
    reference = copy.deepcopy(model)
    mesh = _mesh(2)
    if interface == "fsdp2":
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fsdp2.fully_shard(layer, mesh=mesh["dp"])
        fsdp2.fully_shard(model, mesh=mesh["dp"])
        optimizer, sharded = adamw(model.parameters()), model
    else:
        sharded, optimizer = _shard(model, mesh, strategy)
    reference_optimizer = adamw(reference.parameters())
    scalers = [GradScaler(DEVICE, init_scale=8.0, growth_interval=1) for _ in range(2)]
    data = torch.randn(2, 2, 5, 7, generator=torch.Generator().manual_seed(2)).to(device())
    for number, step in enumerate(data):
        scalers[0].scale(sum(reference(x).pow(2).mean() / 2 for x in step)).backward()
        scalers[1].scale(sharded(step[mesh.get_local_rank("dp")]).pow(2).mean()).backward()
        if number == 0:
            reference.layers[0].up.weight.grad[0, 0] = torch.inf
            grads = {name.removeprefix("module."): p.grad for name, p in sharded.named_parameters()}
            part = local_shard(grads["layers.0.up.weight"])
            if mesh.get_local_rank("tp") == 1 and part.numel():
                part.view(-1)[0] = torch.inf
        for scaler, each in zip(scalers, (reference_optimizer, optimizer), strict=True):
            scaler.step(each)
            scaler.update()
            each.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (4.0, 8.0)[number]
    weights = dict(reference.named_parameters())
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), weights[name.removeprefix("module.")], rtol=1e-5, atol=1e-5)


class WithExperts(Model):
    """Ends with an expert, a different one on each expert-parallel rank, that may get no tokens and so no gradient."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.expert, self.is_used = nn.Linear(3, 3), True
        for parameter in self.expert.parameters():
            parameter.allreduce = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return self.expert(x) if self.is_used else x


@on_ranks(4)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("unused", [None, 0])
def test_experts_of_all_ranks_count_once(strategy: str, unused: int | None) -> None:
    """Two data-parallel ranks with other experts, each with two tensor-parallel ranks with the same expert."""
    mesh = _mesh(2)
    expert_mesh = DeviceMesh(DEVICE, [[[0, 1], [2, 3]]], mesh_dim_names=("dp", "ep", "tp"))
    number = expert_mesh.get_local_rank("ep")
    torch.manual_seed(3)
    model = WithExperts(number).to(device())
    model.is_used = number != unused
    sharded, optimizer = _shard(model, mesh, strategy, expt_device_mesh=expert_mesh)
    sharded(torch.randn(5, 7, generator=torch.Generator().manual_seed(number)).to(device())).pow(2).sum().backward()
    for order in (2.0, torch.inf):
        mine = {
            name: p.grad.full_tensor().cpu().clone() for name, p in sharded.named_parameters() if p.grad is not None
        }
        of_all: list[dict] = [{} for _ in range(4)]
        dist.all_gather_object(of_all, mine)
        once = [grad for name, grad in mine.items() if "expert" not in name]
        once += [grad for rank in (0, 2) for name, grad in of_all[rank].items() if "expert" in name]
        expected = torch.cat([grad.flatten() for grad in once]).norm(order)
        norm = nn.utils.clip_grad_norm_(sharded.parameters(), float(expected) / 2, norm_type=order)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.testing.assert_close(norm.cpu(), expected, rtol=1e-5, atol=0)
        for name, parameter in sharded.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad.full_tensor().cpu(), mine[name] / 2, rtol=1e-5, atol=1e-6)
    # An overflow in an expert, whose other ranks may have no gradient of theirs.
    if number == 1 - (unused or 0):
        local_shard(sharded.module.expert.bias.grad).fill_(torch.inf)
    scaler = GradScaler(DEVICE, init_scale=8.0)
    scaler.scale(torch.zeros((), device=device()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
