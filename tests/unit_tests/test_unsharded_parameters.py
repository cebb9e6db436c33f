"""Parameters that are ignored, or replicated on every rank, train as in an unsharded model on every rank."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from megatron.fsdp import fsdp2
from megatron_fsdp import FSDPConfig, fully_shard, fully_shard_model, save_safetensors
from tests.models import STRATEGIES, Block, TinyModel, adamw, batches, device, load_from, loss_of, save_to
from tests.ranks import RankPool, on_ranks

IGNORED = ("embedding.weight", "blocks.1.up.weight", "blocks.1.up.bias")
REPLICATED = ("blocks.0.down.weight", "blocks.2.norm.weight", "head.weight", "norm.bias")


def _exceptions(model: nn.Module) -> dict[str, set[nn.Parameter]]:
    """The arguments that keep these parameters from being sharded."""
    chosen = (("ignored_params", IGNORED), ("replicated_params", REPLICATED))
    return {argument: {model.get_parameter(name) for name in names} for argument, names in chosen}


def _mark(model: nn.Module, **arguments: object) -> nn.Module:
    """Shard through FSDP2's interface. Every call gets all parameters, of which it takes its own."""
    exceptions = _exceptions(model)
    for block in model.blocks:
        fsdp2.fully_shard(block, **exceptions, **arguments)
    return fsdp2.fully_shard(model, **exceptions, **arguments)


class _Pair:
    """A sharded model, and an unsharded one on every rank, whose gradients are averaged but for ignored ones."""

    def __init__(self, interface: str, **settings: object) -> None:
        torch.manual_seed(0)
        model = TinyModel().to(device())
        with torch.no_grad():  # what a rank ignores may differ between ranks
            model.embedding.weight.mul_(1 + dist.get_rank())
        self.reference = copy.deepcopy(model)
        self.optimizers = [adamw(model.parameters()), adamw(self.reference.parameters())]
        if interface == "own":
            arguments = {"fsdp_unit_modules": [Block], **_exceptions(model), **settings}
            self.sharded, self.optimizers[0] = fully_shard(model, self.optimizers[0], **arguments)
        else:
            self.sharded = _mark(model, **settings)
        self.model = model
        self.sums = bool(settings.get("calculate_per_token_loss"))

    def step(self, data: torch.Tensor) -> None:
        """Train on this rank's micro-batches of one step, and compare losses, norms and weights."""
        ranks, mine = dist.get_world_size(), data[dist.get_rank() :: dist.get_world_size()]
        for number, tokens in enumerate(mine):
            last = number == len(mine) - 1
            if isinstance(self.sharded, fsdp2.FSDPModule):
                self.sharded.set_requires_gradient_sync(last)
                found = loss_of(self.sharded, tokens) / len(mine)
                found.backward()
            elif last:
                found = loss_of(self.sharded, tokens) / len(mine)
                found.backward()
            else:
                with self.sharded.no_sync():
                    found = loss_of(self.sharded, tokens) / len(mine)
                    found.backward()
            expected = loss_of(self.reference, tokens) / len(mine)
            expected.backward()
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
        if self.sums:
            self.sharded.scale_gradients(1 / ranks)
        for name, parameter in self.reference.named_parameters():
            if name not in IGNORED:
                dist.all_reduce(parameter.grad)
            if self.sums or name not in IGNORED:
                parameter.grad /= ranks
        self.assert_same_norms()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.assert_same_weights()

    def assert_same_norms(self) -> None:
        """Clipping counts each parameter once: of ignored ones, the mean of the ranks' squares."""
        squares = torch.zeros((), device=device())
        for name, parameter in self.reference.named_parameters():
            square = parameter.grad.square().sum()
            if name in IGNORED:
                dist.all_reduce(square)
                square /= dist.get_world_size()
            squares += square
        expected = squares.sqrt()
        found = torch.nn.utils.clip_grad_norm_(self.sharded.parameters(), 0.5)
        found = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)
        torch.nn.utils.clip_grads_with_norm_(self.reference.parameters(), 0.5, expected)

    def assert_same_weights(self) -> None:
        """The weights are those of the reference, and have the layout that was asked for."""
        state = self.model.state_dict()
        for name, expected in self.reference.state_dict().items():
            found = state[name]
            assert isinstance(found, DTensor) == (name not in IGNORED), name
            if isinstance(found, DTensor):
                if name in REPLICATED:
                    assert all(isinstance(placement, Replicate) for placement in found.placements)
                found = found.full_tensor()
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def _train(interface: str, settings: dict) -> None:
    if settings.pop("hybrid", False):
        mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("outer", "inner"))
        own = {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
        settings |= own if interface == "own" else {"mesh": mesh}
    pair = _Pair(interface, **settings)
    for data in batches(3, 2 * dist.get_world_size()):
        pair.step(data)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sums", [False, True], ids=["means", "sums"])
def test_trains_as_unsharded(ranks: RankPool, strategy: str, sums: bool) -> None:
    ranks.run(2, _train, "own", {"zero_dp_strategy": strategy, "calculate_per_token_loss": sums})


@pytest.mark.parametrize("reshard", [True, False])
def test_trains_as_unsharded_through_fsdp2s_interface(ranks: RankPool, reshard: bool) -> None:
    ranks.run(2, _train, "fsdp2", {"reshard_after_forward": reshard})


@pytest.mark.parametrize("interface", ["own", "fsdp2"])
def test_trains_as_unsharded_on_two_axes(ranks: RankPool, interface: str) -> None:
    ranks.run(4, _train, interface, {"hybrid": True})


@on_ranks(2)
@pytest.mark.parametrize("with_names", [True, False])
@pytest.mark.parametrize("interface", ["own", "fsdp2"])
def test_checkpoints(tmp_path: Path, interface: str, with_names: bool) -> None:
    saved, loaded = _Pair(interface), _Pair(interface)
    saved.step(batches(1, 2)[0])
    for name in IGNORED:  # a checkpoint has one tensor, that of any rank
        parameter = saved.model.get_parameter(name)
        for value in (parameter.data, *saved.optimizers[0].state[parameter].values()):
            dist.broadcast(value, 0)
    states = []
    for pair in (saved, loaded):
        model_state, optimizer_state = get_state_dict(pair.model, pair.optimizers[0])
        states.append({"model_state_dict": model_state, "optim_state_dict": optimizer_state})
    if with_names:
        dcp.save(states[0], checkpoint_id=tmp_path)
        dcp.load(states[1], checkpoint_id=tmp_path)
        set_state_dict(loaded.model, loaded.optimizers[0], **states[1])
    else:
        save_to(tmp_path, saved.sharded, saved.optimizers[0])
        load_from(tmp_path, loaded.sharded, loaded.optimizers[0])
    for pair in (saved, loaded):
        loss_of(pair.sharded, batches(1, 2, seed=2)[0, dist.get_rank()]).backward()
        pair.optimizers[0].step()
    for name, value in saved.model.state_dict().items():
        torch.testing.assert_close(loaded.model.state_dict()[name], value, rtol=0, atol=0)


@on_ranks(2)
def test_files_of_full_weights_have_all_parameters(tmp_path: Path) -> None:
    pair = _Pair("own")
    save_safetensors(pair.sharded, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == dict(pair.model.named_parameters()).keys()


@on_ranks(1)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_model_reaches_all_parameters(set_to_none: bool) -> None:
    model = TinyModel().to(device())
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block], **_exceptions(model))
    loss_of(sharded, batches(1, 1)[0, 0]).backward()
    sharded.zero_grad(set_to_none)
    gradients = [model.get_parameter(name).grad for name in (*IGNORED, *REPLICATED)]
    assert all(grad is None if set_to_none else not grad.any() for grad in gradients)


@on_ranks(1)
def test_arguments() -> None:
    model = TinyModel().to(device())
    weight, stranger = model.head.weight, nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(TypeError, match=r"^ignored_params: expected parameters of the model; got 'head.weight'\."):
        fully_shard_model(model, ignored_params=["head.weight"])
    with pytest.raises(ValueError, match=r"^replicated_params: 1 of 2 are not parameters of the model, one of shape"):
        fully_shard_model(model, replicated_params=[weight, stranger])
    with pytest.raises(ValueError, match=r"^1 parameters are in ignored_params and in replicated_params: choose one\."):
        fully_shard_model(model, ignored_params=[weight], replicated_params=[weight])
    for given, found in (
        (weight, "alone"),
        ("head.weight", "alone"),
        (["head.weight"], "of the model"),
        ([model], "of"),
    ):
        for shard in (fully_shard_model, fsdp2.fully_shard):
            for name in ("ignored_params", "replicated_params"):
                with pytest.raises(TypeError, match=rf"^{name}: expected .*{found}"):
                    shard(model, **{name: given})
    only = fully_shard_model(model, ignored_params=[weight])
    model.head.weight = nn.Parameter(weight.detach().clone())  # it is not the engine's
    assert "module.head.weight" in only.state_dict()
    assert FSDPConfig(ignored_params=None) == FSDPConfig()


@on_ranks(2)
def test_ranks_compare_what_they_replicate() -> None:
    """Ranks that do not replicate the same parameters raise, and name one."""
    model = TinyModel().to(device())
    chosen = [model.head.weight] if dist.get_rank() else []
    with pytest.raises(ValueError, match=r"parameter head\.weight: .*replicated"):
        fully_shard_model(model, replicated_params=chosen)


@on_ranks(1)
def test_marked_modules_inside_ignore_by_themselves() -> None:
    """A parameter of a marked module is ignored if that module's call says so, and if not, it is sharded."""
    model = TinyModel().to(device())
    first, second = model.blocks[0].up.weight, model.blocks[1].up.weight
    fsdp2.fully_shard(model.blocks[0], ignored_params={first})
    fsdp2.fully_shard(model.blocks[1])
    (first.sum() * 2).backward()  # those of others would be lost
    fsdp2.fully_shard(model, ignored_params={second, model.head.weight})
    found = {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
    assert found == {"blocks.0.up.weight", "head.weight"}
    assert model.blocks[0].up.weight is first
    model.to(torch.float32)
    assert model.blocks[0].up.weight is first
