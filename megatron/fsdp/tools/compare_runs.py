"""Runs a training command twice, with Megatron's DDP and with our FSDP, and finds the first number that differs.

Both runs start from equal weights and train on equal data. Each rank records loss and gradient norm of every iteration,
all gradients of the first one, and all weights after the last, gathered over the data-parallel ranks; what one rank
computes with DDP is what the same rank computes with FSDP.
"""

import functools
import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.helpers.spelling import bare_name
from megatron.fsdp.tools.script import run

RECORD = "MEGATRON_FSDP_RECORD"
STEPS = "MEGATRON_FSDP_RECORD_STEPS"

# Relative. What equal sums of another order may differ by: of one number, and of the elements of a tensor against its
# largest. bf16 has 8 bits.
TOLERANCES = {"fp32": (5e-6, 1e-4), "bf16": (1e-2, 5e-2)}
# Of a tensor's largest gradient.
NOISE = 1e-5

# Options that only one of the two takes, and how many words follow.
_ONLY_FSDP = {
    "--use-megatron-fsdp": 0,
    "--data-parallel-sharding-strategy": 1,
    "--outer-dp-sharding-strategy": 1,
    "--num-distributed-optimizer-instances": 1,
    "--fsdp-double-buffer": 0,
    "--nccl-ub": 0,
    "--init-model-with-meta-device": 0,
    "--ckpt-format": 1,
    "--use-distributed-optimizer": 0,
    "--overlap-param-gather": 0,
    "--megatron-fsdp-main-params-dtype": 1,
    "--megatron-fsdp-main-grads-dtype": 1,
    "--megatron-fsdp-grad-comm-dtype": 1,
}
# What would make the runs differ from what was asked for, or write to where the user's own runs are.
_DROPPED = {"--save": 1, "--load": 1, "--save-interval": 1, "--exit-interval": 1, "--tensorboard-dir": 1}


def without(arguments: Sequence[str], options: dict[str, int]) -> list[str]:
    """The command line without some options.

    Args:
        arguments: Words.
        options: Names, and how many words follow each.
    """
    kept, words = [], iter(arguments)
    for word in words:
        name, _, value = word.partition("=")
        if name not in options:
            kept.append(word)
        elif not value:
            for _ in range(options[name]):
                next(words, None)
    return kept


def with_value(arguments: Sequence[str], option: str, value: int) -> list[str]:
    """The command line with another value of an option."""
    return [*without(arguments, {option: 1}), option, str(value)]


# The run ---------------------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """Writes what a rank computed.

    Attributes:
        folder: Where to.
        steps: Iterations.
        numbers: Loss and gradient norm of each.
    """

    folder: Path
    steps: int
    numbers: list[tuple[float, float]] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def install(self) -> None:
        """Watch Megatron's loop."""
        from megatron.training import training

        training.train_step = self._watch_step(training.train_step)
        training.finalize_model_grads = self._watch_gradients(training.finalize_model_grads)

    def _watch_gradients(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(finalize)
        def finalize_and_record(model: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
            result = finalize(model, *args, **kwargs)
            if not self.numbers and not self.gradients:
                self.gradients = dict(whole_gradients(model))
            return result

        return finalize_and_record

    def _watch_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train_step)
        def step_and_record(step: Any, data: Any, model: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
            result = train_step(step, data, model, *args, **kwargs)
            losses, norms = result[0], [value for value in result[1:] if isinstance(value, float)]
            loss = sum(float(value) for value in losses.values()) if losses else 0.0
            self.numbers.append((loss, norms[0] if norms else 0.0))
            if len(self.numbers) == self.steps:
                found = {
                    "numbers": self.numbers,
                    "gradients": self.gradients,
                    "weights": dict(whole_weights(model)),
                    "key shifts": {} if _is_ours(model) else key_shifts(model),
                }
                torch.save(found, self.folder / f"{dist.get_rank()}.pt")
            return result

        return step_and_record


def _is_ours(model: list[nn.Module]) -> bool:
    from megatron.fsdp.mcore.adapter import FullyShardedDataParallel

    return all(isinstance(chunk, FullyShardedDataParallel) for chunk in model)


def whole_gradients(model: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter's gradient as this rank computes with the parameter, in fp32, by name."""
    from megatron.fsdp.mcore.adapter import FullyShardedDataParallel

    for number, chunk in enumerate(model):
        if isinstance(chunk, FullyShardedDataParallel):
            for entry, tensor in _gathered(chunk, lambda main: main.grad):
                yield _key(number, entry.name), tensor.float()
        else:
            for name, parameter in chunk.named_parameters():
                if parameter.requires_grad:
                    yield _key(number, name), parameter.main_grad.detach().float().cpu().clone()  # type: ignore[attr-defined]


def whole_weights(model: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter as this rank computes with it, by name."""
    from megatron.fsdp.mcore.adapter import FullyShardedDataParallel

    for number, chunk in enumerate(model):
        if isinstance(chunk, FullyShardedDataParallel):
            chunk.stop_communication()
            for entry, tensor in _gathered(chunk, lambda main: main):
                yield _key(number, entry.name), tensor.to(entry.compute.dtype)
        else:
            for name, parameter in chunk.named_parameters():
                yield _key(number, name), parameter.detach().cpu().clone()


def key_shifts(model: list[nn.Module]) -> dict[str, tuple[torch.Tensor, str, torch.Tensor]]:
    """Biases that shift all keys of an attention alike, by name: their rows, and name and rows of the queries' bias.

    A shift of all keys adds the same to all scores of a query, of which a softmax sees nothing: in exact arithmetic
    such a bias has no gradient. Where keys are turned by their positions, or the softmax has an offset, it has one.

    Args:
        model: Chunks in Megatron's DDP.
    """
    from megatron.core import parallel_state
    from megatron.fsdp.mcore.parameter_names import layouts

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    found = {}
    for number, chunk in enumerate(model):
        biases = {name: p for name, p in chunk.named_parameters() if name.endswith(".bias")}
        parts = {name: ranks if getattr(p, "tensor_model_parallel", False) else 1 for name, p in biases.items()}
        shapes = {name: (len(p) * parts[name],) for name, p in biases.items()}
        for name, layout in layouts(chunk, shapes).items():
            kinds = [kind for kind, rows in layout.sections for _ in range(rows)]
            groups, rest = divmod(len(biases[name]), len(kinds))
            if name.endswith("linear_qkv.bias") and not rest:
                key, query = (torch.tensor([kind == one for kind in kinds] * groups) for one in ("key", "query"))
                found[_key(number, name)] = key, _key(number, name), query
        for name, bias in biases.items():
            queries = name.replace(".k_layernorm.", ".q_layernorm.")
            if queries != name and queries in biases:
                everything = torch.ones(len(bias), dtype=torch.bool)
                found[_key(number, name)] = everything, _key(number, queries), everything
    return found


def _key(chunk: int, name: str) -> str:
    return f"chunk {chunk}: {bare_name(name)}" if chunk else bare_name(name)


def _gathered(chunk: Any, choose: Callable[[nn.Parameter], Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Every parameter, and the whole of what ``choose`` takes of it, gathered over the data-parallel ranks."""
    from megatron.fsdp.dtensor.ragged_dtensor import local_shard

    for group in chunk.module.engine.groups:
        axis = group.axes.dp_group
        for entry in group.params:
            value = choose(entry.main)
            mine = None if value is None else local_shard(value).detach().cpu().reshape(-1)
            parts: list[Any] = [None] * axis.size()
            dist.all_gather_object(parts, (entry.shard_slice.start, entry.shard_slice.stop, mine), group=axis)
            whole = torch.zeros(math.prod(entry.local_shape))
            for start, stop, part in parts:
                if part is not None and stop > start:
                    whole[start:stop] = part.float()
            if entry.trained or value is entry.main:
                yield entry, whole.view(entry.local_shape)


def record(script: Path, arguments: Sequence[str]) -> None:
    """Run a script, recording; called in every rank process of :func:`launch`."""
    from megatron.fsdp.mcore import install

    install()
    Recorder(Path(os.environ[RECORD]), int(os.environ[STEPS])).install()
    run(script, arguments)


def launch(script: Path, arguments: Sequence[str], ranks: int, steps: int, folder: Path, ddp: bool) -> str:
    """Train, recording into ``folder``; return the end of the log if that fails, else nothing."""
    folder.mkdir(parents=True)
    words = with_value(with_value(without(arguments, _DROPPED), "--train-iters", steps), "--log-interval", 1)
    environment = {**os.environ, RECORD: str(folder), STEPS: str(steps)}
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if ddp:
        words = without(words, _ONLY_FSDP)
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [*command, "-m", "megatron.fsdp.verify", "--record", str(script), *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    recorded = all((folder / f"{rank}.pt").exists() for rank in range(ranks))
    return "" if recorded else result.stdout[-4000:] or f"exit code {result.returncode}"


# The comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A number in which the runs differ.

    Attributes:
        where: Iteration, and parameter or quantity.
        rank: Where it was seen.
        difference: Relative.
    """

    where: str
    rank: int
    difference: float

    def __str__(self) -> str:
        return f"{self.where} (rank {self.rank}): relative difference {self.difference:.1e}"


@dataclass(frozen=True)
class Comparison:
    """What came of it.

    Attributes:
        findings: Differences, the earliest first.
        compared: How many numbers and tensors.
        largest: The largest relative difference of those that agree.
        fingerprint: Of all weights of the FSDP run.
        noise: Weights that agree but for elements whose gradient is rounding, by name: how many of these there are.
    """

    findings: list[Finding]
    compared: int
    largest: float
    fingerprint: str
    noise: dict[str, int] = field(default_factory=dict)


def compare(ddp: Path, fsdp: Path, ranks: int, precision: str) -> Comparison:
    """Compare what two runs recorded.

    Args:
        ddp: Folder of the run with DDP.
        fsdp: Folder of the run with FSDP.
        ranks: Of each.
        precision: A key of ``TOLERANCES``.
    """
    digest = hashlib.sha256()
    found: list[tuple[int, Finding]] = []
    compared, largest, noise = 0, 0.0, {}
    for rank in range(ranks):
        a, b = (torch.load(folder / f"{rank}.pt", weights_only=True) for folder in (ddp, fsdp))
        checks = [*_numbers(a, b, precision), *_gradients(a, b, precision)]
        for name, difference, discounted in _weights(a, b, precision):
            checks.append((10**9, f"last, weight of {name}", difference, TOLERANCES[precision][1]))
            if discounted:
                noise[name] = discounted
        for name in sorted(b["weights"]):
            digest.update(name.encode() + b["weights"][name].float().numpy().tobytes())
        compared += len(checks)
        for order, where, difference, allowed in checks:
            if difference <= allowed:
                largest = max(largest, difference)
            else:
                found.append((order, Finding(where, rank, difference)))
    found.sort(key=lambda pair: pair[0])
    return Comparison([finding for _, finding in found], compared, largest, digest.hexdigest()[:16], noise)


# Order in time, place, relative difference, and how much that may be.
_Check = tuple[int, str, float, float]


def _numbers(a: dict[str, Any], b: dict[str, Any], precision: str) -> Iterator[_Check]:
    """Losses and gradient norms."""
    for number, (x, y) in enumerate(zip(a["numbers"], b["numbers"], strict=True), start=1):
        for what, p, q in zip(("loss", "gradient norm"), x, y, strict=True):
            yield 3 * number, f"iteration {number}, {what}", relative(p, q), TOLERANCES[precision][0]


def _gradients(a: dict[str, Any], b: dict[str, Any], precision: str) -> Iterator[_Check]:
    """Gradients of the first iteration; of a bias that shifts keys, against those of the queries' bias."""
    for name in sorted(a["gradients"].keys() | b["gradients"].keys()):
        difference = math.inf
        if name in a["gradients"] and name in b["gradients"]:
            scale = 0.0
            if name in a["key shifts"]:
                _, queries, rows = a["key shifts"][name]
                scale = float(a["gradients"][queries][rows].abs().max())
            difference = _distance(a["gradients"][name], b["gradients"][name], scale=scale)
        yield 1, f"iteration 1, gradient of {name}", difference, TOLERANCES[precision][1]


def _weights(a: dict[str, Any], b: dict[str, Any], precision: str) -> Iterator[tuple[str, float, int]]:
    """Each weight's relative difference, and how many elements had to be left out for it to be within the tolerance."""
    allowed = TOLERANCES[precision][1]
    for name in sorted(a["weights"].keys() | b["weights"].keys()):
        if name not in a["weights"] or name not in b["weights"]:
            yield name, math.inf, 0
            continue
        noise = _noise(name, a, b, precision)
        pair = a["weights"][name], b["weights"][name]
        difference = _distance(*pair, noise)
        discounted = noise is not None and difference <= allowed < _distance(*pair)
        yield name, difference, int(noise.sum()) if discounted and noise is not None else 0


def relative(a: float, b: float) -> float:
    """The difference of two numbers against the larger of them; infinite if one is not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def _noise(name: str, a: dict[str, Any], b: dict[str, Any], precision: str) -> torch.Tensor | None:
    """Elements whose gradient is nothing but rounding, such as a key's bias before a softmax.

    Optimizers that divide a gradient by its size, as Adam does, make steps of it that mean nothing.
    """
    gradient = a["gradients"].get(name)
    if gradient is None:
        return None
    noise: torch.Tensor = gradient.abs() <= NOISE * gradient.abs().max()
    if name in a["key shifts"] and name in b["gradients"]:
        rows, queries, of_queries = a["key shifts"][name]
        scale = a["gradients"][queries][of_queries].abs().max()
        largest = max(run["gradients"][name][rows].abs().max() for run in (a, b))
        if largest <= TOLERANCES[precision][1] * scale:
            noise |= rows
    return noise


def _distance(a: torch.Tensor, b: torch.Tensor, ignored: torch.Tensor | None = None, scale: float = 0.0) -> float:
    """The largest difference of two elements, against the largest element or, if that is larger, ``scale``."""
    if a.shape != b.shape:
        return math.inf
    if ignored is not None:
        a, b = a.masked_fill(ignored, 0), b.masked_fill(ignored, 0)
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    largest = max(scale, float(torch.maximum(a.abs(), b.abs()).max()))
    difference = float((a - b).abs().max())
    if not math.isfinite(difference):
        return math.inf
    # Sums of zeros are not always zero.
    return 0.0 if difference < 1e-9 else difference / largest
