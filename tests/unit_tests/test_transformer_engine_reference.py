"""Our formats have the bits of Transformer Engine's reference quantizers, and the plug-in knows its tensors' fields.

MEGATRON_FSDP_TRANSFORMER_ENGINE names a folder that contains transformer_engine, as from
``pip download --no-deps transformer-engine-cu13 transformer-engine-torch`` and unpacking. Nothing of it is compiled.
"""

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fsdp.quantized.reference.float8 import Float8Tensor
from megatron.fsdp.quantized.reference.nvfp4 import NVFP4Tensor
from megatron.fsdp.quantized.transformer_engine import TransformerEngineStorage
from tests import te_mocks as te

ROOT = Path(__file__).resolve().parents[2]
FOLDER = os.environ.get("MEGATRON_FSDP_TRANSFORMER_ENGINE", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="MEGATRON_FSDP_TRANSFORMER_ENGINE does not name a folder")
SHAPES = [(64, 48), (16, 16), (256, 128), (33, 7)]
SCALES = [1.0, 1e-3, 1e4, 1e-30, 0.0]


def _values() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            for scale in SCALES:
                values = torch.randn(shape, generator=generator) * scale
                values[-1, -1] *= 50
                yield values.to(dtype)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Matrices with what the references make of them. They run in a process of their own, with stubs."""
    folder = tmp_path_factory.mktemp("references")
    values = list(_values())
    torch.save(values, folder / "values")
    files = [FOLDER, str(folder / "values"), str(folder / "results")]
    subprocess.run([sys.executable, "-m", "tests.te_references", *files], cwd=ROOT, check=True)
    return list(zip(values, torch.load(folder / "results"), strict=True))


def test_current_scaling(references: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> None:
    for values, expected in references:
        found = Float8Tensor.quantize(values)
        assert torch.equal(found.raw, expected["float8 codes"])
        codes = expected["float8 codes"].view(torch.float8_e4m3fn).float()
        assert torch.equal(found.dequantize(), (codes * expected["float8 scale"]).to(values.dtype))


@pytest.mark.parametrize("rows", [1, 16])
def test_nvfp4(references: list[tuple[torch.Tensor, dict[str, torch.Tensor]]], rows: int) -> None:
    tested = 0
    for values, expected in references:
        if f"nvfp4 {rows} codes" in expected:
            found = NVFP4Tensor.quantize(values, rows)
            assert torch.equal(found.planes[0], expected[f"nvfp4 {rows} codes"].flatten())
            assert torch.equal(found.planes[1], expected[f"nvfp4 {rows} scales"].flatten())
            assert torch.equal(found.state["largest"], expected[f"nvfp4 {rows} largest"])
            tested += 1
    assert tested == 2 * 3 * len(SCALES)


STORAGES = {
    "float8_tensor": te.Float8Tensor,
    "float8_blockwise_tensor": te.Float8BlockwiseQTensor,
    "mxfp8_tensor": te.MXFP8Tensor,
    "nvfp4_tensor": te.NVFP4Tensor,
}


@pytest.mark.parametrize("name", STORAGES)
def test_fields(name: str) -> None:
    """All fields are named in the plug-in, so that none is copied to main weights, and the mocks have them."""
    source = Path(FOLDER, *te.TENSORS.split("."), "storage", f"{name}_storage.py").read_text()
    fields = set(re.findall(r"\binstance\.(_\w+) = ", source))
    assert fields and fields <= TransformerEngineStorage.fields
    assert fields - {"_dtype", "_quantizer"} == set(STORAGES[name].own)


@pytest.mark.parametrize("function", [te.quantize_master_weights, te.post_all_gather_processing])
def test_functions(function: Any) -> None:
    """The mocks of functions take the same arguments."""
    tree = ast.parse(Path(FOLDER, *te.TENSORS.split("."), "utils.py").read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function.__name__)
    assert [argument.arg for argument in found.args.args] == list(inspect.signature(function).parameters)
