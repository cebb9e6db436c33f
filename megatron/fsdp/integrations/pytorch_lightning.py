"""The strategy for PyTorch Lightning, imported as ``pytorch_lightning``: the same as in ``integrations.lightning``."""

from pytorch_lightning.strategies import ModelParallelStrategy

from megatron.fsdp.integrations.lightning_strategy import ShardedStrategy


class MegatronFSDPStrategy(ShardedStrategy, ModelParallelStrategy):  # type: ignore[misc]
    """Trains a LightningModule whose parameters, gradients and optimizer state are sharded.

    Its arguments are those of :class:`megatron.fsdp.integrations.lightning_strategy.ShardedStrategy`.
    """
