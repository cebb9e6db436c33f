"""What a user can say about a conversion, all of it optional."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReadOptions:
    """What is known of a checkpoint besides what is in it. What contradicts the checkpoint is an error.

    Attributes:
        swiglu: The model has SwiGLU layers.
        swiglu_modules: Beginnings of the names under which alone there are SwiGLU layers; empty: anywhere.
        group_map: A JSON file with the optimizer group of each parameter, dumped by a training script.
        transformer_impl: How layers name their norms: ``local`` or ``transformer_engine``. None: as the checkpoint
            says.
        moe_grouped_gemm: Whether a layer's experts are one grouped module. None: as the checkpoint says.
        optimizer: Read optimizer state and main weights too, not the model alone.
        verify: Compare files with the checkpoint's checksums.
    """

    swiglu: bool = False
    swiglu_modules: tuple[str, ...] = ()
    group_map: Path | None = None
    transformer_impl: str | None = None
    moe_grouped_gemm: bool | None = None
    optimizer: bool = True
    verify: bool = True

    def __post_init__(self) -> None:
        if self.transformer_impl not in (None, "local", "transformer_engine"):
            raise ValueError(
                f"ReadOptions: expected transformer_impl local or transformer_engine; got {self.transformer_impl!r}."
            )


@dataclass(frozen=True)
class WriteOptions:
    """How a checkpoint is written.

    Attributes:
        weight_prefix: Of model keys, for ``fsdp_dtensor``.
        optimizer_prefix: Of the keys of optimizer state, for ``fsdp_dtensor``. None: by the model's precision.
        rename_mtp_keys: Name multi-token prediction's layer as it is named in the model, for ``fsdp_dtensor``.
        like: A ``torch_dist`` checkpoint whose layout to write, for ``torch_dist``. None: as the checkpoint was that
            this one was converted from, else as Megatron-Core writes.
        process: Index of this process among those that share the work.
        processes: Number of processes that share the work.
        block: Bytes that are read and written at once.
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
