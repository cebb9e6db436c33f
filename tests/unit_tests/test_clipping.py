"""torch's gradient clipping of a sharded model's parameters: norms and training equal those of the unsharded model."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from megatron.fsdp import fsdp2
from megatron.fsdp.dtensor import torch_patches
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model
from tests.models import STRATEGIES, Block, Pair, TinyModel, assert_same_gradients, batches, device, loss_of
from tests.ranks import RankPool, on_ranks


class Uneven(TinyModel):
    """Begins with a scalar, which every rank has, and has a parameter of one row and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        scalar, row = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.randn(1, 13))
        self._parameters = {"scalar": scalar, "row": row, "unused": nn.Parameter(torch.ones(3)), **self._parameters}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.scalar * self.embedding(tokens) + self.row
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _value(norm: torch.Tensor) -> torch.Tensor:
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).cpu()


def _gradients(strategy: str) -> tuple[nn.Module, MegatronFSDP]:
    pair = Pair(Uneven(), zero_dp_strategy=strategy)
    pair.backward(batches(1, dist.get_world_size())[0])
    return pair.reference, pair.sharded


@on_ranks("world_size")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_norms_and_clipped_gradients(strategy: str, world_size: int) -> None:
    reference, sharded = _gradients(strategy)
    for norm_type in (2.0, 1.0, 3.0, math.inf):
        found, expected = (
            # Not a name of this module, which a rank may import before or after another test has sharded a model.
            nn.utils.get_total_norm([p.grad for p in each.parameters() if p.grad is not None], norm_type)
            for each in (sharded, reference)
        )
        torch.testing.assert_close(_value(found), expected.cpu(), rtol=2e-5, atol=0)
    for foreach in (None, False):
        found = clip_grad_norm_(sharded.parameters(), 0.5, foreach=foreach)
        expected = clip_grad_norm_(reference.parameters(), 0.5, foreach=foreach)
        torch.testing.assert_close(_value(found), expected.cpu(), rtol=2e-5, atol=0)
        assert_same_gradients(sharded, reference, atol=1e-7)
        for each in (sharded, reference):
            for parameter in each.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(3.0)


@on_ranks(4)
@pytest.mark.parametrize("interface", ["row", "parameter", "compat"])
@pytest.mark.parametrize("foreach", [None, False])
def test_infinity_norm(interface: str, foreach: bool | None) -> None:
    """The largest element, wherever it is, also where a rank holds nothing of a parameter."""
    torch.manual_seed(3)
    model = Uneven().to(device())
    reference = copy.deepcopy(model)
    if interface == "compat":
        fsdp2.fully_shard(model)
        sharded: nn.Module = model
    else:
        sharded = fully_shard_model(model, fsdp_unit_modules=[Block], shard_granularity=interface)
    for tokens in batches(1, 1)[0]:
        loss_of(sharded, tokens).backward()
        loss_of(reference, tokens).backward()
    found, expected = (
        clip_grad_norm_(each.parameters(), 1e-3, norm_type=math.inf, foreach=foreach) for each in (sharded, reference)
    )
    torch.testing.assert_close(_value(found), expected.cpu(), rtol=2e-5, atol=0)
    for mine, other in zip(sharded.parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=2e-5, atol=1e-9)


@on_ranks(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipped_values(strategy: str) -> None:
    reference, sharded = _gradients(strategy)
    largest = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
    for foreach, limit in ((None, largest / 2), (False, largest / 5)):
        clip_grad_value_(sharded.parameters(), limit, foreach=foreach)
        clip_grad_value_(reference.parameters(), limit, foreach=foreach)
        assert_same_gradients(sharded, reference, atol=1e-7)


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_norm_that_is_not_finite_on_one_rank_is_so_on_all(strategy: str) -> None:
    """One rank's shard of one gradient is infinite. Every rank computes an infinite norm, and may skip its step."""
    _, sharded = _gradients(strategy)
    if dist.get_rank() == dist.get_world_size() - 1:
        parts = [local_shard(e.main.grad) for e in sharded.engine.params() if e.main.grad is not None and e.main.dim()]
        next(part for part in parts if part.numel()).fill_(math.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(sharded.parameters(), 1.0, error_if_nonfinite=True)


@on_ranks(2)
def test_clipping_of_fsdp2_needs_no_patch() -> None:
    """Rank 0 has sharded a model with this engine, rank 1 has not, and both clip a model of torch's FSDP2."""
    model, reference = nn.Linear(3, 3).to(device()), nn.Linear(3, 3).to(device())
    reference.load_state_dict(model.state_dict())
    fully_shard(model).set_force_sum_reduction_for_comms(True)
    for each in (model, reference):
        each(torch.ones(1, 3, device=device())).sum().backward()
    torch_patches.apply()
    if dist.get_rank():
        torch_patches.TORCH.uninstall()
    found, expected = (clip_grad_norm_(each.parameters(), 0.5) for each in (model, reference))
    torch.testing.assert_close(_value(found), expected.cpu())
    torch_patches.apply()


def _two_dtypes(norm_type: float | str, dtypes: tuple[torch.dtype, torch.dtype]) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5, dtype=dtypes[0]), nn.Linear(5, 1, bias=False, dtype=dtypes[1])).to(device())
    policy = MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=None)
    sharded = fully_shard_model(copy.deepcopy(model), fsdp_unit_modules=[nn.Linear], mixed_precision_policy=policy)
    for module in (model, sharded):
        for parameter in module.parameters():
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(parameter.dtype)
            parameter.grad = parameter.detach() * 0
            parameter.grad.copy_(gradient)
    norm = clip_grad_norm_(sharded.parameters(), 1e9, norm_type)
    expected = clip_grad_norm_(model.parameters(), 1e9, norm_type)
    assert norm.dtype == expected.dtype
    torch.testing.assert_close(_value(norm), expected.cpu(), rtol=1e-2, atol=0)
    return float(norm)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str)
@pytest.mark.parametrize("norm_type", [2.0, math.inf, "inf", "2"])
def test_norms_of_gradients_of_two_dtypes_are_equal_on_all_ranks(
    ranks: RankPool, norm_type: float | str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    assert len(set(ranks.run(3, _two_dtypes, norm_type, dtypes))) == 1
