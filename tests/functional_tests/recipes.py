"""NVIDIA's five functional recipes of Megatron-FSDP (recipes.json), and what a run on a CPU changes in them.

``python -m tests.functional_tests.recipes`` prints what is changed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.fsdp.mcore import cpu
from megatron.fsdp.mcore.limits import LIMITS

PAGE = """# NVIDIA's functional recipes

NVIDIA tests its Megatron-FSDP with five training recipes, which `tests/functional_tests/recipes.json` has in full.
`megatron-fsdp-doctor` examines them. `tests/functional_tests/test_recipes.py` trains, saves and resumes each
on a CPU with its number of ranks. For that, these settings are changed.
`python -m tests.functional_tests.recipes` prints this page.
"""


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    Attributes:
        ranks: Number of ranks.
        environment: Environment variables.
        flags: Values of Megatron's flags by name, without dashes; True for flags without a value.
    """

    ranks: int
    environment: dict[str, str]
    flags: dict[str, Any]

    def words(self) -> list[str]:
        """The command line."""
        return [word for name, value in self.flags.items() for word in words_of(name, value)]


@dataclass(frozen=True)
class Reduction:
    """A flag that has another value in a run on a CPU.

    Attributes:
        flag: Its name, without dashes.
        value: The value; None to leave it out.
        reason: Why.
    """

    flag: str
    value: Any
    reason: str


_SIZE, _DATA, _TIME = "a smaller model", "synthetic tokens", "a shorter run"
_LIMITED = [Reduction(limit.setting.replace("_", "-"), None, limit.reason) for limit in LIMITS]
REDUCTIONS = (
    Reduction("num-layers", 2, _SIZE),
    Reduction("moe-layer-freq", "([0]*1+[1]*1)", _SIZE),
    Reduction("hidden-size", 64, _SIZE),
    Reduction("ffn-hidden-size", 128, _SIZE),
    Reduction("moe-ffn-hidden-size", 64, _SIZE),
    Reduction("moe-shared-expert-intermediate-size", 64, _SIZE),
    Reduction("kv-channels", 8, _SIZE),
    Reduction("q-lora-rank", 32, _SIZE),
    Reduction("kv-lora-rank", 16, _SIZE),
    Reduction("qk-head-dim", 8, _SIZE),
    Reduction("qk-pos-emb-head-dim", 8, _SIZE),
    Reduction("v-head-dim", 8, _SIZE),
    Reduction("seq-length", 32, _SIZE),
    Reduction("max-position-embeddings", 32, _SIZE),
    Reduction("micro-batch-size", 1, _SIZE),
    Reduction("global-batch-size", 8, _SIZE),
    Reduction("data-path", None, _DATA),
    Reduction("vocab-file", None, _DATA),
    Reduction("merge-file", None, _DATA),
    Reduction("data-cache-path", None, _DATA),
    Reduction("split", None, _DATA),
    Reduction("train-iters", 4, _TIME),
    Reduction("save-interval", 2, _TIME),
    Reduction("eval-iters", 1, _TIME),
    Reduction("exit-interval", None, _TIME),
    Reduction("tensorboard-dir", None, "nothing reads it"),
    Reduction("async-save", None, "needs nvidia-resiliency-ext"),
    Reduction("use-persistent-ckpt-worker", None, "needs nvidia-resiliency-ext"),
    *_LIMITED,
)
# Flags that Megatron stores under another name.
_STORED = {"fp8": "fp8-format"}


def words_of(name: str, value: Any) -> list[str]:
    """The words of one flag."""
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]


def load() -> dict[str, Recipe]:
    """All recipes by name."""
    entries = json.loads(Path(__file__).with_name("recipes.json").read_text())
    found: dict[str, Recipe] = {}
    for name, entry in entries.items():
        base = found.get(entry.get("like"), Recipe(0, {}, {}))
        flags = {key: value for key, value in {**base.flags, **entry["flags"]}.items() if value is not None}
        found[name] = Recipe(entry["ranks"], entry.get("environment", base.environment), flags)
    return found


def refused(recipe: Recipe) -> set[str]:
    """Names of the recipe's settings that this FSDP does not support."""
    return {limit.flag.replace("-", "_") for limit in _LIMITED if limit.flag in recipe.flags}


def reduced(recipe: Recipe) -> tuple[list[str], list[tuple[str, Any, Any, str]]]:
    """The command line for a run on a CPU, and what was changed: flag, the recipe's value, the value here, reason.

    Megatron's CPU mode changes some of them itself.
    """
    flags, rows = dict(recipe.flags), []
    for row in REDUCTIONS:
        if row.flag in flags:
            rows.append((row.flag, flags.pop(row.flag), row.value, row.reason))
            if row.value is not None:
                flags[row.flag] = row.value
    for adjusted in cpu.ADJUSTMENTS:
        name = _STORED.get(adjusted.argument, adjusted.argument.replace("_", "-"))
        if name in flags and adjusted.only in (None, flags[name]):
            rows.append((name, flags[name], adjusted.value or None, adjusted.reason))
    words = [word for name, value in flags.items() for word in words_of(name, value)]
    return [*words, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"], rows


def page() -> str:
    """The changes in each recipe, in Markdown."""
    parts = [PAGE]
    for name, recipe in load().items():
        rows = [
            f"| `--{flag}` | {_cell(value)} | {_cell(here)} | {why} |" for flag, value, here, why in reduced(recipe)[1]
        ]
        table = ["| flag | in the recipe | on the CPU | why |", "|---|---|---|---|", *rows]
        parts.append(f"\n## {name}, {recipe.ranks} ranks\n\n" + "\n".join(table) + "\n")
    return "".join(parts)


def _cell(value: Any) -> str:
    return "left out" if value is None else "given" if value is True else f"`{value}`"


if __name__ == "__main__":
    print(page(), end="")
