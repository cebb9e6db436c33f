"""Records how a model that is built on the meta device would be initialized, and does it where there is memory.

    model = deferred_init(Model, config)
    model = fully_shard_model(model, init_model_with_meta_device=True)

Every operation on tensors without memory is recorded while the model is built. What an operation wrote, and what that
was computed from, is computed again for one parameter at a time when the parameter's FSDP unit gets its memory. The
modules need no ``reset_parameters()``, and what is done to their parameters from outside is done, too. The way is that
of torchdistX (https://github.com/pytorch/torchdistx), which is archived.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from megatron.fsdp.helpers.patches import TORCH, Patch, Patches

# Kept in a module's __dict__: what belongs to its own parameters and buffers, by name.
_RECIPES = "_fsdp_recipes"

# They give memory, and no values.
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_permuted.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}

Surroundings = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class _Place:
    """Where a tensor on the meta device lies."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Place":
        return cls(tensor.untyped_storage()._cdata, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


@dataclass(frozen=True)
class _Constant:
    """A tensor that has memory, and its version when it was read."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True)
class _Step:
    """One operation.

    Attributes:
        function: An operator.
        arguments: Positional and keyword arguments, with places and constants for tensors.
        results: What is returned, in the order of a flattened tree.
        surroundings: Makes the context to run it in.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    results: tuple[Any, ...]
    surroundings: Surroundings

    @property
    def reads(self) -> list[int]:
        """Storages of arguments."""
        return [value.storage for value in tree_flatten(self.arguments)[0] if isinstance(value, _Place)]

    @property
    def places(self) -> list[_Place]:
        """Of arguments and results."""
        return [value for value in tree_flatten((self.arguments, self.results))[0] if isinstance(value, _Place)]


@dataclass
class _Tape:
    """What was done while a model was built.

    Attributes:
        steps: In the order of time.
        writes: Numbers of the steps that wrote to a storage.
        storages: They must not end, as others would take their numbers.
    """

    steps: list[_Step] = field(default_factory=list)
    writes: dict[int, list[int]] = field(default_factory=dict)
    storages: list[torch.UntypedStorage] = field(default_factory=list)

    def know(self, tensor: torch.Tensor) -> bool:
        """Note the tensor's storage; False if it was known."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.writes:
            return False
        self.writes[storage._cdata] = []
        self.storages.append(storage)
        return True


class Recipe:
    """How one tensor came about.

    Args:
        tape: What was done while the model was built.
        tensor: It, on the meta device.

    Attributes:
        first: Number of the step that made it.
        complete: False if it depends on what was not recorded.
        gives_values: False if the tensor got its shape and no values.
    """

    def __init__(self, tape: _Tape, tensor: torch.Tensor) -> None:
        self._tape = tape
        self._place = _Place.of(tensor)
        self._written = tape.writes.get(self._place.storage, [])
        self.first = min(self._written, default=0)
        self.gives_values = any(tape.steps[number].function not in _EMPTY for number in self._written)
        read = {storage for number in self._needed() for storage in tape.steps[number].reads}
        self.complete = bool(self._written) and all(tape.writes[storage] for storage in read)

    def run(self, device: torch.device) -> torch.Tensor:
        """The tensor with the values that it would have had; see :meth:`run_all`."""
        ((_, tensor),) = self.run_all([self], device)
        return tensor

    @staticmethod
    def run_all(recipes: Sequence["Recipe"], device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
        """Tensors with the values that they would have had, drawn from the random state as it is now.

        Values are drawn in the order in which they were when the model was built, and a tensor is kept no longer than
        it is needed for others.

        Yields:
            Number of a recipe, and its tensor, in the order in which they are done.

        Raises:
            RuntimeError: A tensor that values were taken from has been changed since.
        """
        for tape in {id(recipe._tape): recipe._tape for recipe in recipes}.values():
            mine = {i: recipe for i, recipe in enumerate(recipes) if recipe._tape is tape}
            yield from _run(tape, mine, device)

    def _needed(self) -> set[int]:
        """The steps that the tensor depends on."""
        found: set[int] = set()
        open_ends = [(self._place.storage, len(self._tape.steps))]
        while open_ends:
            storage, end = open_ends.pop()
            for number in self._tape.writes.get(storage, []):
                if number < end and number not in found:
                    found.add(number)
                    open_ends += [(read, number) for read in self._tape.steps[number].reads]
        return found


def _run(tape: _Tape, recipes: dict[int, Recipe], device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    steps = sorted({number for recipe in recipes.values() for number in recipe._needed()})
    ready: dict[int, list[int]] = {}
    for i, recipe in recipes.items():
        ready.setdefault(recipe._written[-1], []).append(i)
    last_use = {place.storage: number for number in steps for place in tape.steps[number].places}
    memory: dict[int, torch.Tensor] = {}
    for number in steps:
        with torch.no_grad():
            _do(tape.steps[number], memory, device)
        for i in ready.get(number, []):
            yield i, _view(memory, recipes[i]._place)
        for place in tape.steps[number].places:
            if last_use[place.storage] == number:
                memory.pop(place.storage, None)


def _do(step: _Step, memory: dict[int, torch.Tensor], device: torch.device) -> None:
    def real(value: Any) -> Any:
        if isinstance(value, _Place):
            return _view(memory, value)
        if isinstance(value, _Constant):
            if value.tensor._version != value.version:
                raise RuntimeError(f"A tensor that {step.function} reads was changed after the model was built.")
            return value.tensor.to(device)
        return device if isinstance(value, torch.device) and value.type == "meta" else value

    args, kwargs = tree_map(real, step.arguments)
    with step.surroundings():
        results = tree_flatten(step.function(*args, **kwargs))[0]
    for place, result in zip(step.results, results, strict=True):
        if isinstance(place, _Place):
            memory.setdefault(place.storage, result)


class _Recorder(TorchDispatchMode):
    """Writes the tape."""

    def __init__(self, surroundings: Callable[[], Surroundings]) -> None:
        super().__init__()
        self.tape = _Tape()
        self._surroundings = surroundings

    def note_filling(self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Note a function that writes to its first argument, and leaves tensors on the meta device alone."""
        self.tape.know(tensor)
        self.tape.writes[_Place.of(tensor).storage].append(len(self.tape.steps))
        arguments = tree_map(_noted, ((tensor, *args), kwargs))
        # The place of the result is None: the tensor is the first argument, which has a place already.
        self.tape.steps.append(_Step(function, arguments, (None,), self._surroundings()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors come by
        tape, arguments = self.tape, tree_map(_noted, (args, kwargs))  # now: it may change versions
        for tensor in _on_meta((args, kwargs)):
            tape.know(tensor)  # if it came from elsewhere, nobody has written to it
        result = func(*args, **kwargs)
        changed = {_Place.of(tensor).storage for tensor in _on_meta(self._changed(func, args, kwargs))}
        written = changed | {_Place.of(tensor).storage for tensor in _on_meta(result) if tape.know(tensor)}
        for storage in written:
            tape.writes[storage].append(len(tape.steps))
        if written:
            results = tuple(_noted(value) for value in tree_flatten(result)[0])
            tape.steps.append(_Step(func, arguments, results, self._surroundings()))
        return result

    @staticmethod
    def _changed(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        """The arguments that the operator writes to."""
        found: list[Any] = []
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                found += value if isinstance(value, (list, tuple)) else [value]
        return [value for value in found if isinstance(value, torch.Tensor)]


# Functions of torch.nn.init that return at once for a tensor on the meta device, without calling an operator.
RECORDING = Patches(
    "Recording how a model on the meta device is initialized",
    [
        Patch(
            f"torch.nn.init:{name}",
            "does nothing to a tensor on the meta device, so no operation would be recorded",
            "megatron.fsdp.init.deferred:fill_or_note",
            TORCH,
        )
        for name in ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "eye_", "dirac_")
    ],
)
# Recordings in progress; the innermost one is last.
_recorders: list[_Recorder] = []


def fill_or_note(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run an initializer of ``torch.nn.init``, or record it if the tensor is on the meta device."""
    if tensor.is_meta and _recorders:
        _recorders[-1].note_filling(original, tensor, *args, **kwargs)
    else:
        original(tensor, *args, **kwargs)
    return tensor


class _OnMeta(TorchFunctionMode):
    """Makes tensors on the meta device where no other is asked for.

    ``torch.get_default_device()`` does not say so: some libraries ask, and then initialize nothing. What
    ``torch.tensor`` makes has values first, which it would forget; and if empty, it stays, for the same reason.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _device_constructors() or torch.device(kwargs.get("device") or "meta").type != "meta":
            return func(*args, **kwargs)
        if func is not torch.tensor:
            return func(*args, **{**kwargs, "device": "meta"})
        value = func(*args, **{**kwargs, "device": "cpu"})
        return value.to("meta") if value.numel() else value


def _noted(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _Place.of(value) if value.is_meta else _Constant(value, value._version)


def _on_meta(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor) and leaf.is_meta]


def _view(memory: dict[int, torch.Tensor], place: _Place) -> torch.Tensor:
    return memory[place.storage].as_strided(place.size, place.stride, place.offset)


def deferred_init(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build a model on the meta device, and record how its parameters and buffers are initialized.

    Sharding it with ``init_model_with_meta_device=True`` initializes it, unit by unit: no rank ever holds more than one
    unit whole. Values are drawn when that is done, in the order of units. They are the very numbers of a model that is
    built on the device if that has the same random state, and draws in the order of its units.

    Args:
        function: Returns an ``nn.Module``, or a list of them: a class, for example.
        args: Arguments of it.
        kwargs: Keyword arguments of it.

    Returns:
        What ``function`` returns.
    """
    return record(functools.partial(function, *args, **kwargs), lambda: nullcontext)


def record(build: Callable[[], Any], surroundings: Callable[[], Surroundings]) -> Any:
    """As :func:`deferred_init`, where operations depend on a context.

    Args:
        build: Returns a module, or a list of them.
        surroundings: Called at every operation; returns what makes the context to repeat it in.
    """
    recorder = _Recorder(surroundings)
    _recorders.append(recorder)
    try:
        with _OnMeta(), RECORDING.installed(), recorder:
            built = build()
    finally:
        _recorders.pop()
    for model in built if isinstance(built, (list, tuple)) else [built]:
        for module in model.modules():
            own = {**module._parameters, **module._buffers}
            module.__dict__[_RECIPES] = {
                name: _recipe(recorder.tape, tensor)
                for name, tensor in own.items()
                if tensor is not None and tensor.is_meta
            }
    return built


def _recipe(tape: _Tape, tensor: torch.Tensor) -> Recipe | None:
    recipe = None if isinstance(tensor, DTensor) else Recipe(tape, tensor)
    return recipe if recipe is not None and recipe.complete else None


def recipes(module: nn.Module) -> dict[str, Recipe | None]:
    """How the module's own parameters and buffers without memory are initialized, by name; None if that is unknown.

    Empty if the module's building was not recorded.
    """
    found: dict[str, Recipe | None] = module.__dict__.get(_RECIPES, {})
    return found


def forget(module: nn.Module) -> None:
    """Drop what was recorded for a module and those in it, when nothing is left to initialize."""
    for part in module.modules():
        part.__dict__.pop(_RECIPES, None)
