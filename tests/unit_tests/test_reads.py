"""Parameters that a loss reads outside of the model's forward have plain PyTorch's gradient, averaged over ranks."""

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.torch_version import TorchVersion

from megatron.fsdp import fsdp2
from megatron_fsdp import fully_shard, fully_shard_model
from tests.models import DEVICE, FP32_GRADS, Block, TinyModel, assert_same_weights, batches, device, loss_of, sgd
from tests.ranks import RankFailure, RankPool, on_ranks


def _full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _replicated(tensor: Any) -> torch.Tensor:
    if not hasattr(tensor, "redistribute"):
        return tensor
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()


# What a loss may do with one parameter.
READS: dict[str, Callable[[Any], Any]] = {
    "squares": lambda p: p.pow(2).sum(),
    "sum": lambda p: torch.sum(p),
    "mean": lambda p: (p * p).mean(),
    "norm": lambda p: p.norm(),
    "norm of order 1": lambda p: torch.linalg.vector_norm(p, ord=1),
    "norm of order 3": lambda p: torch.norm(p, 3.0),
    "infinity norm": lambda p: p.norm(float("inf")),
    "norms of rows": lambda p: p.norm(dim=-1).sum(),
    "norms of columns": lambda p: torch.linalg.vector_norm(p, dim=0).sum(),
    "norm with dimensions": lambda p: torch.linalg.vector_norm(p, keepdim=True).sum(),
    "random choice": lambda p: torch.manual_seed(3) and nn.functional.gumbel_softmax(p, dim=-1).pow(2).sum(),
    "largest": lambda p: p.max() - p.amin(),
    "variance": lambda p: p.var() + torch.std(p),
    "number": lambda p: (0.5 * p - 0.1).abs().sum(),
    "plain operand": lambda p: ((p - torch.linspace(-1, 1, p.numel(), device=p.device).view(p.shape)) * p).sum(),
    "full tensor": lambda p: (_full(p) @ _full(p).T).square().sum() if p.dim() == 2 else _full(p).prod(),
    "into a plain tensor": lambda p: torch.zeros(p.shape, device=p.device).add_(p).pow(2).sum(),
    "copied to a plain tensor": lambda p: torch.zeros(p.shape, device=p.device).copy_(p).norm(),
    "redistributed": lambda p: _replicated(p).exp().sum(),
    "zero": lambda p: (p - p.detach()).norm(),
}


def _penalty(parameters: Any, reads: Any = READS) -> Any:
    return sum(READS[name](p) for p in parameters for name in reads)


@on_ranks(2)
def test_gradients() -> None:
    torch.manual_seed(0)
    model = TinyModel().to(device())
    reference = copy.deepcopy(model)
    sharded, _ = fully_shard(model, sgd(model.parameters()), fsdp_unit_modules=[Block])
    # Ranks weight the penalty differently.
    weight = 1.0 + dist.get_rank()
    for name in READS:
        sharded.zero_grad()
        value = weight * _penalty(sharded.parameters(), [name])
        expected = weight * _penalty(reference.parameters(), [name])
        torch.testing.assert_close(value.detach(), expected.detach(), rtol=1e-4, atol=1e-4, msg=lambda m, n=name: n + m)
        value.backward()
        reference.zero_grad()
        expected.backward()
        for entry in sharded.engine.params():
            grad = reference.get_parameter(entry.name).grad
            dist.all_reduce(grad)
            found = _full(entry.main.grad.detach())
            torch.testing.assert_close(
                found, grad / dist.get_world_size(), rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m
            )


def _average(model: nn.Module, divisor: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(divisor)


def _losses(model: nn.Module, parameters: Any, step: int, tokens: torch.Tensor) -> list[Callable[[], Any]]:
    """The losses of a step's backward passes, which ranks weight differently; the last step's has no data."""

    def loss(micro_batch: int) -> Any:
        weight = 0.02 * (1 + dist.get_rank() + micro_batch)
        reads = weight * _penalty(parameters(), ["squares", "norm", "number", "full tensor"])
        return reads if step == 2 else loss_of(model, tokens[micro_batch]) + reads

    return [lambda: loss(0), lambda: loss(1)]


def _train(arguments: dict) -> None:
    torch.manual_seed(0)
    model = TinyModel(width=7).to(device())
    reference = copy.deepcopy(model)
    divisor = 1 if "calculate_per_token_loss" in arguments else dist.get_world_size()
    if "mesh" in arguments:
        names = {"dp_shard_dim": "dp_shard", "dp_outer_dim": "dp_outer"}
        mesh = init_device_mesh(DEVICE, arguments["mesh"], mesh_dim_names=("dp_outer", "dp_shard"))
        arguments = {**arguments, **names, "device_mesh": mesh}
        del arguments["mesh"]
    sharded, optimizer = fully_shard(model, sgd(model.parameters()), mixed_precision_policy=FP32_GRADS, **arguments)
    plain = sgd(reference.parameters())
    for step in range(3):
        tokens = batches(3, 2 * dist.get_world_size())[step][2 * dist.get_rank() :]
        for each in _losses(reference, reference.parameters, step, tokens):
            each().backward()
        _average(reference, divisor)
        first, last = _losses(sharded, sharded.parameters, step, tokens)
        with sharded.no_sync():
            first().backward()
        last().backward()
        plain.step()
        optimizer.step()
        plain.zero_grad()
        optimizer.zero_grad()
        assert_same_weights(sharded, reference)


ARGUMENTS: dict[str, tuple[int, dict]] = {
    "ZeRO-3": (2, {}),
    "ZeRO-2": (2, {"zero_dp_strategy": 2}),
    "ZeRO-1": (2, {"zero_dp_strategy": 1}),
    "ZeRO-0": (2, {"zero_dp_strategy": 0}),
    "no units": (2, {"fsdp_unit_modules": None}),
    "double buffer": (2, {"fsdp_double_buffer": True}),
    "sums": (2, {"calculate_per_token_loss": True}),
    "offload": (2, {"offload_optimizer": True}),
    "HSDP": (4, {"mesh": (2, 2), "outer_dp_sharding_strategy": "no_shard"}),
    "hybrid": (4, {"mesh": (2, 2), "outer_dp_sharding_strategy": "optim"}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_trains_as_unsharded(ranks: RankPool, name: str) -> None:
    size, arguments = ARGUMENTS[name]
    ranks.run(size, _train, {"fsdp_unit_modules": [Block], **arguments})


@on_ranks(4)
def test_tensor_parallel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7))
    reference = copy.deepcopy(model)
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    names = {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp"}
    sharded, _ = fully_shard(model.to(device()), sgd(model.parameters()), **names)
    weight = 1.0 + mesh["dp"].get_local_rank()
    (weight * _penalty(sharded.parameters())).backward()
    (1.5 * _penalty(reference.parameters())).backward()
    for entry in sharded.engine.params():
        expected = reference.get_parameter(entry.name).grad
        torch.testing.assert_close(_full(entry.main.grad).cpu(), expected, rtol=1e-4, atol=1e-4)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 2, 9).view(3, 3))
        self.weight.allreduce = False  # Megatron-Core's mark of experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@on_ranks(4)
def test_experts() -> None:
    dense = init_device_mesh(DEVICE, (4,), mesh_dim_names=("dp",))
    expert = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "ep"))
    model = fully_shard_model(_Experts().to(device()), dense, "dp", expt_device_mesh=expert)
    (param,) = model.engine.params()
    # The same function of the weight in the model's forward and outside of it.
    weight = 1.0 + dist.get_rank()
    (weight * model(torch.eye(3, device=device())).pow(2).sum()).backward()
    inside = _full(param.main.grad)
    model.zero_grad()
    (weight * model.module.weight.pow(2).sum()).backward()
    torch.testing.assert_close(_full(param.main.grad), inside)


@on_ranks(2)
def test_divide_factor() -> None:
    model = nn.Sequential(nn.Linear(5, 3)).to(device())
    fsdp2.fully_shard(model)
    model.set_gradient_divide_factor(5.0)
    (parameter, _) = model.parameters()
    (parameter.pow(2).sum() * (1.0 + dist.get_rank())).backward()
    torch.testing.assert_close(_full(parameter.grad), _full(parameter.detach()) * 2 * 3 / 5)


def _linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(5, 3).to(device())
    return model, sgd(model.parameters())


@on_ranks(2)
def test_decoupled_gradients() -> None:
    model, _ = fully_shard(*_linear(), use_decoupled_grad=True)
    (weight, _) = model.parameters()
    for repeat in range(1, 3):
        weight.pow(2).sum().backward()
        assert weight.grad is None
        torch.testing.assert_close(_full(weight.decoupled_grad), _full(weight.detach()) * 2 * repeat)


@on_ranks(2)
def test_frozen() -> None:
    model, _ = _linear()
    model.bias.requires_grad_(False)
    model, _ = fully_shard(model, sgd([model.weight]))
    (weight, bias) = model.parameters()
    assert not bias.norm().requires_grad
    bias.requires_grad_(True)
    weight.requires_grad_(False)
    (weight.sum() + bias.pow(2).sum()).backward()
    assert weight.grad is None
    torch.testing.assert_close(_full(bias.grad), _full(bias.detach()) * 2)


@on_ranks(2)
def test_what_cannot_be_right_raises() -> None:
    model, _ = fully_shard(*_linear())
    (weight, bias) = model.parameters()
    x = torch.ones(2, 5, device=device())
    handle = weight.register_hook(lambda grad: grad)
    with pytest.raises(NotImplementedError, match="weight has gradient hooks"):
        weight.pow(2).sum().backward()
    handle.remove()
    named = {"weight": weight} if TorchVersion(torch.__version__) >= "2.13" else weight  # others take no dictionary
    for inputs in (weight, [bias, weight], named, model.parameters(), model.module.weight):
        with pytest.raises(RuntimeError, match=r"gradient of (weight|bias) is reduced.*loss\.backward"):
            torch.autograd.grad(model(x).sum(), inputs=inputs, allow_unused=True)
    with pytest.raises(RuntimeError, match="gradient of weight is reduced"):
        model(x).sum().backward(inputs=[weight])
    square = weight * weight
    with pytest.raises(NotImplementedError, match="in place"):
        square.mul_(2.0)


@on_ranks(2)
def test_norms_can_be_printed() -> None:
    model, _ = fully_shard(*_linear())
    model(torch.ones(2, 5, device=device())).sum().backward()
    expected = float(torch.stack([_full(p.grad).norm() for p in model.parameters()]).norm())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert f"{norm:.3f}" == f"{expected:.3f}" and f"{norm}" == str(norm.item())
    values: tuple[Any, ...] = (norm.tolist(), norm.cpu().numpy(), numpy.asarray(norm.cpu()))
    assert values == (norm.item(),) * 3


@on_ranks(2)
def test_results_of_a_graph_have_the_method_for_the_full_tensor() -> None:
    """Code for torch's FSDP2 calls it on penalties, and on norms that are logged, in whatever they are part of."""
    plain = nn.Linear(5, 3).to(device())
    sharded, data = fsdp2.fully_shard(copy.deepcopy(plain)), torch.ones(2, 5, device=device())
    losses = []
    for model in (plain, sharded):
        weight, bias = model.parameters()
        reads = [weight.norm(), (weight * 2).max(dim=0)[0].sum(), torch.linalg.matrix_norm(weight * weight), bias.std()]
        penalty = torch.stack([*reads, sum(reads)]).norm()  # type: ignore[list-item]
        loss = model(data).sum() + penalty
        losses += [loss, penalty, weight.norm(dim=1), reads[0].detach() ** 2]
        (model(data).sum() + _full(penalty)).backward()
    for expected, found in zip(losses[:4], losses[4:], strict=True):
        assert type(found.full_tensor()) is torch.Tensor
        torch.testing.assert_close(found.full_tensor(), expected)
        assert repr(found.detach()) == repr(expected.detach()) or DEVICE == "cuda"
    for parameter, reference in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(_full(parameter.grad), reference.grad)
    shown = losses[-1]
    assert f"{shown:.3f}" == f"{shown.item():.3f}" and type(copy.deepcopy(shown)) is torch.Tensor
    file = io.BytesIO()
    torch.save(shown, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == shown
    total = torch.zeros((), device=device())
    alias = total
    total += shown
    assert total is alias
    assert type(data * shown) is torch.Tensor  # activations stay plain
    assert torch.compile(lambda x: x * 2, backend="eager")(shown) == shown * 2


@on_ranks(2)
def test_torch_func_of_a_parameter_names_full_tensor() -> None:
    model, _ = fully_shard(*_linear())
    weight = next(iter(model.parameters()))
    with pytest.raises(NotImplementedError, match=r"pass parameter\.full_tensor\(\) instead"):
        torch.vmap(torch.sum)(weight)
    torch.testing.assert_close(torch.vmap(torch.sum)(weight.full_tensor()), _full(weight).sum(1))


def _early_read() -> None:
    model = TinyModel().to(device())
    loss = model.head.weight.pow(2).sum()
    model = fully_shard_model(model, fsdp_unit_modules=[Block])
    (loss + loss_of(model, batches(1, 1)[0, 0])).backward()


def _early_gradient() -> None:
    """Reading the parameters of a module that is not marked does not shard the model."""
    model = fsdp2.fully_shard(TinyModel().to(device()))
    (weight,) = (p for p in model.head.parameters() if p.dim() > 1)
    weight.pow(2).sum().backward()
    loss_of(model, batches(1, 1)[0, 0])


def _kept_gradient() -> None:
    model = TinyModel().to(device())
    model.head.weight.pow(2).sum().backward()
    fully_shard_model(model, fsdp_unit_modules=[Block])


@pytest.mark.parametrize("case", [_early_read, _early_gradient, _kept_gradient])
def test_a_gradient_of_a_parameter_from_before_the_model_was_sharded_raises(
    ranks: RankPool, case: Callable[[], None]
) -> None:
    with pytest.raises(RankFailure, match=r"head\.weight before the model was sharded"):
        ranks.run(2, case)
