"""A schedule that runs parts of units itself, the forward of one micro-batch beside the backward of another."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.runtime.unit import WeightState
from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from tests.models import FP32_GRADS, STRATEGIES, Block, TinyModel, assert_same_weights, batches, sgd, train_reference
from tests.ranks import RankPool

Watch = Callable[[MegatronFSDP], None]


def _parts(block: Block) -> list[Callable[..., torch.Tensor]]:
    """The two parts of a block that are called one by one, each with the results of those before it."""
    return [
        lambda x: block.up(block.norm(x)),
        lambda inner, x: x + block.down(nn.functional.gelu(inner)),
    ]


class _MicroBatch:
    """One micro-batch whose parts are passes of autograd of their own."""

    def __init__(self, model: TinyModel, tokens: torch.Tensor) -> None:
        self.model, self.tokens = model, tokens
        self.saved: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        self.grad: torch.Tensor | None = None
        self.x = self._run(lambda: model.embedding(tokens))

    def _run(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        detached = [each.detach().requires_grad_() for each in inputs]
        output = function(*detached)
        self.saved.append((detached, output))
        return output

    def _back(self, grad: torch.Tensor | None) -> list[torch.Tensor]:
        inputs, output = self.saved.pop()
        output.backward(grad)
        return [each.grad for each in inputs if each.grad is not None]

    def forward_block(self, block: Block) -> Iterator[None]:
        first, second = _parts(block)
        inner = self._run(first, self.x)
        yield
        self.x = self._run(second, inner, self.x)
        yield

    def backward_block(self) -> Iterator[None]:
        inner, through = self._back(self.grad)
        yield
        (below,) = self._back(inner)
        self.grad = below + through
        yield

    def loss(self, micro_batches: int) -> float:
        def mean(x: torch.Tensor) -> torch.Tensor:
            logits = self.model.head(self.model.norm(x)).flatten(0, 1)
            return nn.functional.cross_entropy(logits.float(), self.tokens.flatten()) / micro_batches

        return self._run(mean, self.x).item()

    def begin_backward(self) -> None:
        (self.grad,) = self._back(None)

    def end_backward(self) -> None:
        self._back(self.grad)


def _run_blocks(model: MegatronFSDP, ahead: _MicroBatch | None, behind: _MicroBatch | None, watch: Watch) -> None:
    """Block by block, part by part: the forward of ``ahead`` and the backward of ``behind``."""
    blocks = list(model.module.blocks)
    for forward, backward in zip(blocks, reversed(blocks), strict=True):
        if behind is not None:
            model.pre_backward_unshard_module(backward)
        if ahead is not None:
            model.pre_forward_unshard_module(forward)
        parts = [ahead.forward_block(forward) if ahead else iter(()), behind.backward_block() if behind else iter(())]
        for part in [*parts, *parts]:
            next(part, None)
            watch(model)
        if ahead is not None:
            model.post_forward_release_module(forward)
        if behind is not None:
            model.post_backward_release_module(backward)


def _interleave(
    model: MegatronFSDP, tokens: torch.Tensor | None, behind: _MicroBatch | None, count: int, watch: Watch
) -> _MicroBatch | None:
    """The forward of ``tokens`` and the backward of ``behind``."""
    ahead = None
    if behind is not None:
        model.pre_backward()
        behind.begin_backward()
    if tokens is not None:
        model.pre_forward()
        ahead = _MicroBatch(model.module, tokens)
    _run_blocks(model, ahead, behind, watch)
    if ahead is not None:
        ahead.loss(count)
        model.post_forward()
    if behind is not None:
        behind.end_backward()
        model.post_backward()
    return ahead


def _train(model: MegatronFSDP, data: torch.Tensor, watch: Watch = lambda model: None) -> None:
    optimizer = fully_shard_optimizer(sgd(model.parameters()))
    for step in data:
        behind = None
        for i, tokens in enumerate([*step, None]):
            with model.no_sync() if i < len(step) else model.sync():
                behind = _interleave(model, tokens, behind, len(step), watch)
        optimizer.step()
        optimizer.zero_grad()


def _shard(module: TinyModel, strategy: str = "optim_grads_params", **settings: object) -> MegatronFSDP:
    return fully_shard_model(
        module, fsdp_unit_modules=[Block], zero_dp_strategy=strategy, mixed_precision_policy=FP32_GRADS, **settings
    )


def _equals_the_unsharded_loop(strategy: str, depth: int, micro_batches: int) -> None:
    torch.manual_seed(3)
    module, reference = TinyModel(depth=depth, tied=True), TinyModel(depth=depth, tied=True)
    reference.load_state_dict(module.state_dict())
    data = batches(steps=3, per_step=micro_batches * dist.get_world_size())
    train_reference(reference, data)
    model = _shard(module, strategy)
    _train(model, data[:, dist.get_rank() :: dist.get_world_size()])
    assert_same_weights(model, reference)
    assert all(unit.state is WeightState.SHARDED for unit in model.engine.units)


# With an odd number of blocks, the forward and the backward are in the same block halfway.
@pytest.mark.every_strategy
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("depth", "micro_batches"), [(3, 3), (4, 2)])
def test_it_equals_the_unsharded_loop(ranks: RankPool, strategy: str, depth: int, micro_batches: int) -> None:
    ranks.run(2, _equals_the_unsharded_loop, strategy, depth, micro_batches)


def _most_unsharded(depth: int) -> int:
    most = 0

    def watch(model: MegatronFSDP) -> None:
        nonlocal most
        units = [unit for unit in model.engine.units if not unit.is_root]
        # Memory, not only the state.
        buffers = [unit.groups[0].weights.planes[0].buffer.flat for unit in units]
        most = max(most, sum(flat.untyped_storage().nbytes() > 0 for flat in buffers))

    _train(_shard(TinyModel(depth=depth)), batches(steps=2, per_step=3), watch)
    return most


def test_blocks_are_resharded_when_neither_micro_batch_needs_them(ranks: RankPool) -> None:
    # Each of the two has a block that it computes and the next one.
    assert ranks.run(2, _most_unsharded, 8) == [4, 4]
