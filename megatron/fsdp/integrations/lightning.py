"""The strategy for PyTorch Lightning, imported as ``lightning``: ``Trainer(strategy=MegatronFSDPStrategy(...))``."""

from lightning.pytorch.strategies import ModelParallelStrategy

from megatron.fsdp.integrations.lightning_strategy import ShardedStrategy


class MegatronFSDPStrategy(ShardedStrategy, ModelParallelStrategy):  # type: ignore[misc]
    __doc__ = ShardedStrategy.__doc__
