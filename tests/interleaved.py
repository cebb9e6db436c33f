"""A schedule that calls parts of units itself: the forward of one micro-batch during the backward of another."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from megatron_fsdp import MegatronFSDP
from tests.models import Block, TinyModel, loss_of

Watch = Callable[[MegatronFSDP], None]


def _nothing(model: MegatronFSDP) -> None:
    """Does nothing."""


class MicroBatch:
    """One micro-batch whose parts are passes of autograd of their own.

    Args:
        model: The model, without the wrapper.
        tokens: The micro-batch.
        delay: Compute the gradients of the blocks' matrices later, in :meth:`delayed_gradients`.

    Attributes:
        delays: Whether gradients are computed later.
        loss: The loss divided by the number of micro-batches, once it is computed.
    """

    def __init__(self, model: TinyModel, tokens: torch.Tensor, delay: bool = False) -> None:
        self.model, self.tokens, self.delays = model, tokens, delay
        self.loss: torch.Tensor | None = None
        self._delayed: list[Callable[[], None]] = []
        self._saved: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        self._grad: torch.Tensor | None = None
        self._x = self._run(lambda: model.embedding(tokens))

    def _run(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        detached = [each.detach().requires_grad_() for each in inputs]
        output = function(*detached)
        self._saved.append((detached, output))
        return output

    def _back(self, grad: torch.Tensor | None) -> list[torch.Tensor]:
        inputs, output = self._saved.pop()
        output.backward(grad)
        return [each.grad for each in inputs if each.grad is not None]

    def _linear(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if not self.delays:
            return layer(x)
        return _Delayed.apply(x, layer.weight, layer.bias, self._delayed)

    def forward_block(self, block: Block) -> Iterator[None]:
        """The two parts of a block."""
        inner = self._run(lambda x: self._linear(block.up, block.norm(x)), self._x)
        yield
        second = lambda inner, x: x + self._linear(block.down, nn.functional.gelu(inner))  # noqa: E731
        self._x = self._run(second, inner, self._x)
        yield

    def backward_block(self) -> Iterator[None]:
        """The backward of these two parts, without delayed gradients."""
        inner, through = self._back(self._grad)
        yield
        (below,) = self._back(inner)
        self._grad = below + through
        yield

    def delayed_gradients(self) -> None:
        """Compute the gradients that the backward of a block has left out."""
        while self._delayed:
            self._delayed.pop(0)()

    def compute_loss(self, micro_batches: int) -> None:
        """The rest of the forward."""

        def mean(x: torch.Tensor) -> torch.Tensor:
            logits = self.model.head(self.model.norm(x)).flatten(0, 1)
            return nn.functional.cross_entropy(logits.float(), self.tokens.flatten()) / micro_batches

        self.loss = self._run(mean, self._x).detach()

    def begin_backward(self) -> None:
        """Backward down to the last block."""
        (self._grad,) = self._back(None)

    def end_backward(self) -> None:
        """Backward from the first block."""
        self._back(self._grad)


class _Delayed(torch.autograd.Function):
    """A linear layer that appends the computation of its weight's gradient to a list."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        weight: nn.Parameter,
        bias: torch.Tensor | None,
        delayed: list[Callable[[], None]],
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.has_bias, ctx.delayed = weight, bias is not None, delayed
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, torch.Tensor | None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight

        @torch.no_grad()
        def compute() -> None:
            assert weight.grad is None
            weight.grad = grad.flatten(0, -2).t() @ x.flatten(0, -2)

        ctx.delayed.append(compute)
        return grad @ weight, None, grad.flatten(0, -2).sum(0) if ctx.has_bias else None, None


def _run_blocks(model: MegatronFSDP, ahead: MicroBatch | None, behind: MicroBatch | None, watch: Watch) -> None:
    """Block by block, part by part: the forward of ``ahead`` and the backward of ``behind``."""
    blocks = list(model.module.blocks)
    for forward, backward in zip(blocks, reversed(blocks), strict=True):
        if behind is not None:
            model.pre_backward_unshard_module(backward)
        if ahead is not None:
            model.pre_forward_unshard_module(forward)
        ahead_parts = ahead.forward_block(forward) if ahead else iter(())
        behind_parts = behind.backward_block() if behind else iter(())
        for is_last in (False, True):
            next(ahead_parts, None)
            watch(model)
            if ahead is not None and is_last:
                model.post_forward_release_module(forward)
            next(behind_parts, None)
            watch(model)
        # The last block's delayed gradients are computed later. The end of the whole backward reduces them.
        if behind is not None and not (behind.delays and backward is blocks[0]):
            behind.delayed_gradients()
            model.post_backward_release_module(backward)


def interleave(
    model: MegatronFSDP,
    tokens: torch.Tensor | None,
    behind: MicroBatch | None,
    count: int,
    watch: Watch = _nothing,
    delay: bool = False,
) -> MicroBatch | None:
    """Run the forward of ``tokens`` and the backward of ``behind``, and return the micro-batch of ``tokens``."""
    ahead = None
    if behind is not None:
        model.pre_backward()
        behind.begin_backward()
    if tokens is not None:
        model.pre_forward()
        ahead = MicroBatch(model.module, tokens, delay)
    _run_blocks(model, ahead, behind, watch)
    if behind is not None:
        behind.end_backward()
        behind.delayed_gradients()
        model.post_backward()
    if ahead is not None:
        ahead.compute_loss(count)
        model.post_forward()
    return ahead


def interleaved_step(
    model: MegatronFSDP,
    micro_batches: torch.Tensor,
    watch: Watch = _nothing,
    delay: bool = False,
    sync_each: bool = False,
) -> None:
    """Run forward and backward of a step. Only the last backward synchronizes gradients, or each does."""
    behind = None
    for i, tokens in enumerate([*micro_batches, None]):
        with model.sync() if sync_each or i == len(micro_batches) else model.no_sync():
            behind = interleave(model, tokens, behind, len(micro_batches), watch, delay)


def ordinary_step(model: MegatronFSDP, micro_batches: torch.Tensor) -> None:
    """One micro-batch after the other."""
    for i, tokens in enumerate(micro_batches):
        with model.no_sync() if i + 1 < len(micro_batches) else model.sync():
            (loss_of(model, tokens) / len(micro_batches)).backward()
