"""megatron.fsdp.fsdp2 has every name and argument of torch's interface, and docs/fsdp2.md describes them."""

import inspect
import re

import torch.distributed.fsdp as torch_fsdp

from megatron.fsdp import fsdp2
from tests.ranks import ROOT

# What some supported versions of torch lack.
LATER_ARGUMENTS, LATER_CLASSES = {"dp_mesh_dims"}, {"DataParallelMeshDims"}


def _public(owner: type) -> set[str]:
    return {name for name, value in vars(owner).items() if callable(value) and not name.startswith("_")}


def test_everything_of_torchs_interface_is_there_and_documented() -> None:
    page = (ROOT / "docs" / "fsdp2.md").read_text()
    cells = re.findall(r"^\| (`\w+`[^|]*)\|", page, flags=re.MULTILINE)
    rows = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    names = _public(torch_fsdp.FSDPModule)
    assert names <= _public(fsdp2.FSDPModule)
    parameters = inspect.signature(torch_fsdp.fully_shard).parameters
    ours = inspect.signature(fsdp2.fully_shard).parameters
    assert set(parameters) | {"shard_granularity"} | LATER_ARGUMENTS == set(ours)
    assert names | set(ours) <= rows, f"docs/fsdp2.md lacks {sorted((names | set(ours)) - rows)}"
    for name in names - {"set_requires_gradient_sync"}:
        theirs, mine = getattr(torch_fsdp.FSDPModule, name), getattr(fsdp2.FSDPModule, name)
        wanted = list(inspect.signature(theirs).parameters)
        got = inspect.signature(mine).parameters
        assert wanted == list(got) or "kwargs" in got, name
    for name in fsdp2.__all__:
        assert name in LATER_CLASSES or hasattr(torch_fsdp, name)
        assert name in page
