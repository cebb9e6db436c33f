"""Writes docs/flags.md: what this FSDP does with each flag of Megatron that touches data parallelism.

python scripts/flag_table.py --write
python scripts/flag_table.py          # prints the page
"""

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from pathlib import Path

from megatron.fsdp.mcore import cpu

cpu.enable()

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.fsdp.mcore.limits import ADJUSTMENTS, IGNORED, LIMITS  # noqa: E402
from megatron.training import arguments  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "flags.md"
# Groups of Megatron's parser that belong to the list as a whole.
GROUPS = ("distributed init", "checkpointing", "mixed precision")
# Flags of other groups that decide how a model is divided, or when its weights and gradients are used.
OTHERS = """
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    expert_tensor_parallel_size sequence_parallel recompute_granularity recompute_modules calculate_per_token_loss
    init_model_with_meta_device check_for_nan_in_loss_and_grad fp8 fp8_recipe fp8_param_gather fp4 log_params_norm
    overlap_moe_expert_parallel_comm delay_wgrad_compute cuda_graph_impl gradient_accumulation_fusion
    untie_embeddings_and_output_weights num_experts mtp_num_layers dump_param_to_param_group_map
""".split()
# Where runs are described by command lines.
COMMANDS = (
    "tests/functional_tests/*.py",
    "tests/unit_tests/mcore/*.py",
    "tests/unit_tests/simulated/test_megatron.py",
    "scripts/parity*.py",
)
# Where they are described by the fields of configs, as keyword arguments or keys of dicts.
FIELDS = ("mcore", "simulated")
# Files that name flags and do not train with this FSDP.
NO_RUNS = ("test_limits.py", "test_flags.py", "test_doctor.py", "test_convert.py", "test_estimate.py")
SHOWN = 2

INTRODUCTION = """# Flags

Every flag of Megatron-Core's command line that touches data parallelism: its groups {groups},
the fields of `DistributedDataParallelConfig` and `OptimizerConfig`, what `validate_args()` reads for FSDP, and a few
others. Printed by `scripts/flag_table.py` from Megatron's parser, the tables of [limits.md](limits.md), and the tests.

*Refused* raises an error, *adjusted* is set to another value and logged, *no effect* is logged; limits.md says when and
why, and `test_limits.py` tests each. *Supported* flags have a test or a tool that trains with the flag, or with its
field of a config; at most {shown} are named. *Accepted* flags go to Megatron-Core unchanged, and no test here has them.

| flag | status | runs |
|---|---|---|
"""


def parser() -> argparse.ArgumentParser:
    """Megatron's parser."""
    made: argparse.ArgumentParser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return made


def read_for_fsdp() -> set[str]:
    """The arguments that Megatron's ``validate_args`` reads where it has found FSDP on."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(arguments.validate_args))))
    branches = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "use_megatron_fsdp" in ast.unparse(n.test)]
    return {
        node.attr
        for branch in branches
        for node in ast.walk(branch)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args"
    }


def flags() -> dict[str, list[str]]:
    """The flags on the page, by the attribute of the parsed arguments that they set."""
    fields = {
        field.name for kind in (DistributedDataParallelConfig, OptimizerConfig) for field in dataclasses.fields(kind)
    }
    wanted = fields | read_for_fsdp() | set(OTHERS) | statuses().keys()
    wanted |= {f"ddp_{name}" for name in wanted}
    found: dict[str, list[str]] = {}
    for group in parser()._action_groups:
        for action in group._group_actions:
            if action.option_strings and (group.title in GROUPS or action.dest in wanted):
                found.setdefault(action.dest, []).extend(action.option_strings)
    return found


def statuses() -> dict[str, list[str]]:
    """What the tables of limits.py do with a setting, and with which values."""
    found: dict[str, list[str]] = {}
    for table, status in ((LIMITS, "refused"), (ADJUSTMENTS, "adjusted"), (IGNORED, "no effect")):
        for row in table:
            name, _, values = row.setting.partition(" ")
            text = f"{status}: {values}" if values else status
            found.setdefault(name, []).append(f"{text} (`{row.value}`)" if row in ADJUSTMENTS else text)
    return found


def runs() -> dict[str, list[str]]:
    """Where code names flags, and fields of configs in the form ``"name="``."""
    found: dict[str, dict[str, None]] = {}
    for path in (path for pattern in COMMANDS for path in sorted(ROOT.glob(pattern)) if path.name not in NO_RUNS):
        function = ""
        for line in path.read_text().splitlines():
            if line and not line[0].isspace():
                match = re.match(r"def (\w+)", line)
                function = f"::{match[1]}" if match else ""
            words = re.findall(r"--[a-z][\w-]+", line)
            if path.parent.name in FIELDS:
                words += [f"{name}=" for pair in re.findall(r'\b(\w+)=|"(\w+)":', line) for name in pair if name]
            for word in words:
                found.setdefault(word, {})[f"`{path.relative_to(ROOT)}{function}`"] = None
    return {word: list(places) for word, places in found.items()}


def as_markdown() -> str:
    """The page."""
    known, places = statuses(), runs()
    lines = [INTRODUCTION.format(groups=", ".join(GROUPS), shown=SHOWN).rstrip()]
    for dest, options in sorted(flags().items(), key=lambda item: item[1][0]):
        field = dest.removeprefix("ddp_")
        seen = [place for name in (*dict.fromkeys(options), f"{field}=") for place in places.get(name, [])]
        row = known.get(dest) or known.get(field)
        shown = ", ".join(seen[:SHOWN]) + (" and others" if len(seen) > SHOWN else "")
        shown = shown or ("`tests/unit_tests/mcore/test_limits.py`" if row else "no run")
        names = ", ".join(f"`{option}`" for option in dict.fromkeys(options))
        lines.append(f"| {names} | {'; '.join(row or ['supported' if seen else 'accepted'])} | {shown} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(as_markdown())
    else:
        print(as_markdown(), end="")
