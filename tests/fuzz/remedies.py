"""Mechanisms that keep sharded programs right, each with a change that removes it: does the grammar notice?"""

import itertools
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.ranks import ROOT

from .program import Program, programs
from .runner import Runner
from .settings import values_of

ENGINE = Path("megatron") / "fsdp"


class Remedy(NamedTuple):
    """One remedy.

    Attributes:
        name: What it is.
        file: Its file, under megatron/fsdp.
        text: Text that the file has once.
        instead: What takes it out.
        settings: Values of settings to try, where only some need it.
        steps: Kinds of steps to try; empty: all.
    """

    name: str
    file: str
    text: str
    instead: str
    settings: dict[str, tuple[Any, ...]]
    steps: tuple[str, ...]


# For each remedy its name, its file, and where it matters as ``FUZZ_FLAGS`` takes it; then the lines that it has, and
# those that take it out. If there are none of these, the line is removed.
TABLE = r"""
versions of main weights: buffers/weights.py
-return [weights for weights in buffers if weights._axes in written] if written else []
+return []
writes counted in aliases: dtensor/ragged_dtensor.py
-torch._C._increment_version([*tensors, *(each._local_tensor for each in tensors)])
+torch._C._increment_version(tensors)
main weights between forward and backward: runtime/schedule.py
-            self.show_main()
-        return grad
+            pass
+        return grad
full tensors in losses: dtensor/ragged_dtensor.py
-return ToFull.apply(self) if in_graph([self]) else
+return ToFull.apply(self) if False else
gradients of reads are averaged: dtensor/gathering.py
-range(mesh.ndim)).div_(mesh.size())
+range(mesh.ndim))
backward by use: runtime/graph.py
-entered = {} if in_backward() else _entered_aside(edges, passed)
+entered: dict[Any, Any] = {}
versions of compute weights: runtime/unit.py
-torch._C._autograd._unsafe_set_version_counter(tuple(weights), tuple(self._versions))
+self._versions = [weight._version for weight in weights]
calls of a pending backward: runtime/schedule.py
-            if torch.is_grad_enabled():
-                unit.new_pass()
+            unit.new_pass()
parameters from before sharding: buffers/parameter.py
-self.original.__class__ = _EarlierDTensor if is_dtensor else _EarlierParameter
+unused = _EarlierDTensor if is_dtensor else _EarlierParameter
equal weights at the start: runtime/agreement.py
-        differs.append(bool(text))
+        differs.append(False)
equal weights in a load: state/loading.py
-    _compare(engine, wanted, state_dict)
.grad synchronizes: runtime/engine.py
-            if self.reads_synchronize:
+            if False:
overflow on any rank: dtensor/ragged_dtensor.py
-    found_inf.copy_(reduce_over(
+    reduced(reduce_over(
norms count replicas once: dtensor/placements.py ranks=4 mesh=hsdp,tp
-copies.append(inside * outside)
+copies.append(1)
zero_grad of some parameters: optim/hooks.py
-shared = any(
+shared = False and any(
zeros that zero_grad leaves: runtime/engine.py
-            self.finish_pending_gradients()  # parameters
+            pass  # parameters
closures synchronize: optim/local_step.py
-            after_closure()
thawing is followed: runtime/schedule.py
-as in an unsharded model.
-        self._follow_freezing()
+as in an unsharded model.
frozen since the forward: buffers/parameter_group.py
-grad if e.main.requires_grad else None for
+grad for
hooks of gradients: buffers/parameter_group.py
-if before is None or hooks:
+if before is None:
weights that functional_call gives: buffers/parameter_group.py
-if found is hidden:
+if True:
exceptions in backward reshard: runtime/graph.py
-            schedule.reset_if_failed()
+            pass
writes in the forward: runtime/unit.py
-if not self._shows_compute or [
+if True or [
freed weights are not read: dtensor/unsupported.py
-refuse_reads = torch._C._set_storage_data_ptr_access_error_msg if _CAN_ALLOW else None
+refuse_reads = None
a load is a write: state/loading.py
-    torch._C._increment_version([param.main])
+    pass
tied weights of other units: runtime/builder.py units=nested tied=blocks only=captured,backward
-            user.is_open = True
+            pass
codes are sent as bytes: comm/collectives.py extra=codes
-return tensor if can_be_trained(tensor.dtype) else
+return tensor if True else
codes are no values to update: helpers/codes.py extra=codes
-return of_codes(parameter) or not (values or
+return of_codes(parameter) or not (True or
penalties of frozen units: runtime/graph.py
-            _mark_gradients(gradients or (), passed)
+            pass
gradients of frozen parameters stay: optim/hooks.py ranks=2 groups=part only=forward,backward,freeze,zero_grad,optimize
-main.requires_grad or main.grad is not None for
+main.requires_grad for
gradients from before sharding: fsdp2/marked.py ranks=2 interface=fsdp2 only=forward,backward,regularized,optimize
-        if parameter.requires_grad and parameter not in ignored
-    ]
+        if False
+    ]
units that others run are gathered first: runtime/schedule.py
-            self._has_skipped = True
+            pass
a backward in a forward: runtime/schedule.py
-            self._inner = []
+            pass
writes of a forward to later units: runtime/unit.py
-        if outdated(
+        if False and outdated(
shards that stay follow writes: buffers/weights.py ranks=4 mesh=hsdp outer=1
  only=forward,backward,accumulate,write_in_forward
-        if outdated([self]):
+        if False:
reductions wait for units of the graph: runtime/unit.py ranks=2 strategy=2 interface=own
  only=forward,backward,apart,optimize
-        return (self.in_graph or self.hidden) and not self.complete and self.trainable
+        return False
unshards wait for their buffer: runtime/plan.py units=fine double_buffer=True strategy=3 only=apart,backward,forward
- and self._units[unshard.unit_index].slot not in self._slots[other.unit_index]
+
gathered again where others gather again: runtime/schedule.py ranks=2 strategy=3 only=both_models,apart,backward
-        in_use = op.kind is OpKind.UNSHARD and unit.state is WeightState.BACKWARD and plan.repeats
+        in_use = False
earlier .data stays: dtensor/ragged_dtensor.py
-        local.data = kept
full tensors stay full: dtensor/ragged_dtensor.py strategy=0 ranks=2 only=resume,teach,other_model
-lead = written_values(func, args, kwargs)[0] if in_place else _leading(flat)
+lead = _leading(flat)
units that checkpoints hide: runtime/unit.py strategy=2 ranks=2 only=apart,backward
-return (self.in_graph or self.hidden) and
+return self.in_graph and
"""


def _remedies() -> Iterator[Remedy]:
    for entry in re.split(r"\n(?=[^-+ ])", TABLE.strip()):
        head, *lines = entry.split("\n")
        has, takes_out, further = ([line[1:] for line in lines if line[0] == sign] for sign in "-+ ")
        name, _, where = " ".join([head, *further]).partition(": ")
        file, *words = where.split()
        settings = dict(map(values_of, words)) or {"ranks": (2,)}
        text = "\n".join(has if takes_out else [*has, ""])
        yield Remedy(name, file, text, "\n".join(takes_out), settings, settings.pop("only", ()))


REMEDIES = list(_remedies())


def find(remedy: Remedy, made: Iterator[Program], right: Runner) -> tuple[int, str]:
    """Run programs without a remedy, up to the first that is right with it.

    Returns:
        How many programs were run, and what became of the last one: "right" if all were.
    """
    count = 0
    with tempfile.TemporaryDirectory(prefix="without-") as folder:
        for name in ("megatron", "megatron_fsdp"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        file = Path(folder) / ENGINE / remedy.file
        file.write_text(file.read_text().replace(remedy.text, remedy.instead))
        runner = Runner(project=folder)
        while chunk := list(itertools.islice(made, 10)):
            for result in sorted(runner.results(chunk), key=lambda result: chunk.index(result.made)):
                count += 1
                wrong = result.verdict.kind != "right"
                if wrong and right.results([result.program])[0].verdict.kind == "right":
                    runner.pool.close()
                    return count, f"{result.verdict.kind}: {result.verdict.what.splitlines()[0][:80]}"
        runner.pool.close()
    return count, "right"


def table(names: str, count: int, seed: int, only: dict[str, tuple[Any, ...]], kinds: list[str]) -> str:
    """Markdown: for each remedy, after how many programs it was missed.

    Args:
        names: Beginnings of the remedies' names, separated by commas; empty for all.
        count: After how many programs to give up.
        seed: Of the programs.
        only: Values of settings to try.
        kinds: Kinds of steps to try.
    """
    lines = ["| without | programs until found | verdict |", "|---|---|---|"]
    right = Runner()
    for remedy in REMEDIES:
        if remedy.name.startswith(tuple(names.split(","))):
            made = programs(count, seed, only | remedy.settings, list(remedy.steps) or kinds)
            number, verdict = find(remedy, made, right)
            lines.append(f"| {remedy.name} | {number} | {verdict} |")
            print(lines[-1], file=sys.stderr, flush=True)
    right.pool.close()
    return "\n".join(lines) + "\n"
