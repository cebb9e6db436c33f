"""Arguments of fully_shard_model that have no separate test file: each has the effect that its description states."""

import copy
import dataclasses
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import megatron_fsdp
from megatron.fsdp.api import fully_shard as signatures
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import FSDPConfig, MixedPrecisionPolicy, fully_shard, fully_shard_model, register_optimizer
from scripts import argument_table
from tests.models import (
    DEVICE,
    Block,
    TinyModel,
    adamw,
    assert_same_training,
    batches,
    device,
    logged,
    loss_of,
    main_weights,
)
from tests.ranks import RankPool, on_ranks

# Frozen: users' calls depend on names, order and defaults of the first 33.
ARGUMENTS = """
    module device_mesh dp_shard_dim dp_outer_dim tp_dim hybrid_fsdp_group hybrid_fsdp_expt_group
    expt_device_mesh fsdp_group_ag expt_fsdp_group_ag fsdp_unit_modules zero_dp_strategy
    outer_dp_sharding_strategy device init_model_with_meta_device mixed_precision_policy
    overlap_grad_reduce overlap_param_gather sync_model_each_microbatch
    preproc_state_dict_for_dcp_ckpt report_nan_in_param_grad average_in_collective disable_bucketing
    calculate_per_token_loss keep_fp8_transpose_cache nccl_ub fsdp_double_buffer
    fsdp_db_use_persist_buf_on_alloc_fail disable_symmetric_registration
    enable_fine_grained_param_gather use_decoupled_grad cuda_graph_mode maxpool_double_buffer
""".split()


def test_names_and_order_of_the_arguments() -> None:
    parameters = inspect.signature(fully_shard_model).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ARGUMENTS
    assert parameters["zero_dp_strategy"].default == 3


def test_fully_shard_takes_the_same_arguments_behind_the_optimizer() -> None:
    both, model = (list(inspect.signature(f).parameters.values()) for f in (fully_shard, fully_shard_model))
    assert [p.name for p in both[:2]] == ["module", "optimizer"]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in both[:2])
    assert both[2:] == model[1:]


@pytest.mark.parametrize("function", [fully_shard, fully_shard_model])
def test_every_setting_is_an_argument_of_the_same_name_type_and_default(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    settings = {field.name: field for field in dataclasses.fields(FSDPConfig) if field.init}
    assert settings.keys() <= parameters.keys()
    assert FSDPConfig().mixed_precision_policy == MixedPrecisionPolicy()
    del settings["mixed_precision_policy"]  # the argument may be None, which means the default
    for name, field in settings.items():
        assert (parameters[name].annotation, parameters[name].default) == (field.type, field.default), name


def test_a_new_setting_is_added_to_signatures_and_docstring_by_the_tool() -> None:
    source = Path(signatures.__file__).read_text()
    assert argument_table.with_settings(source) == source, "run: python scripts/argument_table.py --write"
    declaration = argument_table.settings()["max_unsharded_units"]
    without = source.replace(declaration, "")
    begin = without.index("        max_unsharded_units: ")
    without = without[:begin] + without[without.index("        max_reducing_units: ") :]
    again = argument_table.with_settings(without)
    assert again.count(declaration) == 1
    assert sorted(again.splitlines()) == sorted(source.splitlines())


@on_ranks(1)
def test_every_setting_reaches_the_config() -> None:
    given: dict[str, object] = {
        field.name: not field.default if isinstance(field.default, bool) else field.default
        for field in dataclasses.fields(FSDPConfig)
        if field.init and field.name not in ("nccl_ub", "cuda_graph_mode", "average_in_collective")
    }
    given |= {"zero_dp_strategy": 2, "mixed_precision_policy": MixedPrecisionPolicy(main_grads_dtype=torch.float32)}
    given |= {"shard_granularity": "tensor", "max_unsharded_units": 3, "max_reducing_units": 2}
    model = fully_shard_model(TinyModel(), fsdp_unit_modules=[Block], **given)
    assert model.fsdp_config == FSDPConfig(**given)
    assert fully_shard_model(TinyModel(), maxpool_double_buffer=True).fsdp_config.fsdp_double_buffer


@on_ranks(1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("argument", ["nccl_ub", "cuda_graph_mode"])
def test_what_needs_cuda_says_so(argument: str) -> None:
    model = TinyModel()
    with pytest.raises(ValueError, match=f"{argument}.*expected a CUDA device"):
        fully_shard_model(model, **{argument: True})
    fully_shard_model(model)  # nothing was changed


class ReadsDecoupled(torch.optim.SGD):
    """Has the interface of fused optimizers that read gradients from ``decoupled_grad``."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.numel():
                    parameter.sub_(parameter.decoupled_grad.float(), alpha=group["lr"])


register_optimizer(ReadsDecoupled, "element")


@on_ranks(2)
def test_decoupled_gradients() -> None:
    torch.manual_seed(1)
    model = TinyModel().to(device())
    reference = copy.deepcopy(model)
    tokens = batches(1, 1)[0, 0]
    loss_of(reference, tokens).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    sharded, optimizer = fully_shard(
        model, ReadsDecoupled(model.parameters(), lr=0.1), fsdp_unit_modules=[Block], use_decoupled_grad=True
    )
    loss_of(sharded, tokens).backward()
    for entry in sharded.engine.params():
        assert entry.main.grad is None
        assert local_shard(entry.main.decoupled_grad).shape == local_shard(entry.main).shape
    sharded.scale_gradients(2.0)
    sharded.scale_gradients(0.5)
    optimizer.step()
    weights = main_weights(sharded)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach().cpu())
    sharded.zero_grad()
    assert all(entry.main.decoupled_grad is None for entry in sharded.engine.params())


class _Scaled(Block):
    """A block that reads a list of parameters."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scales[0]


@on_ranks(2)
def test_fine_grained_gather_makes_every_module_a_unit() -> None:
    sharded = assert_same_training(
        TinyModel(), batches(2, dist.get_world_size()), adamw, enable_fine_grained_param_gather=True
    )
    assert "blocks.0" not in sharded.engine.unit_names or "blocks.0.up" in sharded.engine.unit_names
    assert {f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")} <= set(sharded.engine.unit_names)
    # A list of parameters is never called, so it stays in the unit around it.
    model = TinyModel()
    model.blocks[1] = _Scaled(13)
    sharded = assert_same_training(model, batches(2, dist.get_world_size()), enable_fine_grained_param_gather=True)
    assert "blocks.1.up" in sharded.engine.unit_names and "blocks.1.scales" not in sharded.engine.unit_names


@on_ranks(2)
def test_gathers_may_have_a_group_of_their_own() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (size,), mesh_dim_names=("dp",))
    apart = dist.new_group(list(range(size)))
    sharded = assert_same_training(
        TinyModel(), batches(3, size), adamw, device_mesh=mesh, dp_shard_dim="dp", fsdp_group_ag=apart
    )
    assert sharded.index.has_gather_group
    group = sharded.engine.groups[0]
    assert group.weights.stream is not group.gradients.reduction.stream


class Expert(nn.Linear):
    """Its parameters are marked as Megatron-Core marks experts: not reduced over all data-parallel ranks."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        for parameter in self.parameters():
            parameter.allreduce = False


def _experts() -> tuple[int, int]:
    """Two expert-parallel ranks times two that share an expert: each expert is sharded over its two."""
    dense = init_device_mesh(DEVICE, (4,), mesh_dim_names=("dp",))
    expert = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(dist.get_rank() % 2)
    model = nn.Sequential(nn.Linear(8, 8), Expert(8)).to(device())
    torch.manual_seed(9)
    nn.init.normal_(model[0].weight)
    sharded = fully_shard_model(model, dense, "dp", expt_device_mesh=expert)
    params = {entry.name: entry for entry in sharded.engine.params()}
    sharded(torch.ones(1, 8, device=device()) * (1 + dist.get_rank())).sum().backward()
    expected = torch.full((8,), 2 / 4)  # two ranks, each with a gradient of one, of which all four take the mean
    grad, shard_slice = local_shard(params["1.bias"].main.grad), params["1.bias"].shard_slice
    torch.testing.assert_close(grad.cpu(), expected[shard_slice.start : shard_slice.stop])
    return local_shard(params["0.weight"].main).numel(), local_shard(params["1.weight"].main).numel()


def test_experts_are_sharded_over_their_own_mesh(ranks: RankPool) -> None:
    found = ranks.run(4, _experts)
    assert sum(dense for dense, _ in found) == 64
    assert found[0][1] + found[2][1] == found[1][1] + found[3][1] == 64


class Mixture(nn.Module):
    """A dense layer and two experts whose parameters have no marks."""

    def __init__(self) -> None:
        super().__init__()
        self.shared_experts, self.experts = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


def _experts_by_name() -> tuple[dict[str, int], list[str]]:
    dense = init_device_mesh(DEVICE, (4,), mesh_dim_names=("dp",))
    expert = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "ep"))
    model = nn.Sequential(Mixture(), Mixture()).to(device())
    model[1].experts[1].bias.allreduce = True  # a mark counts more than the name
    with logged(logging.INFO) as texts:
        sharded = fully_shard_model(model, dense, "dp", expt_device_mesh=expert, fsdp_unit_modules=[])
    sizes = {entry.name: local_shard(entry.main).numel() for entry in sharded.engine.params()}
    without = nn.Linear(8, 8).to(device())
    with pytest.raises(ValueError, match=r"expt_device_mesh serves no parameter.*'\.experts\.' in their names"):
        fully_shard_model(without, dense, "dp", expt_device_mesh=expert)
    renamed = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("expert_dp", "ep"))
    with pytest.raises(ValueError, match="different experts would be trained as one"):
        fully_shard_model(without, dense, "dp", expt_device_mesh=renamed)
    whole = init_device_mesh(DEVICE, (4, 1), mesh_dim_names=("dp", "ep"))
    fully_shard_model(without, dense, "dp", expt_device_mesh=whole)  # every rank has all experts: it changes nothing
    return sizes, [text for text in texts if "expt_device_mesh" in text]


def test_experts_are_known_by_their_names_as_well(ranks: RankPool) -> None:
    found = ranks.run(4, _experts_by_name)
    for name in found[0][0]:
        numel = 64 if name.endswith("weight") else 8
        is_expert = ".experts." in name and name != "1.experts.1.bias"
        assert sum(sizes[name] for sizes, _ in found) == numel * (2 if is_expert else 1), name
    assert [len(texts) for _, texts in found] == [1, 0, 0, 0]
    assert "serves 7 of 12 parameters: 0.experts.0.weight, 0.experts.0.bias," in found[0][1][0]


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_a_mesh_of_experts_without_the_axes_matters_to_experts_only(strategy: str) -> None:
    """The recipe of a long-used example: a mesh of experts whose axes have other names."""
    mesh = init_device_mesh(DEVICE, (1, 2, 1, 1), mesh_dim_names=("dp_outer", "dp_shard", "cp", "tp"))
    mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    expert = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("dp_shard", "tp"))

    arguments = {
        "device_mesh": mesh,
        "dp_shard_dim": "dp_shard_cp",
        "dp_outer_dim": "dp_outer",
        "tp_dim": "tp",
        "expt_device_mesh": expert,
        "zero_dp_strategy": strategy,
    }
    assert_same_training(TinyModel(), batches(2, 2), fsdp_unit_modules=[Block], **arguments)
    experts = nn.Sequential(Expert(8)).to(device())
    with pytest.raises(ValueError, match=r"Expert 0\.weight cannot be sharded .*: The mesh has no axis 'dp_shard_cp'"):
        fully_shard_model(experts, fsdp_unit_modules=[Expert], **arguments)
    assert type(experts[0].weight) is nn.Parameter and experts[0].weight.shape == (8, 8)


def _full_weights() -> list[list[str]]:
    """The messages logged where every rank keeps full weights, and none where that is asked for."""
    unasked, single = megatron_fsdp.DistributedDataParallelConfig(), nn.Linear(4, 4).to(device())
    found = []
    for shard in (
        lambda: fully_shard_model(copy.deepcopy(single)),
        lambda: megatron_fsdp.MegatronFSDP(copy.deepcopy(single), ddp_config=unasked),
        lambda: fully_shard_model(copy.deepcopy(single), fsdp_unit_modules=[]),
        lambda: fully_shard_model(copy.deepcopy(single), zero_dp_strategy=0),
    ):
        with logged() as texts:
            shard()
        found.append(texts)
    return found


def test_full_weights_are_logged_once(ranks: RankPool) -> None:
    (units, nothing_sharded, *asked_for), other = ranks.run(2, _full_weights)
    assert len(units) == len(nothing_sharded) == 1 and not any(asked_for) and not any(other)
    assert "fsdp_unit_modules is None: every rank keeps full compute weights" in units[0]
    assert "Set it to optim_grads_params to shard them" in nothing_sharded[0]


@on_ranks(4)
def test_mesh_with_the_outer_axis_last() -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "outer"))
    with pytest.raises(ValueError, match=r"in the order \['outer', 'dp'\].*mesh_dim_names=\('outer', 'dp'\)"):
        fully_shard_model(nn.Linear(4, 4), mesh, "dp", "outer")


class _Listing(nn.Module):
    """Lists a class that it lacks, as Whisper's classifier does."""

    _no_split_modules = ("Linear", "Decoder")

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_units_of_a_model_that_lists_classes_it_lacks() -> None:
    assert megatron_fsdp.unit_classes(_Listing()) == ["Linear"]
    assert megatron_fsdp.unit_classes(nn.Linear(2, 2)) == []
