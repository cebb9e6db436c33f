"""Combinations of a command line's settings, and estimates of all of them from the few that were predicted.

Each value of a setting multiplies a step's computation, its communication, what their overlap leaves over, and each
category of memory by a factor. Ridge regression of logarithms fits the factors to the predictions so far. Sizes, as of
micro-batches, also have a power: what 2 does says something of 4. What remains is a Gaussian process over the number of
settings that differ (kriging; Matheron, 1963). A combination that is like refused ones is probably refused (Nadaraya
and Watson, 1964).
"""

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set

import torch

from megatron.fsdp.tools.script import Change, CommandStep, edited, recomputation

# A combination: of each setting, the place of its value.
Place = tuple[int, ...]
# How much score a certain refusal costs, and memory above the capacity by a factor of e.
REFUSED, TOO_LARGE = 3.0, 10.0
# For each setting that differs, another combination says that much less of one.
LESS_ALIKE = 0.3
# Values that were never tried score a little more, and less together, or while the first try is pending.
NEW, NEW_TOGETHER = 0.02, 0.2
# Values of these are likely to be faster.
PROMISING = {"format": 0.2}
# Sizes are tried in their order: others score that much less.
FAR = 5.0
# Categories of memory that are estimated alone, and strategies that shard them.
SHARDED_BY = {"shards": ("optim_grads_params",), "gradients": ("optim_grads_params", "optim_grads"), "optimizer": None}
# How much score it costs that the most similar one differs in several settings, and is less alike by a factor of e.
CAUTION = 0.2
# Variance of a prediction around the Gaussian process, whose own is 1.
NOISE = 0.01
POWER = "power"
# Penalties of the regression: of the mean, of powers and of factors.
RIDGE = 1e-6, 1e-2, 1e-1


def _sizes(flag: str, sizes: Iterable[int], with_flag: str = "") -> list[Change]:
    """Values of a flag that Megatron takes as 1 without it, and a flag that larger ones need."""
    return [{flag: str(n), **({with_flag: ""} if with_flag else {})} if n > 1 else {flag: None} for n in sizes]


def _formats(recipes: Iterable[str]) -> list[Change]:
    """Computation in bf16, and in 8 bits."""
    names = "--fp8-format", "--fp8-recipe", "--fp8-param-gather"
    with_it: list[Change] = [dict(zip(names, ("hybrid", recipe, ""), strict=True)) for recipe in recipes]
    return [dict.fromkeys(names), *with_it]


def _instances(outer: str) -> list[Change]:
    """Numbers of groups of ranks, in each of which weights are sharded."""
    names = "--num-distributed-optimizer-instances", "--outer-dp-sharding-strategy"
    return [dict(zip(names, (str(n), outer), strict=True)) for n in (2, 4, 8, 16, 32)]


# In the order in which new values are tried. The first flag of a setting has its size.
SETTINGS: dict[str, list[Change]] = {
    "micro batch": [{"--micro-batch-size": str(n)} for n in (1, 2, 4, 8, 16)],
    "recomputation": [
        recomputation("full", method="uniform", num_layers="1"),
        recomputation("selective", modules="core_attn"),
        recomputation(None),
    ],
    "expert parallelism": _sizes("--expert-model-parallel-size", (1, 2, 4, 8, 16, 32, 64)),
    "groups of ranks": [dict.fromkeys(_instances("")[0]), *_instances("optim"), *_instances("no_shard")],
    "tensor parallelism": _sizes("--tensor-model-parallel-size", (1, 2, 4, 8), "--sequence-parallel"),
    "pipeline": _sizes("--pipeline-model-parallel-size", (1, 2, 4, 8, 16)),
    "context parallelism": _sizes("--context-parallel-size", (1, 2, 4, 8)),
    "format": _formats(("tensorwise", "mxfp8")),
    "offloading": [
        {"--optimizer-cpu-offload": None},
        {"--optimizer-cpu-offload": "", "--use-precision-aware-optimizer": "", "--fp8-param-gather": None},
    ],
    "strategy": [
        {"--data-parallel-sharding-strategy": name} for name in ("optim", "optim_grads", "optim_grads_params")
    ],
}


def with_changes(arguments: Sequence[str], changes: Change) -> tuple[tuple[str, ...], Change]:
    """A command line with other values of some flags, and those of them that differ from before."""
    found, before = edited(arguments, changes)
    ones = {flag for flag, value in before.items() if value == "1" and flag.endswith(("-parallel-size", "-instances"))}
    differ = {flag: value for flag, value in changes.items() if value != (None if flag in ones else before[flag])}
    return (tuple(found), differ) if differ else (tuple(arguments), {})


def settings_of(arguments: Sequence[str]) -> dict[str, list[Change]]:
    """The settings that can be varied in a command line, and their values."""
    experts = any(word.partition("=")[0] == "--num-experts" for word in arguments)
    found = {name: values for name, values in SETTINGS.items() if experts or name != "expert parallelism"}
    return found | {"pipeline": [uneven(arguments, change) for change in found["pipeline"]]}


def uneven(arguments: Sequence[str], change: Change) -> Change:
    """A number of pipeline stages, with fewer layers in the last one if the layers cannot be divided evenly."""
    if "--pipeline-model-parallel-size" not in change:  # the user keeps it
        return change
    _, given = edited(arguments, {"--num-layers": None, "--pipeline-model-parallel-layout": None})
    layers, stages = int(given["--num-layers"] or 0), int(change["--pipeline-model-parallel-size"] or 1)
    last = None
    if layers % stages and given["--pipeline-model-parallel-layout"] is None:
        last = next((str(n) for n in range(layers // stages, 0, -1) if (layers - n) % (stages - 1) == 0), None)
    return change | {"--decoder-last-pipeline-num-layers": last}


class _Setting:
    """A setting of a command line.

    Attributes:
        name: As in ``SETTINGS``.
        values: Changes to the line; none of them is its own value. Those whose size is closest come first. None changes
            flags to keep.
        states: Values of the setting's flags with each change; the first one is its size, if it has one.
        sizes: Those numbers, or 1.
        before: For each value, the place of the one to try before: the next one towards the line's own.
    """

    def __init__(self, name: str, own: Sequence[str], values: Sequence[Change], keep: Set[str]) -> None:
        flags = dict.fromkeys(flag for value in values for flag in value)
        before = edited(own, flags)[1]

        def state(change: Change) -> list[str]:
            return [value or "" for value in (before | change).values()]

        def size(change: Change) -> int:
            return max(int(state(change)[0]), 1) if state(change)[0].isdigit() else 1

        def distance(change: Change) -> float:
            return abs(math.log2(size(change) / size({})))

        changed = ((value, with_changes(own, value)[1]) for value in values)
        different = (value for value, changes in changed if changes and keep.isdisjoint(changes))
        self.name, self.values = name, [Change(), *sorted(different, key=distance)]
        self.states, self.sizes = [state(value) for value in self.values], [size(value) for value in self.values]
        self.before = [self._closer(number) for number in range(len(self.values))]

    def _closer(self, number: int) -> int:
        far = self.sizes[number] - self.sizes[0]
        same = [n for n in range(1, number) if self._kind(n) == self._kind(number)]
        return max((n for n in same if far * (self.sizes[n] - self.sizes[0]) > 0), default=0)

    def _kind(self, number: int) -> str:
        """The thing that a size counts, if the setting has several."""
        return "/".join(word for word in self.states[number][1:] if not word.isdigit())

    def features(self, number: int, keys: dict[tuple[str, ...], int]) -> dict[int, float]:
        """A value for the regression: itself, and its size. ``keys`` gets their places."""
        found: dict[tuple[str, ...], float] = {(self.name, *self.states[number]): 1.0}
        if self.sizes[number] > 1:
            found[self.name, self._kind(number), POWER] = math.log2(self.sizes[number])
        return {keys.setdefault(key, len(keys)): amount for key, amount in found.items()}


class Space:
    """All combinations of settings of a command line.

    Args:
        arguments: The user's command line.
        start: Changes to it, which all combinations begin with. The first one has no others.
        by_memory: Whether the fewest bytes are wanted, instead of most tokens per second.
        keep: Flags that are not changed.

    Attributes:
        shape: Number of values of each setting.
    """

    def __init__(self, arguments: Sequence[str], start: Change, by_memory: bool, keep: Iterable[str] = ()) -> None:
        self._start, self._by_memory = start, by_memory
        own, settings = with_changes(arguments, start)[0], settings_of(arguments)
        self._settings = [_Setting(name, own, values, {*keep}) for name, values in settings.items()]
        self.shape = [len(setting.values) for setting in self._settings]
        keys: dict[tuple[str, ...], int] = {}
        rows = [[setting.features(number, keys) for number in range(len(setting.values))] for setting in self._settings]
        self._features = [torch.zeros(n, 1 + len(keys), dtype=torch.float64) for n in self.shape]
        for table, of_setting in zip(self._features, rows, strict=True):
            for row, features in zip(table, of_setting, strict=True):
                for key, amount in features.items():
                    row[1 + key] = amount
            table -= table[0].clone()
        penalties = [RIDGE[1] if key[-1] == POWER else RIDGE[2] for key in keys]
        self._ridge = torch.tensor([RIDGE[0], *penalties], dtype=torch.float64)
        self._begun: list[Place] = []
        self._new = [torch.tensor([0.0] + [-FAR] * (n - 1)) for n in self.shape]
        self._offer((0,) * len(self.shape))
        self._refused: list[Place] = []
        self._predicted: dict[Place, tuple[CommandStep, int]] = {}
        self._capacity = 1

    def _product(self, places: torch.Tensor, powers: Mapping[str, int]) -> torch.Tensor:
        """A product of powers of settings' sizes, of each combination."""
        found = torch.ones(len(places), dtype=torch.float64)
        for setting, numbers in zip(self._settings, places.T, strict=True):
            if setting.name in powers:
                found *= torch.tensor(setting.sizes, dtype=torch.float64)[numbers] ** powers[setting.name]
        return found

    def _bubble(self, places: torch.Tensor) -> torch.Tensor:
        """The number that the bubble is proportional to: micro-batches are as many as a step's tokens take."""
        tokens = self._product(places, {"micro batch": 1, "tensor parallelism": -1, "context parallelism": -1})
        return tokens * (1 - self._product(places, {"pipeline": -1}))

    def _divided(self, places: torch.Tensor) -> torch.Tensor:
        """Logarithms of the parts of ``SHARDED_BY`` that a rank has, without what strategies shard."""
        axes = "tensor parallelism", "expert parallelism", "pipeline"
        parts = -self._product(places, dict.fromkeys(axes, 1)).log()
        number = next(n for n, setting in enumerate(self._settings) if setting.name == "strategy")
        strategies = [state[0] for state in self._settings[number].states]
        whole = [[names is not None and name not in names for name in strategies] for names in SHARDED_BY.values()]
        return torch.tensor(whole)[:, places[:, number]] * parts

    def __len__(self) -> int:
        return math.prod(self.shape)

    def change(self, place: Place) -> Change:
        """All changes of a combination."""
        values = (setting.values[n] for setting, n in zip(self._settings, place, strict=True))
        return functools.reduce(operator.or_, values, self._start)

    def begin(self, place: Place) -> None:
        """Say that a combination is tried."""
        self._begun.append(place)
        for new, number in zip(self._new, place, strict=True):
            if new[number] > 0:
                new[new > 0] /= 2
                new[number] = -NEW_TOGETHER

    def _offer(self, place: Place) -> None:
        """Let values be tried that are next to those of a combination."""
        for order, (number, setting, new) in enumerate(zip(place, self._settings, self._new, strict=True), 1):
            new[number] = 0.0
            next_ones = [n for n, before in enumerate(setting.before) if n and before == number and new[n] == -FAR]
            new[next_ones] = PROMISING.get(setting.name, NEW / order)

    def note(self, place: Place, step: CommandStep | None, memory: int, capacity: int) -> None:
        """Add what was predicted for a combination.

        Args:
            place: The combination.
            step: The step; None if it would not start.
            memory: Bytes of the device that it takes.
            capacity: Bytes of the device.
        """
        self._offer(place)
        if step is None:
            self._refused.append(place)
        else:
            self._predicted[place] = step, memory
            self._capacity = max(capacity, 1)

    def best(self, least: float) -> Place | None:
        """The combination to try next; None if all others are estimated to have a score below ``least``.

        Values that are next to no tried one are left out.
        """
        if not self._begun:
            return (0,) * len(self.shape)
        if self._refused and not self._predicted:
            return None  # nothing is known of changes to a line that does not start
        places = torch.cartesian_prod(*((new > -FAR).nonzero()[:, 0] for new in self._new))
        places = places[(_differing(places, self._begun) > 0).all(1)]
        if not len(places):
            return None
        scores = self.scores(places)
        best = int(scores.argmax())
        return tuple(places[best].tolist()) if scores[best] >= least else None

    def score(self, step: CommandStep, memory: int) -> float:
        """How good a predicted step is."""
        if self._by_memory:
            return -math.log(max(memory, 1))
        return math.log(step.tokens_per_second) - TOO_LARGE * max(math.log(max(memory, 1) / self._capacity), 0)

    def scores(self, places: torch.Tensor) -> torch.Tensor:
        """Estimated scores of combinations, with what is added and subtracted for the new and the uncertain.

        Args:
            places: A combination in each row.
        """
        new = torch.stack([of_value[numbers] for of_value, numbers in zip(self._new, places.T, strict=True)])
        scores = new.sum(0) - NEW_TOGETHER * ((new > 0).sum(0) - 1).clamp(min=0)
        alike = LESS_ALIKE ** _differing(places, [*self._predicted, *self._refused])
        if self._refused:
            scores -= REFUSED * alike[:, len(self._predicted) :].sum(1) / alike.sum(1)
        if self._predicted:
            scores += CAUTION * (alike.amax(1) / LESS_ALIKE).clamp(max=1).log()
            compute, communication, rest, *memory = self._estimates(places, alike[:, : len(self._predicted)])
            bytes_ = torch.stack(memory).exp().sum(0)
            if self._by_memory:
                return scores - bytes_.log()
            bubbles = self._bubbles() * self._bubble(places)
            scores = scores - torch.maximum(compute, communication) - rest - bubbles.log1p()
            scores -= TOO_LARGE * (bytes_ / self._capacity).log().clamp(min=0)
        return scores

    def _estimates(self, places: torch.Tensor, alike: torch.Tensor) -> torch.Tensor:
        """Logarithms of what :func:`_amounts` returns, in rows, of combinations that are alike to predicted ones."""
        known = torch.tensor([*self._predicted])
        amounts = [_amounts(*each, self._capacity) for each in self._predicted.values()]
        y, divided = torch.tensor(amounts, dtype=torch.float64).log(), slice(-len(SHARDED_BY) - 1, -1)
        y[:, divided] -= self._divided(known).T
        # Ridge regression.
        x = sum((table[numbers] for table, numbers in zip(self._features, known.T, strict=True)), torch.zeros(()))
        x[:, 0] = 1.0
        mean = y.mean(0)
        factors = torch.linalg.solve(x.T @ x + self._ridge.diag(), x.T @ (y - mean))
        # What the factors leave over is a Gaussian process: combinations that are alike have much of it in common.
        between = (LESS_ALIKE ** _differing(known, [*self._predicted])).double()
        left = torch.linalg.solve(between + NOISE * torch.eye(len(between)), y - mean - x @ factors)
        found = alike.double() @ left + mean + factors[0]
        for table, numbers in zip(self._features, places.T, strict=True):
            found += (table @ factors)[numbers]
        found[:, divided] += self._divided(places).T
        return found.T

    def _bubbles(self) -> float:
        """The pipeline's bubble as a part of the other time, per ``_bubble``."""
        found = torch.tensor([step.bubble / (step.seconds - step.bubble) for step, _ in self._predicted.values()])
        per = self._bubble(torch.tensor([*self._predicted]))
        return float((found / per)[per > 0].max()) if (per > 0).any() else 0.0


def _differing(places: torch.Tensor, others: Sequence[Place]) -> torch.Tensor:
    """The number of settings in which each combination differs from each of some others."""
    found = torch.zeros(len(places), len(others), dtype=torch.uint8)
    for number, of_setting in enumerate(places.T):
        found += of_setting[:, None] != torch.tensor([other[number] for other in others], dtype=torch.long)
    return found


def _amounts(step: CommandStep, memory: int, capacity: float) -> list[float]:
    """The amounts that settings multiply: times per token, a ratio, and bytes.

    Returns:
        Seconds of computation and of communication, the time without bubble as a multiple of the larger; bytes of
        weights, gradients and optimizer state, and of everything else at the peak.
    """
    tokens, waits, whole = step.seconds * step.tokens_per_second, step.waits, step.seconds - step.bubble
    compute = (whole - waits.get("unshard", 0.0) - waits.get("reduce", 0.0)) / tokens
    communication = max(step.communication / tokens, 1e-3 * compute)
    rest = whole / tokens / max(compute, communication)
    kept = [step.peak.get(name, 0) for name in SHARDED_BY]
    sizes = (max(size, 1e-6 * capacity) for size in (*kept, memory - sum(kept)))
    return [compute, communication, rest, *sizes]
