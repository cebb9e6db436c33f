"""A program: a setting and steps. They are chosen at random, print as Python, and run on the ranks of a group."""

import contextlib
import faulthandler
import gc
import importlib
import math
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from megatron.fsdp.comm import gloo
from megatron.fsdp.comm.streams import CollectiveMismatch, raise_if_ranks_disagree
from megatron.fsdp.dtensor.torch_patches import TORCH
from tests.exchanges import delayed

from .network import CHOICES as FEATURES
from .network import Features
from .settings import CHOICES, TOLERANCES, Meshes, Setting, meshes
from .sides import RaisedElsewhere, Shard, Sharded, Side, full
from .steps import KINDS

SECONDS = 12
# torch's error of a checkpoint is no Exception.
FAILURES = (Exception, CheckpointException)


class Step(NamedTuple):
    kind: str
    arguments: dict[str, Any]

    def __repr__(self) -> str:
        return f"step({', '.join([repr(self.kind), *(f'{k}={v!r}' for k, v in self.arguments.items())])})"


def step(kind: str, /, **arguments: Any) -> Step:
    """A step whose other arguments are the plainest."""
    return Step(kind, {name: choices[0] for name, choices in KINDS[kind].choices.items()} | arguments)


class Verdict(NamedTuple):
    """How a program ended: "right", "wrong", "error" (sharded), "plain" (an error of plain torch), "crash", "hang".

    ``mismatch`` says that ranks have issued different collectives, which every later wait of the processes raises.
    """

    kind: str
    at: int = -1
    what: str = ""
    trace: str = ""
    mismatch: str = ""


class Program(NamedTuple):
    setting: Setting
    steps: list[Step]

    def source(self) -> str:
        """Python that runs the program; see ``check``."""
        differing = {k: v for k, v in self.setting._asdict().items() if v != Setting._field_defaults[k]}
        if "features" in differing:
            features = {k: v for k, v in self.setting.features._asdict().items() if v != Features._field_defaults[k]}
            differing["features"] = "FEATURES"
        arguments = ", ".join(f"{k}={v!r}" for k, v in differing.items())
        if "FEATURES" in arguments:
            inside = ", ".join(f"{k}={v!r}" for k, v in features.items())
            arguments = arguments.replace("'FEATURES'", f"Features({inside})")
        lines = "".join(f"        {s!r},\n" for s in self.steps)
        return f"PROGRAM = Program(\n    Setting({arguments}),\n    [\n{lines}    ],\n)\n"


def programs(count: int, start: int, only: dict[str, tuple[Any, ...]], kinds: list[str]) -> Iterator[Program]:
    """Random programs, always the same ones for the same arguments."""
    choices, features = ({name: only.get(name, each[name]) for name in each} for each in (CHOICES, FEATURES))
    always = bool(only.keys() & features.keys())
    weights = [KINDS[name].weight for name in kinds]
    for number in range(count):
        # Not Hypothesis: it prefers constants of the project's modules that are imported, which differ between runs.
        random = Random(f"{start} {number}")
        chosen = {name: random.choice(values) for name, values in choices.items()}
        drawn = random.random() < 0.5 or always
        odd = {name: random.choice(values) for name, values in features.items()} if drawn else {}
        names = random.choices(kinds, weights, k=random.randint(6, 20))
        steps = [Step(kind, {k: random.choice(v) for k, v in KINDS[kind].choices.items()}) for kind in names]
        yield Program(Setting(**chosen, features=Features(**odd)).valid(), steps)


def run_in(project: str, *arguments: Any) -> list[Verdict]:
    """Call :func:`run` with the engine that is in the folder ``project``, or with this one."""
    if project and sys.path[0] != project:
        sys.path.insert(0, project)
        for name in list(sys.modules):
            parts = name.split(".")
            if parts[0] in ("megatron", "megatron_fsdp") or parts[:2] in (["tests", "fuzz"], ["tests", "exchanges"]):
                del sys.modules[name]
    verdicts: list[Verdict] = importlib.import_module("tests.fuzz.program").run(*arguments)
    return verdicts


def run(batch: list[Program], torchs: bool, folder: Path, seconds: int) -> list[Verdict]:
    """Run programs on this rank, up to the first one that is not right; every rank returns what the worst one saw.

    A file per rank in ``folder`` says where it is, for whoever finds this process ended.
    """
    # DTensor remembers the names of an earlier run's groups.
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    notes = folder / str(dist.get_rank())
    trace = notes.with_suffix(".trace").open("w")
    gc.freeze()
    # Every full_tensor() of a parameter that one of 3 ranks holds waits that long, which answers do not depend on.
    gloo.SECONDS_TO_RELEASE = 0.0
    places: dict[str, Meshes] = {}
    verdicts = []
    for number, program in enumerate(batch):
        notes.write_text(f"{number}")
        signal.alarm(seconds)
        trace.truncate(0)
        faulthandler.dump_traceback_later(seconds - 2, file=trace)
        if program.setting.mesh not in places:
            places[program.setting.mesh] = meshes(program.setting)
        late = program.setting.slow == "all" or (program.setting.slow == "first" and dist.get_rank() == 0)
        with delayed(lambda: 0.001) if late else contextlib.nullcontext():
            mine = _run(program, places[program.setting.mesh], torchs)
        try:
            raise_if_ranks_disagree()
        except CollectiveMismatch as error:
            mine = mine._replace(mismatch=str(error))
        notes.write_text(f"{number} {mine.what.splitlines()[0] if mine.what else ''}")
        every: list[Verdict] = [mine] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        order = ("error", "wrong", "plain", "right")
        worst = min(every, key=lambda v: (order.index(v.kind), v.at))
        # Waits of the process group now raise: a rank's program may have ended otherwise, as where plain torch raises.
        mismatch = next((v.mismatch for v in every if v.mismatch), "")
        verdicts.append(worst._replace(mismatch=mismatch))
        gc.collect()
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        if verdicts[-1].kind in ("error", "wrong") or mismatch:
            break
    return verdicts


def _run(program: Program, place: Meshes, torchs: bool) -> Verdict:
    choices: list[Any] = []
    wanted: list[Any] = []
    raised: Verdict | None = None
    # Sharded models of earlier programs leave patches of torch in the process, which answer where plain torch raises.
    TORCH.uninstall()
    side: Side = Side(program.setting, place, choices)
    try:
        for one in program.steps:
            wanted.append(_do(side, one))
            side.agree()
        wanted.append(side.observe())
        side.agree()
    except FAILURES as error:  # the program is not valid in plain torch
        raised = Verdict("plain", min(len(wanted), len(program.steps)), *_described(error))
        if isinstance(error, RaisedElsewhere) or not side.agree(error):
            return raised
        wanted.append(None)
    at, tolerance, first = 0, _tolerance(program), Verdict("right")
    try:
        side = Sharded(program.setting, place, choices, torchs)
        for at, want in enumerate(wanted):
            seen = _do(side, program.steps[at]) if at < len(program.steps) else side.observe()
            difference = f"no error: {raised.what}" if raised and want is None else compare(want, seen, tolerance)
            if difference and first.kind == "right":
                # The program goes on, because other ranks may have seen no difference, and would wait.
                first = Verdict("wrong", min(at, len(program.steps) - 1), difference)
    except FAILURES as error:  # what the program is run for
        if first.kind == "right":
            first = raised or Verdict("error", at, *_described(error))
    return first


def _described(error: BaseException) -> tuple[str, str]:
    return f"{type(error).__name__}: {error}", traceback.format_exc()


def _do(side: Side, one: Step) -> Any:
    seen = {"returned": KINDS[one.kind].run(side, **one.arguments)}
    return {k: _copy(v) for k, v in (seen | (side.observe() if side.setting.watch else {})).items()}


def _copy(value: Any) -> Any:
    return full(value).detach().clone() if isinstance(value, torch.Tensor) else value


def _tolerance(program: Program) -> float:
    rounded = program.setting.mixed or any(one.arguments.get("autocast") for one in program.steps)
    # Each second derivative of rounded values adds its own error.
    penalties = sum(one.kind == "penalty" for one in program.steps)
    return TOLERANCES["bf16"] * (1 + penalties) if rounded else TOLERANCES[program.setting.precision]


def compare(wanted: dict[str, Any], got: dict[str, Any], tolerance: float) -> str:
    """The first difference, or nothing."""
    # A sharded optimizer's state dict has zeros where a plain one has nothing yet: checkpoints are loaded into them.
    got = {k: v for k, v in got.items() if k in wanted or not k.startswith("state") or getattr(v, "local", v).any()}
    if wanted.keys() != got.keys():
        return f"names {sorted(wanted.keys() ^ got.keys())[:3]}"
    # Sums of large values that cancel are as inexact as the large values, in programs whose weights grow.
    tensors = [value for value in wanted.values() if isinstance(value, torch.Tensor) and value.numel()]
    largest = max((value.double().abs().max().nan_to_num(posinf=0).item() for value in tensors), default=0)
    for name, value in wanted.items():
        other = got[name]
        if isinstance(other, Shard) and isinstance(value, torch.Tensor):
            value, other = other.part.take_from(value), other.local
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            if value.shape != other.shape:
                return f"{name}: shape {tuple(other.shape)} instead of {tuple(value.shape)}"
            value, other = value.double(), other.double()
            bound = tolerance * max(1.0, largest / 100, value.abs().max().item() if value.numel() else 0.0)
            apart = (value - other).abs().max().item() if value.numel() else 0.0
            if not (apart <= bound or math.isnan(apart) and torch.equal(value.isnan(), other.isnan())):
                start, wanted_start = other.flatten()[:3].tolist(), value.flatten()[:3].tolist()
                return f"{name}: {start} instead of {wanted_start}, {apart:.3g} apart"
        elif (value is None) != (other is None) or (not isinstance(value, torch.Tensor) and value != other):
            return f"{name}: {_short(other)} instead of {_short(value)}"
    return ""


def _short(value: Any) -> str:
    return (
        f"a tensor (largest {value.abs().max().item() if value.numel() else 0:.3g})"
        if isinstance(value, torch.Tensor)
        else repr(value)
    )
