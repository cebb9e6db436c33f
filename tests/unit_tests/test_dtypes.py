"""A unit with parameters of several dtypes, some of them frozen: each group computes and updates in its dtype."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.models import FP32_GRADS, STRATEGIES, adamw, batches, device, loss_of, main_weights
from tests.ranks import on_ranks

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class MixedBlock(nn.Module):
    """Norm and gain in fp32, matrices in bf16, of which one bias and one factor are frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1, dtype=BF16)
        self.down = nn.Linear(2 * width + 1, width, dtype=BF16)
        self.gain = nn.Parameter(torch.ones(()))
        self.factor = nn.Parameter(torch.rand(width), requires_grad=False)
        self.down.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(self.up(self.norm(x).to(BF16)))
        return x + self.gain * self.factor * self.down(y).float()


class MixedModel(nn.Module):
    """Embedding in bf16, head in fp32, and blocks between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 13, dtype=BF16)
        self.blocks = nn.ModuleList(MixedBlock(13) for _ in range(2))
        self.head = nn.Linear(13, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).float()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Reference:
    """Trains fp32 main weights of an unsharded model, whose gradients are summed in a dtype."""

    def __init__(self, model: nn.Module, grad_dtype: torch.dtype = FP32) -> None:
        self.model, self.grad_dtype = model, grad_dtype
        self.weights = {name: p.detach().to(FP32, copy=True) for name, p in model.named_parameters()}
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = adamw([self.weights[name].requires_grad_() for name in self.trained])

    def step(self, data: torch.Tensor) -> None:
        sums = {name: torch.zeros_like(self.weights[name], dtype=self.grad_dtype) for name in self.trained}
        for tokens in data:
            loss_of(self.model, tokens).backward()
            for name, parameter in self.trained.items():
                assert parameter.grad is not None
                sums[name] += parameter.grad.to(self.grad_dtype)
                parameter.grad = None
        for name in self.trained:
            self.weights[name].grad = (sums[name] / len(data)).to(FP32)
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(self.weights[name])


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dtypes_and_frozen_parameters_in_one_unit(strategy: str) -> None:
    torch.manual_seed(3)
    model = MixedModel().to(device())
    dtypes = {name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    reference = Reference(copy.deepcopy(model))
    seen: dict[str, torch.dtype] = {}
    model.blocks[1].register_forward_pre_hook(lambda m, _: seen.update({n: p.dtype for n, p in m.named_parameters()}))
    sharded, optimizer = fully_shard(
        model,
        adamw(model.parameters()),
        fsdp_unit_modules=[MixedBlock],
        zero_dp_strategy=strategy,
        mixed_precision_policy=FP32_GRADS,
    )
    # fp32, bf16, each frozen, and the scalar.
    assert [len(unit.groups) for unit in sharded.engine.units] == [2, 5, 5]
    for data in batches(steps=3, per_step=dist.get_world_size()):
        reference.step(data)
        loss_of(sharded, data[dist.get_rank()]).backward()
        optimizer.step()
        for name, parameter in sharded.module.named_parameters():
            assert parameter.dtype == FP32 and (parameter.grad is not None) == dtypes[name][1]
        optimizer.zero_grad()
    assert all(dtypes[f"blocks.1.{name}"][0] == dtype for name, dtype in seen.items())
    for name, weight in main_weights(sharded).items():
        expected = reference.weights[name].detach().cpu()
        torch.testing.assert_close(weight, expected, rtol=2e-6, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(2)
def test_main_weights_have_the_dtypes_of_the_parameters_if_asked_to() -> None:
    model = MixedModel().to(device())
    policy = MixedPrecisionPolicy(main_params_dtype=None)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    sharded, optimizer = fully_shard(
        model, adamw(model.parameters()), fsdp_unit_modules=[MixedBlock], mixed_precision_policy=policy
    )
    loss_of(sharded, batches(1, 1)[0, 0]).backward()
    for name, parameter in sharded.module.named_parameters():
        assert parameter.dtype == dtypes[name]
        assert parameter.grad is None or parameter.grad.dtype == dtypes[name]
    optimizer.step()
