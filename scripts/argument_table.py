"""Writes what follows from the settings: signature of fully_shard_model, and docs/arguments.md.

    python scripts/argument_table.py --write
    python scripts/argument_table.py          # prints docs/arguments.md

A setting is a field of ``FSDPConfig``. ``--write`` adds new fields to the signature of ``fully_shard_model``, which
``fully_shard`` shares, and copies the fields' descriptions into the docstring. The effects on memory and speed are in
the table here.
"""

import dataclasses
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.fsdp import FSDPConfig, MegatronFSDP, fully_shard_model  # noqa: E402

SAME = "-"
# What follows the last argument in the docstring of fully_shard_model.
AFTER_SETTINGS = "\n\n    Returns:\n        The sharded model. Its"


class Effect(NamedTuple):
    """What an argument does to memory and to speed."""

    memory: str
    speed: str


# By argument; those that are missing here have no effect on either.
EFFECTS = {
    "device_mesh": Effect("divides by the ranks of the axes that shard", "collectives run inside the axes"),
    "dp_shard_dim": Effect("more ranks: smaller shards", "more ranks: longer collectives"),
    "dp_outer_dim": Effect(
        "shards are replicated, unless the outer strategy is optim", "all-gathers stay inside the inner axis"
    ),
    "tp_dim": Effect("tensor-parallel shards are divided again", SAME),
    "hybrid_fsdp_group": Effect(SAME, "saves making the group"),
    "hybrid_fsdp_expt_group": Effect(SAME, "saves making the group"),
    "expt_device_mesh": Effect("experts are divided by the ranks of their own axes", SAME),
    "fsdp_group_ag": Effect("NCCL: buffers of one more communicator", "all-gathers overlap with reductions"),
    "expt_fsdp_group_ag": Effect("NCCL: buffers of one more communicator", "all-gathers overlap with reductions"),
    "fsdp_unit_modules": Effect(
        "peak: two of the largest unit; None: the whole model, at all times", "small units: many collectives"
    ),
    "zero_dp_strategy": Effect("see memory.md", "3 unshards twice per step, 1 and 2 once, 0 never"),
    "outer_dp_sharding_strategy": Effect(
        "optim: main weights and optimizer state divided again", "one more all-gather per step"
    ),
    "init_model_with_meta_device": Effect("building: one whole unit at a time", "no copy from the host"),
    "mixed_precision_policy": Effect("see memory.md", "narrow grad_comm_dtype: less to send"),
    "overlap_grad_reduce": Effect("False: one unit of gradients less", "False: backward waits for every reduction"),
    "overlap_param_gather": Effect("False: one unsharded unit less", "False: compute waits for every all-gather"),
    "sync_model_each_microbatch": Effect(
        "False: ZeRO-0 and 1 keep whole gradients between micro-batches",
        "False: less communication with gradient accumulation",
    ),
    "report_nan_in_param_grad": Effect(SAME, "True: the host waits for every gradient"),
    "average_in_collective": Effect(SAME, "saves a pass over the shard; gloo cannot"),
    "calculate_per_token_loss": Effect(SAME, "saves a pass over the shard"),
    "keep_fp8_transpose_cache": Effect("whole 8-bit weights on every rank", "backward makes no transposed copies"),
    "nccl_ub": Effect("as fsdp_double_buffer", "fewer SMs and copies for communication"),
    "fsdp_double_buffer": Effect("the peak's buffers are never freed", "no allocation after the first step"),
    "fsdp_db_use_persist_buf_on_alloc_fail": Effect("one more buffer per nested unit", SAME),
    "disable_symmetric_registration": Effect(SAME, "with nccl_ub: no symmetric kernels"),
    "fsdp_manual_registration": Effect(SAME, "with nccl_ub: no comparison between ranks after each step"),
    "enable_fine_grained_param_gather": Effect("peak: two modules instead of two units", "more, smaller collectives"),
    "cuda_graph_mode": Effect("as fsdp_double_buffer", "no launch overhead when a graph is replayed"),
    "offload_optimizer": Effect("main weights and optimizer state on the host", "copies over PCIe; the host steps"),
    "offload_fraction": Effect("below 1: the other units' stay on the device", "below 1: the host updates less"),
    "exchange_gradients": Effect(
        "bf16: the send buffer is half as large", "bf16 reduced in fp32: half the bytes; no rings between nodes"
    ),
    "zero_unused_gradients": Effect("gradients of zeros for unused parameters", "True: ranks compare no flags"),
    "fused_weight_gradients": Effect("less: autograd makes no weight gradients", "no cast or copy of weight gradients"),
    "max_unsharded_units": Effect("peak: as many of the largest unit", "more: prefetches further ahead"),
    "max_reducing_units": Effect("as many units of gradients more", "more: backward waits less for reductions"),
    "shard_granularity": Effect("tensor: padding up to the largest matrix per rank", SAME),
}


def described(documented: object, section: str = "Args:") -> dict[str, str]:
    """Descriptions by name, each on one line, from a section of a docstring."""
    documentation = inspect.getdoc(documented) or ""
    block = documentation.partition(section)[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", block, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in found}


def settings() -> dict[str, str]:
    """The settings, and how each is declared in a signature."""
    fields = [field for field in dataclasses.fields(FSDPConfig) if field.init]
    return {
        field.name: f"    {field.name}: {inspect.formatannotation(field.type)} = {field.default!r},\n".replace("'", '"')
        for field in fields
    }


def with_settings(source: str) -> str:
    """The text of fully_shard.py, with every setting in the signature and described as in ``FSDPConfig``."""
    descriptions = described(FSDPConfig, "Attributes:")
    for name, declaration in settings().items():
        if not re.search(rf"^    {name}: ", source, flags=re.MULTILINE):
            source = source.replace("\n) -> MegatronFSDP", f"\n{declaration}) -> MegatronFSDP")
            source = source.replace(AFTER_SETTINGS, f"\n        {name}: .{AFTER_SETTINGS}")
        entry = textwrap.fill(
            f"{name}: {descriptions[name]}",
            width=120,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_on_hyphens=False,
        )
        source = re.sub(
            rf"^ {{8}}{name}: .*(?:\n {{12}}.*)*", entry.replace("\\", r"\\"), source, count=1, flags=re.MULTILINE
        )
    return source


def as_markdown() -> str:
    """The page."""
    lines = [
        "# Arguments of `fully_shard_model`",
        "",
        "`fully_shard` takes the same ones after `module` and `optimizer`. Printed by `scripts/argument_table.py`.",
        "",
        "| argument | type | default | meaning | memory | speed |",
        "|---|---|---|---|---|---|",
    ]
    texts = {name: text.replace("``", "`") for name, text in described(fully_shard_model).items()}
    for name, parameter in inspect.signature(fully_shard_model).parameters.items():
        kind = _type(parameter.annotation)
        default = "" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        memory, speed = EFFECTS.get(name, Effect(SAME, SAME))
        lines.append(f"| `{name}` | {kind} | {default} | {texts[name]} | {memory} | {speed} |")
    lines += ["", "# Methods of the sharded model", "", "| method | what it does |", "|---|---|"]
    classes = MegatronFSDP.__mro__[: MegatronFSDP.__mro__.index(nn.Module)]
    for name, method in {name: method for kind in classes[::-1] for name, method in vars(kind).items()}.items():
        if not name.startswith("_") and (callable(method) or isinstance(method, property)):
            text = (inspect.getdoc(method) or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")
            text = re.sub(r":meth:`~?([^`]*)`", r"`\1`", text)
            lines.append(f"| `{name}` | {text} |")
    return "\n".join(lines) + "\n"


def _type(annotation: object) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", text)  # the modules that classes are in
    text = re.sub(r"\btorch\.", "", text)
    return f"`{text}`".replace("|", "\\|")


def write() -> None:
    """Bring fully_shard.py and docs/arguments.md up to date."""
    path = ROOT / "megatron" / "fsdp" / "api" / "fully_shard.py"
    if (text := with_settings(path.read_text())) != path.read_text():
        path.write_text(text)
        # The page is printed by a process that imports the new signatures.
        subprocess.run([sys.executable, __file__, "--write"], check=True)
        return
    (ROOT / "docs" / "arguments.md").write_text(as_markdown())


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
    else:
        print(as_markdown(), end="")
