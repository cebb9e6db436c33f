"""Draws the pictures of the documentation from the engine's own layout and schedule.

    python scripts/draw_pictures.py     # writes docs/images/layout.svg and docs/images/step.svg

The pictures have a light ground of their own, so that they are legible on light and on dark pages.
"""

import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.fsdp.sharding.layout import Layout  # noqa: E402
from megatron.fsdp.sharding.packing import plan_layout  # noqa: E402
from megatron.fsdp.tools.trace.clock import HostClock  # noqa: E402
from megatron.fsdp.tools.trace.recorder import StepRecorder  # noqa: E402
from megatron.fsdp.tools.trace.spans import Kind, RankTrace, Row  # noqa: E402
from megatron_fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from tests.simulated.device import DEVICE, SimulatedDevice, simulated_device  # noqa: E402
from tests.simulated.ranks import fake_ranks  # noqa: E402

IMAGES = ROOT / "docs" / "images"
WIDTH = 720
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
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
            'font-family="system-ui, sans-serif" font-size="15">',
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

    def svg(self) -> str:
        """The file's text."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def _legend(drawing: Drawing, y: float, entries: Iterable[tuple[str, str]]) -> None:
    x = 24.0
    for name, color in entries:
        drawing.box(x, y, 14, 14, color)
        drawing.text(x + 20, y + 12, name, extra=SMALL)
        x += 38 + 7 * len(name)


# The layout of a unit ------------------------------------------------------------------------------------------------

LAYER = {"qkv": (36, 12), "qkv bias": (36,), "proj": (12, 12), "up": (40, 12), "down": (12, 40), "norm": (12,)}


def draw_layout() -> Drawing:
    """The parameters of a small transformer layer in the shards of four ranks."""
    layout = plan_layout([*LAYER.values()], RANKS)
    drawing = Drawing("The parameters of a layer in one flat buffer, which is cut into shards of four ranks", 396)
    drawing.text(
        24, 34, "The flat buffer of a unit: its parameters one after another, cut into equal shards", extra=BOLD
    )
    left, top, height = 24, 52, 48
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
    drawing.text(24, 168, "What each rank keeps: slices of whole rows", extra=BOLD)
    for rank in range(RANKS):
        _draw_shard(drawing, layout, rank, 184 + 40 * rank)
    padding = f"padding: {layout.padding} of {layout.numel}"
    _legend(drawing, 362, [*zip(LAYER, COLORS, strict=True), (padding, PADDING)])
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
    drawing = Drawing("A step on one rank: computation, all-gathers and reduce-scatters of four blocks over time", 262)
    drawing.text(24, 34, "One training step of four blocks with ZeRO-3, on one rank (simulated)", extra=BOLD)
    left, height = 140, 44
    scale = (WIDTH - left - 24) / (end - start)
    for number, (row, name) in enumerate(ROWS.items()):
        y = 56 + number * (height + 8)
        drawing.text(24, y + 28, name)
        drawing.box(left, y, WIDTH - left - 24, height, "#e3e6ea")
        for span in spans:
            is_wait = span.row is Row.WAITS and row is Row.COMPUTE
            if span.row is row or is_wait:
                x, width = left + (span.start - start) * scale, (span.end - span.start) * scale
                drawing.box(x + 0.75, y, max(width - 1.5, 1), height, WAIT if is_wait else SPANS[span.kind][1])
                if span.unit.isdigit() and not is_wait and width > 12:
                    drawing.text(x + width / 2, y + 28, str(int(span.unit) + 1), "white", MIDDLE)
    drawing.text(WIDTH - 24, 228, "time \u2192", extra='text-anchor="end" ' + SMALL)
    _legend(drawing, 236, [*SPANS.values(), ("wait", WAIT)])
    return drawing


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "layout.svg").write_text(draw_layout().svg())
    (IMAGES / "step.svg").write_text(draw_step(record_step()).svg())
