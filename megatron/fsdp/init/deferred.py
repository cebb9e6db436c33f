"""Records the initialization of a model that is built on the meta device, and replays it unit by unit.

    model = deferred_init(Model, config)
    model = fully_shard_model(model, init_model_with_meta_device=True)

While the model is built, all operations on meta tensors are recorded. When a unit is allocated, the operations that its
parameters depend on are replayed, one parameter at a time. The modules need no ``reset_parameters()``, and
initialization from outside of a module is replayed as well. The approach is that of torchdistX
(https://github.com/pytorch/torchdistx), which is archived.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from megatron.fsdp.dtensor.schemas import written_values
from megatron.fsdp.helpers.arguments import described
from megatron.fsdp.helpers.patches import TORCH, Patch, Patches

# Key in a module's __dict__ for the recipes of its direct parameters and buffers, by name.
_RECIPES = "_fsdp_recipes"

# Operators that allocate memory without initializing it.
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_permuted.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}

# Operators that initialize a tensor element by element, in place, by numbers: the first argument is the tensor.
_IN_PLACE = set(
    """uniform_ normal_ trunc_normal_ _no_grad_trunc_normal_ exponential_ log_normal_ cauchy_ bernoulli_ zero_ fill_
    add_ sub_ mul_ div_ pow_ clamp_ erfinv_ sqrt_ neg_ exp_ log_ abs_""".split()
)
# Those that make such a tensor: the first argument is its size.
_NEW = {"ones", "zeros", "full", "rand", "randn"}

# Creates the context in which an operation is replayed.
ContextFactory = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class _MetaView:
    """A view of a meta tensor's storage, which stands for the tensor in the recording."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_MetaView":
        return cls(tensor.untyped_storage()._cdata, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


@dataclass(frozen=True)
class _Constant:
    """A tensor with memory, and its version counter when it was read."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True)
class _Operation:
    """One recorded operation.

    Attributes:
        function: The operator.
        arguments: Positional and keyword arguments, with ``_MetaView`` and ``_Constant`` in place of tensors.
        results: The results as a flattened tree.
        context: Creates the context to replay it in.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    results: tuple[Any, ...]
    context: ContextFactory

    @property
    def is_random(self) -> bool:
        """Whether it may draw random numbers. Recorded functions of torch.nn.init have no tags."""
        return torch.Tag.nondeterministic_seeded in getattr(self.function, "tags", [torch.Tag.nondeterministic_seeded])

    @property
    def reads(self) -> list[int]:
        """Storages of the arguments."""
        return [value.storage for value in tree_flatten(self.arguments)[0] if isinstance(value, _MetaView)]

    @property
    def views(self) -> list[_MetaView]:
        """The arguments and results on the meta device."""
        return [value for value in tree_flatten((self.arguments, self.results))[0] if isinstance(value, _MetaView)]


@dataclass
class _Tape:
    """The operations that built a model.

    Attributes:
        operations: In the order of execution. Other fields refer to them by index.
        writes: By storage, the operations that wrote to it.
        storages: All storages. Keeping them alive prevents new storages from getting the same address.
        needed_later: The operations that the model's tensors depend on.
        position: The operations before this one have drawn their random numbers.
        states: The random states in which they did.
    """

    operations: list[_Operation] = field(default_factory=list)
    writes: dict[int, list[int]] = field(default_factory=dict)
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    needed_later: set[int] = field(default_factory=set)
    position: int = 0
    states: dict[int, torch.Tensor] = field(default_factory=dict)

    def register(self, tensor: torch.Tensor) -> bool:
        """Register the tensor's storage; False if it was registered before."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.writes:
            return False
        self.writes[storage._cdata] = []
        self.storages.append(storage)
        return True

    def needed(self, storages: list[int], end: int) -> set[int]:
        """The operations before ``end`` that the storages' values depend on: writes to them and to what these read."""
        found: set[int] = set()
        pending = [(storage, end) for storage in storages]
        while pending:
            storage, end = pending.pop()
            for number in self.writes.get(storage, []):
                if number < end and number not in found:
                    found.add(number)
                    pending += [(read, number) for read in self.operations[number].reads]
        return found

    def is_known(self, numbers: set[int]) -> bool:
        """Whether all that these operations read or write was created in the recording."""
        reads = ((read, number) for number in numbers for read in self.operations[number].reads)
        return all(self.writes[read] and self.writes[read][0] < number for read, number in reads)

    def replay(self, number: int, memory: dict[int, torch.Tensor], device: torch.device, in_order: bool = True) -> None:
        """Run an operation, with the random numbers that it draws when the model is built, unless not ``in_order``."""
        operation = self.operations[number]
        if not (operation.is_random and in_order):
            with operation.context():
                _replay(operation, memory, device)
            return
        self.advance(number, device)
        with operation.context():
            generator = _generator(operation, device)
            now = generator.get_state()
            generator.set_state(self.states.setdefault(number, now))
            _replay(operation, memory, device)
            if number < self.position:  # drawn again
                generator.set_state(now)
        self.position = max(self.position, number + 1)

    def advance(self, end: int, device: torch.device) -> None:
        """Draw the random numbers of operations before ``end`` for nothing, if they have not been drawn.

        They belong to tensors that another unit or nothing in the model has: a module may replace another one, as
        multi-latent attention does with a layer of its base class.
        """
        while self.position < end:
            number, memory = self.position, dict[int, torch.Tensor]()
            if self.operations[number].is_random:
                numbers = {number, *self.needed(self.operations[number].reads, number)}
                for each in sorted(numbers) if self.is_known(numbers) else ():
                    self.replay(each, memory, device)
            self.position = number + 1


class Recipe:
    """The operations that initialize one tensor.

    Args:
        tape: The recording of the model.
        tensor: The tensor on the meta device.

    Attributes:
        first: Index of the operation that created the tensor.
        complete: False if the tensor depends on operations that were not recorded.
        gives_values: False if the tensor was allocated and never initialized.
    """

    def __init__(self, tape: _Tape, tensor: torch.Tensor) -> None:
        self._tape = tape
        self._view = _MetaView.of(tensor)
        self._dtype = tensor.dtype
        self._written = tape.writes.get(self._view.storage, [])
        self.first = min(self._written, default=0)
        self.gives_values = any(tape.operations[number].function not in _EMPTY for number in self._written)
        self.complete = bool(self._written) and tape.is_known(self._needed())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recipe":
        """The same one: a copy of a model has its values, and draws no further random numbers."""
        return self

    def draw(self, part: torch.Tensor, begin: int, number: int, device: torch.device) -> None:
        """Initialize a part of the tensor, with other random numbers than those of the full tensor.

        Args:
            part: Gets the values: consecutive elements, flat.
            begin: The first of them in the flat tensor.
            number: Of the part. Equal numbers give equal values from one random state, which advances equally for all.
            device: Where to compute.
        """
        operations = [self._tape.operations[number] for number in sorted(self._needed())]
        if not all(self._is_elementwise(operation) for operation in operations):
            part.copy_(self.run(device, in_order=False).reshape(-1)[begin : begin + part.numel()])
            return
        value = torch.empty(part.shape, dtype=self._dtype, device=device)
        for operation in operations:
            if operation.function not in _EMPTY:
                with torch.no_grad(), operation.context(), _random_numbers_of(number, device):
                    _replay_on(operation, value)
        part.copy_(value)

    def _is_elementwise(self, operation: _Operation) -> bool:
        """Whether the operation does the same with every element of this tensor, and reads no other."""
        (first, *rest), named = operation.arguments if operation.arguments[0] else ((None,), operation.arguments[1])
        others = [value for value in tree_flatten((rest, named))[0] if isinstance(value, (_MetaView, _Constant))]
        if operation.function in _EMPTY or _name(operation) in _NEW:
            return not others and operation.results == (self._view,)
        return _name(operation) in _IN_PLACE and first == self._view and not others

    def run(self, device: torch.device, in_order: bool = True) -> torch.Tensor:
        """Compute the initialized tensor; see :meth:`run_all`."""
        ((_, tensor),) = self.run_all([self], device, in_order)
        return tensor

    @staticmethod
    def run_all(
        recipes: Sequence["Recipe"], device: torch.device, in_order: bool = True
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Compute initialized tensors, with random numbers from the current random state.

        Operations run in the order in which the model was built. Each intermediate tensor is freed after its last use.

        Args:
            recipes: Of the tensors.
            device: Where to compute.
            in_order: Draw the numbers that building the model on ``device`` draws, whichever recipes run first. Those
                before them are drawn as well, so a model takes least time if its recipes run in the order of building.

        Yields:
            Index of a recipe and its tensor, in the order in which they are finished.

        Raises:
            RuntimeError: A tensor outside of the model that values were read from has changed since.
        """
        for tape in {id(recipe._tape): recipe._tape for recipe in recipes}.values():
            mine = {i: recipe for i, recipe in enumerate(recipes) if recipe._tape is tape}
            yield from _run(tape, mine, device, in_order)

    def _needed(self) -> set[int]:
        """The operations that the tensor depends on: writes to its storage, and earlier writes to what these read."""
        return self._tape.needed([self._view.storage], len(self._tape.operations))


def _name(operation: _Operation) -> str:
    schema = getattr(operation.function, "_schema", None)
    name: str = operation.function.__name__ if schema is None else schema.name
    return name.rpartition("::")[2]


def _replay_on(operation: _Operation, part: torch.Tensor) -> None:
    """Replay an element-wise operation on a part of its tensor."""
    (_, *rest), named = operation.arguments
    if _name(operation) in _NEW:
        part.copy_(operation.function(part.shape, *rest, **{**named, "device": part.device}))
    else:
        operation.function(part, *rest, **named)


@contextmanager
def _random_numbers_of(number: int, device: torch.device) -> Iterator[None]:
    """Draw one number from the present random state, and begin with another state in this context."""
    seed = int(torch.randint(2**62, (), device=device))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed + number)
        yield


def _run(
    tape: _Tape, recipes: dict[int, Recipe], device: torch.device, in_order: bool
) -> Iterator[tuple[int, torch.Tensor]]:
    numbers = sorted(set[int]().union(*(recipe._needed() for recipe in recipes.values())))
    ready: dict[int, list[int]] = {}
    for i, recipe in recipes.items():
        ready.setdefault(recipe._written[-1], []).append(i)
    last_use = {view.storage: number for number in numbers for view in tape.operations[number].views}
    memory: dict[int, torch.Tensor] = {}
    for number in numbers:
        with torch.no_grad():
            tape.replay(number, memory, device, in_order)
        for i in ready.get(number, []):
            yield i, _real_view(memory, recipes[i]._view)
        for view in tape.operations[number].views:
            if last_use[view.storage] == number:
                memory.pop(view.storage, None)
    if in_order:
        following = (number for number in tape.needed_later if number >= tape.position)
        with torch.no_grad():
            tape.advance(min(following, default=len(tape.operations)), device)


def _generator(operation: _Operation, device: torch.device) -> torch.Generator:
    """The generator of the operation's random numbers."""
    given = [value for value in tree_flatten(operation.arguments)[0] if isinstance(value, torch.Generator)]
    if given or device.type == "cpu":
        return given[0] if given else torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[module.current_device() if device.index is None else device.index]


def _replay(operation: _Operation, memory: dict[int, torch.Tensor], device: torch.device) -> None:
    def real(value: Any) -> Any:
        if isinstance(value, _MetaView):
            return _real_view(memory, value)
        if isinstance(value, _Constant):
            if value.tensor._version != value.version:
                raise RuntimeError(f"A tensor that {operation.function} reads was changed after the model was built.")
            return value.tensor.to(device)
        return device if isinstance(value, torch.device) and value.type == "meta" else value

    args, kwargs = tree_map(real, operation.arguments)
    results = tree_flatten(operation.function(*args, **kwargs))[0]
    for view, result in zip(operation.results, results, strict=True):
        if isinstance(view, _MetaView):
            memory.setdefault(view.storage, result)


class _TapeRecorder(TorchDispatchMode):
    """Records operations on meta tensors."""

    def __init__(self, context_of: Callable[[], ContextFactory]) -> None:
        super().__init__()
        self.tape = _Tape()
        self._context_of = context_of

    def record_in_place(self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Record a function that writes to its first argument, without calling it."""
        self.tape.register(tensor)
        self.tape.writes[_MetaView.of(tensor).storage].append(len(self.tape.operations))
        arguments = tree_map(_recorded, ((tensor, *args), kwargs))
        # The result is the first argument, whose storage is known already, so it is recorded as None.
        self.tape.operations.append(_Operation(function, arguments, (None,), self._context_of()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's dispatch calls the operation again with local tensors
        # Convert the arguments before the call, which may change the version counters of constants.
        tape, arguments = self.tape, tree_map(_recorded, (args, kwargs))
        for tensor in _on_meta((args, kwargs)):
            tape.register(tensor)  # without writes, which marks a tensor from elsewhere as unknown
        result = func(*args, **kwargs)
        changed = {_MetaView.of(tensor).storage for tensor in _on_meta(written_values(func, args, kwargs))}
        written = changed | {_MetaView.of(tensor).storage for tensor in _on_meta(result) if tape.register(tensor)}
        for storage in written:
            tape.writes[storage].append(len(tape.operations))
        if written:
            results = tuple(_recorded(value) for value in tree_flatten(result)[0])
            tape.operations.append(_Operation(func, arguments, results, self._context_of()))
        return result


# Functions of torch.nn.init that return early for a meta tensor, so that no operation reaches the dispatcher.
RECORDING = Patches(
    "Recording how a model on the meta device is initialized",
    [
        Patch(
            f"torch.nn.init:{name}",
            "does nothing to a tensor on the meta device, so no operation would be recorded",
            "megatron.fsdp.init.deferred:fill_or_record",
            TORCH,
        )
        for name in ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "eye_", "dirac_")
    ],
)
# Recordings in progress; the innermost one is last.
_recorders: list[_TapeRecorder] = []


def fill_or_record(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run an initializer of ``torch.nn.init``, or record it if the tensor is on the meta device."""
    if tensor.is_meta and _recorders:
        _recorders[-1].record_in_place(original, tensor, *args, **kwargs)
    else:
        original(tensor, *args, **kwargs)
    return tensor


class _OnMeta(TorchFunctionMode):
    """Creates tensors on the meta device unless another device is given.

    Unlike ``torch.device("meta")`` as a context, this does not change ``torch.get_default_device()``, which some
    libraries check in order to skip initialization. ``torch.tensor`` would lose its values on the meta device, so it
    creates a CPU tensor, whose move to the meta device is recorded. Empty tensors have no values and stay on the CPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _device_constructors() or torch.device(kwargs.get("device") or "meta").type != "meta":
            return func(*args, **kwargs)
        if func is not torch.tensor:
            return func(*args, **{**kwargs, "device": "meta"})
        value = func(*args, **{**kwargs, "device": "cpu"})
        return value.to("meta") if value.numel() else value


def _recorded(value: Any) -> Any:
    """The representation of an argument or result in the recording."""
    if not isinstance(value, torch.Tensor):
        return value
    return _MetaView.of(value) if value.is_meta else _Constant(value, value._version)


def _on_meta(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor) and leaf.is_meta]


def _real_view(memory: dict[int, torch.Tensor], view: _MetaView) -> torch.Tensor:
    return memory[view.storage].as_strided(view.size, view.stride, view.offset)


def deferred_init(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build a model on the meta device, and record how its parameters and buffers are initialized.

    Sharding the model with ``init_model_with_meta_device=True`` initializes it unit by unit, so no rank ever holds more
    than one whole unit. Random numbers are drawn during sharding. They are the same as in a model that is built on the
    device from the same random state, which is then the same afterwards, too.

    Args:
        function: Returns an ``nn.Module`` or a list of them; for example, a class.
        args: Positional arguments of ``function``.
        kwargs: Keyword arguments of ``function``.

    Returns:
        The result of ``function``.

    Raises:
        TypeError: ``function`` is a model, or cannot be called.
    """
    if isinstance(function, nn.Module) or not callable(function):
        raise TypeError(
            f"deferred_init: expected a class, or a function that builds the model; got {described(function)}. Call "
            "deferred_init(Model, ...) instead of deferred_init(Model(...))."
        )
    return record(functools.partial(function, *args, **kwargs), lambda: nullcontext)


def record(build: Callable[[], Any], context_of: Callable[[], ContextFactory]) -> Any:
    """Like :func:`deferred_init`, for operations that depend on a context, such as a random state.

    Args:
        build: Returns a module or a list of them.
        context_of: Called at every operation. Returns a function that creates the context to replay it in.
    """
    with _recording(context_of) as recorder, _OnMeta():
        built = build()
    found: list[Recipe] = []
    for model in built if isinstance(built, (list, tuple)) else [built]:
        for module in model.modules():
            own = {**module._parameters, **module._buffers}
            module.__dict__[_RECIPES] = {
                name: _recipe(recorder.tape, tensor)
                for name, tensor in own.items()
                if tensor is not None and tensor.is_meta
            }
            found += filter(None, recipes(module).values())
    recorder.tape.needed_later = set[int]().union(*(recipe._needed() for recipe in found))
    return built


@contextmanager
def _recording(context_of: Callable[[], ContextFactory]) -> Iterator[_TapeRecorder]:
    recorder = _TapeRecorder(context_of)
    _recorders.append(recorder)
    try:
        with RECORDING.installed(), recorder:
            yield recorder
    finally:
        _recorders.pop()


@contextmanager
def recorded_resets(parameters: dict[tuple[nn.Module, str], nn.Parameter]) -> Iterator[Callable[..., Recipe | None]]:
    """Context in which modules initialize their parameters on the meta device, and what they do is recorded.

    Args:
        parameters: The parameters, by the places where they are registered.

    Yields:
        A function of a module and a name that returns the recipe of the parameter that is now registered there.
    """
    with _recording(lambda: nullcontext) as recorder:
        # Not empty_like: the recording would depend on the parameter.
        fresh = {id(p): torch.empty(p.shape, dtype=p.dtype, device="meta") for p in parameters.values()}
        new = {key: nn.Parameter(value, requires_grad=False) for key, value in fresh.items()}
        for (module, name), parameter in parameters.items():
            new[id(parameter)].__dict__.update(vars(parameter))
            module._parameters[name] = new[id(parameter)]
        try:
            yield lambda module, name: _recipe(recorder.tape, module._parameters[name])
        finally:
            for (module, name), parameter in parameters.items():
                module._parameters[name] = parameter


def _recipe(tape: _Tape, tensor: torch.Tensor) -> Recipe | None:
    recipe = None if isinstance(tensor, DTensor) or not tensor.is_meta else Recipe(tape, tensor)
    return recipe if recipe is not None and recipe.complete else None


def recipes(module: nn.Module) -> dict[str, Recipe | None]:
    """The recipes of the module's direct parameters and buffers on the meta device, by name; None where incomplete.

    The result is empty if the building of the module was not recorded.
    """
    found: dict[str, Recipe | None] = module.__dict__.get(_RECIPES, {})
    return found


def drop_recipes(module: nn.Module) -> None:
    """Drop the recipes of a module and its submodules once all of them are initialized."""
    for submodule in module.modules():
        submodule.__dict__.pop(_RECIPES, None)
