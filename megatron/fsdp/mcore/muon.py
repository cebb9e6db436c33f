"""Megatron's Muon for sharded matrices.

Main weights and momentum are sharded like Adam's. In the step, each matrix's update is sent to one rank of its
data-parallel group, which orthogonalizes it as Megatron's own class does: with the parts of a fused QKV projection
apart, and over tensor-parallel ranks according to ``--muon-tp-mode``. The result is sent back and updates the shards.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.emerging_optimizers import (
    _EMERGING_OPTIMIZERS,
    HAVE_EMERGING_OPTIMIZERS,
    TensorParallelMuon,
    _get_qkv_split_shapes,
)
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.fsdp.dtensor.placements import local_slice
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.mcore.adapter import FullyShardedDataParallel
from megatron.fsdp.mcore.limits import Settings, check
from megatron.fsdp.optim.full_matrices import FullMatrices


class ShardedMuon(TensorParallelMuon):
    """Megatron's Muon, whose step updates shards. Arguments are those of the base class."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self._matrices: FullMatrices | None = None
        self._trained: list[int] = []
        self._options: dict[nn.Parameter, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update all matrices. A collective of all ranks of the model."""
        if closure is not None:
            raise ValueError("ShardedMuon.step: expected no closure.")
        self._options = {p: group for group in self.param_groups for p in group["params"] if p.requires_grad}
        trained = [id(main) for main in self._options]
        if self._matrices is None or trained != self._trained:
            self._matrices, self._trained = FullMatrices(list(self._options), self._work), trained
        for group in self.param_groups:
            self._init_group(group, skip_non_grad_params=False)
        self._matrices.map(self._update, self._compute, self._apply)

    def _update(self, main: nn.Parameter, update: torch.Tensor) -> None:
        """Decay this rank's shard of a weight, add the gradient to the momentum, and write the update."""
        weight = local_shard(main).view(-1)
        if not weight.numel():
            return
        assert main.grad is not None, "Megatron's optimizer has the gradients of all parameters that require them"
        options, grad = self._options[main], local_shard(main.grad).view(-1)
        momentum = local_shard(self.state[main]["momentum_buffer"]).view(-1)
        self._apply_weight_decay_inplace(weight, grad, options["lr"], options["weight_decay"])
        momentum.lerp_(grad, 1 - options["momentum"])
        update.copy_(grad.lerp(momentum, options["momentum"]) if self.nesterov else momentum)

    def _compute(self, main: nn.Parameter, update: torch.Tensor) -> torch.Tensor:
        from emerging_optimizers.utils import fp32_matmul_precision

        options = {name: value for name, value in self._options[main].items() if name != "params"}
        with fp32_matmul_precision(self.fp32_matmul_prec):
            result: torch.Tensor = self.orthogonalize(main, update, **options)
        return result

    def _apply(self, main: nn.Parameter, update: torch.Tensor) -> None:
        local_shard(main).view(-1).add_(update.to(main.device), alpha=-self._options[main]["lr"])

    def _work(self, main: nn.Parameter) -> float:
        """Multiplications of a Newton-Schulz iteration, up to a factor that all matrices have in common."""
        blockwise = self.tp_mode == "blockwise" or getattr(main, "partition_dim", -1) in (None, -1)
        rows, columns = local_slice(main._spec).shape if blockwise else main.shape  # type: ignore[attr-defined]
        sizes = [1]
        if self.split_qkv and self.is_qkv_fn(main):
            sizes = main.qkv_split_shapes  # type: ignore[attr-defined]
        parts = [size / sum(sizes) for size in sizes]
        return sum(rows * part * columns * min(rows * part, columns) for part in parts)


class MatricesAndRest(ChainedOptimizer):
    """The optimizer of matrices and that of all other parameters, in this order."""

    def step_with_ready_grads(self) -> bool:
        """Step both. Only the second makes compute weights follow, because it starts to unshard the next forward's."""
        matrices, rest = self.chained_optimizers
        if not matrices.is_stub_optimizer:
            matrices.optimizer.step()
        return bool(rest.step_with_ready_grads())


def get_emerging_optimizer(
    original: Callable[..., Any],
    config: Any,
    model_chunks: list[Any],
    config_overrides: dict[Any, Any] | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> Any:
    """Build the optimizer as Megatron builds it for Adam with FSDP, and let Muon update the matrices."""
    if not isinstance(model_chunks[0], FullyShardedDataParallel):
        return original(config, model_chunks, config_overrides, pg_collection)
    check(Settings(config))
    if not HAVE_EMERGING_OPTIMIZERS:
        raise ImportError(f"optimizer {config.optimizer}: expected the package emerging-optimizers, 0.2 or later.")
    entry = _EMERGING_OPTIMIZERS["muon"]
    _mark(model_chunks)
    # Parameters that these overrides do not match are matrices; Adam gets separate groups of them.
    overrides = {**(config_overrides or {}), **entry.default_param_overrides}
    of_adam = copy.copy(config)
    of_adam.optimizer = "adam"
    rest = get_megatron_optimizer(
        of_adam, model_chunks, overrides, use_gloo_process_groups=False, pg_collection=pg_collection
    )
    matrices = copy.copy(rest)
    rest.config = matrices.config = config
    if not rest.is_stub_optimizer:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "expt_tp"])
        settings = entry.config_to_kwargs(config, model_chunks, groups)
        matrices.optimizer = _take_matrices(rest.optimizer, settings)
        matrices.init_state_fn = entry.init_state_fn
    return MatricesAndRest([matrices, rest])


def _take_matrices(adam: torch.optim.Optimizer, settings: dict[str, Any]) -> ShardedMuon:
    """Move the groups of matrices from Adam to a new optimizer."""
    taken = [group for group in adam.param_groups if "optimizer" not in group]
    adam.param_groups = [group for group in adam.param_groups if "optimizer" in group]
    groups = [{name: value for name, value in group.items() if name not in adam.defaults} for group in taken]
    # Without matrices, as on a pipeline stage that has the embedding only, both optimizers exist all the same:
    # Megatron sums statistics over all ranks once for each.
    muon = ShardedMuon(groups or [{"params": []}], **settings)
    if not groups:
        muon.param_groups.clear()
    return muon


def _mark(model_chunks: list[FullyShardedDataParallel]) -> None:
    """Set the attributes by which Megatron's Muon recognizes experts and fused QKV projections."""
    for chunk in model_chunks:
        sizes = _get_qkv_split_shapes(chunk.config)
        for param in chunk.module.engine.params():
            main: Any = param.main
            if "experts" in param.name and "shared" not in param.name:
                main.expert_tp = True
            if "linear_qkv.weight" in param.name and len(param.local_shape) == 2:
                if param.local_shape[0] % sum(sizes) == 0:
                    main.is_qkv, main.qkv_split_shapes = True, sizes
