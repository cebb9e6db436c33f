"""Models whose parameters are DTensors over a tensor-parallel axis: sharded over the data-parallel axis as well."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import MegatronFSDP, fully_shard
from tests.models import DEVICE, STRATEGIES, adamw, device
from tests.ranks import RankPool


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


def _shard(model: Model, mesh: DeviceMesh, strategy: str) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
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


def _save(folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    sharded, _ = _shard(Model(), _mesh(2), "optim_grads_params")
    dcp.save({"model": sharded.state_dict()}, checkpoint_id=folder)
    return _whole(sharded)


def _load(folder: str) -> dict[str, torch.Tensor]:
    whole = {f"module.{name}": torch.empty_like(value) for name, value in Model().state_dict().items()}
    dcp.load({"model": whole}, checkpoint_id=folder)
    return whole


def test_checkpoint_has_the_whole_weights(ranks: RankPool, tmp_path: object) -> None:
    expected = ranks.run(4, _save, str(tmp_path))[0]
    found = ranks.run(1, _load, str(tmp_path))[0]
    for name, value in expected.items():
        assert torch.equal(found[f"module.{name}"], value), name


def _placements() -> None:
    sharded, _ = _shard(Model(), _mesh(2), "optim_grads_params")
    up = sharded.module.layers[0].up.weight
    assert tuple(up.shape) == (10, 7)
    assert up.placements[1] == Shard(0) and up.placements[0].dim == 0
    down = sharded.module.layers[0].down.weight
    assert down.placements == (Shard(0), Shard(1))


def test_main_weights_are_dtensors_over_both_axes(ranks: RankPool) -> None:
    ranks.run(4, _placements)


def _forgotten() -> None:
    model = Model()
    parallelize_module(model.layers[0], _mesh(1)["tp"], {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match="layers.0.up.* is a DTensor over .*named by tp_dim; got tp_dim=None"):
        fully_shard(model, adamw(model.parameters()), device_mesh=_mesh(1), dp_shard_dim="dp")


def test_mesh_axis_must_be_named(ranks: RankPool) -> None:
    ranks.run(2, _forgotten)
