"""State dicts: plain torch checkpointing of shards, on a different number of ranks, and loading of full tensors."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from megatron_fsdp import MegatronFSDP, fully_shard_model
from tests.models import (
    Block,
    TinyModel,
    assert_same_weights,
    batches,
    device,
    loss_of,
    main_weights,
    shard,
    state_of,
    train_step,
)
from tests.ranks import RankPool, on_ranks


def _trained(strategy: str, steps: int) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = TinyModel(tied=True).to(device())
    sharded, optimizer = shard(model, strategy)
    _train(sharded, optimizer, 0, steps)
    return sharded, optimizer


def _train(model: MegatronFSDP, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for tokens in batches(steps=8, per_step=1)[first:last, 0]:
        train_step(model, optimizer, tokens)


def _count_collectives_of_a_state_dict() -> int:
    from torch.distributed.distributed_c10d import _world  # noqa: PLC2701

    model, optimizer = _trained("optim_grads_params", steps=1)
    # The step's flags, for which a rank that used all its parameters has not waited.
    model.engine.context.stream.run(lambda: None).wait()
    before = [pg._get_sequence_number_for_group() for pg in _world.pg_map]
    state_of(model, optimizer)
    return sum(pg._get_sequence_number_for_group() for pg in _world.pg_map) - sum(before)


def test_state_dict_communicates_nothing(ranks: RankPool) -> None:
    assert ranks.run(2, _count_collectives_of_a_state_dict) == [0, 0]


@on_ranks(2)
def test_keys_that_do_not_fit() -> None:
    sharded = fully_shard_model(TinyModel(), fsdp_unit_modules=[Block])
    state = {f"module.{name}": value for name, value in TinyModel().state_dict().items()}
    before = main_weights(sharded)
    missing = {key: value for key, value in state.items() if "norm.bias" not in key}
    with pytest.raises(
        RuntimeError,
        match=r"Missing: module.norm.bias, module.blocks.0.norm.bias, .*module.blocks.2.norm.bias\.",
    ):
        sharded.load_state_dict(missing)
    with pytest.raises(RuntimeError, match=r"Unexpected: module.tail\."):
        sharded.load_state_dict({**state, "module.tail": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"module.head.weight: expected shape \(31, 13\); got \(13, 31\)"):
        sharded.load_state_dict({**state, "module.head.weight": torch.zeros(13, 31)})
    result = sharded.load_state_dict({"module.norm.bias": torch.ones(13)}, strict=False)
    assert "module.norm.weight" in result.missing_keys
    after = main_weights(sharded)
    assert torch.equal(after["norm.bias"], torch.ones(13))
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("embedding"))


class WithBuffers(TinyModel):
    """Has a running mean, which is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].norm = torch.nn.BatchNorm1d(5)


@on_ranks(2)
def test_buffers_stay_whole() -> None:
    torch.manual_seed(3)
    model = WithBuffers().to(device())
    reference = copy.deepcopy(model)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block])
    tokens = batches(1, 1)[0, 0]
    loss_of(sharded, tokens)
    loss_of(reference, tokens)
    state = sharded.state_dict()
    mean = "module.blocks.0.norm.running_mean"
    torch.testing.assert_close(state[mean], reference.blocks[0].norm.running_mean)
    sharded.load_state_dict({**state, mean: torch.full((5,), 7.0)})
    assert sharded.module.blocks[0].norm.running_mean.tolist() == [7.0] * 5


@on_ranks(2)
def test_state_dict_between_forward_and_backward() -> None:
    """A state dict taken between forward and backward contains main weights, and backward still works."""
    sharded, optimizer = _trained("optim_grads_params", steps=1)
    loss = loss_of(sharded, batches(1, 1)[0, 0])
    state = sharded.state_dict()
    assert all(hasattr(value, "placements") for value in state.values())
    loss.backward()
    optimizer.step()
    assert dist.get_world_size() == 2


class Upgraded(nn.Linear):
    """A layer whose older checkpoints have another scale and another name."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.register_load_state_dict_pre_hook(self._rename)
        self.register_load_state_dict_post_hook(lambda module, keys: module.loaded.append(keys.missing_keys))
        self.loaded: list[list[str]] = []

    @staticmethod
    def _rename(module: nn.Module, state: dict, prefix: str, *unused: object) -> None:
        if prefix + "shift" in state:
            state[prefix + "bias"] = state.pop(prefix + "shift")

    def _load_from_state_dict(self, state: dict, prefix: str, *arguments: object) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] * 0.5
        super()._load_from_state_dict(state, prefix, *arguments)


@on_ranks(2)
def test_modules_change_what_is_loaded_into_them() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Upgraded(), nn.Linear(3, 3))
    sharded = fully_shard_model(copy.deepcopy(reference).to(device()), fsdp_unit_modules=[Upgraded])
    state = {name: torch.randn(value.shape) for name, value in reference.state_dict().items()}
    state["0.shift"] = state.pop("0.bias")
    reference.load_state_dict(state)
    sharded.load_state_dict({f"module.{name}": value for name, value in state.items()})
    assert_same_weights(sharded, reference)
    assert sharded.module[0].loaded == reference[0].loaded == [[]]


class Lenient(nn.Linear):
    """A layer that needs no bias in a state dict."""

    def _load_from_state_dict(self, state: dict, prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state, prefix, *arguments)
        arguments[2][:] = [name for name in arguments[2] if name != f"{prefix}bias"]


@on_ranks(2)
def test_hooks_take_keys_off_those_that_are_missing() -> None:
    state = {name: torch.randn(3, 3) for name in ("0.weight", "1.weight", "2.weight")}
    for sharded in (False, True):
        layers = nn.Sequential(Lenient(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)).to(device())
        model = fully_shard_model(layers, fsdp_unit_modules=[nn.Linear]) if sharded else layers
        # A hook of a layer sees the keys of the layers before it and its own.
        layers[1].register_load_state_dict_post_hook(lambda module, found: found.missing_keys.clear())
        with pytest.raises(RuntimeError, match=r"2\.bias") as raised:
            model.load_state_dict(state)
        assert "0.bias" not in str(raised.value) and "1.bias" not in str(raised.value)
        layers[2].register_load_state_dict_post_hook(lambda module, found: found.missing_keys.clear())
        model.load_state_dict(state)
        with pytest.raises(RuntimeError, match="nothing"):
            model.load_state_dict(state | {"nothing": torch.ones(1)})


class Transposed(nn.Module):
    """A layer that stored its weight the other way round in its first version."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.register_buffer("mask", torch.rand(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight * self.mask)

    def _load_from_state_dict(self, state: dict, prefix: str, metadata: dict, *arguments: Any) -> None:
        if metadata.get("version", 1) < 2:
            for name in ("weight", "mask"):
                state[prefix + name] = state[prefix + name].t()
        super()._load_from_state_dict(state, prefix, metadata, *arguments)


class Renaming(nn.Module):
    """A layer whose keys were those of the layer inside, in its first version."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.again = self.inner

    def _load_from_state_dict(self, state: dict, prefix: str, metadata: dict, *arguments: Any) -> None:
        for name in ("weight", "bias") if metadata.get("version", 1) < 2 else ():
            state[f"{prefix}inner.{name}"] = state[f"{prefix}again.{name}"] = state.pop(prefix + name)
        super()._load_from_state_dict(state, prefix, metadata, *arguments)


@on_ranks(2)
def test_a_wrong_shape_inside_of_a_module_that_loads_itself_raises() -> None:
    sharded = fully_shard_model(nn.Sequential(Renaming()).to(device()), fsdp_unit_modules=[nn.Linear])
    state = sharded.state_dict()
    state |= {f"module.0.{name}.weight": torch.ones(3, 5) for name in ("inner", "again")}
    with pytest.raises(RuntimeError, match=r"module\.0\.inner\.weight: expected shape \(5, 5\); got \(3, 5\)"):
        sharded.load_state_dict(state)


@on_ranks(2)
def test_modules_convert_by_version_and_rename_keys_of_their_children() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Transposed(), Renaming())
    sharded = fully_shard_model(copy.deepcopy(reference).to(device()), fsdp_unit_modules=[Transposed, nn.Linear])
    seen: list[dict] = []
    sharded.module[1].inner.register_load_state_dict_pre_hook(lambda *given: seen.append(given[3]))
    for strict in (True, False):
        state = {name: torch.randn_like(value) for name, value in reference.state_dict().items()}
        old = {name.replace(".inner", ""): value for name, value in state.items() if "again" not in name}
        old |= {name: value.t() for name, value in state.items() if name.startswith("0.")}
        for model in (reference, sharded):
            model.load_state_dict(old, strict)
        assert_same_weights(sharded, reference)
    with_versions = reference.state_dict()
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    sharded.load_state_dict(with_versions)
    assert_same_weights(sharded, reference)
    sharded.load_state_dict(sharded.state_dict())
    assert_same_weights(sharded, reference)
    assert torch.equal(sharded.module[0].mask, reference[0].mask)
    assert seen[-1] == {"version": 1}


def _refused_on_one_rank() -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    sharded = fully_shard_model(model.to(device()), fsdp_unit_modules=[nn.Linear], ignored_params={model[2].bias})
    before = main_weights(sharded)
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    state = {f"module.{name}": value for name, value in other.state_dict().items()}
    for name in ("1.running_mean", "2.bias"):
        with pytest.raises(ValueError, match=name):
            sharded.load_state_dict(state | {f"module.{name}": torch.ones(1)})

    def fail(*unused: object) -> None:
        if dist.get_rank() == 1:
            raise KeyError("an old key")

    model[0].register_load_state_dict_pre_hook(fail)
    with pytest.raises((KeyError, ValueError), match="an old key") as raised:
        sharded.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in main_weights(sharded).items())
    return type(raised.value).__name__


def test_every_rank_raises_for_shapes_and_for_an_error_of_one_rank(ranks: RankPool) -> None:
    assert ranks.run(2, _refused_on_one_rank) == ["ValueError", "KeyError"]


@on_ranks(2)
def test_names_of_a_state_that_is_broadcast() -> None:
    start = nn.Linear(4, 4)
    sharded = fully_shard_model(copy.deepcopy(start), fsdp_unit_modules=[])
    given, options = start.state_dict(), StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises((RuntimeError, ValueError), match=r"names on rank 0 must begin with 'module\.'"):
        set_model_state_dict(sharded, dict(given) if dist.get_rank() == 0 else {}, options=options)
    given = {f"module.{name}": value for name, value in given.items()} if dist.get_rank() == 0 else {}
    set_model_state_dict(sharded, given, options=options)
