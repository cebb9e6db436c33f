"""Runs pretrain_gpt.py with quantized weights: the reference format takes the place of Transformer Engine's tensors.

With Megatron's DDP, weights are plain tensors that every forward rounds in the same way.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt  # noqa: E402 - it switches Megatron to the CPU, which must come first
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.fsdp.mcore.cpu import arguments  # noqa: E402
from tests.quantized_models import quantize_layers, round_layers  # noqa: E402

if __name__ == "__main__":
    # On a CPU these arguments would be switched off, since Transformer Engine needs CUDA.
    arguments.ADJUSTMENTS = tuple(row for row in arguments.ADJUSTMENTS if not row.argument.startswith("fp8"))
    build, change = GPTModel.__init__, quantize_layers if "--use-megatron-fsdp" in sys.argv else round_layers

    def init(model: GPTModel, *args: Any, **kwargs: Any) -> None:
        build(model, *args, **kwargs)
        change(model, "5x7")

    GPTModel.__init__ = init
    pretrain_gpt.main()
