"""Draws the pictures of the documentation from the engine's own layout and schedule.

    python scripts/draw_pictures.py     # writes docs/images

The pictures have a light ground of their own, so that they are legible on light and on dark pages.
"""

import contextlib
import functools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.fsdp.comm import streams  # noqa: E402
from megatron.fsdp.sharding.layout import Layout  # noqa: E402
from megatron.fsdp.sharding.mesh import MeshIndex  # noqa: E402
from megatron.fsdp.sharding.ownership import Ownership, shards_of  # noqa: E402
from megatron.fsdp.sharding.packing import plan_layout  # noqa: E402
from megatron.fsdp.sharding.strategy import INNER, OUTER, Sharding  # noqa: E402
from megatron.fsdp.tools.trace.clock import HostClock  # noqa: E402
from megatron.fsdp.tools.trace.recorder import StepRecorder  # noqa: E402
from megatron.fsdp.tools.trace.spans import Kind, RankTrace, Row  # noqa: E402
from megatron_fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from tests.simulated.device import DEVICE, SimulatedDevice, simulated_device  # noqa: E402
from tests.simulated.ranks import fake_ranks  # noqa: E402
from tests.tensor_bytes import TensorBytes, build, call_counted  # noqa: E402

IMAGES = ROOT / "docs" / "images"
# Narrow enough for the text to be legible on a phone, which shows a picture at 360 pixels.
WIDTH = 480
RANKS = 4
COLORS = ("#3d6cb9", "#c2570c", "#4a7c3a", "#8a4fa3", "#0e7c86", "#a8323e")
PADDING = "#c9cdd4"
TEXT = "#24292f"
BOLD = 'font-weight="600" '
MIDDLE = 'text-anchor="middle" '
SMALL = 'font-size="13"'


class Drawing:
    """An SVG picture that grows downwards.

    Args:
        title: Read out instead of the picture.
        height: In pixels, of ``WIDTH`` across.
    """

    def __init__(self, title: str, height: float) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            f'width="{1.2 * WIDTH:g}" role="img" font-family="system-ui, sans-serif" font-size="15">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="#f6f8fa"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled rectangle."""
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>')

    def text(self, x: float, y: float, text: str, fill: str = TEXT, extra: str = "") -> None:
        """A line of text whose baseline is at ``y``."""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" {extra}>{escape(text)}</text>')

    def line(self, x: float, top: float, bottom: float) -> None:
        """A dashed vertical line."""
        ends = f'x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"'
        self._parts.append(f'<line {ends} stroke="{TEXT}" stroke-width="1.5" stroke-dasharray="4 3"/>')

    def curve(self, points: list[tuple[float, float]], stroke: str) -> None:
        """A line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="3"/>')

    def circles(self, points: list[tuple[float, float]], stroke: str) -> None:
        """A small circle at each point."""
        for x, y in points:
            ring = f'fill="none" stroke="{stroke}" stroke-width="1.5"'
            self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {ring}/>')

    def svg(self) -> str:
        """The file's text."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def _legend(drawing: Drawing, y: float, entries: Iterable[tuple[str, str]]) -> None:
    x = 24.0
    for name, color in entries:
        if x + 20 + 7 * len(name) > WIDTH - 12:
            x, y = 24.0, y + 22
        drawing.box(x, y, 14, 14, color)
        drawing.text(x + 20, y + 12, name, extra=SMALL)
        x += 38 + 7 * len(name)


# The layout of a unit ------------------------------------------------------------------------------------------------

LAYER = {"qkv": (36, 12), "qkv bias": (36,), "proj": (12, 12), "up": (40, 12), "down": (12, 40), "norm": (12,)}


def draw_layout() -> Drawing:
    """The parameters of a small transformer layer in the shards of four ranks."""
    layout = plan_layout([*LAYER.values()], RANKS)
    drawing = Drawing("The parameters of a layer in one flat buffer, which is cut into shards of four ranks", 414)
    drawing.text(24, 34, "The flat buffer of a unit: its parameters one after", extra=BOLD)
    drawing.text(24, 54, "another, cut into equal shards", extra=BOLD)
    left, top, height = 24, 72, 48
    scale = (WIDTH - 48) / layout.numel
    drawing.box(left, top, layout.numel * scale, height, PADDING)
    for name, slot, color in zip(LAYER, layout.slots, COLORS, strict=True):
        x, width = left + slot.offset * scale, slot.numel * scale
        drawing.box(x, top, width, height, color)
        if width > 50:
            # In the middle of the largest slice, where no boundary crosses the text.
            slices = [layout.shard_slice([*LAYER].index(name), rank) for rank in range(RANKS)]
            largest = max(slices, key=lambda part: part.stop - part.start)
            middle = x + (largest.start + largest.stop) / 2 * scale
            drawing.text(middle, top + 21, name, "white", MIDDLE)
            drawing.text(middle, top + 40, f"{slot.shape[0]} x {slot.row}", "white", MIDDLE + SMALL)
    for rank in range(RANKS):
        x, width = left + rank * layout.shard_numel * scale, layout.shard_numel * scale
        drawing.text(x + width / 2, top + height + 22, f"rank {rank}", extra=MIDDLE)
        if rank:
            drawing.line(x, top - 6, top + height + 26)
    drawing.text(24, 186, "What each rank keeps: slices of whole rows", extra=BOLD)
    for rank in range(RANKS):
        _draw_shard(drawing, layout, rank, 200 + 40 * rank)
    padding = f"padding: {layout.padding} of {layout.numel}"
    _legend(drawing, 370, [*zip(LAYER, COLORS, strict=True), (padding, PADDING)])
    return drawing


def _draw_shard(drawing: Drawing, layout: Layout, rank: int, y: float) -> None:
    left, height = 84, 32
    scale = (WIDTH - left - 24) / layout.shard_numel
    drawing.text(24, y + 21, f"rank {rank}")
    drawing.box(left, y, layout.shard_numel * scale, height, PADDING)
    for index, color in enumerate(COLORS[: len(layout.slots)]):
        part = layout.shard_slice(index, rank)
        x, width = left + part.shard_offset * scale, (part.stop - part.start) * scale
        drawing.box(x, y, width, height, color)
        rows = f"{part.shape[0]} rows" if len(part.shape) > 1 else str(part.shape[0])
        if width > 8 * len(rows):
            drawing.text(x + width / 2, y + 21, rows, "white", MIDDLE + SMALL)


# The timeline of a step ----------------------------------------------------------------------------------------------

BLOCKS, WIDE, TOKENS = 4, 64, 64
# Time units per product of two numbers, per byte that is communicated, and per element that an operator of the
# optimizer updates. Other operators take no time.
PER_PRODUCT, PER_BYTE, PER_UPDATE = 2e-3, 5e-2, 1e-2


class SimulatedClock(HostClock):
    """Reads the time at which the current stream of the simulated device will have run its kernels."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._timeline = device.timeline

    def mark(self) -> int:
        """The end of the current stream."""
        return int(self._timeline.current[-1].end)


def record_step() -> RankTrace:
    """Record a step with ZeRO-3 on one of four simulated ranks."""
    with fake_ranks(RANKS), simulated_device(kernel_time=0) as device:
        device.on_kernel = functools.partial(_take_time, device)
        return _record_on(device)


def _record_on(device: SimulatedDevice) -> RankTrace:
    model = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False, dtype=torch.bfloat16) for _ in range(BLOCKS)))
    sharded, optimizer = fully_shard(
        model.to(DEVICE),
        torch.optim.AdamW(model.parameters(), foreach=True),
        fsdp_unit_modules=[nn.Linear],
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32),
    )
    batch = torch.randn(TOKENS, WIDE, dtype=torch.bfloat16).to(DEVICE)
    for _ in range(2):
        _step(sharded, optimizer, batch)
    device.timeline.synchronize()
    recorder = StepRecorder(sharded.engine, SimulatedClock(device))
    recorder.start()
    _step(sharded, optimizer, batch)
    recorder.stop()
    return recorder.trace(0)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _take_time(device: SimulatedDevice, stream: int, function: Any, args: tuple, kwargs: dict, result: Any) -> None:
    name = function._schema.name
    tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
    if name.startswith("c10d::"):
        cost = PER_BYTE * max(tensor.nbytes for tensor in tensors)
    elif name.endswith("mm"):
        cost = PER_PRODUCT * args[-2].shape[0] * args[-1].shape[0] * args[-1].shape[1]
    elif "_foreach" in name:
        cost = PER_UPDATE * sum(tensor.numel() for tensor in args[0])
    else:
        cost = 0.0
    device.timeline.streams[stream].end += cost


ROWS = {
    Row.COMPUTE: "compute",
    Row.GATHERS: "all-gather",
    Row.REDUCTIONS: "reduce-scatter",
}
WAIT = "#e5534b"
SPANS = {
    Kind.FORWARD: ("forward", "#3d6cb9"),
    Kind.BACKWARD: ("backward", "#27457a"),
    Kind.ENGINE: ("engine", "#8b929c"),
    Kind.OPTIMIZER: ("optimizer", "#4a7c3a"),
    Kind.GATHER: ("all-gather", "#b25a0b"),
    Kind.REDUCTION: ("reduce-scatter", "#8a4fa3"),
}


def draw_step(trace: RankTrace) -> Drawing:
    """A recorded step: what the streams of a rank run, and where the computation waits."""
    spans = [span for span in trace.spans if span.end > span.start and span.kind in SPANS]
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    drawing = Drawing("A step on one rank: computation, all-gathers and reduce-scatters of four blocks over time", 306)
    drawing.text(24, 34, "One training step of four blocks with ZeRO-3,", extra=BOLD)
    drawing.text(24, 54, "on one rank (simulated)", extra=BOLD)
    left, height = 122, 44
    scale = (WIDTH - left - 24) / (end - start)
    for number, (row, name) in enumerate(ROWS.items()):
        y = 70 + number * (height + 8)
        drawing.text(24, y + 28, name, extra=SMALL)
        drawing.box(left, y, WIDTH - left - 24, height, "#e3e6ea")
        for span in spans:
            is_wait = span.row is Row.WAITS and row is Row.COMPUTE
            if span.row is row or is_wait:
                x, width = left + (span.start - start) * scale, (span.end - span.start) * scale
                drawing.box(x + 0.75, y, max(width - 1.5, 1), height, WAIT if is_wait else SPANS[span.kind][1])
                if span.unit.isdigit() and not is_wait and width > 12:
                    drawing.text(x + width / 2, y + 28, str(int(span.unit) + 1), "white", MIDDLE)
    drawing.text(WIDTH - 24, 242, "time \u2192", extra='text-anchor="end" ' + SMALL)
    _legend(drawing, 252, [*SPANS.values(), ("wait", WAIT)])
    return drawing


# What ranks hold ------------------------------------------------------------------------------------------------------

STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
# The parts of a rank's memory, with their bytes per parameter: bf16 weights, fp32 gradients, main weights and Adam.
PARTS = {"weights": (2, COLORS[0]), "gradients": (4, COLORS[1]), "main weights, Adam": (12, COLORS[2])}


def draw_stages() -> Drawing:
    """The shards of each of four ranks, by strategy."""
    drawing = Drawing("Bytes per parameter of one of four ranks with ZeRO-0 to 3", 318)
    drawing.text(24, 34, f"Bytes per parameter on each of {RANKS} ranks,", extra=BOLD)
    drawing.text(24, 54, "with bf16 weights and Adam", extra=BOLD)
    left = 170
    scale = (WIDTH - left - 60) / sum(size for size, _ in PARTS.values())
    for number, name in enumerate(STAGES):
        strategy, y, x, total = INNER[name], 72 + 50 * number, float(left), 0.0
        drawing.text(24, y + 16, f"ZeRO-{number}")
        drawing.text(24, y + 34, name, extra=SMALL)
        sharded = (strategy.shards_parameters, strategy.shards_gradients, strategy.shards_optimizer)
        for (size, color), is_sharded in zip(PARTS.values(), sharded, strict=True):
            # Sharded weights are cast from the main weights when a unit is unsharded, and take nothing in between.
            share = (0 if color == COLORS[0] else size / RANKS) if is_sharded else size
            drawing.box(x, y, share * scale, 38, color)
            x, total = x + share * scale, total + share
        drawing.text(x + 8, y + 25, f"{total:g}")
    _legend(drawing, 284, [(name, color) for name, (_, color) in PARTS.items()])
    return drawing


def _place_of(rank: int, outer: str) -> str:
    """The shard of the main weights that one of the ranks of two nodes holds."""
    with fake_ranks(2 * RANKS, rank):
        mesh = init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("outer", "inner"))
        axes, sharding = MeshIndex(mesh, "inner", "outer").dense, Sharding(INNER["optim_grads_params"], OUTER[outer])
        layout = plan_layout([*LAYER.values()], shards_of(sharding, axes))
        return f"{(Ownership.of(layout, sharding, axes).index or 0) + 1} of {layout.num_shards}"


def draw_meshes() -> Drawing:
    """Which shard of the main weights each GPU of two nodes holds: HSDP and hybrid FSDP."""
    drawing = Drawing("Two nodes of four GPUs with HSDP and with hybrid FSDP", 442)
    for group, (title, outer) in enumerate({"HSDP": "no_shard", "hybrid FSDP": "optim"}.items()):
        top = 34 + group * 184
        drawing.text(24, top, f"{title}: main weights", extra=BOLD)
        for node in range(2):
            y = top + 16 + node * 68
            drawing.text(24, y + 32, f"node {node}", extra=SMALL)
            for gpu in range(RANKS):
                x = 92 + gpu * 92
                drawing.box(x, y, 84, 52, COLORS[gpu])
                drawing.text(x + 42, y + 32, _place_of(node * RANKS + gpu, outer), "white", MIDDLE + SMALL)
    drawing.text(24, 402, "All-gathers of compute weights stay inside a node.", extra=SMALL)
    drawing.text(24, 422, "Equal labels are replicas.", extra=SMALL)
    return drawing


def draw_dtypes() -> Drawing:
    """The dtypes of weights and gradients through a step, by the default policy with float32 gradients."""
    drawing = Drawing("Dtypes through a step: main weights, compute weights, gradients, main gradients", 250)
    drawing.text(24, 34, "Dtypes through a step of a bf16 model", extra=BOLD)
    dtypes = MixedPrecisionPolicy(main_grads_dtype=torch.float32).resolve(torch.bfloat16, "weight")
    names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    main, grads, compute = (names[each] for each in (dtypes.main_params, dtypes.main_grads, dtypes.compute))
    rows = [
        [("main weights", f"{main} shard", 2), ("cast", f"{compute} shard", 0), ("all-gather", f"{compute} full", 0)],
        [
            ("optimizer", f"{main} shard", 2),
            ("reduce-scatter", f"{grads} shard", 1),
            ("backward", f"{compute} full", 1),
        ],
    ]
    for number, row in enumerate(rows):
        for column, (name, dtype, color) in enumerate(row):
            x, y = 24 + column * 154, 56 + number * 94
            drawing.box(x, y, 124, 60, COLORS[color])
            drawing.text(x + 62, y + 25, name, "white", MIDDLE + BOLD + SMALL)
            drawing.text(x + 62, y + 46, dtype, "white", MIDDLE + SMALL)
            if column < 2:
                drawing.text(x + 139, y + 36, "\u2192" if number == 0 else "\u2190", extra=MIDDLE + 'font-size="22"')
    drawing.text(24 + 2 * 154 + 62, 138, "\u2193", extra=MIDDLE + 'font-size="22"')
    drawing.text(86, 138, "\u2191", extra=MIDDLE + 'font-size="22"')
    drawing.text(24, 236, "forward to the right, gradients back to the left", extra=SMALL)
    return drawing


def draw_reshard() -> Drawing:
    """Rows of a parameter that four ranks save and two ranks load, from the layouts of both."""
    drawing = Drawing("A parameter is saved by four ranks and loaded by two", 272)
    shape = (40, 12)
    for number, (ranks, title) in enumerate({RANKS: "saved by 4 ranks", 2: "loaded by 2 ranks"}.items()):
        y, layout = 44 + number * 92, plan_layout([shape], ranks)
        drawing.text(24, y - 8, title, extra=BOLD)
        scale = (WIDTH - 48) / (shape[0] * shape[1])
        for rank in range(ranks):
            part = layout.shard_slice(0, rank)
            x, width = 24 + part.start * scale, (part.stop - part.start) * scale
            drawing.box(x + 1, y, width - 2, 46, COLORS[rank])
            rows = f"rows {part.start // shape[1]}-{part.stop // shape[1] - 1}"
            drawing.text(x + width / 2, y + 20, f"rank {rank}", "white", MIDDLE + SMALL)
            drawing.text(x + width / 2, y + 38, rows, "white", MIDDLE + SMALL)
    drawing.text(24, 216, "The checkpoint stores the full parameter in parts.", extra=SMALL)
    drawing.text(24, 236, "Each rank that loads reads the rows it needs,", extra=SMALL)
    drawing.text(24, 256, "from as many parts as that takes.", extra=SMALL)
    return drawing


# Ratios to other engines ----------------------------------------------------------------------------------------------


def draw_ratios(title: str, head: str) -> Drawing:
    """Bars for the columns with a slash, the ratios, of the table of docs/performance.md that begins with ``head``."""
    table = head + (ROOT / "docs" / "performance.md").read_text().partition(f"\n{head}")[2].partition("\n\n")[0]
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    first, left = next(i for i, name in enumerate(names) if name.split("/")[-1].lstrip()[:1].isupper()), 110
    height = 18 * len(names[first:]) + 12
    drawing = Drawing(title, (bottom := 52 + height * len(rows)) + 44)
    drawing.text(24, 34, f"{title}; lower is better", extra=BOLD)
    for number, row in enumerate(rows):
        y = 52 + height * number
        drawing.text(24, y + height / 2 - 2, ", ".join(row[: head.count("|") - 1]), extra=SMALL)
        for ratio, color in zip(row[first:], COLORS, strict=False):
            width = float(ratio) * (WIDTH - left - 60)
            drawing.box(left, y, width, 16, color)
            drawing.text(left + width - 36, y + 13, ratio, "white", SMALL)
            y += 18
    drawing.line(WIDTH - 60, 46, bottom)
    _legend(drawing, bottom + 12, zip(names[first:], COLORS, strict=False))
    return drawing


# Losses ---------------------------------------------------------------------------------------------------------------

STEPS = 40


def losses(strategy: str | None) -> list[float]:
    """The mean loss of every step on this rank's part of the data. None: with torch's DDP."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Embedding(64, 32), *(Residual(32) for _ in range(3)), nn.Linear(32, 64))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if strategy is None:
        model = nn.parallel.DistributedDataParallel(model)
    else:
        model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[Residual], zero_dp_strategy=strategy)
    found = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(2 * step + dist.get_rank())
        tokens = (torch.randint(64, (8, 1), generator=draw) + 3 * torch.arange(17)) % 64
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        found.append(mean.item())
    return found


class Residual(nn.Module):
    """A block of a small model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the input."""
        return x + self.down(torch.relu(self.up(x)))


def both_losses() -> tuple[list[float], list[float]]:
    """Those of DDP and of ZeRO-3."""
    return losses(None), losses("optim_grads_params")


def draw_losses(ddp: list[float], sharded: list[float]) -> Drawing:
    """Two curves on top of each other: DDP as circles, ZeRO-3 as a line."""
    apart = max(abs(a - b) / abs(a) for a, b in zip(ddp, sharded, strict=True))
    drawing = Drawing("The losses of DDP and ZeRO-3 over the steps of a run", 330)
    how_near = f"at most {apart:.0e} apart" if apart else "bit-identical"
    drawing.text(24, 34, f"Loss of DDP and ZeRO-3, 2 ranks, fp32: {how_near}", extra=BOLD)
    left, top, height = 64, 56, 210
    high, low = max(ddp), min(ddp)
    for value in (high, (high + low) / 2, low):
        y = top + (high - value) / (high - low) * height
        drawing.box(left, y, WIDTH - left - 24, 1, PADDING)
        drawing.text(left - 8, y + 5, f"{value:.2f}", extra='text-anchor="end" ' + SMALL)

    def places(values: list[float]) -> list[tuple[float, float]]:
        return [
            (left + 8 + step * (WIDTH - left - 44) / (STEPS - 1), top + (high - value) / (high - low) * height)
            for step, value in enumerate(values)
        ]

    drawing.curve(places(sharded), COLORS[0])
    drawing.circles(places(ddp), COLORS[1])
    drawing.text(WIDTH - 24, 290, "step \u2192", extra='text-anchor="end" ' + SMALL)
    _legend(drawing, 302, [("ZeRO-3 (line)", COLORS[0]), ("DDP (circles)", COLORS[1])])
    return drawing


# Memory over a step ------------------------------------------------------------------------------------------------

MIB = 2**20
DEPTH, BLOCK_WIDTH = 8, 384
COMPUTE, COMMUNICATION = 0.02, 0.005  # seconds that a block's pass and half a collective take at least


def measured(strategies: list[int]) -> list[dict[str, list]]:
    """The live bytes of all tensors over a step of rank 0 of 8, every millisecond: see tests/tensor_bytes.py."""
    # Kernels keep scratch memory from their first call on.
    return [_measured(strategy) for strategy in (*strategies[:1], *strategies)][1:]


def _measured(strategy: int) -> dict[str, list]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    streams._STREAMS["fake", None, ""] = SlowStream()
    counter = TensorBytes()
    torch.manual_seed(0)
    blocks = [Residual(BLOCK_WIDTH).bfloat16() for _ in range(DEPTH)]
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: time.sleep(COMPUTE))
        block.register_full_backward_hook(lambda *_: time.sleep(COMPUTE))
    model = nn.Sequential(*blocks)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
    sharded, optimizer = fully_shard(
        model,
        optimizer,
        fsdp_unit_modules=[Residual],
        zero_dp_strategy=strategy,
        mixed_precision_policy=policy,
    )
    samples: list[int] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.001):
            samples.append(counter.live())

    begins = []
    for step in range(3):
        if step == 2:  # the first ones allocate the optimizer's state and record the plan
            threading.Thread(target=sample).start()
            time.sleep(COMPUTE)
        for last in (False, True):
            begins.append(len(samples))
            with contextlib.nullcontext() if last else sharded.no_sync():
                loss = sharded(torch.randn(128, BLOCK_WIDTH, dtype=torch.bfloat16)).float().pow(2).mean()
                begins.append(len(samples))
                loss.backward()
        begins.append(len(samples))
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(COMPUTE)
    ended.set()
    dist.destroy_process_group()
    return {"bytes": samples, "begins": begins[-5:]}


class SlowStream(streams.CpuStream):
    """Communication of the fake process group that takes time."""

    def run(self, task: streams.Task) -> streams.Handle:
        """Run a task between two pauses."""

        def slow() -> None:
            time.sleep(COMMUNICATION)
            task()
            time.sleep(COMMUNICATION)

        return super().run(slow)

    def group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The same group: it is a fake."""
        return group


def draw_memory(found: list[dict[str, list]]) -> Drawing:
    """A curve for each of ZeRO-1, 2 and 3. Their phases take equally long in the picture."""
    drawing = Drawing("The memory of a rank over one step with ZeRO-1, 2 and 3", 350)
    weights = DEPTH * 8 * BLOCK_WIDTH**2 / 1e6
    drawing.text(24, 24, "MiB on rank 0 of 8 over a step:", extra=BOLD)
    drawing.text(24, 44, f"{weights:.0f} million weights in bf16, AdamW", extra=BOLD)
    left, right, top, height = 64, WIDTH - 24, 56, 220
    most = max(max(each["bytes"]) for each in found) / MIB
    for value in range(0, int(most) + 1, 10):
        y = top + height * (1 - value / most)
        drawing.box(left, y, right - left, 1, PADDING)
        drawing.text(left - 8, y + 5, str(value), extra='text-anchor="end" ' + SMALL)
    phases = ("", "forward 1", "backward 1", "forward 2", "backward 2", "step", "")
    ends = [left + (right - left) * share for share in (0, 0.04, 0.25, 0.46, 0.67, 0.88, 1)]
    for x, name in zip(ends[1:-1], phases[1:], strict=False):
        drawing.line(x, top, top + height)
        drawing.text(x + 4, top + height + 18, name, extra=SMALL)
    for each, color in zip(found, COLORS, strict=False):
        samples = each["bytes"]
        times = [0, *each["begins"], len(samples)]
        places: list[tuple[float, float]] = []
        for first, last, begin, end in zip(times, times[1:], ends, ends[1:], strict=False):
            for n in range(first, last):
                if n and n < len(samples) - 1 and samples[n - 1] == samples[n] == samples[n + 1]:
                    continue
                x = begin + (end - begin) * (n - first) / (last - first)
                places.append((x, top + height * (1 - samples[n] / MIB / most)))
        drawing.curve(places, color)
    _legend(drawing, 318, [(f"ZeRO-{n + 1}", color) for n, color in enumerate(COLORS[: len(found)])])
    return drawing


STATIC: dict[str, Callable[[], Drawing]] = {
    "layout": draw_layout,
    "zero_stages": draw_stages,
    "hsdp": draw_meshes,
    "dtypes": draw_dtypes,
    "reshard": draw_reshard,
    "peak_ratios": functools.partial(draw_ratios, "Peak relative to peers, by ranks", "| ranks |"),
    "step_ratios": functools.partial(draw_ratios, "Step time relative to peers", "| dtype | tokens per rank |"),
}


if __name__ == "__main__":
    from scripts import draw_pictures  # whose functions other processes find by name
    from tests.ranks import RankPool

    IMAGES.mkdir(exist_ok=True)
    for name, draw in STATIC.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg())
    pool = RankPool()
    (IMAGES / "losses.svg").write_text(draw_losses(*pool.run(2, draw_pictures.both_losses)[0]).svg())
    pool.close()
    with tempfile.TemporaryDirectory() as folder:
        curves = call_counted(build(Path(folder)), "scripts.draw_pictures:measured", [1, 2, 3])
    (IMAGES / "memory_over_a_step.svg").write_text(draw_memory(curves).svg())
    (IMAGES / "step.svg").write_text(draw_step(record_step()).svg())
