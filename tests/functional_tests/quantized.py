"""Runs pretrain_gpt.py with --fp8-param-gather: the reference format takes the place of Transformer Engine's."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt  # noqa: E402 - it switches Megatron to the CPU, which must come first
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.fsdp.mcore.cpu import arguments  # noqa: E402
from tests.quantized_models import quantize_layers  # noqa: E402

if __name__ == "__main__":
    # On a CPU these arguments would be switched off, since Transformer Engine needs CUDA.
    arguments.ADJUSTMENTS = tuple(row for row in arguments.ADJUSTMENTS if not row.argument.startswith("fp8"))
    build = GPTModel.__init__

    def quantized(model: GPTModel, *args: Any, **kwargs: Any) -> None:
        build(model, *args, **kwargs)
        quantize_layers(model, (32, 32))

    if "--fp8-param-gather" in sys.argv:
        GPTModel.__init__ = quantized
    pretrain_gpt.main()
