"""What keeps sharded programs right, each with a change of the engine that takes it out: does the grammar notice?"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.ranks import ROOT

ENGINE = Path("megatron") / "fsdp"


class Remedy(NamedTuple):
    """One remedy.

    Attributes:
        name: What it is.
        file: Its file, under megatron/fsdp.
        text: Text that the file has once.
        instead: What takes it out.
        settings: The settings that need it, for ``--settings``.
        test: The test that holds it where the grammar has no step for it.
    """

    name: str
    file: str
    text: str
    instead: str
    settings: str = "ranks=2"
    test: str = ""


REMEDIES = [
    Remedy(
        "versions of main weights",
        "buffers/weights.py",
        "return read and self.version != self.main._version and not self.needs_nothing",
        "return False",
    ),
    Remedy(
        "writes counted in aliases",
        "dtensor/ragged_dtensor.py",
        "torch._C._increment_version([*tensors, *(each._local_tensor for each in tensors)])",
        "torch._C._increment_version(tensors)",
    ),
    Remedy(
        "main weights between forward and backward",
        "runtime/schedule.py",
        "            self.show_main()\n        return grad",
        "            pass\n        return grad",
    ),
    Remedy(
        "full tensors in losses",
        "dtensor/ragged_dtensor.py",
        "        if in_graph([self]):\n            full:",
        "        if False:\n            full:",
    ),
    Remedy("gradients of reads are averaged", "dtensor/gathering.py", "return mean.div_(mesh.size())", "return mean"),
    Remedy(
        "backward by use",
        "runtime/graph.py",
        "entered = {} if in_backward() else _entered_aside(edges)",
        "entered: dict[Any, Any] = {}",
    ),
    Remedy(
        "versions of compute weights",
        "runtime/unit.py",
        "torch._C._autograd._unsafe_set_version_counter(tuple(weights), tuple(self._versions))",
        "self._versions = [weight._version for weight in weights]",
    ),
    Remedy(
        "calls of a pending backward",
        "runtime/schedule.py",
        "            if torch.is_grad_enabled():\n                unit.new_pass()",
        "            unit.new_pass()",
    ),
    Remedy(
        "parameters from before sharding",
        "buffers/parameter.py",
        "self.original.__class__ = _EarlierDTensor if is_dtensor else _EarlierParameter",
        "unused = _EarlierDTensor if is_dtensor else _EarlierParameter",
    ),
    Remedy(
        "equal weights at the start",
        "runtime/agreement.py",
        "        differs.append(bool(text))",
        "        differs.append(False)",
    ),
    Remedy(
        "equal weights in a load",
        "state/loading.py",
        "    _compare(engine, wanted, state_dict)\n",
        "",
    ),
    Remedy(
        ".grad synchronizes",
        "runtime/engine.py",
        "            if self.reads_synchronize:",
        "            if False:",
    ),
    Remedy(
        "overflow on any rank",
        "dtensor/torch_patches.py",
        "        found_inf.copy_(_reduced(found_inf, spanning_mesh(grads)[0], dist.ReduceOp.MAX))",
        "        pass",
    ),
    Remedy(
        "norms count replicas once",
        "dtensor/placements.py",
        "copies.append(inside * outside)",
        "copies.append(1)",
        "ranks=4 mesh=hsdp,tp",
    ),
    Remedy(
        "zero_grad of some parameters",
        "optim/hooks.py",
        "shared = any(",
        "shared = False and any(",
    ),
    Remedy(
        "zeros that zero_grad leaves",
        "runtime/engine.py",
        "            self.finish_pending_gradients()  # parameters",
        "            pass  # parameters",
    ),
    Remedy(
        "closures synchronize",
        "optim/hooks.py",
        "            loss = closure()\n            self._finish()",
        "            loss = closure()",
    ),
    Remedy(
        "freezing is followed",
        "runtime/schedule.py",
        "            self.plans.follow_freezing()",
        "            pass",
    ),
    Remedy(
        "frozen since the forward",
        "buffers/parameter_group.py",
        "grad if e.main.requires_grad else None for",
        "grad for",
    ),
    Remedy(
        "hooks of gradients",
        "buffers/parameter_group.py",
        "if before is None or hooks:",
        "if before is None:",
    ),
    Remedy(
        "weights that functional_call gives",
        "buffers/parameter_group.py",
        "if module._parameters.get(attribute) is hidden:",
        "if True:",
    ),
    Remedy(
        "exceptions in backward reshard",
        "runtime/graph.py",
        "            schedule.backward_failed()",
        "            pass",
    ),
]


def find(remedy: Remedy, flags: list[str]) -> tuple[int, str]:
    """Run random programs on a copy of this project without a remedy, up to the first that is right with it.

    Returns:
        How many programs were run, and what became of the last one: "right" if all were.
    """
    with tempfile.TemporaryDirectory(prefix="without-") as folder:
        copy = Path(folder)
        for name in ("megatron", "megatron_fsdp", "tests/fuzz"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "found"))
        for name in ("__init__.py", "ranks.py"):
            shutil.copy(ROOT / "tests" / name, copy / "tests")
        file = copy / ENGINE / remedy.file
        file.write_text(file.read_text().replace(remedy.text, remedy.instead))
        command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", "--settings", remedy.settings, *flags]
        end = ["--original", str(ROOT), "--reduce", "0", "--out", str(copy / "out")]
        subprocess.run([*command, *end], cwd=copy, check=False, stdout=subprocess.DEVNULL)
        count, _, verdict = (copy / "out" / "found").read_text().partition(" ")
        return int(count), verdict


def table(names: str, flags: list[str]) -> str:
    """Markdown: for each remedy, after how many programs it was missed.

    Args:
        names: Beginnings of the remedies' names, separated by commas; empty for all.
        flags: Flags of the runs.
    """
    lines = ["| without | programs until found | verdict | seconds |", "|---|---|---|---|"]
    for remedy in REMEDIES:
        if remedy.name.startswith(tuple(names.split(","))):
            start = time.time()
            count, verdict = find(remedy, flags)
            lines.append(f"| {remedy.name} | {count} | {verdict} | {time.time() - start:.0f} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def still_right(script: str, original: str) -> bool:
    """Whether a program that is not right here is right with the project in another folder."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        command = [sys.executable, "-W", "ignore", file.name]
        environment = os.environ | {"PYTHONPATH": original}
        return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
