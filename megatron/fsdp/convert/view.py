"""Shows a checkpoint as its conversion to ``fsdp_dtensor`` would be, without writing that."""

import io
from typing import Any

from megatron.fsdp.checkpoint import safe_pickle
from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.checkpoint.writer import RawObject
from megatron.fsdp.convert.options import ReadOptions
from megatron.fsdp.convert.rewrites import FSDP_DTENSOR
from megatron.fsdp.convert.run import lay_out, read_opened


class ConvertedView:
    """A checkpoint with the keys, tensors and objects of its conversion to ``fsdp_dtensor``.

    Tensors are read from the checkpoint when they are needed, and only the rows that are needed.

    Args:
        opened: A ``torch_dist`` checkpoint.
        options: Facts that the checkpoint may not record.

    Attributes:
        metadata: Keys, and the shapes and dtypes of tensors.
        tensors: By key.

    Raises:
        DamagedCheckpoint: A file is damaged.
        ValueError: The checkpoint lacks information, or contradicts itself or the options.
        NotImplementedError: The checkpoint is of a kind that cannot be converted.
    """

    def __init__(self, opened: CheckpointReader, options: ReadOptions) -> None:
        draft = lay_out(read_opened(opened, options), FSDP_DTENSOR)
        self.tensors, self._objects, self.metadata = draft.tensors, draft.objects, draft.metadata()

    def read_object(self, key: str) -> Any:
        """Return what is not a tensor."""
        value = self._objects[key]
        return safe_pickle.load_torch(io.BytesIO(value), key) if isinstance(value, RawObject) else value
