"""torch.compile with sharding: equal results, graphs without the engine, and no recompilation in later steps."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp import fsdp2
from megatron_fsdp import fully_shard, fully_shard_model
from tests.models import STRATEGIES, Block, Pair, TinyModel, adamw, assert_same_gradients, batches, device, loss_of
from tests.ranks import RankPool, on_ranks
from tests.training_models import Recomputing


class Graphs:
    """A backend of torch.compile that counts."""

    def __init__(self, backend: str = "eager") -> None:
        self.compiled = self.called = self.operations = 0
        self._backend = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.compiled += 1
        self.operations += sum(node.op in ("call_function", "call_method", "call_module") for node in graph.graph.nodes)
        function = self._backend(graph, example_inputs)

        def call(*args: Any) -> Any:
            self.called += 1
            return function(*args)

        # Compiled autograd passes its arguments in one list.
        if getattr(function, "_boxed_call", False):
            call._boxed_call = True
        return call


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    import torch._dynamo

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    try:
        yield
    finally:
        torch.compiler.reset()


def _wrap_blocks(model: TinyModel, graphs: Graphs) -> None:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=graphs, fullgraph=True)


def _blocks_in_place(model: TinyModel, graphs: Graphs) -> None:
    for block in model.blocks:
        block.compile(backend=graphs, fullgraph=True)


def _parts_of_blocks(model: TinyModel, graphs: Graphs) -> None:
    for block in model.blocks:
        block.up = torch.compile(block.up, backend=graphs, fullgraph=True)
        block.down = torch.compile(block.down, backend=graphs, fullgraph=True)


def _forwards(model: TinyModel, graphs: Graphs) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=graphs, fullgraph=True)


def _model_in_place(model: TinyModel, graphs: Graphs) -> None:
    model.compile(backend=graphs)


_ALL = (_wrap_blocks, _blocks_in_place, _parts_of_blocks, _forwards, _model_in_place)
WAYS = {way.__name__.strip("_"): way for way in _ALL}


def _train(strategy: str, way: str, backend: str, before: bool) -> None:
    with _fresh_compiler():
        graphs, seen = Graphs(backend), []
        pair = Pair(TinyModel(), prepare=lambda model: before and WAYS[way](model, graphs), zero_dp_strategy=strategy)
        if not before:
            WAYS[way](pair.sharded.module, graphs)
        assert pair.sharded.engine.unit_names == ["", "blocks.0", "blocks.1", "blocks.2"]
        for step in batches(4, dist.get_world_size()):
            pair.backward(step)
            pair.update()
            seen.append((graphs.compiled, graphs.called))
        _assert_each_step_calls_the_same_graphs(seen)
        pair.assert_same_weights()


def _assert_each_step_calls_the_same_graphs(seen: list[tuple[int, int]]) -> None:
    (compiled, called), *later = seen
    assert compiled >= 1 and called >= 3
    for number, (compiled_until, called_until) in enumerate(later, start=2):
        assert compiled_until == compiled and called_until == number * called, seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_before_sharding(ranks: RankPool, way: str, backend: str) -> None:
    ranks.run(2, _train, "optim_grads_params", way, backend, True)


@pytest.mark.parametrize("strategy", STRATEGIES[:-1])
@pytest.mark.parametrize("way", ["wrap_blocks", "blocks_in_place"])
def test_compiled_blocks_with_each_strategy(ranks: RankPool, strategy: str, way: str) -> None:
    ranks.run(2, _train, strategy, way, "aot_eager", True)


@pytest.mark.parametrize("way", ["parts_of_blocks", "forwards", "model_in_place"])
def test_compiled_after_sharding(ranks: RankPool, way: str) -> None:
    ranks.run(2, _train, "optim_grads_params", way, "eager", False)


def _same_gradients(model: TinyModel, compile_all: bool) -> None:
    """Gradients with and without compiling, evaluation in between, and no graph made again when all is repeated."""
    with _fresh_compiler():
        reference = copy.deepcopy(model)
        graphs = Graphs("aot_eager")
        if not compile_all:
            _wrap_blocks(model, graphs)
        sharded = fully_shard_model(model, fsdp_unit_modules=[Block])
        call = torch.compile(sharded, backend=graphs) if compile_all else sharded
        tokens = batches(1, 1)[0, 0]
        compiled = []
        for _ in range(3):
            with torch.no_grad():
                torch.testing.assert_close(loss_of(call, tokens), loss_of(reference, tokens))
            sharded.zero_grad()
            loss_of(call, tokens).backward()
            compiled.append(graphs.compiled)
        assert compiled[0] == compiled[2] >= 2, compiled  # with gradients and without
        loss_of(reference, tokens).backward()
        assert_same_gradients(sharded, reference, atol=2e-6)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_compiled_units_that_are_recomputed(reentrant: bool) -> None:
    torch.manual_seed(3)
    _same_gradients(Recomputing(reentrant).to(device()), compile_all=False)


@on_ranks(2)
def test_compiling_the_sharded_model() -> None:
    torch.manual_seed(3)
    _same_gradients(TinyModel().to(device()), compile_all=True)


@on_ranks(2)
@pytest.mark.parametrize("early", [False, True])
def test_compiling_a_marked_model_before_its_first_forward(early: bool) -> None:
    with _fresh_compiler():
        torch.manual_seed(3)
        reference = TinyModel().to(device())
        model = copy.deepcopy(reference)
        for module in (*model.blocks, model):
            fsdp2.fully_shard(module)
        if early:
            list(model.parameters())
        compiled = torch.compile(model, backend="eager")
        for tokens in batches(2, 1)[:, 0]:
            loss_of(compiled, tokens).backward()
            loss_of(reference, tokens).backward()
        for ours, plain in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)


def _nothing_of_the_engine() -> tuple[int, int]:
    """Operations in the graphs, which are those of a block; and how often a graph had to be broken."""
    with _fresh_compiler():
        graphs = Graphs()
        model = TinyModel().to(device())
        model.compile(backend=graphs)
        sharded = fully_shard_model(model, fsdp_unit_modules=[Block])
        loss_of(sharded, batches(1, 1)[0, 0]).backward()
        return graphs.operations, sum(torch._dynamo.utils.counters["graph_break"].values())


def test_graphs_hold_nothing_of_the_engine(ranks: RankPool) -> None:
    # Norm, two linear layers, their activation and a sum.
    assert ranks.run(2, _nothing_of_the_engine) == [(5, 0)] * 2


@on_ranks(1)
def test_class_of_a_compiled_module_is_matched() -> None:
    with _fresh_compiler():
        for units in ([Block], ["tests.models.Block"], [torch._dynamo.OptimizedModule]):
            model = TinyModel()
            _wrap_blocks(model, Graphs())
            sharded = fully_shard_model(model, fsdp_unit_modules=units)
            assert sharded.engine.unit_names == ["", "blocks.0", "blocks.1", "blocks.2"]
            assert all(isinstance(block, torch._dynamo.OptimizedModule) for block in model.blocks)
            assert [len(unit.groups[0].params) for unit in sharded.engine.units[1:]] == [5, 5, 5]
        root = torch.compile(TinyModel(), backend=Graphs())
        sharded = fully_shard_model(root, fsdp_unit_modules=[TinyModel, Block])
        assert sharded.engine.unit_names == ["", *(f"_orig_mod.blocks.{i}" for i in range(3))]
        loss_of(sharded, batches(1, 1)[0, 0]).backward()


@on_ranks(2)
def test_a_compiled_step_of_the_optimizer_raises() -> None:
    model = TinyModel().to(device())
    model, optimizer = fully_shard(model, adamw(model.parameters()), fsdp_unit_modules=[Block])
    loss_of(model, batches(1, 1)[0, 0]).backward()
    with _fresh_compiler(), pytest.raises(RuntimeError, match="cannot trace sharded tensors. Compile modules before"):
        torch.compile(optimizer.step, backend="eager")()
