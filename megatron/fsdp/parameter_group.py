"""The parameters of one unit that share dtype and ``requires_grad``: their weights, gradients and DTensors."""

import functools
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron.fsdp.device import Stream
from megatron.fsdp.gradients import GradientBuffer, GradientScaling
from megatron.fsdp.layout import Layout, Piece, plan_layout
from megatron.fsdp.mesh import FSDPDistributedIndex
from megatron.fsdp.pool import Pool
from megatron.fsdp.precision import MixedPrecisionPolicy
from megatron.fsdp.strategy import INNER, Placements
from megatron.fsdp.uneven_dtensor import local_part, make_dtensor
from megatron.fsdp.weak import weak_method
from megatron.fsdp.weights import WeightBuffer


@dataclass(frozen=True)
class Environment:
    """What every parameter group of a model shares."""

    index: FSDPDistributedIndex
    placements: Placements
    policy: MixedPrecisionPolicy
    scaling: GradientScaling
    device: torch.device
    stream: Stream
    pool: Pool


@dataclass
class ParameterEntry:
    """One parameter of the model, however often it is registered.

    Attributes:
        name: First of its names in the wrapped model.
        compute: The model's own Parameter: what forward and backward read.
        sites: Every (module, attribute) it is registered as: more than one if it is tied.
        names: Its name at each site.
        main: What the optimizer updates: a Parameter that is a DTensor.
        piece: Which part of it this rank owns.
        fused: Gradients that kernels wrote by themselves during this backward, in the parameter's shape.
    """

    name: str
    compute: nn.Parameter
    sites: list[tuple[nn.Module, str]]
    names: list[str]
    main: nn.Parameter = field(init=False)
    piece: Piece = field(init=False)
    fused: list[torch.Tensor] = field(default_factory=list)

    def take_fused(self, grad: torch.Tensor | None) -> torch.Tensor:
        """The sum of what fused kernels wrote, and of ``grad``, what autograd has, if that is marked as real."""
        total, *others = self.fused
        self.fused = []
        for other in others:
            total.add_(other)
        if grad is not None and getattr(self.compute, "zero_out_wgrad", False):
            total.add_(grad)
        self.compute.main_grad = None  # type: ignore[attr-defined]
        self.compute.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        return total

    @property
    def sort_key(self) -> tuple[torch.dtype, bool, bool]:
        """Parameters of a unit with equal keys share a group. A scalar cannot be sharded along dimension 0."""
        return self.compute.dtype, self.compute.requires_grad, self.compute.dim() > 0


class ParameterGroup:
    """Parameters of one unit in one flat buffer.

    Args:
        entries: Parameters with equal ``sort_key``; at least one.
        environment: What all groups of the model share.

    Attributes:
        used: For each parameter, whether this rank has had a gradient for it since the last synchronization.
    """

    def __init__(self, entries: list[ParameterEntry], environment: Environment) -> None:
        dtype, self.requires_grad, shardable = entries[0].sort_key
        self.entries = entries
        self._env = environment
        self.placements = environment.placements if shardable else INNER["no_shard"]
        self.dtypes = environment.policy.resolve(dtype, entries[0].name)
        index = environment.index
        self.layout: Layout = plan_layout([tuple(e.compute.shape) for e in entries], index.shard_size)
        self.weights = WeightBuffer(
            self.layout,
            self.dtypes,
            self.placements,
            index.shard_group,
            environment.stream,
            environment.pool,
            environment.device,
        )
        self.gradients = GradientBuffer(
            self.layout,
            self.dtypes,
            self.placements,
            environment.scaling,
            index.shard_group,
            environment.stream,
            environment.pool,
        )
        self.used = [False] * len(entries)
        self._take_over()

    @property
    def device(self) -> torch.device:
        """Where the group computes."""
        return self._env.device

    def _take_over(self) -> None:
        """Move the parameters' values into the buffers and make the parameters views of them."""
        self.weights.load([e.compute.data for e in self.entries])
        for i, entry in enumerate(self.entries):
            entry.compute.data = self.weights.compute.views[i]
            entry.piece = self._piece(i)
            entry.main = nn.Parameter(self._as_dtensor(self.weights.main, i), requires_grad=self.requires_grad)
            # Frameworks mark parameters with attributes, and read them from whichever the optimizer holds.
            for name, value in vars(entry.compute).items():
                if not callable(value):
                    setattr(entry.main, name, value)

    def _piece(self, i: int) -> Piece:
        if self.placements.shards_optimizer:
            return self.layout.piece(i, self._env.index.shard_rank)
        slot = self.layout.slots[i]
        return Piece(0, slot.numel, 0, slot.shape, slot.offset)

    def _as_dtensor(self, flat: torch.Tensor, i: int) -> torch.Tensor:
        """Parameter ``i`` of a tensor that is flat like the main weights, as a DTensor whose local part is a view."""
        piece = self.entries[i].piece
        local = flat[piece.shard_offset : piece.shard_offset + piece.stop - piece.start].view(piece.shape)
        return make_dtensor(
            local, self._env.index.shard_mesh, self.layout.slots[i].shape, self.placements.shards_optimizer
        )

    def shard(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's part of a whole tensor in parameter ``i``'s shape, as a DTensor."""
        piece = self.entries[i].piece
        local = tensor.detach().reshape(-1)[piece.start : piece.stop].view(piece.shape).clone()
        return make_dtensor(local, self._env.index.shard_mesh, tuple(tensor.shape), self.placements.shards_optimizer)

    def show(self, compute: bool) -> None:
        """Register compute weights (or else main weights) as the modules' parameters."""
        for entry in self.entries:
            parameter = entry.compute if compute else entry.main
            for module, attribute in entry.sites:
                module._parameters[attribute] = parameter

    def collect_gradients(self) -> list[torch.Tensor | None]:
        """Take this micro-batch's gradients off the parameters: one per parameter, None where there is none."""
        grads: list[torch.Tensor | None] = []
        for entry in self.entries:
            grad, entry.compute.grad = entry.compute.grad, None
            grads.append(entry.take_fused(grad) if entry.fused else grad)
        return grads

    def reduce_gradients(self, now: bool) -> bool:
        """Hand this micro-batch's gradients over; see :meth:`megatron.fsdp.unit.Unit.reduce_gradients`."""
        grads = self.collect_gradients()
        self.used = [used or grad is not None for used, grad in zip(self.used, grads, strict=True)]
        if now or self.placements.shards_gradients:
            self.gradients.reduce(grads, self.device)
            return True
        self.gradients.accumulate(grads)
        return False

    def has_gradients(self) -> bool:
        """True if a gradient of this micro-batch has not been collected."""
        return any(e.compute.grad is not None or e.fused for e in self.entries)

    def let_kernels_write(self) -> None:
        """Let fused kernels write weight gradients into buffers of ours, instead of returning them to autograd.

        Transformer Engine and Megatron-Core's tensor-parallel layers ask a parameter that has ``__fsdp_param__`` for
        a buffer (``get_main_grad()``), keep it as ``main_grad`` while the kernel runs, and set
        ``grad_added_to_main_grad``. Autograd then gets a placeholder of undefined content as ``.grad``, unless
        ``zero_out_wgrad`` is set.
        """
        for i, entry in enumerate(self.entries):
            parameter = entry.compute
            parameter.__fsdp_param__ = True  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            # The parameter must not keep its group alive: the group keeps the parameter.
            parameter.get_main_grad = functools.partial(weak_method(self.main_grad), i)  # type: ignore[attr-defined]

    def main_grad(self, i: int) -> torch.Tensor:
        """A new buffer of zeros, in parameter ``i``'s shape and ``main_grads_dtype``, for a kernel to write into."""
        entry = self.entries[i]
        buffer = torch.zeros(entry.compute.shape, dtype=self.dtypes.main_grads, device=self._env.device)
        entry.fused.append(buffer)
        return buffer

    def attach_gradients(self, used: list[bool], zero_unused: bool) -> None:
        """Add what was reduced to the main weights' ``.grad``.

        Args:
            used: For each parameter, whether any rank had a gradient for it.
            zero_unused: Give the others zeros instead of nothing.
        """
        self.used = [False] * len(self.entries)
        reduced = self.gradients.take()
        if reduced is None and zero_unused:
            reduced = torch.zeros_like(self.weights.main)
        if reduced is None:
            return
        for i, entry in enumerate(self.entries):
            if not used[i] and not zero_unused:
                continue
            grad = self._as_dtensor(reduced, i)
            if entry.main.grad is None:
                entry.main.grad = grad
            else:
                local_part(entry.main.grad).add_(local_part(grad))

    def clear_gradients(self) -> None:
        """Drop gradients in every form."""
        self.gradients.clear()
        self.used = [False] * len(self.entries)
        for entry in self.entries:
            entry.compute.grad = entry.main.grad = None
            entry.fused.clear()
