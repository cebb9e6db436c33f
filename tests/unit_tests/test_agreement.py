"""Ranks compare their models before sharding, and all of them raise the same error if the models differ."""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.fsdp.comm import journal
from megatron.fsdp.comm.journal import Journal
from megatron.fsdp.fsdp2 import fully_shard
from megatron.fsdp.runtime import agreement
from megatron.fsdp.runtime.agreement import samples
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from tests.models import logged
from tests.ranks import RankPool


class Net(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(4, width, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def _frozen() -> Net:
    net = Net()
    net.layers[1].requires_grad_(False)
    return net


def _tied() -> Net:
    net = Net()
    net.layers[1].weight = net.layers[0].weight
    return net


def _marked() -> Net:
    net = Net()
    net.first.weight.shared_embedding = True  # type: ignore[attr-defined]
    return net


# For each case: the last rank's model and arguments, and a pattern for the error.
DIFFERENT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "width": (lambda: Net(width=12), {}, r"parameter first.weight: rank.* 0.*: shape \(8, 4\).*shape \(12, 4\)"),
    "depth": (lambda: Net(depth=3), {}, r"parameter layers.2.weight: .*does not exist.*shape \(8, 8\)"),
    "dtype": (lambda: Net(dtype=torch.bfloat16), {}, r"parameter first.weight: .*float32.*bfloat16"),
    "frozen": (_frozen, {}, r"parameter layers.1.weight: .*trained.*frozen"),
    "tied": (_tied, {}, r"parameter layers.0.weight: .*tied to \['layers.1.weight'\]"),
    "marked": (_marked, {}, r"parameter first.weight: .*repeated"),
    "strategy": (Net, {"zero_dp_strategy": 2}, "setting zero_dp_strategy: .*params.*: optim_grads. Give all"),
    "dtypes": (
        Net,
        {"mixed_precision_policy": MixedPrecisionPolicy(main_grads_dtype=torch.float32)},
        "setting mixed_precision_policy: .*main_grads_dtype=None.*main_grads_dtype=torch.float32",
    ),
    "overlap": (Net, {"overlap_param_gather": False}, "setting overlap_param_gather: .*True.*False"),
    "units": (Net, {"fsdp_unit_modules": None}, "setting of unit 0: .*resharded: True.*resharded: False. Give"),
    "unfit": (
        Net,
        {"fsdp_unit_modules": [nn.Conv2d]},
        "cannot continue, because rank . failed: ValueError: fsdp_unit",
    ),
}


def _raised(function: Callable[[], object]) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        function()
    except Exception as error:  # noqa: BLE001 - returned to the test
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "nothing", time.monotonic() - begin


def _shard(case: str) -> tuple[str, float, bool]:
    build, arguments, _ = DIFFERENT[case]
    last = dist.get_rank() == dist.get_world_size() - 1
    net = build() if last else Net()
    defaults: dict[str, Any] = {"fsdp_unit_modules": [nn.Linear], "device": "cpu"}
    before = {name: parameter for name, parameter in net.named_parameters()}
    raised = _raised(lambda: fully_shard_model(net, **{**defaults, **(arguments if last else {})}))
    return *raised, all(before[name] is parameter for name, parameter in net.named_parameters())


@pytest.mark.parametrize("case", DIFFERENT)
def test_every_rank_raises_the_first_difference_and_no_model_changes(ranks: RankPool, case: str) -> None:
    results = ranks.run(3 if case == "width" else 2, _shard, case)
    for text, seconds, untouched in results:
        assert text.startswith("ValueError") and seconds < 10 and untouched, results
    expected = DIFFERENT[case][2]
    own = results[:-1] if case == "unfit" else results
    assert all(re.search(expected, text, re.S) for text, *_ in own), results
    if case == "width":
        assert "ranks 0-1: shape (8, 4)" in results[2][0] and "rank 2: shape (12, 4)" in results[2][0]


def _shard_again() -> str:
    """After an error, ranks can shard a model that is the same on all of them."""
    rank = dist.get_rank()
    with suppress(ValueError):
        fully_shard_model(Net(width=8 + 4 * rank), device="cpu")
    model = fully_shard_model(Net(), device="cpu")
    model(torch.ones(2, 4)).sum().backward()
    return _raised(lambda: fully_shard_model(Net(depth=rank + 1), device="cpu"))[0]


def test_ranks_can_continue_after_an_error(ranks: RankPool) -> None:
    assert all("layers.1.weight" in text for text in ranks.run(2, _shard_again))


def _shard_marked(rank_differs: bool) -> list[str]:
    rank, found = dist.get_rank(), []
    net = Net(width=8 + 4 * (rank_differs and rank))
    for layer in net.layers:
        fully_shard(layer, reshard_after_forward=not (rank and not rank_differs))
    fully_shard(net)
    # Marking a module does not wait for other ranks, so one rank may read parameters alone.
    if rank == 0:
        found.append(str(sum(parameter.numel() for parameter in net.parameters())))
    found.append(_raised(lambda: net(torch.ones(2, 4)))[0])
    return found


def test_marked_modules_are_compared_before_the_first_forward(ranks: RankPool) -> None:
    first, second = ranks.run(2, _shard_marked, True)
    assert first[0] == str(sum(parameter.numel() for parameter in Net().parameters()))
    assert all("parameter first.weight" in texts[-1] for texts in (first, second))
    for texts in ranks.run(2, _shard_marked, False):
        assert "reshard_after_forward=True" in texts[-1] and "reshard_after_forward=False" in texts[-1]


def _shard_over_other_groups() -> tuple[str, str]:
    """Disjoint process groups, and single ranks, shard different models."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("each", "one"))
    if dist.get_rank() == 1:
        fully_shard_model(Net(width=20), device_mesh=alone["one"], device="cpu")
    good = _raised(lambda: fully_shard_model(Net(depth=1 + stage), device_mesh=mesh["dp"], device="cpu"))[0]
    width = 12 if dist.get_rank() == 3 else 8
    bad = _raised(lambda: fully_shard_model(Net(width=width), device_mesh=mesh["dp"], device="cpu"))[0]
    return good, bad


def test_only_ranks_of_one_model_are_compared(ranks: RankPool) -> None:
    results = ranks.run(4, _shard_over_other_groups)
    assert [good for good, _ in results] == ["nothing"] * 4
    assert [bad == "nothing" for _, bad in results] == [True, True, False, False]
    assert "rank 2: shape (8, 4)" in results[2][1] and "rank 3: shape (12, 4)" in results[2][1]


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense, self.expert = nn.Linear(4, 4), nn.Linear(4, width)
        for parameter in self.expert.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]


def _shard_experts(widths: list[int]) -> str:
    """Ranks 0 and 2 shard the same experts, and so do ranks 1 and 3."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("ep", "dp"))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = Experts(widths[dist.get_rank()])
    return _raised(
        lambda: fully_shard_model(
            model, device_mesh=mesh, dp_shard_dim="dp", expt_device_mesh=experts, fsdp_unit_modules=[], device="cpu"
        )
    )[0]


def test_experts_are_compared_by_the_ranks_that_shard_them(ranks: RankPool) -> None:
    assert ranks.run(4, _shard_experts, [8, 12, 8, 12]) == ["nothing"] * 4
    found = ranks.run(4, _shard_experts, [8, 12, 8, 16])
    assert all("parameter expert.weight: rank 1: shape (12, 4)" in text for text in found), found
    assert "because rank 1 failed:" in found[0] or "because ranks 1, 3 failed:" in found[0]


def _count_messages() -> tuple[int, int]:
    """The number of messages that the last rank sends if nothing differs: before it waits, and in total."""
    messages = [0]

    class Counting(dist.PrefixStore):
        def add(self, key: str, value: int) -> int:
            messages[0] += 1
            return super().add(key, value)

        def set(self, key: str, value: str) -> None:
            messages[0] += 1
            super().set(key, value)

    with patch.object(agreement.dist, "PrefixStore", Counting):
        comparison = agreement.Comparison(dist.group.WORLD, {"a": "b" * 10**6})
        dist.barrier()
        sent = messages[0]
        comparison.wait(Journal().channel([0]))
    return sent, messages[0]


def test_comparison_takes_few_messages_for_any_number_of_ranks(ranks: RankPool) -> None:
    assert ranks.run(4, _count_messages) == [(2, 4)] * 4


class Buffered(Net):
    """A model with buffers of several dtypes, all of which depend on the seed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("scale", torch.rand(()), persistent=False)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full weights, and all buffers, by name."""
    weights = {name: cast("DTensor", p).full_tensor().detach() for name, p in model.named_parameters()}
    return {name.removeprefix("module."): value for name, value in (*weights.items(), *model.named_buffers())}


def _seeded(seed: int, build: Callable[[], nn.Module] = Buffered, device: str = "cpu") -> nn.Module:
    torch.manual_seed(seed)
    with torch.device(device):
        return build()


def _share(interface: str, sync: bool | None, on_meta: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Shard a model with a seed per rank, over 2 x 2 ranks. Returns its state, and what was logged."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    rank = dist.get_rank()
    model = _seeded(rank, device="meta" if on_meta and rank else "cpu")
    with logged() as texts:
        if interface == "fsdp2":
            for layer in model.layers:  # type: ignore[union-attr]
                fully_shard(layer, mesh=mesh)
            return _state(fully_shard(model, mesh=mesh)), texts
        axes: dict[str, Any] = {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
        units = [nn.Linear] if interface == "units" else None
        sharded = fully_shard_model(model, **axes, fsdp_unit_modules=units, device="cpu", sync_module_states=sync)
        return _state(sharded), texts


@pytest.mark.parametrize(
    ("interface", "sync", "on_meta"),
    [
        ("units", None, False),
        ("none", None, False),
        ("fsdp2", None, False),
        ("units", True, True),
        ("none", True, False),
    ],
)
def test_the_first_rank_gives_its_model_to_the_others(
    ranks: RankPool, interface: str, sync: bool | None, on_meta: bool
) -> None:
    expected = _state_of_plain(_seeded(0))
    results = ranks.run(4, _share, interface, sync, on_meta)
    for state, _ in results:
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
    warnings = [[text for text in texts if "values of" in text] for _, texts in results]
    assert [len(texts) for texts in warnings] == [int(sync is None), 0, 0, 0]
    assert sync or re.search(r"values of .*weight.*: rank 0: checksum \w+; rank 1: checksum", warnings[0][0])


def _state_of_plain(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}


def _share_experts(sync: bool | None) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Ranks 0 and 2 shard the same experts, and so do ranks 1 and 3; the other ranks' experts are not theirs."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = _seeded(dist.get_rank(), lambda: Experts(4))
    own = _state_of_plain(model)
    sharded = fully_shard_model(
        model, mesh, "dp", expt_device_mesh=experts, fsdp_unit_modules=[], device="cpu", sync_module_states=sync
    )
    return own, _state(sharded)


@pytest.mark.parametrize("sync", [None, False])
def test_weights_are_given_to_the_ranks_that_shard_the_same_ones(ranks: RankPool, sync: bool | None) -> None:
    results = ranks.run(4, _share_experts, sync)
    for rank, (_, state) in enumerate(results):
        sources = {name: rank % 2 if name.startswith("expert") else 0 for name in state}
        equal = [torch.equal(value, results[sources[name]][0][name]) for name, value in state.items()]
        assert all(equal) == (sync is None)


def _refuse_replicas(differ: bool, axes: dict[str, Any]) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "dp"))
    model = _seeded(mesh.get_local_rank("other") if differ else 0)
    return _raised(lambda: fully_shard_model(model, mesh, "dp", **axes, device="cpu"))[0]


def test_replicas_along_an_axis_without_a_name_are_refused(ranks: RankPool) -> None:
    for text in ranks.run(4, _refuse_replicas, False, {}):
        assert text.startswith("ValueError") and "axis 'other' have the same model" in text
    # The stages of a pipeline differ, and a named axis is synchronized.
    assert ranks.run(4, _refuse_replicas, True, {}) == ["nothing"] * 4
    assert ranks.run(4, _refuse_replicas, False, {"dp_outer_dim": "other"}) == ["nothing"] * 4


def _load(case: str, interface: str) -> tuple[str, float, bool]:
    """Load other full tensors on the last rank. Returns the error, and whether the weights are as before."""
    rank, model = dist.get_rank(), Net()
    given = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    sharded: nn.Module
    if interface == "fsdp2":
        sharded = fully_shard(model)
        sharded(torch.ones(2, 4))
    else:
        sharded = fully_shard_model(model, fsdp_unit_modules=[nn.Linear], device="cpu")
    before = _state(sharded)
    given = {} if case == "keys" and rank else given
    if case == "values" and rank:
        given["layers.1.weight"] += 1
    if case == "alone" and rank:
        raised = _raised(lambda: sharded(torch.ones(2, 4)).sum().backward())
    else:
        raised = _raised(lambda: sharded.load_state_dict(given, strict=case == "strict"))
    if case == "alone":
        return *raised, True
    after = _state(sharded)
    return *raised, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("interface", ["model", "fsdp2"])
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("values", r"ValueError.*entry .*layers.1.weight: rank 0: checksum .*; rank 1: checksum"),
        ("keys", r"ValueError.*entry .*first.weight: rank 0: checksum .*; rank 1: does not exist"),
        ("alone", r"CollectiveMismatch.*rank 0: last issued compare models.*which has called load"),
    ],
)
def test_full_tensors_that_differ_are_not_loaded(ranks: RankPool, case: str, expected: str, interface: str) -> None:
    results = ranks.run(2, _load, case, interface)
    # Where ranks issue different operations, the second to notice may find the connection closed.
    assert (any if case == "alone" else all)(re.search(expected, text, re.S) for text, *_ in results), results
    assert all(text != "nothing" and seconds < 60 and untouched for text, seconds, untouched in results), results


def _load_with_missing_keys() -> str:
    model = fully_shard_model(Net(), device="cpu")
    given = Net().state_dict() if dist.get_rank() == 0 else {}
    text = _raised(lambda: model.load_state_dict(given))[0]
    model.load_state_dict(_seeded(5, Net).state_dict())  # all ranks can load afterwards
    torch.testing.assert_close(_state(model), _state_of_plain(_seeded(5, Net)))
    return text


def test_every_rank_raises_if_keys_are_missing_on_one(ranks: RankPool) -> None:
    first, second = ranks.run(2, _load_with_missing_keys)
    assert "because rank 1 failed: RuntimeError: state_dict does not fit" in first
    assert second.startswith("RuntimeError: state_dict does not fit")


def _write_where_there_are_elements(strategy: int) -> tuple[str, float]:
    with patch.object(journal, "SECONDS_TO_COMPARE", 60.0):
        model = fully_shard_model(nn.Linear(8, 1, bias=False), zero_dp_strategy=strategy, device="cpu")
    batch = torch.ones(2, 8)
    model(batch).sum().backward()
    if (shard := next(model.parameters()).to_local()).numel():
        with torch.no_grad():
            shard.mul_(2)
    return _raised(lambda: [model(batch).sum().backward() for _ in range(3)])


@pytest.mark.parametrize("strategy", [1, 2])
def test_a_write_on_ranks_with_elements_alone(ranks: RankPool, strategy: int) -> None:
    results = ranks.run(2, _write_where_there_are_elements, strategy)
    ranks.close()
    expected = "(?s)CollectiveMismatch.*first differ.*write the same parameters"
    assert any(re.search(expected, text) for text, _ in results), results
    assert all(text != "nothing" and seconds < 30 for text, seconds in results), results


def test_samples_see_more_than_a_column() -> None:
    ours = {"matrix": torch.zeros(64, 64), "mask": torch.ones(3) > 0, "empty": torch.ones(0)}
    other = torch.ones(64, 64)
    other[:, 0] = 0
    assert samples(ours) == samples({name: value.clone() for name, value in ours.items()})
    found, theirs = samples(ours), samples(ours | {"matrix": other})
    assert [name for name in ours if found[name] != theirs[name]] == ["matrix"]
