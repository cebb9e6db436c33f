"""The strategy for PyTorch Lightning, imported as ``pytorch_lightning``: the same as in ``integrations.lightning``."""

from pytorch_lightning.strategies import ModelParallelStrategy

from megatron.fsdp.integrations.lightning_strategy import ShardedStrategy


class MegatronFSDPStrategy(ShardedStrategy, ModelParallelStrategy):  # type: ignore[misc]
    """See :class:`megatron.fsdp.integrations.lightning_strategy.ShardedStrategy`, which has all of its arguments."""
