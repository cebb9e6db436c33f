"""Predicts a training step of a Megatron command line: its script, its schedule and the engine run on ghosts.

One process stands for one rank of any number. Of each kind of layer, a run keeps a few; one more run per kind, with two
more, says what each further layer adds. Layers are Megatron's own in plain PyTorch, with fused attention and norms
where the command line has them: Transformer Engine's kernels are not run. Other pipeline stages are assumed to take as
long as this one.
"""

import bisect
import dataclasses
import functools
import importlib
import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import adam

from megatron.fsdp.tools.examine import become_rank, described, dry_run, has_fused_attention, keep_to_itself
from megatron.fsdp.tools.fit import Situation, verdict
from megatron.fsdp.tools.predict import Clock, Moment, kernels, moments
from megatron.fsdp.tools.predict.ghosts import Cost
from megatron.fsdp.tools.predict.machine import Cluster
from megatron.fsdp.tools.predict.play import Simulation, in_program_order
from megatron.fsdp.tools.predict.record import LOSS, LabelledMemory, Mark, Recorder
from megatron.fsdp.tools.predict.replay import Replays, kind_of
from megatron.fsdp.tools.recipes import DTYPES, PlannedWeight, plan, quantized_weights, recipe_of
from megatron.fsdp.tools.report import Report
from megatron.fsdp.tools.script import Change, CommandStep, edited, options_without, recomputation, run
from megatron.fsdp.tools.trace.recorder import StepRecorder
from megatron.fsdp.tools.trace.spans import Kind, RankTrace, Row

# Layers of each kind that a run keeps: more than are unsharded at the same time. With a double buffer, layers differ by
# turns, so another run has two more.
KEPT, MORE = 4, 6
# Steps, or samples, of a training that is long enough.
LONG = 1 << 20
# Numbers in names of modules.
NUMBER = r"\.(\d+)(?=\W|$)"
# Templates of layers, which all runs of this process share.
KNOWN: dict[Any, Any] = {}
# Flags that change what is around layers, and not what layers do.
OF_SHARDING = (
    "--data-parallel-sharding-strategy",
    "--num-distributed-optimizer-instances",
    "--outer-dp-sharding-strategy",
    "--pipeline-model-parallel-size",
    "--decoder-last-pipeline-num-layers",
)
# Seconds of each unit by what takes them.
Units = dict[str, dict[str, float]]
# Kinds of communication, as the report calls them.
WAITS, OTHER = {"gather": "unshard", "reduction": "reduce"}, str(Kind.OTHER)


class _Ended(BaseException):
    """Ends the script after the predicted steps. Not an ``Exception``, which the script might catch."""


def judge(script: Path, arguments: Sequence[str], report: Report, cluster: Cluster, capacity: int) -> Report:
    """Predict a step of a command line that the doctor has accepted, and say whether it fits into a device.

    Args:
        script: A training script for Megatron.
        arguments: Its command line.
        report: What the doctor has said of it.
        cluster: What the ranks compute on.
        capacity: Bytes of a device.

    Returns:
        The report of the fullest stage, with ``step`` and ``verdict``.
    """
    best, predicted = report, None
    try:
        best = predict_stages(script, arguments, report, cluster)
        predicted = functools.partial(_with_fewer_activations, script, arguments, best, cluster)
    except Exception as error:  # noqa: BLE001 - the rest of the report stands
        best.step = described(error, script)
    assert best.situation is not None, "the command line was accepted"
    best.verdict = verdict(best.situation, capacity, best.world_size, predicted)
    return best


def predict_stages(
    script: Path, arguments: Sequence[str], report: Report, cluster: Cluster, slowest: float = 0.0
) -> Report:
    """Predict a step of the first and the last pipeline stage: one has most micro-batches, the other has logits.

    If the first trains on less than ``slowest`` tokens per second, the last one does not matter.

    Returns:
        The report of the one that holds more, with the time of the slower one.
    """
    ends = report.stages[:1] + report.stages[1:][-1:]
    steps: list[CommandStep] = []
    situations: list[Situation] = []
    for each in ends:
        steps.append(predict_command(script, arguments, each, cluster))
        situations.append(_with_step(each, steps[-1]))
        if steps[-1].tokens_per_second < slowest:
            break
    longest = max(steps, key=lambda each: each.seconds)
    fullest = max(range(len(steps)), key=lambda number: situations[number].total)
    best, step = ends[fullest], steps[fullest]
    best.situation = situations[fullest]
    best.step = dataclasses.replace(longest, peak=step.peak, module=step.module)
    best.stages = report.stages
    return best


def _with_step(report: Report, step: CommandStep) -> Situation:
    """The situation of a stage with the bytes that a step adds to those of layouts."""
    assert report.situation is not None, "the command line was accepted"
    rest = sum(step.peak.values()) - report.situation.of_layouts.total
    return dataclasses.replace(report.situation, rest=rest)


def _with_fewer_activations(
    script: Path, arguments: Sequence[str], report: Report, cluster: Cluster
) -> Iterator[tuple[str, int]]:
    """Flags that need fewer activations, in the order of what they cost, and at last all together, with their bytes."""
    args = report.args
    changes: list[Change] = []
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        changes.append({"--sequence-parallel": ""})
    if args.micro_batch_size > 1:
        changes.append({"--micro-batch-size": "1"})
    if args.recompute_granularity != "full":
        changes.append(recomputation("full", method="uniform", num_layers="1"))
    together: Change = functools.reduce(operator.or_, changes, {})
    for change in [*changes, together] if len(changes) > 1 else changes:
        try:
            step = predict_command(script, edited(arguments, change)[0], report, cluster)
        except (Exception, SystemExit):  # noqa: BLE001 - Megatron refuses it together with other flags
            continue
        rest = _with_step(report, step).rest
        assert rest is not None, "a step was predicted"
        yield " ".join(f"{flag} {value}".strip() for flag, value in change.items() if value is not None), rest


def predict_command(script: Path, arguments: Sequence[str], report: Report, cluster: Cluster) -> CommandStep:
    """Predict a step of a command line that the doctor has accepted.

    Args:
        script: A training script for Megatron.
        arguments: Its command line.
        report: What the doctor has said of it. The first rank of its pipeline stage is run.
        cluster: What the ranks compute on.

    Raises:
        NotImplementedError: The shape of an operator's result depends on values. The message names the operator.
    """
    stages = report.sizes["pipeline"]
    rank, behind = report.stage * report.world_size // stages, stages - 1 - report.stage
    found = _Run(cluster, {}, behind)
    found.go(script, arguments, report.world_size, rank)
    numbers, peaks = Counter(found.numbers), {place: Counter(peak.bytes) for place, peak in found.peaks.items()}
    for kind, count in found.counts.items():
        if count > MORE:
            more = _Run(cluster, {kind: MORE}, behind)
            more.go(script, arguments, report.world_size, rank)
            factor = (count - KEPT) / (MORE - KEPT)
            _extrapolate(numbers, found.numbers, more.numbers, factor)
            for place in peaks.keys() & more.peaks.keys():
                _extrapolate(peaks[place], found.peaks[place].bytes, more.peaks[place].bytes, factor)
    highest = max(peaks, key=lambda place: peaks[place].total())
    seconds = numbers["seconds"] + numbers["bubble"]
    return CommandStep(
        seconds,
        numbers["bubble"],
        found.tokens / seconds,
        found.flops / report.world_size / seconds / cluster.device.flops[found.dtype],
        {name: numbers[f"wait {name}"] for name in (*WAITS.values(), OTHER)},
        {name: max(round(size), 0) for name, size in peaks[highest].items()},
        found.peaks[highest].module,
        found.units,
        numbers["communication"],
        numbers["optimizer"],
    )


def _extrapolate(total: Counter[str], few: Mapping[str, float], more: Mapping[str, float], factor: float) -> None:
    """Add ``factor`` times the difference between two runs to every number."""
    for name in few.keys() | more.keys():
        total[name] += factor * (more.get(name, 0) - few.get(name, 0))  # type: ignore[assignment]


class _Run:
    """One run of the script.

    Args:
        cluster: What the ranks compute on.
        kept: Layers to keep of a kind, if not ``KEPT``.
        behind: Number of pipeline stages after this one. As many micro-batches are in flight besides the latest.

    Attributes:
        counts: Layers of each kind that the stage has.
        numbers: Seconds of a step.
        peaks: See :func:`_peaks`.
        units: See ``CommandStep``.
        tokens: Of a step, on all ranks.
        flops: Floating-point operations of the model in a step, on all ranks, as Megatron counts them.
        dtype: Name of the dtype of the computation.
    """

    def __init__(self, cluster: Cluster, kept: dict[Any, int], behind: int) -> None:
        self._cluster, self._kept, self._behind = cluster, kept, behind
        self._recorder = Recorder("nccl", runs_ahead=True)
        self._labels: list[LabelledMemory] = []
        self._engines: list[Any] = []
        self._ends: list[tuple[Mark, Mark]] = []  # of steps that have recorded no layer
        self._backwards: list[Mark] = []
        self._steps: list[StepRecorder] = []
        self.counts: dict[Any, int] = {}
        self.numbers: dict[str, float] = {}
        self.peaks: dict[Any, Moment] = {}
        self.units: dict[str, dict[str, float]] = {}
        self.tokens = 0
        self.flops = 0.0
        self.dtype = "bfloat16"

    def go(self, script: Path, arguments: Sequence[str], world_size: int, rank: int) -> None:
        """Run the script up to the end of a few steps."""
        become_rank(rank, world_size)
        # With several micro-batches in flight, layers meet what other ones have left.
        setting = str(self._cluster.device), world_size, not self._behind, *options_without(arguments, OF_SHARDING)
        self._replays = Replays(self._recorder, self._cluster.device.seconds, KNOWN, setting)
        validation: Any = importlib.import_module("megatron.training.arguments")
        training: Any = importlib.import_module("megatron.training.training")
        schedules: Any = importlib.import_module("megatron.core.pipeline_parallel.schedules")
        attention: Any = resolve_name("megatron.core.transformer.dot_product_attention:DotProductAttention")
        layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
        experts: Any = resolve_name("megatron.core.transformer.moe.experts:SequentialMLP")
        with ExitStack() as active, dry_run(self._wrapper(), lambda: MORE) as replace:
            replace(validation, "validate_args", self._validate)
            replace(training, "setup_model_and_optimizer", functools.partial(self._set_up, training, active))
            replace(training, "build_train_valid_test_data_iterators", self._iterators)
            replace(training, "train_step", self._step)
            replace(schedules, "forward_step", self._forward)
            replace(schedules, "backward_step", self._backward)
            replace(dist, "all_gather_object", _gather_as_neighbours)
            replace(attention, "forward", self._attend)
            replace(experts, "__init__", self._build_experts)
            replace(experts, "forward", self._compute_experts)
            replace(layers.LinearWithGradAccumulationAndAsyncCommunication, "backward", self._backward_of_linear)
            for linear in (layers.ColumnParallelLinear, layers.RowParallelLinear):
                replace(linear, "_forward_impl", self._compute_linear)
            replace(adam, "adam", kernels.one_adam)
            self._replace_kernels(replace)
            try:
                run(script, arguments)
            except _Ended:
                pass
            else:
                raise RuntimeError("The script ended without training.")
            self._replays.finish()
            active.close()
        self._play()

    # What the script meets ----------------------------------------------------------------------------------------

    def _validate(self, validate: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
        self._fused = has_fused_attention(args)
        self._format = next((dtype for name, dtype in DTYPES.items() if getattr(args, name)), "")
        self._recipe = recipe_of(args)  # these are switched off on a CPU
        self._kernels = {"softmax": args.masked_softmax_fusion, "rotary": args.apply_rope_fusion}
        keep_to_itself(args)
        args.fake_process_group = 1  # a dry run: True is refused
        args.init_model_with_meta_device = args.perform_initialization = False
        args.save = args.load = args.tensorboard_dir = args.rampup_batch_size = None
        args.exit_signal_handler = args.nccl_ub = args.manual_gc = False
        args.exit_interval = args.exit_duration_in_mins = None
        for length in ("train_iters", "train_samples"):
            if getattr(args, length):
                setattr(args, length, max(getattr(args, length), LONG))
        self._grouped = args.moe_grouped_gemm
        result = validate(args, *rest, **kwargs)
        per_micro_batch = args.micro_batch_size * args.data_parallel_size
        self._micro_batches = max((args.global_batch_size or per_micro_batch) // per_micro_batch, 1)
        self._stages = args.pipeline_model_parallel_size
        # Memory is at its peak with all that can be in flight. Schedules that interleave take multiples of the stages,
        # and at most twice as many are in flight.
        interleaved = bool(args.virtual_pipeline_model_parallel_size)
        self._round = self._stages if interleaved else min(self._stages, 2)
        few = min(self._micro_batches, 2 * self._stages if interleaved else max(1 + self._behind, self._round))
        self._taken = few + self._round * (self._micro_batches > few)
        self.tokens = self._micro_batches * per_micro_batch * args.seq_length
        self._per_micro_batch = per_micro_batch
        # The first step allocates what only several micro-batches need.
        args.global_batch_size = min(self._taken, max(self._round, 2)) * per_micro_batch
        self._args = args
        return result

    def _set_up(self, training: Any, active: ExitStack, setup: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        active.enter_context(self._recorder.active())
        found = setup(*args, **kwargs)
        batch = self._micro_batches * self._per_micro_batch
        self.flops = training.num_floating_point_operations(self._args, batch)
        self.dtype = str(self._args.params_dtype).removeprefix("torch.")
        self._args.do_train, self._args.do_valid, self._args.do_test = True, False, False
        return found

    def _wrapper(self) -> type[Any]:
        """The wrapper of model chunks, which keeps some of their layers."""
        from megatron.fsdp.mcore.adapter import FullyShardedDataParallel

        this = self

        class Wrapper(FullyShardedDataParallel):
            def __init__(self, config: Any, ddp_config: Any, module: nn.Module, *rest: Any, **kwargs: Any) -> None:
                for weight in quantized_weights(module, config) if this._format else ():
                    weight.computes_quantized = True  # type: ignore[attr-defined]
                    if this._recipe is not None:
                        plan(weight, this._recipe)
                this._drop_layers(module)
                super().__init__(config, ddp_config, module, *rest, **kwargs)
                this._engines.append(self.module.engine)
                this._labels.append(LabelledMemory(this._recorder, self.module.module, self.module.engine))
                this._replays.attach(self.module.module, self.module.engine)

        return Wrapper

    def _drop_layers(self, module: nn.Module) -> None:
        blocks: list[Any] = [m for m in module.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList)]
        kinds = {layer: kind_of(layer) for block in blocks for layer in block.layers}
        counts = Counter(kinds[layer] for block in blocks for layer in block.layers)
        left = {kind: count if count <= MORE else self._kept.get(kind, KEPT) for kind, count in counts.items()}
        for block in blocks:
            kept = []
            for layer in block.layers:
                left[kinds[layer]] -= 1
                if left[kinds[layer]] >= 0:
                    kept.append(layer)
            for parameter in (p for layer in {*block.layers} - {*kept} for p in layer.parameters()):
                parameter.untyped_storage().resize_(0)  # what has built the layer still holds it
            block.layers = nn.ModuleList(kept)
            if hasattr(block, "num_layers_per_pipeline_rank"):
                block.num_layers_per_pipeline_rank = len(kept)
        # Chunks of a stage are alike.
        self.counts = {kind: max(count, self.counts.get(kind, 0)) for kind, count in counts.items()}

    def _iterators(self, *unused: Any, **kwargs: Any) -> tuple[Any, None, None]:
        """Batches without data."""
        from megatron.core.rerun_state_machine import RerunDataIterator

        args = self._args

        def batches() -> Iterator[dict[str, torch.Tensor]]:
            shape = args.micro_batch_size, args.seq_length
            integers = torch.zeros(shape, dtype=torch.int64)
            batch = {"tokens": integers, "labels": integers, "position_ids": integers, "loss_mask": torch.ones(shape)}
            yield from itertools.repeat(batch)

        return RerunDataIterator(batches()), None, None

    def _step(
        self,
        step: Callable[..., Any],
        forward_step: Any,
        iterator: Any,
        model: Any,
        optimizer: Any,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        """The first step allocates state and records the plan, and the second one is the first to follow it."""
        recorder, is_first = self._recorder, not self._ends
        if is_first:
            optimizer.step = functools.partial(self._update, optimizer.step)
        else:
            self._take_micro_batches(self._taken)
        self._steps = [] if is_first else [StepRecorder(engine, Clock(recorder)) for engine in self._engines]
        self._backwards.clear()
        recordings = self._replays.recordings
        begin = recorder.mark("forward")
        for each in self._steps:
            each.start()
        result = step(forward_step, iterator, model, optimizer, *rest, **kwargs)
        for each in self._steps:
            each.stop()
        for each in getattr(optimizer, "chained_optimizers", [optimizer]):
            for labels in self._labels:
                labels.label(each.optimizer)
        self._replays.end_step()
        if recordings == self._replays.recordings:  # else the next one repeats them
            self._ends.append((begin, recorder.mark("")))
        if len(self._ends) == 2:
            raise _Ended
        return result

    def _take_micro_batches(self, number: int) -> None:
        calculator: Any = importlib.import_module("megatron.core.num_microbatches_calculator")
        args = self._args
        args.global_batch_size = number * self._per_micro_batch
        calculator.reconfigure_num_microbatches_calculator(
            args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
        )

    def _update(self, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._recorder.mark("optimizer")
        return update(*args, **kwargs)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._labels[0].forward():
            return forward(*args, **kwargs)

    def _backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._labels[0].begin_backward()
        self._backwards.append(self._recorder.mark())
        return backward(*args, **kwargs)

    def _attend(self, attend: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        if self._fused:
            groups: Any = importlib.import_module("megatron.core.parallel_state")
            ring = groups.get_context_parallel_group()
            return kernels.Attention.apply(self._recorder.entries, ring, *args[:3])  # query, key and value
        return attend(module, *args, **kwargs)

    def _replace_kernels(self, replace: Callable[..., Any]) -> None:
        """Record what is one kernel on a GPU as one operator."""
        softmax: Any = resolve_name("megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax")
        rotary: Any = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
        replace(softmax, "forward", self._softmax)
        replace(rotary, "_apply_rotary_pos_emb_bshd", self._rotary)
        for owner, name in kernels.compiled():
            replace(owner, name, self._recorder.as_one)

    def _softmax(self, compute: Callable[..., Any], module: Any, scores: torch.Tensor, *rest: Any) -> Any:
        fused = self._kernels["softmax"]
        return kernels.Kernel.apply(self, scores, True) if fused else compute(module, scores, *rest)

    def _rotary(self, compute: Callable[..., Any], x: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        return kernels.Kernel.apply(self, x, False) if self._kernels["rotary"] else compute(x, *rest, **kwargs)

    def add(self, cost: Cost) -> None:
        """Record an operator."""
        self._recorder.add(cost)

    def quantized(self, weight: Any, *inputs: torch.Tensor) -> AbstractContextManager[None]:
        """Where a linear layer computes, in 8 or 4 bits if it does so with this weight."""
        if not getattr(weight, "computes_quantized", False):
            return nullcontext()
        cast = inputs if isinstance(weight, PlannedWeight) else (*inputs, weight)
        return self._recorder.quantized(self._format, weight, *cast)

    def _compute_linear(self, compute: Callable[..., Any], module: Any, input: Any, weight: Any, **kwargs: Any) -> Any:  # noqa: A002
        with self.quantized(weight, input):
            result = compute(module, input=input, weight=weight, **kwargs)
        if result.grad_fn is not None:  # saved tensors are other objects
            result.grad_fn.own_weight = weight
        return result

    def _backward_of_linear(self, compute: Callable[..., Any], ctx: Any, gradient: torch.Tensor) -> Any:
        with self.quantized(getattr(ctx, "own_weight", None), gradient):
            return compute(ctx, gradient)

    def _build_experts(self, build: Callable[..., Any], module: Any, number: int, *rest: Any, **kwargs: Any) -> None:
        """One expert with the weights of all, one below the other: grouped matmuls compute them together."""
        build(module, 1 if self._grouped else number, *rest, **kwargs)
        if not self._grouped or number == 1:
            return
        first = module.local_experts[0]
        if first.linear_fc1.bias is not None or module.tp_group.size() > 1:
            return build(module, number, *rest, **kwargs)
        module.num_local_experts = number
        for layer in (first.linear_fc1, first.linear_fc2):
            one = layer.weight
            layer.weight = nn.Parameter(one.new_empty(number * len(one), *one.shape[1:]))
            layer.weight.__dict__.update(one.__dict__)

    def _compute_experts(
        self, compute: Callable[..., Any], module: Any, tokens: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor
    ) -> Any:
        """Experts by one grouped matmul for each of their two layers, as with Transformer Engine."""
        experts, number = module.local_experts, module.num_local_experts
        if len(experts) == number:
            return compute(module, tokens, counts, probs)

        def grouped(layer: Any) -> Any:
            def forward(x: torch.Tensor, *unused: Any) -> tuple[torch.Tensor, None]:
                with self.quantized(layer.weight, x):
                    return kernels.Grouped.apply(self, number, x, layer.weight), None

            return mock.patch.object(layer, "forward", forward)

        with grouped(experts[0].linear_fc1), grouped(experts[0].linear_fc2):
            return experts[0](tokens, probs)

    # The result ---------------------------------------------------------------------------------------------------

    def _play(self) -> None:
        recorder, cluster = self._recorder, self._cluster
        simulation = Simulation(cluster.device, cluster.link_of, 1)
        simulation.play(recorder.program)
        begin, end = self._ends[-1]
        # Between two backwards, a round of the pipeline passes in its steady state. All rounds that the step lacks are
        # as long.
        lacking, per_round = (self._micro_batches - self._taken) / self._round, (begin, begin)
        if lacking:
            per_round = self._backwards[0], self._backwards[self._round * len(self._engines)]
        traces = [step.trace(0) for step in self._steps]
        self.numbers, self.units = _measured(begin, end, traces, simulation.messages)
        numbers, units = _measured(*per_round, traces, simulation.messages)
        self.numbers = {name: number + lacking * numbers[name] for name, number in self.numbers.items()}
        for unit, parts in self.units.items():
            self.units[unit] = {name: time + lacking * units[unit].get(name, 0.0) for name, time in parts.items()}
        per_micro_batch = numbers["seconds"] / self._round if lacking else (end.seconds - begin.seconds) / self._taken
        self.numbers["bubble"] = (self._stages - 1) / len(self._engines) * per_micro_batch
        # Gradients are kept between micro-batches, if there are several.
        self.peaks = _peaks(moments(in_program_order(recorder.program), begin.seconds, end.seconds))


def _peaks(timeline: Iterable[Moment]) -> dict[Any, Moment]:
    """The moment with most bytes of each module that computes, after each begin of a backward.

    The keys are names of modules with numbers from the nearer end of their lists: with more layers, the bytes at each
    grow in proportion, while the highest of all may pass from one to another.
    """
    found: dict[tuple[str, int], Moment] = {}
    sizes: Counter[str] = Counter()
    before, backwards = "", 0
    for moment in timeline:
        name = moment.module
        if name != before:
            before, backwards = name, backwards + (name == LOSS)
            for number in re.finditer(NUMBER, name):
                sizes[name[: number.start()]] = max(sizes[name[: number.start()]], int(number[1]) + 1)
        if (name, backwards) not in found or moment.total > found[name, backwards].total:
            found[name, backwards] = moment

    def place(number: re.Match[str]) -> str:
        size, index = sizes[number.string[: number.start()]], int(number[1])
        return f".{index if 2 * index < size else index - size}"

    return {(re.sub(NUMBER, place, name), after): moment for (name, after), moment in found.items()}


def _measured(
    begin: Mark, end: Mark, traces: Sequence[RankTrace], messages: Sequence[tuple[float, float]]
) -> tuple[dict[str, float], Units]:
    """Seconds between two moments: of everything, of waits and communication, and of each unit's parts."""
    first, last = round(begin.seconds * 1e9), round(end.seconds * 1e9)
    spans = (tuple(span for span in trace.spans if first <= span.start < last) for trace in traces)
    within = [dataclasses.replace(trace, spans=own) for trace, own in zip(traces, spans, strict=True)]
    found = {"seconds": end.seconds - begin.seconds, "communication": 0.0, "optimizer": 0.0}
    found |= {f"wait {name}": 0.0 for name in (*WAITS.values(), OTHER)}
    units: Units = {}
    for unit, times in (pair for trace in within for pair in trace.per_unit().items()):
        before = units.get(unit, {})  # the chunks of a stage have units of the same names
        units[unit] = {name: before.get(name, 0.0) + time for name, time in times.parts.items()}
    # Tensor, context and expert parallelism, and the pipeline, send in the course of the computation.
    starts = [start * 1e9 for start, _ in messages]
    sums = [0.0, *itertools.accumulate(seconds for _, seconds in messages)]

    def sent(start: float, stop: float) -> float:
        return sums[bisect.bisect_left(starts, stop)] - sums[bisect.bisect_left(starts, start)]

    found[f"wait {OTHER}"] += sent(begin.seconds * 1e9, end.seconds * 1e9)
    for span in (span for trace in within for span in trace.spans):
        if span.row is Row.WAITS:
            found[f"wait {WAITS.get(str(span.kind), OTHER)}"] += span.milliseconds / 1e3
        elif span.row is not Row.COMPUTE:
            found["communication"] += span.milliseconds / 1e3
        elif span.kind is Kind.OPTIMIZER:
            found["optimizer"] += span.milliseconds / 1e3 - sent(span.start, span.end)
        elif span.unit in units and messages and span.kind is not Kind.ENGINE:
            seconds = sent(span.start, span.end)
            units[span.unit]["compute"] -= seconds
            units[span.unit][OTHER] = units[span.unit].get(OTHER, 0.0) + seconds
    return found, units


def _gather_as_neighbours(
    gather: Callable[..., Any], results: list[Any], value: Any, group: dist.ProcessGroup | None = None
) -> None:
    """Replaces ``all_gather_object``: other ranks' lists of ranks are this one's, moved to their places."""
    me = dist.get_rank()
    for place, rank in enumerate(dist.get_process_group_ranks(group)):
        moved = isinstance(value, list) and all(isinstance(each, int) for each in value)
        results[place] = [each + rank - me for each in value] if moved else value
