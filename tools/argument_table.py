"""Prints docs/arguments.md: every argument of `fully_shard_model`, its type, default, and effect on memory and speed.

    python tools/argument_table.py > docs/arguments.md

Names, types and defaults come from the signature, meanings from its docstring, effects from the table here.
"""

import inspect
import re
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.fsdp import MegatronFSDP, fully_shard_model  # noqa: E402

SAME = "-"


class Effect(NamedTuple):
    """What an argument does to memory and to speed."""

    memory: str
    speed: str


EFFECTS = {
    "module": Effect(SAME, SAME),
    "device_mesh": Effect("divides by the ranks of the axes that shard", "collectives run inside the axes"),
    "dp_shard_dim": Effect("more ranks: smaller shards", "more ranks: longer collectives"),
    "dp_outer_dim": Effect(
        "shards are repeated, unless the outer strategy is optim", "gathers stay inside the inner axis"
    ),
    "tp_dim": Effect("tensor-parallel parts are divided again", SAME),
    "hybrid_fsdp_group": Effect(SAME, "saves making the group"),
    "hybrid_fsdp_expt_group": Effect(SAME, "saves making the group"),
    "expt_device_mesh": Effect("experts are divided by the ranks of their own axes", SAME),
    "fsdp_group_ag": Effect("NCCL: buffers of one more communicator", "gathers run beside reductions"),
    "expt_fsdp_group_ag": Effect("NCCL: buffers of one more communicator", "gathers run beside reductions"),
    "fsdp_unit_modules": Effect(
        "peak: two of the largest unit; None: the whole model, also at rest", "small units: many collectives"
    ),
    "zero_dp_strategy": Effect("see memory.md", "3 gathers twice per step, 1 and 2 once, 0 never"),
    "outer_dp_sharding_strategy": Effect(
        "optim: main weights and optimizer state divided again", "one gather more per step"
    ),
    "device": Effect(SAME, SAME),
    "init_model_with_meta_device": Effect("building: one whole unit at a time", "no copy from the host"),
    "mixed_precision_policy": Effect("see memory.md", "narrow grad_comm_dtype: less to send"),
    "overlap_grad_reduce": Effect("False: one unit of gradients less", "False: backward waits for every reduction"),
    "overlap_param_gather": Effect("False: one gathered unit less", "False: compute waits for every gather"),
    "sync_model_each_microbatch": Effect(
        "False: ZeRO-0 and 1 keep whole gradients between micro-batches",
        "False: less communication with gradient accumulation",
    ),
    "preproc_state_dict_for_dcp_ckpt": Effect(SAME, SAME),
    "report_nan_in_param_grad": Effect(SAME, "True: the host waits for every gradient"),
    "average_in_collective": Effect(SAME, "saves a pass over the shard; gloo cannot"),
    "disable_bucketing": Effect(SAME, SAME),
    "calculate_per_token_loss": Effect(SAME, "saves a pass over the shard"),
    "keep_fp8_transpose_cache": Effect("not supported", "not supported"),
    "nccl_ub": Effect("as fsdp_double_buffer", "fewer SMs and copies for communication"),
    "fsdp_double_buffer": Effect("the peak's buffers are held at rest", "no allocation after the first step"),
    "fsdp_db_use_persist_buf_on_alloc_fail": Effect("one buffer more per nested unit", SAME),
    "disable_symmetric_registration": Effect(SAME, "with nccl_ub: no symmetric kernels"),
    "enable_fine_grained_param_gather": Effect("peak: two modules instead of two units", "more, smaller collectives"),
    "use_decoupled_grad": Effect(SAME, SAME),
    "cuda_graph_mode": Effect("as fsdp_double_buffer", "no launch overhead when a graph is replayed"),
    "maxpool_double_buffer": Effect(SAME, SAME),
    "offload_optimizer": Effect("main weights and optimizer state on the host", "copies over PCIe; the host steps"),
    "exchange_gradients": Effect(
        "less: what is sent is half of an fp32 reduction", "half the bytes for bf16 and fp32; no rings between nodes"
    ),
    "shard_granularity": Effect("tensor: padding up to the largest matrix per rank", SAME),
    "preserve_fp32_weights": Effect("as the policy", "as the policy"),
    "grad_reduce_in_fp32": Effect("as the policy", "as the policy"),
    "keep_fp8_transpose_cache_when_using_custom_fsdp": Effect("not supported", "not supported"),
}


def meanings() -> dict[str, str]:
    """What the docstring says of each argument, on one line."""
    documentation = inspect.getdoc(fully_shard_model) or ""
    block = documentation[documentation.index("Args:") : documentation.index("Returns:")]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", block, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).replace("``", "`") for name, text in found}


def as_markdown() -> str:
    """The page."""
    lines = [
        "# Arguments of `fully_shard_model`",
        "",
        "`fully_shard` takes the same ones after `module` and `optimizer`. Printed by `tools/argument_table.py`.",
        "",
        "| argument | type | default | meaning | memory | speed |",
        "|---|---|---|---|---|---|",
    ]
    texts = meanings()
    for name, parameter in inspect.signature(fully_shard_model).parameters.items():
        kind = _type(parameter.annotation)
        default = "" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        lines.append(
            f"| `{name}` | {kind} | {default} | {texts[name]} | {EFFECTS[name].memory} | {EFFECTS[name].speed} |"
        )
    lines += ["", "# Methods of the sharded model", "", "| method | what it does |", "|---|---|"]
    for name, method in vars(MegatronFSDP).items():
        if not name.startswith("_") and (callable(method) or isinstance(method, property)):
            text = (inspect.getdoc(method) or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")
            lines.append(f"| `{name}` | {re.sub(r':meth:`~?([^`]*)`', r'`\1`', text)} |")
    return "\n".join(lines) + "\n"


def _type(annotation: object) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", text)  # the modules that classes are in
    text = re.sub(r"\btorch\.", "", text)
    return f"`{text}`".replace("|", "\\|")


if __name__ == "__main__":
    print(as_markdown(), end="")
