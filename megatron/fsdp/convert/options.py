"""The options of a conversion."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ReadOptions:
    """Facts about a checkpoint that it may not record. Options that contradict the checkpoint raise an error.

    Attributes:
        swiglu: Require SwiGLU layers.
        swiglu_modules: Prefixes of the names of all modules with SwiGLU layers; empty: any.
        group_map: A JSON file with the optimizer group of each parameter, dumped by a training script.
        transformer_impl: Whose layers the model has, which decides how norms are named: ``local`` or
            ``transformer_engine``. None: read it from the checkpoint.
        moe_grouped_gemm: Whether the experts of a layer are one grouped module. None: read it from the checkpoint.
        optimizer: Read optimizer state and main weights, not only the model.
        verify: Compare files with the checkpoint's checksums.
        args: Training arguments to use if the checkpoint has none.
        keeps_rest: Also read what only a conversion back needs.
    """

    swiglu: bool = False
    swiglu_modules: tuple[str, ...] = ()
    group_map: Path | None = None
    transformer_impl: str | None = None
    moe_grouped_gemm: bool | None = None
    optimizer: bool = True
    verify: bool = True
    args: argparse.Namespace = field(default_factory=argparse.Namespace)
    keeps_rest: bool = True

    def __post_init__(self) -> None:
        if self.transformer_impl not in (None, "local", "transformer_engine"):
            raise ValueError(
                f"ReadOptions: expected transformer_impl local or transformer_engine; got {self.transformer_impl!r}."
            )


@dataclass(frozen=True)
class WriteOptions:
    """How to write a checkpoint.

    Attributes:
        weight_prefix: Prefix of model keys, for ``fsdp_dtensor``.
        optimizer_prefix: Prefix of optimizer state keys, for ``fsdp_dtensor``. None: by the model's precision.
        rename_mtp_keys: Give the layer of multi-token prediction its name in the model, for ``fsdp_dtensor``.
        like: A ``torch_dist`` checkpoint whose layout to copy, for ``torch_dist``. None: the layout before an earlier
            conversion, else that of Megatron-Core.
        process: The rank of this process.
        processes: The number of processes among which the work is divided.
        block: The number of bytes to read and write at once.
    """

    weight_prefix: str = "model.module"
    optimizer_prefix: str | None = None
    rename_mtp_keys: bool = False
    like: Path | None = None
    process: int = 0
    processes: int = 1
    block: int = 64 << 20

    def __post_init__(self) -> None:
        if not 0 <= self.process < self.processes or self.block < 1:
            raise ValueError(
                "WriteOptions: expected 0 <= process < processes and block >= 1; got "
                f"{self.process}, {self.processes} and {self.block}."
            )
