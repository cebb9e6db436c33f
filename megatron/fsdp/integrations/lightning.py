"""The strategy for PyTorch Lightning, imported as ``lightning``: ``Trainer(strategy=MegatronFSDPStrategy(...))``."""

from lightning.pytorch.strategies import ModelParallelStrategy

from megatron.fsdp.integrations.lightning_strategy import ShardedStrategy


class MegatronFSDPStrategy(ShardedStrategy, ModelParallelStrategy):
    """See :class:`megatron.fsdp.integrations.lightning_strategy.ShardedStrategy`, which has all of its arguments."""
