"""Prints every name of PyTorch and Megatron-Core that is replaced, in Markdown."""

from megatron.fsdp.mcore import cpu

cpu.enable()

from megatron.fsdp.helpers.patches import TABLES, Patch, tables  # noqa: E402

INTRODUCTION = """# Patches

PyTorch and Megatron-Core offer no hook in some places where sharded models need one. There, names are replaced. All of
them are rows of tables in the code, which `scripts/patch_table.py` prints.

A table is installed when it is needed: Megatron's by `megatron.fsdp.mcore.install()`, PyTorch's when the first model is
sharded, those for a model on the meta device while it is built, and those for the CPU by
`megatron.fsdp.mcore.cpu.enable()`. Patches of an optional package, and those for the CPU, are installed when their
modules are imported, if that is later. `megatron.fsdp.mcore.uninstall()` puts Megatron's originals back, and
`megatron.fsdp.helpers.patches.uninstall_all()` puts all originals back. A name that a new version lacks raises an
`ImportError` that names it, before anything is replaced.

Some objects get attributes, which are no replaced names: main weights (`__fsdp_param__`, `megatron_fsdp_slice`,
`megatron_fsdp_dist_index`, `main_grad`), Megatron's optimizers (`grad_stats_parallel_group`), and layers
(`gradient_accumulation_fusion` is set to False where the adapter turns that setting off). On a CPU, Megatron's modules
also see some names of PyTorch with other values; `scripts/limit_table.py cpu` prints them.
"""


def as_markdown() -> str:
    """The page."""
    lines = [INTRODUCTION.rstrip()]
    for name, table in zip(TABLES, tables(), strict=True):
        module = name.partition(":")[0]
        lines += ["", f"## {table.title}", "", f"In `{module}`.", ""]
        lines += ["| name | the original | instead | checked with |", "|---|---|---|---|"]
        lines += [f"| `{row.target}` | {row.reason} | `{row.replacement}` | {_versions(row)} |" for row in table.rows]
    return "\n".join(lines) + "\n"


def _versions(row: Patch) -> str:
    bounds = [f"since {row.since}"] * bool(row.since) + [f"before {row.before}"] * bool(row.before)
    return f"{row.versions}; {' and '.join(bounds)} only" if bounds else str(row.versions)


if __name__ == "__main__":
    print(as_markdown(), end="")
