"""The strategy for PyTorch Lightning, imported as ``lightning``: ``Trainer(strategy=MegatronFSDPStrategy(...))``."""

from lightning.pytorch.strategies import ModelParallelStrategy

from megatron.fsdp.integrations.lightning_strategy import ShardedStrategy


class MegatronFSDPStrategy(ShardedStrategy, ModelParallelStrategy):
    """Trains a LightningModule whose parameters, gradients and optimizer state are sharded.

    Its arguments are those of :class:`megatron.fsdp.integrations.lightning_strategy.ShardedStrategy`.
    """
