"""Runs a training command with Megatron's DDP and with our FSDP, and finds the first number that differs.

Both runs start from the same weights and train on the same data. Each rank records loss and gradient norm of every
iteration, all gradients of the first iteration, and all weights after the last, gathered over the data-parallel ranks.
The recordings of the same rank are compared.
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

# Relative differences that another order of summation may cause: of a number, and of a tensor's elements relative to
# its largest element.
TOLERANCES = {"fp32": (5e-6, 1e-4), "bf16": (1e-2, 5e-2)}
# Gradients below this fraction of a tensor's largest gradient are rounding errors.
NOISE = 1e-5

# Options for FSDP only, with the number of values that follow each.
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
# Options that would end the runs early or overwrite the user's files.
_DROPPED = {"--save": 1, "--load": 1, "--save-interval": 1, "--exit-interval": 1, "--tensorboard-dir": 1}


def without(arguments: Sequence[str], options: dict[str, int]) -> list[str]:
    """Remove options from a command line.

    Args:
        arguments: The command line.
        options: Names of options, with the number of values that follow each.
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
    """Set the value of an option in a command line."""
    return [*without(arguments, {option: 1}), option, str(value)]


# Recording a run -------------------------------------------------------------------------------------------------


@dataclass
class RunRecorder:
    """Records losses, gradients and weights of one rank.

    Attributes:
        folder: Folder for the recording.
        steps: Number of iterations.
        numbers: Loss and gradient norm of each iteration.
        gradients: Whole gradients of the first iteration, by name.
    """

    folder: Path
    steps: int
    numbers: list[tuple[float, float]] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def install(self) -> None:
        """Wrap the functions of Megatron's training loop."""
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
    """The gradient of each parameter on this tensor-parallel rank, in fp32, by name."""
    from megatron.fsdp.mcore.adapter import FullyShardedDataParallel

    for number, chunk in enumerate(model):
        if isinstance(chunk, FullyShardedDataParallel):
            for param, tensor in _gather_chunk(chunk, lambda main: main.grad):
                yield _key(number, param.name), tensor.float()
        else:
            for name, parameter in chunk.named_parameters():
                if parameter.requires_grad:
                    yield _key(number, name), parameter.main_grad.detach().float().cpu().clone()  # type: ignore[attr-defined]


def whole_weights(model: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter on this tensor-parallel rank, by name."""
    from megatron.fsdp.mcore.adapter import FullyShardedDataParallel

    for number, chunk in enumerate(model):
        if isinstance(chunk, FullyShardedDataParallel):
            chunk.stop_communication()
            for param, tensor in _gather_chunk(chunk, lambda main: main):
                yield _key(number, param.name), tensor.to(param.compute.dtype)
        else:
            for name, parameter in chunk.named_parameters():
                yield _key(number, name), parameter.detach().cpu().clone()


def key_shifts(model: list[nn.Module]) -> dict[str, tuple[torch.Tensor, str, torch.Tensor]]:
    """Find biases of attention keys.

    A bias of the keys adds the same value to all scores of a query, and softmax ignores it, so its exact gradient is
    zero. With rotary embeddings or a softmax offset, the gradient is not zero.

    Args:
        model: Model chunks in Megatron's DDP.

    Returns:
        By name of the bias: a mask of its rows that belong to keys, and name and mask of the bias of the queries.
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


def _gather_chunk(chunk: Any, choose: Callable[[nn.Parameter], Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Every parameter of a chunk, and the tensor that ``choose`` returns for it, gathered over data-parallel ranks."""
    from megatron.fsdp.dtensor.ragged_dtensor import local_shard

    for group in chunk.module.engine.groups:
        dp_group = group.axes.dp_group
        for param in group.params:
            value = choose(param.main)
            mine = None if value is None else local_shard(value).detach().cpu().reshape(-1)
            shards: list[Any] = [None] * dp_group.size()
            dist.all_gather_object(shards, (param.shard_slice.start, param.shard_slice.stop, mine), group=dp_group)
            whole = torch.zeros(math.prod(param.local_shape))
            for start, stop, shard in shards:
                if shard is not None and stop > start:
                    whole[start:stop] = shard.float()
            if param.trained or value is param.main:
                yield param, whole.view(param.local_shape)


def record(script: Path, arguments: Sequence[str]) -> None:
    """Run a script and record it. :func:`launch` calls this in every rank process."""
    from megatron.fsdp.mcore import install

    install()
    RunRecorder(Path(os.environ[RECORD]), int(os.environ[STEPS])).install()
    run(script, arguments)


def launch(script: Path, arguments: Sequence[str], ranks: int, steps: int, folder: Path, ddp: bool) -> str:
    """Train and record into ``folder``. Returns the end of the log if the run fails, else an empty string."""
    folder.mkdir(parents=True)
    words = with_value(with_value(without(arguments, _DROPPED), "--train-iters", steps), "--log-interval", 1)
    environment = {**os.environ, RECORD: str(folder), STEPS: str(steps)}
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if ddp:
        words = without(words, _ONLY_FSDP)
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [*command, "-m", "megatron.fsdp.tools.verify", "--record", str(script), *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    recorded = all((folder / f"{rank}.pt").exists() for rank in range(ranks))
    return "" if recorded else result.stdout[-4000:] or f"exit code {result.returncode}"


# Comparing two runs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A difference between the runs.

    Attributes:
        where: The iteration, and the parameter or quantity.
        rank: The rank that recorded it.
        difference: The relative difference.
    """

    where: str
    rank: int
    difference: float

    def __str__(self) -> str:
        return f"{self.where} (rank {self.rank}): relative difference {self.difference:.1e}"


@dataclass(frozen=True)
class RunComparison:
    """The result of a comparison.

    Attributes:
        findings: Differences, earliest first.
        compared: Number of compared numbers and tensors.
        largest: Largest relative difference within the tolerances.
        fingerprint: Hash of all weights of the FSDP run.
        noise: By name of weight, the number of elements that were left out because their gradient is a rounding error.
    """

    findings: list[Finding]
    compared: int
    largest: float
    fingerprint: str
    noise: dict[str, int] = field(default_factory=dict)


def compare(ddp: Path, fsdp: Path, ranks: int, precision: str) -> RunComparison:
    """Compare the recordings of two runs.

    Args:
        ddp: Folder of the run with DDP.
        fsdp: Folder of the run with FSDP.
        ranks: Number of ranks of each run.
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
    return RunComparison([finding for _, finding in found], compared, largest, digest.hexdigest()[:16], noise)


# Position in time, description, relative difference, and tolerance.
_Check = tuple[int, str, float, float]


def _numbers(a: dict[str, Any], b: dict[str, Any], precision: str) -> Iterator[_Check]:
    """Compare losses and gradient norms."""
    for number, (x, y) in enumerate(zip(a["numbers"], b["numbers"], strict=True), start=1):
        for what, p, q in zip(("loss", "gradient norm"), x, y, strict=True):
            yield 3 * number, f"iteration {number}, {what}", relative(p, q), TOLERANCES[precision][0]


def _gradients(a: dict[str, Any], b: dict[str, Any], precision: str) -> Iterator[_Check]:
    """Compare the gradients of the first iteration. For key biases, the scale is the gradient of the query bias."""
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
    """Compare weights: relative difference of each, and the number of elements left out to meet the tolerance."""
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
    """The difference of two numbers relative to the larger one; infinite if one is not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def _noise(name: str, a: dict[str, Any], b: dict[str, Any], precision: str) -> torch.Tensor | None:
    """A mask of elements whose gradient is only a rounding error, such as biases of attention keys.

    Optimizers that normalize gradients, such as Adam, turn these into steps of full size in a random direction.
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
    """The largest difference of elements, relative to the largest element or to ``scale``, whichever is larger."""
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
    # Gradients that are zero in theory may be tiny, so ignore absolute differences below 1e-9.
    return 0.0 if difference < 1e-9 else difference / largest
