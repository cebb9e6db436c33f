"""Runs Transformer Engine's reference quantizers, which are plain torch, without its compiled parts.

python -m tests.te_references FOLDER VALUES RESULTS

FOLDER contains transformer_engine. VALUES is a file of a list of matrices; RESULTS will have a dictionary for each.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

RECIPES = "transformer_engine.pytorch.custom_recipes"


def _stub(path: str, **things: Any) -> ModuleType:
    module = sys.modules[path] = ModuleType(path)
    vars(module).update(things)
    return module


def _stub_all(folder: Path) -> None:
    """Make only the modules importable that the references need, and not their packages' ``__init__``."""
    for package in ("", ".common", ".pytorch", ".pytorch.tensor", ".pytorch.custom_recipes"):
        path = f"transformer_engine{package}"
        _stub(path).__path__ = [str(folder.joinpath(*path.split(".")))]
    _stub("transformer_engine_torch", DType=SimpleNamespace)
    _stub("transformer_engine.common.recipe", Recipe=object)
    _stub("transformer_engine.pytorch.constants", dist_group_type=object)
    _stub("transformer_engine.pytorch.tensor.utils", is_custom=lambda tensor: False)


def quantize(values: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix in the formats that have references."""
    current = importlib.import_module(f"{RECIPES}.reference_current_scaling")
    nvfp4 = importlib.import_module(f"{RECIPES}.reference_nvfp4")
    dtype = importlib.import_module(f"{RECIPES}.reference_utils").Fp4Formats.E2M1
    found = current.CurrentScalingQuantizerRef(torch.float8_e4m3fn).quantize(values)
    result = {"float8 codes": found.data.view(torch.uint8), "float8 scale": found.scale}
    if not values.shape[0] % 16 and not values.shape[1] % 16:
        for rows in (1, 16):
            found = nvfp4.NVFP4QuantizerRef(dtype, quant_tile_shape=(rows, 16)).quantize(values)
            result[f"nvfp4 {rows} codes"] = found.data.view(torch.uint8)
            result[f"nvfp4 {rows} scales"] = found.scale.view(torch.uint8)
            result[f"nvfp4 {rows} largest"] = found.global_amax_row
    return result


if __name__ == "__main__":
    _stub_all(Path(sys.argv[1]))
    torch.save([quantize(values) for values in torch.load(sys.argv[2])], sys.argv[3])
