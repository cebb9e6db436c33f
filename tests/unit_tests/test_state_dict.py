"""State dicts: plain torch checkpointing of shards, on another number of ranks, and loading of whole tensors."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from tests.models import STRATEGIES, Block, TinyModel, adamw, batches, device, loss_of, main_weights, whole
from tests.ranks import RankPool


def _trained(strategy: str, steps: int) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = TinyModel(tied=True).to(device())
    sharded, optimizer = fully_shard(
        model, adamw(model.parameters()), fsdp_unit_modules=[Block], zero_dp_strategy=strategy
    )
    _train(sharded, optimizer, 0, steps)
    return sharded, optimizer


def _train(model: MegatronFSDP, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for tokens in batches(steps=8, per_step=1)[first:last, 0]:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def _whole_state(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = {f"weight {name}": weight for name, weight in main_weights(model).items()}
    for entry in model.engine.params():
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"{key} {entry.name}"] = whole(entry, optimizer.state[entry.main][key])
        state[f"step {entry.name}"] = optimizer.state[entry.main]["step"].cpu()
    return state


def _state(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _save(folder: str, strategy: str) -> dict[str, torch.Tensor]:
    model, optimizer = _trained(strategy, steps=3)
    dcp.save(_state(model, optimizer), checkpoint_id=folder)
    return _whole_state(model, optimizer)


def _load(folder: str, strategy: str, expected: dict[str, torch.Tensor]) -> None:
    """Load into a model that has trained differently, from zeroed state. State and further training must be equal."""
    model, optimizer = _trained(strategy, steps=1)
    for entry in model.engine.params():
        local_shard(entry.main).zero_()
        for value in optimizer.state[entry.main].values():
            (local_shard(value) if isinstance(value, DTensor) else value).zero_()
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    found = _whole_state(model, optimizer)
    assert found.keys() == expected.keys() and len(found) > 50
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    reference, reference_optimizer = _trained(strategy, steps=3)
    _train(model, optimizer, 3, 5)
    _train(reference, reference_optimizer, 3, 5)
    for name, weight in main_weights(reference).items():
        torch.testing.assert_close(main_weights(model)[name], weight, rtol=1e-5, atol=1e-6)


SAME = [(strategy, strategy, 3, 2) for strategy in STRATEGIES]
OTHER = [
    ("optim_grads_params", "optim_grads_params", 2, 2),
    ("optim_grads_params", "optim_grads_params", 1, 4),
    ("optim_grads_params", "no_shard", 1, 4),
    ("optim", "optim_grads_params", 3, 2),
]


@pytest.mark.parametrize(
    ("saver", "loader", "before", "after"),
    [OTHER[-1], *(pytest.param(*case, marks=pytest.mark.slow) for case in SAME + OTHER[:-1])],
)
def test_torch_checkpoint_resumes_on_other_ranks(
    ranks: RankPool, saver: str, loader: str, before: int, after: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = ranks.run(before, _save, folder, saver)[0]
        assert Path(folder, ".metadata").exists()
        ranks.run(after, _load, folder, loader, saved)


def _count_collectives_of_a_state_dict() -> int:
    from torch.distributed.distributed_c10d import _world  # noqa: PLC2701

    model, optimizer = _trained("optim_grads_params", steps=1)
    # The step's flags, for which a rank that used all its parameters has not waited.
    model.engine.context.stream.run(lambda: None).wait()
    before = [pg._get_sequence_number_for_group() for pg in _world.pg_map]
    _state(model, optimizer)
    return sum(pg._get_sequence_number_for_group() for pg in _world.pg_map) - sum(before)


def test_state_dict_communicates_nothing(ranks: RankPool) -> None:
    assert ranks.run(2, _count_collectives_of_a_state_dict) == [0, 0]


def _whole_tensors(strategy: str) -> None:
    torch.manual_seed(5)
    source = TinyModel(tied=True)
    sharded, optimizer = _trained(strategy, steps=1)
    whole = {f"module.{name}": value for name, value in source.state_dict().items()}
    result = sharded.load_state_dict(whole)
    assert not result.missing_keys and not result.unexpected_keys
    for name, value in source.named_parameters():
        assert torch.equal(main_weights(sharded)[name], value)
    tokens = batches(1, 1)[0, 0]
    torch.testing.assert_close(loss_of(sharded, tokens), loss_of(source.to(device()), tokens))
    assert optimizer.state


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loading_whole_tensors_reaches_the_next_forward(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _whole_tensors, strategy)


def _wrong_keys() -> None:
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


def test_keys_that_do_not_fit(ranks: RankPool) -> None:
    ranks.run(2, _wrong_keys)


class WithBuffers(TinyModel):
    """Has a running mean, which every rank keeps whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].norm = torch.nn.BatchNorm1d(5)


def _buffers() -> None:
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


def test_buffers_stay_whole(ranks: RankPool) -> None:
    ranks.run(2, _buffers)


def _while_unsharded() -> None:
    """A state dict taken between forward and backward contains main weights, and backward still works."""
    sharded, optimizer = _trained("optim_grads_params", steps=1)
    loss = loss_of(sharded, batches(1, 1)[0, 0])
    state = sharded.state_dict()
    assert all(hasattr(value, "placements") for value in state.values())
    loss.backward()
    optimizer.step()
    assert dist.get_world_size() == 2


def test_state_dict_between_forward_and_backward(ranks: RankPool) -> None:
    ranks.run(2, _while_unsharded)
