"""Code written for torch's fully_shard: when it shards a model, its state, its optimizers, and its errors."""

import copy
import gc
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron.fsdp import fsdp2
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.dtensor.torch_patches import TORCH
from megatron.fsdp.fsdp2.marked import model_of
from megatron_fsdp import fully_shard_model, save_safetensors
from tests.models import DEVICE, TinyModel, adamw, batches, device, loss_of, sgd
from tests.ranks import RankPool, on_ranks
from tests.unit_tests.test_fsdp2 import BF16, FSDP2, Run, assert_same, build, full_weights, train

# When the model is sharded ------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(
    "first", ["parameters", "named_parameters", "state_dict", "load_state_dict", "forward", "unshard", "around"]
)
def test_single_module_is_sharded_when_first_needed(first: str) -> None:
    start = TinyModel().to(device())
    model = fsdp2.fully_shard(copy.deepcopy(start))
    assert isinstance(model, TinyModel) and isinstance(model, fsdp2.FSDPModule)
    assert isinstance(model.head.weight, nn.Parameter) and not isinstance(model.head.weight, DTensor)
    tokens = batches(1, 1)[0, 0]
    if first == "parameters":
        assert all(isinstance(p, DTensor) for p in model.parameters())
    elif first == "named_parameters":
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in start.named_parameters()]
    elif first == "state_dict":
        assert list(model.state_dict()) == list(start.state_dict())
    elif first == "load_state_dict":
        model.load_state_dict(start.state_dict())
    elif first == "forward":
        with torch.no_grad():
            torch.testing.assert_close(model(tokens), start(tokens))
    elif first == "unshard":
        model.unshard()
        assert torch.equal(model.head.weight, start.head.weight)
        model.reshard()
    else:  # a module around it, which is not marked
        model = nn.Sequential(model)
        assert list(model.state_dict()) == [f"0.{name}" for name in start.state_dict()]
    assert all(isinstance(p, DTensor) for p in model.parameters())
    torch.testing.assert_close(model(tokens), start(tokens))


def _units() -> list[str]:
    """Nested as deep as one likes, in any order, some in a list."""
    model: Any = TinyModel()
    for block in model.blocks:
        fsdp2.fully_shard([block.up, block.norm])
        fsdp2.fully_shard(block)
    model = fsdp2.fully_shard(model)
    fsdp2.fully_shard(model.head)
    train(model.to(device()), batches(2, 2))
    return model_of(model).engine.unit_names


def test_marked_modules_are_units(ranks: RankPool) -> None:
    blocks = [f"blocks.{i}{part}" for i in range(3) for part in ("", ".norm")]
    assert ranks.run(2, _units)[0] == ["", *blocks, "head"]


@on_ranks(2)
@pytest.mark.parametrize("early", [True, False])
def test_modules_that_nothing_marked_is_around(early: bool) -> None:
    """Several models in one that is not marked; an optimizer that has its parameters from before."""
    start = TinyModel().to(device())
    runs = []
    for library in (fsdp2, FSDP2):
        model = copy.deepcopy(start)
        for block in model.blocks:
            library.fully_shard(block)
            if early:
                assert all(isinstance(p, DTensor) for p in block.parameters())
        # Not foreach, torch's default on CUDA: it does not take DTensors and other tensors at once.
        optimizer, run = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), Run()
        for step in batches(3, 2):
            loss = loss_of(model, step[dist.get_rank()])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(loss.item())
        run.weights = full_weights(model.blocks[1])
        runs.append(run)
        assert all(isinstance(p, DTensor) for p in model.blocks.parameters())
        assert model.head.weight.dim() == 2 and not isinstance(model.head.weight, DTensor)
    assert_same(*runs)


@on_ranks(2)
def test_one_rank_may_ask_alone() -> None:
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("replicate", "shard"))
    start = TinyModel().to(device())
    model = build(fsdp2, start, mesh=mesh)
    model.scale = nn.Parameter(torch.ones((), device=device()))
    if dist.get_rank() == 0:
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in start.parameters()) + 1
        assert len(model.state_dict()) == len(start.state_dict()) + 1
    dist.barrier()
    train(model, batches(1, 2))


@on_ranks(2)
@pytest.mark.parametrize("trained", [True, False])
def test_deleting_the_model_frees_it(trained: bool) -> None:
    adamw([nn.Parameter(torch.zeros(1))])  # torch's own first optimizer is kept by an import that it tries
    gc.collect()
    gc.disable()
    try:
        model = build(fsdp2, TinyModel().to(device()))
        model.own = nn.Parameter(torch.zeros(3, device=device()))
        fsdp2.register_fsdp_forward_method(model, "forward")
        if trained:
            train(model, batches(1, 2))
        engine = weakref.ref(model.unshard(async_op=True) and model_of(model).engine)
        model.reshard()
        references = [weakref.ref(model), engine, *(weakref.ref(local_shard(p)) for p in model.parameters())]
        del model
        assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()


@on_ranks(2)
def test_parts_that_the_optimizer_meets_later() -> None:
    """Parts that are sharded, or given to the optimizer, after it has taken steps."""
    start = nn.ModuleList(nn.Linear(13, 13) for _ in range(3)).to(device())
    runs = []
    for library in (None, fsdp2):
        parts = copy.deepcopy(start)
        for part in parts:
            if library:
                library.fully_shard(part)
        optimizer = torch.optim.AdamW(parts[:2].parameters(), lr=0.1)
        for step, chosen in enumerate(([0], [0, 1], [0, 1, 2], [2])):
            if step == 2:
                optimizer.add_param_group({"params": list(parts[2].parameters()), "lr": 0.2})
            x = torch.ones(2, 13, device=device())
            for number in chosen:
                x = parts[number](x)
            x.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append([full_weights(part) if library else part.cpu().state_dict() for part in parts])
    torch.testing.assert_close(*runs)


# Optimizers ---------------------------------------------------------------------------------------------------------


# State --------------------------------------------------------------------------------------------------------------


def _marked() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of which nothing has been read since it was marked, and its optimizer, which was built before."""
    model = TinyModel().to(device())
    optimizer = adamw(model.parameters())
    for module in (*model.blocks, model):
        fsdp2.fully_shard(module)
    return model, optimizer


@on_ranks(2)
@pytest.mark.parametrize("calls", ["both", "shards", "full"])
def test_state_may_be_set_before_anything_is_read(calls: str) -> None:
    model, optimizer = _marked()
    train(model, batches(1, 2), make_optimizer=lambda _: optimizer)
    full = StateDictOptions(full_state_dict=calls == "full")
    states = get_model_state_dict(model, options=full), get_optimizer_state_dict(model, optimizer, options=full)
    states = copy.deepcopy(states)  # the functions of torch may share the steps
    TORCH.uninstall()  # as in a new process
    other, resumed = _marked()
    if calls == "both":
        set_state_dict(other, resumed, model_state_dict=states[0], optim_state_dict=states[1])
    else:
        set_optimizer_state_dict(other, resumed, states[1], options=full)
        set_model_state_dict(other, states[0], options=full)
    pairs: Any = ((model, optimizer), (other, resumed))
    assert_same(*(train(each, batches(1, 2, seed=5), make_optimizer=lambda _, its=its: its) for each, its in pairs))


def _safetensors(folder: str) -> None:
    with pytest.raises(ValueError, match="expected a sharded model; got a TinyModel. Give what fully_shard returned"):
        save_safetensors(TinyModel(), folder)
    model, optimizer = _marked()
    with pytest.raises(ValueError, match="expected a sharded model; got a FSDPBlock. Give what fully_shard returned"):
        save_safetensors(model.blocks[0], folder)
    train(model, batches(1, 2), make_optimizer=lambda _: optimizer)
    save_safetensors(model, folder)
    dist.barrier()
    saved = pytest.importorskip("safetensors.torch").load_file(f"{folder}/model.safetensors")
    torch.testing.assert_close(saved, full_weights(model), rtol=0, atol=0)


def test_safetensors(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    ranks.run(2, _safetensors, str(tmp_path))


def _evenly_sharded() -> None:
    """State of torch's FSDP2, or from distribute_tensor, loads into a model on the meta device."""
    start = TinyModel().to(device())
    with torch.device("meta"):
        empty = TinyModel()
    for block in empty.blocks:
        fsdp2.fully_shard(block)
    model = fsdp2.fully_shard(empty)
    with pytest.raises(RuntimeError, match="Missing: "):
        model.load_state_dict({})
    own = model.state_dict()
    for dim in (1, 0):
        even = {
            name: nn.Parameter(distribute_tensor(value, own[name].device_mesh, [Shard(min(dim, value.dim() - 1))]))
            for name, value in start.state_dict().items()
        }
        model.load_state_dict(even, assign=True)
        assert all(torch.equal(weight, start.state_dict()[name].cpu()) for name, weight in full_weights(model).items())
        start.load_state_dict({name: value + 1 for name, value in start.state_dict().items()})
    other = build(fsdp2, TinyModel().to(device()))
    other.load_state_dict(build(FSDP2, start).state_dict())
    assert all(torch.equal(weight, start.state_dict()[name].cpu()) for name, weight in full_weights(other).items())
    with pytest.raises(ValueError, match=r"head\.weight: expected shape \(31, 13\); got \(2, 2\)"):
        model.load_state_dict({"head.weight": torch.zeros(2, 2)}, strict=False)


@pytest.mark.parametrize("world", [2, 3])
def test_evenly_sharded_state_loads(ranks: RankPool, world: int) -> None:
    ranks.run(world, _evenly_sharded)


@on_ranks(2)
def test_state_of_a_part_loads() -> None:
    """A module inside, which is marked, loads its own state as without sharding, before and after a forward."""
    expected = TinyModel().to(device())
    model, batch = build(fsdp2, copy.deepcopy(expected)), batches(1, 1)[0, 0]
    for value in (0.5, 0.25):
        state = {name: torch.full_like(weight, value) for name, weight in expected.blocks[1].state_dict().items()}
        expected.blocks[1].load_state_dict(state)
        assert model.blocks[1].load_state_dict(state) == ([], [])
        assert all(
            torch.equal(weight, expected.state_dict()[name].cpu()) for name, weight in full_weights(model).items()
        )
        torch.testing.assert_close(model(batch), expected(batch))
    del state["up.bias"]
    assert model.blocks[1].load_state_dict(state | {"other": batch}, strict=False) == (["up.bias"], ["other"])
    with pytest.raises(RuntimeError, match=r"Missing: up\.bias\. Unexpected: none"):
        model.blocks[1].load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"up\.bias: expected shape \(40,\); got \(3,\)"):  # a ValueError, too
        model.blocks[1].load_state_dict({"up.bias": torch.zeros(3)}, strict=False)


@on_ranks(2)
def test_meta_device() -> None:
    """Building on the meta device, as one writes it for FSDP2: the values come from the user's own code."""
    with torch.device("meta"):
        model = TinyModel()
    for block in model.blocks:
        fsdp2.fully_shard(block, mp_policy=fsdp2.MixedPrecisionPolicy(**BF16))
    fsdp2.fully_shard(model, mp_policy=fsdp2.MixedPrecisionPolicy(**BF16)).to_empty(device=device())
    assert all(isinstance(p, DTensor) and p.dtype is torch.float32 for p in model.parameters())
    torch.manual_seed(7)
    start = TinyModel()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            parameter.add_(0.25)
        assert all((weight == 0.25).all() for weight in full_weights(model).values())
    model.load_state_dict(start.state_dict())
    train(model, batches(2, 2))


@dataclass
class Value:
    x: torch.Tensor


class Scale(nn.Module):
    """It takes and returns a dataclass, and has no ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))

    def forward(self, value: Value) -> Value:
        assert value.x.dtype is self.weight.dtype is torch.bfloat16
        return Value(value.x * self.weight)


@on_ranks(2)
@pytest.mark.parametrize("by", ["state", "load", "init"])
def test_the_caller_initializes_modules_without_a_method_for_it(by: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Scale(), Scale())
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    for module in [*model, model]:
        fsdp2.fully_shard(module, mp_policy=policy)
    data = Value(torch.ones(2, 4, device=device()))
    with pytest.raises(RuntimeError, match=r"has no values: 0.weight. Call model.to_empty\(device=...\)"):
        model(data)
    if by == "state":
        own = model.state_dict()
        with pytest.raises(RuntimeError, match=r"has no values: 0.weight. Call model.to_empty\(device=...\)"):
            model(data)
        mesh, placements = own["0.weight"].device_mesh, own["0.weight"].placements
        model.load_state_dict({name: distribute_tensor(torch.full((4,), 2.0), mesh, placements) for name in own})
    elif by == "load":
        model.load_state_dict({"0.weight": torch.full((4,), 2.0), "1.weight": torch.full((4,), 2.0)})
    else:
        model.to_empty(device=device())
        assert all(weight.isnan().all() for weight in full_weights(model).values())
        for parameter in model.parameters():
            nn.init.constant_(parameter, 2.0)
    assert not any(hasattr(module, "reset_parameters") for module in model)
    result = model(data).x
    assert result.dtype is torch.float64 and (result == 4).all()


# Errors ---------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_arguments() -> None:
    model = TinyModel()
    with pytest.raises(NotImplementedError, match="dp_mesh_dims: give the data-parallel axes"):
        fsdp2.fully_shard(model, dp_mesh_dims=fsdp2.DataParallelMeshDims(shard="dp"))
    mesh = init_device_mesh(DEVICE, (2, 1, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match="^fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh"):
        fsdp2.fully_shard(model, mesh=mesh)
    with pytest.raises(AssertionError, match="^Please init the 2D mesh for HSDP with mesh_dim_names specified"):
        fsdp2.fully_shard(model, mesh=init_device_mesh(DEVICE, (2, 1)))
    with pytest.raises(ValueError, match="expected None or one of"):
        fsdp2.fully_shard(model, mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.int8))
    assert type(model) is TinyModel
    fsdp2.fully_shard(model, ignored_params=set(), shard_placement_fn=lambda p: Shard(0) if p.dim() > 1 else Shard(-1))
    model.set_requires_gradient_sync(True)
    train(model.to(device()), batches(1, 2))


@on_ranks(2)
def test_models() -> None:
    with pytest.raises(ValueError, match=r"Parameter 1\.weight is a .*UninitializedParameter, which has no shape yet"):
        fsdp2.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)))
    half = fsdp2.MixedPrecisionPolicy(param_dtype=torch.float16)
    model: Any = build(fsdp2, TinyModel().bfloat16().to(device()), {})
    fsdp2.fully_shard(model.head, mp_policy=half)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"is torch.bfloat16 and parameter head\.weight is torch.float16"):
            list(model.parameters())
    model = TinyModel().to(device())
    fsdp2.fully_shard(model.head, offload_policy=fsdp2.CPUOffloadPolicy())
    with pytest.raises(NotImplementedError, match="offload_policy: head and the modules around it"):
        fsdp2.fully_shard(model).state_dict()


@on_ranks(2)
def test_methods() -> None:
    model = build(fsdp2, TinyModel().to(device()))
    with pytest.raises(NotImplementedError, match="cannot be copied"):
        copy.deepcopy(model)
    for method in (
        "set_symm_mem_for_comm",
        "set_keep_unsharded_storage",
        "set_manual_backward_finalization",
        "finalize_backward",
    ):
        with pytest.raises(NotImplementedError, match=f"^{method}: "):
            getattr(model, method)(None)
    with pytest.raises(ValueError, match="expected a bool; got 2"):
        model.set_reshard_after_forward(2)
    for call in (model.set_modules_to_forward_prefetch, fsdp2.share_comm_ctx):
        with pytest.raises(ValueError, match="Expected modules that fully_shard was called on; got Linear"):
            call([model.head])
    with pytest.raises(RuntimeError, match="reset_iter_state: call it on the outermost"):
        model.blocks[0].reset_iter_state()
    with pytest.raises(NotImplementedError, match=r"stay torch\.float32 on .* cannot become torch\.bfloat16"):
        model.bfloat16()
    model.to(device())
    part = fsdp2.fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).to(device()))
    assert type(part[1:]) is nn.Sequential and len(part[1:]) == 2
    inner = model.blocks[0]
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="has been deleted"):
        inner(torch.zeros(2, 13, device=device()))


def _exception(library: Any, start: nn.Module, accumulated: bool) -> dict[str, torch.Tensor]:
    """Train after a forward that raised, and after gradients that are dropped with it if there are any."""
    model = build(library, start)
    optimizer, data = sgd(model.parameters()), batches(4, 2)[:, dist.get_rank()]
    if accumulated:
        model.set_requires_gradient_sync(False)
        loss_of(model, data[0]).backward()
        model.set_requires_gradient_sync(True)
    handle = model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, data[1])
    handle.remove()
    model.reset_iter_state()
    for tokens in data[2:]:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


@on_ranks(2)
@pytest.mark.skipif(
    not hasattr(torch_fsdp.FSDPModule, "reset_iter_state"), reason="this version of torch has no reset_iter_state"
)
def test_reset_after_an_exception() -> None:
    start = TinyModel().to(device())
    torch.testing.assert_close(_exception(fsdp2, start, True), _exception(FSDP2, start, False))


@on_ranks(1)
def test_states_and_exceptions() -> None:
    model = TinyModel().to(device())
    fsdp2.fully_shard(model.blocks[0])
    fsdp2.fully_shard(model)
    states = [fsdp2.fully_shard.state(module) for module in (model, model.blocks[0], model.norm)]
    assert None not in states[:2] and states[0] is not states[1] and states[2] is None
    with pytest.raises(AssertionError, match="distributed API can only be applied to a module once."):
        fsdp2.fully_shard(model)
    with pytest.raises(ValueError, match="^fully_shard does not support containers that do not implement forward"):
        fsdp2.fully_shard(nn.ModuleList(TinyModel().blocks))
    part = TinyModel().to(device())
    fsdp2.fully_shard(part.blocks[0])
    with pytest.raises(NotImplementedError, match=r"In place of replicate\(\) or DDP around it, .* replicated_params"):
        replicate(part)(batches(1, 1)[0][0])
    with pytest.raises(AssertionError, match="^FSDP does not support deepcopy. A sharded model cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match="expected a divisor of the 1 ranks of dp_shard_dim; got 2"):
        fully_shard_model(TinyModel(), reshard_after_forward=2)
    refused = ({"zero_dp_strategy": 2}, "expected zero_dp_strategy=3"), ({"fsdp_double_buffer": True}, "fixed buffers")
    for settings, reason in refused:
        with pytest.raises(ValueError, match=reason):
            fully_shard_model(TinyModel(), reshard_after_forward=2, **settings)
