"""Repeats what a layer does on ghosts, without running its operators again.

Layers of one kind do the same: equal operators, messages and changes of memory, in the same order. Of each kind, one
forward and its backward are recorded. Later ones append that to the program, and only make the tensors that the engine
and other layers meet: output and gradients.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from megatron.fsdp.runtime.engine import Engine
from megatron.fsdp.tools.predict.ghosts import Cost, Memory
from megatron.fsdp.tools.predict.record import Busy, Change, Mark, Message, Recorder

# Tensors of a template, by number. Gradients of further parameters follow.
OUTPUT, INPUT_GRADIENT, FIRST_GRADIENT = 0, 1, 2


class _Make(NamedTuple):
    """A tensor that others meet."""

    tensor: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Release(NamedTuple):
    """The end of what the layer holds: its input, its output or the gradient of that."""

    held: str


class _Bytes(NamedTuple):
    """A change of memory that only the layer uses; ``kept`` after its forward."""

    kept: bool
    bytes: int


class _Before(NamedTuple):
    """The end of what the layer's last call has left. Its bytes are those of the recorded layer."""

    bytes: int


class _Label(NamedTuple):
    """A part of the layer that computes from here on, by the end of its name, or something else."""

    text: str
    within: bool


@dataclass(eq=False)
class Template:
    """The work of a kind of layer.

    Attributes:
        forward: Its forward, as a list of the classes above, ``Busy`` and ``Message``.
        backward: Its backward; empty for a forward without gradients.
        trained: Places of the parameters that get gradients, in the order of these.
        output: Place of the output among the leaves of the results.
        results: Those leaves, and their structure. Leaves of the inputs are their places.
        held: What the layer holds until its backward: "input", "output".
        caches: Bytes that stay after a layer's first forward.
        left: Bytes of forward and backward that the layer leaves, until its next call replaces them.
        graph: Of the recorded layer. If it lives, layers hold their graphs until the next call. After the run, whether
            it lived to its end.
    """

    forward: list[Any] = field(default_factory=list)
    backward: list[Any] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    output: int = 0
    results: tuple[list[Any], Any] = field(default_factory=lambda: ([], None))
    held: set[str] = field(default_factory=set)
    caches: int = 0
    left: tuple[int, int] = 0, 0
    graph: "weakref.ref[_Node] | bool" = False


@dataclass(eq=False)
class _Layer:
    """A layer of the model.

    Attributes:
        module: The layer.
        name: Its name in the model.
        engine: The engine of the model.
        forward: Its own forward.
        left: Bytes that its last call has left; None if that call was run.
        balance: Bytes of what has been left and replaced in calls that were not run.
        graph: Of its last call, if it is held.
        met: Kinds of calls that it has had.
    """

    module: nn.Module
    name: str
    engine: Engine
    forward: Callable[..., Any]
    left: int | None = 0
    balance: int = 0
    graph: torch.Tensor | None = None
    met: set[Any] = field(default_factory=set)


class Replays:
    """Templates of layers, and where they are used.

    Args:
        recorder: What is recorded into.
        seconds: Time of an operator.
        known: Templates by kind of call; None for one that cannot be repeated. Models share them.
        setting: All that a call depends on, except for parameters and inputs.

    Attributes:
        recordings: Number of calls that have been recorded.
    """

    def __init__(
        self,
        recorder: Recorder,
        seconds: Callable[[Cost], float],
        known: dict[Any, Template | None],
        setting: Any,
    ) -> None:
        self.recorder = recorder
        self._seconds, self._known, self._setting = seconds, known, setting
        self.recordings = 0
        self._latest: dict[Any, _Recording] = {}
        self._recorded: list[Any] = []
        # Memory that the first call of a kind has allocated, in the layer that met it last: what is made once for all
        # layers is not among it.
        self._first: dict[Any, list[Memory]] = {}

    def attach(self, model: nn.Module, engine: Engine) -> None:
        """Let the units of a sharded model that are one layer be repeated."""
        for unit in engine.units[1:]:
            if not (unit.children or unit.together):
                module = model.get_submodule(unit.name)
                layer = _Layer(module, unit.name, engine, module.forward)
                kind = self._setting, *kind_of(module)
                module.forward = self._calls(layer, kind)

    def _calls(self, layer: _Layer, kind: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, structure = tree_flatten((args, kwargs))
            has_graph = torch.is_grad_enabled()
            trained = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if has_graph and len(trained) != 1:
                return layer.forward(*args, **kwargs)
            key = (*kind, layer.module.training, has_graph, tuple(map(_described, leaves)), structure)
            # The first call of a kind is run, as Megatron's logs need what it adds to them. No layer is recorded in its
            # first call, in which it may make what it keeps.
            is_first, is_new = key not in self._first, key not in layer.met
            layer.met.add(key)
            template = None if is_first else self._known.get(key)
            if template is not None:
                return self._repeat(template, layer, leaves, trained if has_graph else [], is_new)
            layer.left = None
            if layer.balance:  # what it has left when it was run last is there
                self._add(Change(Memory("activations", 0), -layer.balance))
                layer.balance = 0
            if is_new:
                return self._run_first(key, layer, args, kwargs)
            if key in self._known:
                return layer.forward(*args, **kwargs)
            self.recordings += 1
            recording = self._latest[key] = _Recording(self, key, layer)
            return recording.run(leaves, structure, trained[0] if has_graph else None)

        return call

    def _add(self, entry: Any) -> None:
        self.recorder.entries.append(entry)

    def _run_first(self, key: Any, layer: _Layer, args: Any, kwargs: Any) -> Any:
        start = len(self.recorder.entries)
        result = layer.forward(*args, **kwargs)
        outputs = {self.memory_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        made = [each for each in self.recorder.entries[start:] if isinstance(each, Change) and each.bytes > 0]
        self._first[key] = [*({each.memory for each in made} - outputs)]
        return result

    def end_step(self) -> None:
        """Give up recordings whose backward has not ended: a later step would record them again."""
        for recording in [*self._latest.values()]:
            recording.give_up()

    def finish(self) -> None:
        """Note what the layers of recorded kinds keep for good, after the last step."""
        for key in self._recorded:
            template = self._known[key]
            if template is not None:
                template.caches = sum(memory.nbytes for memory in self._first[key])
                template.graph = not isinstance(template.graph, bool) and template.graph() is not None

    def memory_of(self, tensor: torch.Tensor) -> Memory:
        """The record of a tensor's memory."""
        return self.recorder.ghosts.memory_of(tensor.untyped_storage())

    def settle(self, recording: "_Recording", template: Template | None) -> None:
        """Keep the template of a recording, unless another call of its kind was recorded later."""
        if self._latest.get(recording.key) is recording:
            del self._latest[recording.key]
            self._known[recording.key] = template
            self._recorded.append(recording.key)
            if template is not None:
                template.forward, template.backward = map(self._compressed, (template.forward, template.backward))

    def _compressed(self, items: list[Any]) -> list[Any]:
        """A list in which neighbouring operators and changes of memory are few, with the same time and peak."""
        found: list[Any] = []
        run: list[Any] = []
        for item in [*items, None]:
            if isinstance(item, Cost | _Bytes):
                run.append(item)
            else:
                found += [*self._as_few(run), *([] if item is None else [item])]
                run = []
        return found

    def _as_few(self, run: list[Any]) -> list[Any]:
        changes = [item for item in run if isinstance(item, _Bytes)]
        total, most, peak = 0, 0, 0
        for place, change in enumerate(changes, 1):
            total += change.bytes
            if total > most:
                most, peak = total, place
        seconds = sum(self._seconds(item) for item in run if isinstance(item, Cost))
        return [*_sums(changes[:peak]), *([Busy(seconds)] if seconds else []), *_sums(changes[peak:])]

    def _repeat(
        self, template: Template, layer: _Layer, leaves: list[Any], trained: list[torch.Tensor], is_new: bool
    ) -> Any:
        if is_new and template.caches:
            self._add(Change(Memory("activations", 0), template.caches))
        params = [*layer.module.parameters()]
        call = _Call(self, template, layer, Memory(self.recorder.ghosts.category, 0))
        call.held["others"] = [leaf for leaf in leaves if not any(leaf is each for each in trained)]
        token = _Repeated.apply(call, *trained, *(params[place] for place in template.trained))
        if template.graph if isinstance(template.graph, bool) else template.graph() is not None:
            layer.graph = token
        found, structure = template.results
        results = [leaves[each] if isinstance(each, int) else each for each in found]
        results[template.output] = _Output.apply(token, call)
        return tree_unflatten(results, structure)


@dataclass(eq=False)
class _Call:
    """A call that is not run.

    Attributes:
        replays: Where its template is from.
        template: What it does.
        layer: The layer.
        kept: Memory that lives until the backward.
        made: Tensors of the template, until they are given away.
        held: What it holds, by name.
    """

    replays: Replays
    template: Template
    layer: _Layer
    kept: Memory
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)

    def append(self, is_backward: bool = False) -> None:
        """Append a part of the template to the program, and make its tensors."""
        recorder, template, layer = self.replays.recorder, self.template, self.layer
        add, passing = recorder.entries.append, Memory("temporary", 0)
        for item in template.backward if is_backward else template.forward:
            if isinstance(item, _Bytes):
                add(Change(self.kept if item.kept else passing, item.bytes))
            elif isinstance(item, _Make):
                self.made[item.tensor] = torch.empty_strided(item.shape, item.stride, dtype=item.dtype)
            elif isinstance(item, _Release):
                self.held.pop(item.held, None)
            elif isinstance(item, _Before):
                change = item.bytes if layer.left is None else -layer.left
                add(Change(self.kept, change))
                layer.balance += change
                layer.left, layer.graph = layer.left and 0, None
            elif isinstance(item, _Label):
                recorder.mark(layer.name + item.text if item.within else item.text)
            else:
                add(item._replace())  # its identity says when it may begin
        layer.balance += template.left[is_backward]
        layer.left = sum(template.left[: 1 + is_backward])


class _Repeated(torch.autograd.Function):
    """A call whose forward and backward are a template. The arguments after it are an input and parameters."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *trained: torch.Tensor) -> torch.Tensor:
        call.append()
        if "input" in call.template.held:
            call.held["input"] = trained[0].detach()
        if "output" in call.template.held:
            call.held["output"] = call.made[OUTPUT].detach()
        ctx.call = call
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        call, ctx.call = ctx.call, None
        call.append(is_backward=True)
        numbers = INPUT_GRADIENT, *range(FIRST_GRADIENT, FIRST_GRADIENT + len(call.template.trained))
        call.held.clear()
        return None, *(call.made.pop(number) for number in numbers)


class _Output(torch.autograd.Function):
    """The output of such a call. Autograd would hold the gradient in the course of the whole backward."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, call: _Call) -> torch.Tensor:
        ctx.call = call
        return call.made.pop(OUTPUT)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call.held["gradient"] = gradients
        ctx.call = None
        return torch.empty(0), None


class _Recording:
    """A call that is run, from which a template is made.

    Args:
        replays: Where the template belongs.
        key: The kind of the call.
        layer: The layer.
    """

    def __init__(self, replays: Replays, key: Any, layer: _Layer) -> None:
        self.key, self._replays, self._layer = key, replays, layer
        self._template = Template()
        self._made: dict[Memory, _Make] = {}
        self._held: dict[Memory, str] = {}
        self._hooks: list[Any] = []
        self._nodes: list[Any] = []
        self._left_out: list[tuple[int, int]] = []
        self._entries: list[Any] | None = None  # of the backward, once it has begun
        self._fails = False

    def run(self, leaves: list[Any], structure: Any, trained: torch.Tensor | None) -> Any:
        """Run the forward, and watch its backward.

        Args:
            leaves: The tensors and other values that the layer is given.
            structure: Their structure.
            trained: The one that needs a gradient; None without a graph.
        """
        given = leaves
        if trained is not None:
            node = _Node()
            self._template.graph = weakref.ref(node)
            edge = _Edge.apply(trained, self._end, node)
            given = [edge if leaf is trained else leaf for leaf in leaves]
            del node
        entries = self._replays.recorder.entries
        start = len(entries)
        args, kwargs = tree_unflatten(given, structure)
        result = self._layer.forward(*args, **kwargs)
        self._forward = entries[start:]
        found, of_result = tree_flatten(result)
        known = {id(leaf): place for place, leaf in enumerate(given) if isinstance(leaf, torch.Tensor)}
        own = [place for place, leaf in enumerate(found) if isinstance(leaf, torch.Tensor) and id(leaf) not in known]
        alone = self._replays.recorder.entries is entries and len(own) == 1 and _only_computes(self._forward)
        if not (alone and self._can_make(OUTPUT, found[own[0]], self._forward)):
            return self.give_up(result)
        self._template.output = own[0]
        self._template.results = [None if n == own[0] else known.get(id(x), x) for n, x in enumerate(found)], of_result
        if trained is None:
            self._finish([])
            return result
        places = {id(param): place for place, param in enumerate(self._layer.module.parameters())}
        for param in (each for group in self._layer.engine.groups for each in group.params if each.trained):
            self._watch(places.get(id(param.compute)), param.compute)
        self._held = {self._replays.memory_of(trained): "input", self._replays.memory_of(found[own[0]]): "output"}
        found[own[0]] = _Edge.apply(found[own[0]], self._begin, None)
        return tree_unflatten(found, of_result)

    def _can_make(self, number: int, tensor: torch.Tensor, entries: Iterable[Any]) -> bool:
        """Whether a tensor has memory of its own, which was allocated among some entries; if so, note it."""
        memory = self._replays.memory_of(tensor)
        if memory in self._made or tensor.untyped_storage().nbytes() != tensor.nbytes:
            return False
        self._made[memory] = _Make(number, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        return any(isinstance(each, Change) and each.memory is memory and each.bytes > 0 for each in entries)

    def _watch(self, place: int | None, param: torch.Tensor) -> None:
        """Note a parameter's gradient, and leave out what autograd does to accumulate it: it does that again.

        Args:
            place: Among the layer's parameters; None for one of another module.
            param: The parameter.
        """
        entries, trained = self._replays.recorder.entries, self._template.trained

        def begin(gradients: Any) -> None:
            if self._entries is None:
                return  # another layer's backward
            self._begun = len(entries)
            if place is None or not self._can_make(FIRST_GRADIENT + len(trained), gradients[0], entries[self._start :]):
                self._fails = True
            else:
                trained.append(place)

        def end(*_: Any) -> None:
            if self._entries is not None:
                self._left_out.append((self._begun, len(entries)))

        # The engine would see hooks of the parameter itself.
        node: Any = param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._hooks += [node.register_prehook(begin), node.register_hook(end)]
        self._nodes.append(node)

    def _begin(self, gradient: torch.Tensor) -> None:
        """The gradient of the output begins the backward."""
        self._held[self._replays.memory_of(gradient)] = "gradient"
        self._entries = self._replays.recorder.entries
        self._start = len(self._entries)

    def _end(self, gradient: torch.Tensor) -> None:
        """The gradient of the input ends it."""
        self._unwatch()
        expected = sum(param.requires_grad for param in self._layer.module.parameters())
        complete = len(self._template.trained) == expected  # else a different call in the graph has the rest
        if self._entries is not self._replays.recorder.entries or self._fails or not complete:
            return self.give_up()
        backward = self._entries[self._start :]
        for first, last in reversed(self._left_out):
            del backward[first - self._start : last - self._start]
        if not (_only_computes(backward) and self._can_make(INPUT_GRADIENT, gradient, backward)):
            return self.give_up()
        self._finish(backward)

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._nodes = [], []

    def give_up(self, result: Any = None) -> Any:
        """End the recording without a template. Returns the result of the call."""
        self._unwatch()
        self._replays.settle(self, None)
        return result

    def _finish(self, backward: list[Any]) -> None:
        """Make the template of both parts."""
        template, parts = self._template, (self._forward, backward)
        of_forward, of_backward = ([each for each in part if isinstance(each, Change)] for part in parts)
        left = Counter[Memory]()
        for each in (*of_forward, *of_backward):
            left[each.memory] += each.bytes
        own = left.keys() - self._made.keys() - self._held.keys()
        born = {each.memory for each in (*of_forward, *of_backward) if each.bytes > 0} & own
        in_backward = {each.memory for each in of_backward}
        stays = {memory for memory in born if memory.nbytes}
        replaced = -sum(min(left[memory], 0) for memory in own - born)
        if 2 * replaced < sum(left[memory] for memory in stays):
            stays = set()  # it goes with something else, else a call would have found as much
        kept = stays | {each.memory for each in of_forward} & in_backward
        items = [[item for entry in part for item in self._items(entry, born, kept)] for part in parts]
        for memory in born - stays:
            if left[memory]:  # what called the layer has freed it afterwards
                items[memory in in_backward].append(_Bytes(memory in kept, -left[memory]))
        sizes = [sum(left[memory] for memory in stays if (memory in in_backward) == part) for part in (False, True)]
        template.left = sizes[0], sizes[1]
        template.forward, template.backward = items
        self._replays.settle(self, template)

    def _items(self, entry: Any, born: set[Memory], kept: set[Memory]) -> list[Any]:
        """The items that stand for an entry of the program."""
        if isinstance(entry, Mark):
            text, name = entry.label or "", self._layer.name
            return [_Label(text.removeprefix(name), text.startswith(name))] if text else []
        if not isinstance(entry, Change):
            return [entry]
        memory, size = entry
        if memory in self._held and size < 0:
            self._template.held.add(self._held[memory])
            return [_Release(self._held[memory])]
        if memory in self._made:
            return [self._made[memory]] if size > 0 else []
        if memory in born:
            return [_Bytes(memory in kept, size)]
        return [_Before(size)] if size < 0 else []


class _Node:
    """Lives as long as a graph."""


class _Edge(torch.autograd.Function):
    """The input or the output of a recorded layer, whose gradient ends or begins the layer's backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, on_gradient: Callable[[torch.Tensor], None], node: _Node | None
    ) -> torch.Tensor:
        ctx.on_gradient, ctx.node = on_gradient, node
        # Pipelines free outputs, unless they are views.
        return tensor.new_empty(0).set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.on_gradient(gradients[0])
        return gradients[0], None, None


def _sums(changes: list[_Bytes]) -> list[_Bytes]:
    """Two changes in place of many, frees first."""
    sums = (_Bytes(kept, sum(each.bytes for each in changes if each.kept == kept)) for kept in (True, False))
    return sorted((each for each in sums if each.bytes), key=lambda each: each.bytes)


def _only_computes(entries: list[Any]) -> bool:
    """Whether the engine has done nothing among some entries."""
    return all(isinstance(entry, Cost | Change | Mark | Message) for entry in entries)


def kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """The properties of a layer that say what it does: its class, and those of its parameters."""
    return type(layer).__name__, *(
        (tuple(p.shape), p.dtype, p.requires_grad, getattr(p, "computes_quantized", False)) for p in layer.parameters()
    )


def _described(leaf: Any) -> Any:
    """The part of a given value that a layer may depend on."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf)
