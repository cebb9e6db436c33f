"""MegatronFSDP has the constructor, attributes and methods that code for NVIDIA's uses."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.fsdp.api.ddp_config import from_megatron, to_megatron
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    mixed_precision,
)
from megatron_fsdp.utils import contains_submesh, find_megatron_fsdp, get_mesh_names, is_submodule, is_torch_min_version
from tests.models import DEVICE, Block, TinyModel, adamw, batches, device, loss_of, main_weights
from tests.ranks import RankPool, on_ranks


def _index() -> FSDPDistributedIndex:
    return FSDPDistributedIndex(init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("dp",)), "dp")


@on_ranks(1)
def test_constructor_accepts_the_originals_arguments() -> None:
    index, policy = _index(), MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    ddp_config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads",
        megatron_fsdp_use_decoupled_grad=True,
        check_for_nan_in_grad=True,
        fp8_param_gather=True,
        keep_fp8_transpose_cache=True,
    )
    model = MegatronFSDP(TinyModel(), index, ddp_config, policy, [Block], True, device(), fsdp_double_buffer=True)
    assert model.dist_index is model.get_distributed_index() is model.index is index
    assert model.ddp_config is ddp_config
    assert model.mp_policy is policy
    assert model.data_parallel_sharding_strategy == "optim_grads"
    assert model.model_auto_sync is False
    assert model.fsdp_config == FSDPConfig(
        zero_dp_strategy=2,
        mixed_precision_policy=policy,
        overlap_param_gather=False,
        sync_model_each_microbatch=False,
        report_nan_in_param_grad=True,
        use_decoupled_grad=True,
        fsdp_double_buffer=True,
        keep_fp8_transpose_cache=True,
    )
    model = MegatronFSDP(module=TinyModel(), dist_index=index, enable_fine_grained_param_gather_backward_hook=True)
    assert model.fsdp_config == FSDPConfig(sync_model_each_microbatch=False, enable_fine_grained_param_gather=True)
    assert model.ddp_config == to_megatron(model.fsdp_config)
    assert model.ddp_config.data_parallel_sharding_strategy == "optim_grads_params"
    model = MegatronFSDP(TinyModel(), index, config=FSDPConfig(zero_dp_strategy="optim"))
    assert model.dist_index is index and model.data_parallel_sharding_strategy == "optim"


@on_ranks(1)
def test_unsupported_arguments_raise() -> None:
    model, index = TinyModel(), _index()
    with pytest.raises(TypeError, match=r"expected megatron_fsdp\.FSDPDistributedIndex; got .*DeviceMesh"):
        MegatronFSDP(model, index.device_mesh)
    with pytest.raises(ValueError, match="config has all settings; got nccl_ub, sync_model_each_microbatch besides"):
        MegatronFSDP(model, index, nccl_ub=True, sync_model_each_microbatch=True, config=FSDPConfig())
    with pytest.raises(NotImplementedError):
        MegatronFSDP(model, index, fine_grained_recurse_module_types=(nn.Linear,))
    MegatronFSDP(model, index)  # nothing was changed


def test_settings_survive_a_round_trip_through_megatrons_names() -> None:
    config = FSDPConfig(
        zero_dp_strategy="optim",
        mixed_precision_policy=MixedPrecisionPolicy(None, torch.float32, torch.bfloat16),
        fsdp_double_buffer=True,
        enable_fine_grained_param_gather=True,
        disable_symmetric_registration=True,
    )
    assert from_megatron(to_megatron(config)) == config
    # Overlap that sharding needs is on, even if the config disables it.
    defaults = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    assert from_megatron(defaults) == FSDPConfig()
    assert from_megatron(defaults, shard_granularity="tensor").shard_granularity == "tensor"
    pooled = DistributedDataParallelConfig(megatron_fsdp_max_pool_double_buffer=True)
    assert pooled.fsdp_double_buffer and from_megatron(pooled).fsdp_double_buffer


def _trained(sharded: MegatronFSDP, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    for micro_batches in batches(2, 2, seed=dist.get_rank()):
        for tokens in micro_batches:
            loss_of(sharded, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return main_weights(sharded)


@on_ranks(2)
def test_constructor_trains_like_fully_shard() -> None:
    torch.manual_seed(3)
    first, second, third = TinyModel(), TinyModel(), TinyModel()
    for model in (second, third):
        model.load_state_dict(first.state_dict())
    expected = _trained(*fully_shard(first.to(device()), adamw(first.parameters()), fsdp_unit_modules=[Block]))
    model = MegatronFSDP(second.to(device()), _index(), fsdp_unit_modules=[Block])
    found = _trained(model, fully_shard_optimizer(adamw(model.parameters())))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight)
    # Synchronized by the caller, in steps.
    model = MegatronFSDP(third.to(device()), _index(), fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(adamw(model.parameters()))
    for micro_batches in batches(2, 2, seed=dist.get_rank()):
        for tokens in micro_batches:
            model.is_last_microbatch = tokens is micro_batches[-1]
            loss_of(model, tokens).backward()
        model.start_grad_sync()
        model.synchronize_gradient_reduce()
        model.attach_grad_to_optimizer_state()
        assert all(isinstance(p.grad, DTensor) for p in model.parameters())
        optimizer.step(sync_grad_before_optimizer_step=False, install_optimized_model_weights=False)  # type: ignore
        model.install_optimized_model_weights()
        optimizer.zero_grad(zero_grad_buffer=False)  # type: ignore
        model.zero_grad_buffer()
    for name, weight in expected.items():
        torch.testing.assert_close(main_weights(model)[name], weight)


@on_ranks(1)
def test_parameters_refer_to_their_model() -> None:
    model = fully_shard_model(TinyModel(), fsdp_unit_modules=[Block])
    assert isinstance(model, MegatronFSDP)
    seen = []
    model.module.blocks[0].up.register_forward_pre_hook(
        lambda module, args: seen.append(module.weight._megatron_fsdp_model)
    )
    loss_of(model, batches(1, 1)[0, 0])
    for found in (*seen, *(parameter._megatron_fsdp_model for parameter in model.parameters())):
        assert isinstance(found, MegatronFSDP)
        assert found == model and found.module is model.module


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_dtype_of_communication_of_a_block(strategy: str) -> None:
    """Gradients of one step are reduced in bf16, as by a model that always does so, and those of the next in fp32."""
    policy = MixedPrecisionPolicy(torch.float32, torch.float32)
    narrow = dataclasses.replace(policy, grad_comm_dtype=torch.bfloat16)
    found = []
    for given, inside in ((policy, narrow), (narrow, narrow), (policy, policy)):
        torch.manual_seed(3)
        model = fully_shard_model(TinyModel(), mixed_precision_policy=given, zero_dp_strategy=strategy)
        data = batches(2, dist.get_world_size())[:, dist.get_rank()]
        with model.mixed_precision_context(inside):
            assert model.mp_policy == inside
            loss_of(model, data[0]).backward()
        assert model.mp_policy == given
        found.append([local_shard(p.grad).clone() for p in model.parameters()])
        model.zero_grad()
        loss_of(model, data[1]).backward()
        found.append([local_shard(p.grad).clone() for p in model.parameters()])

    def equal(one: int, other: int) -> bool:
        return all(torch.equal(a, b) for a, b in zip(found[one], found[other], strict=True))

    assert equal(0, 2) and not equal(0, 4), "the block is reduced in bf16"
    assert equal(1, 5) and not equal(1, 3), "and what follows in fp32"


@on_ranks(1)
def test_changing_the_dtype_of_communication_raises() -> None:
    narrow = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
    model = fully_shard_model(TinyModel(), zero_dp_strategy="optim")
    with model.no_sync():
        loss_of(model, batches(1, 1)[0, 0]).backward()
    with pytest.raises(RuntimeError, match="still to be reduced in torch.float32. Change it after finish_grad_sync"):
        model.reset_mixed_precision_policy(narrow)
    fixed = fully_shard_model(TinyModel(), fsdp_unit_modules=[Block], fsdp_double_buffer=True)
    with pytest.raises(NotImplementedError, match="Shard the model with the dtype that it needs"):
        fixed.reset_mixed_precision_policy(narrow)


@on_ranks(2)
def test_automatic_synchronization_is_an_attribute() -> None:
    model = fully_shard_model(TinyModel(), fsdp_unit_modules=[Block])
    assert model.model_auto_sync
    model.model_auto_sync = False
    loss_of(model, batches(1, 1)[0, 0]).backward()
    assert model.engine.has_pending_gradients
    with model.sync():
        assert model.model_auto_sync
    assert not model.model_auto_sync
    model.finish_grad_sync()
    assert all(p.grad is not None for p in model.parameters())


@torch.no_grad()
@on_ranks(2)
def test_units_are_unsharded_on_request() -> None:
    torch.manual_seed(5)
    whole = TinyModel().to(device())
    weights = {name: p.detach().clone() for name, p in whole.named_parameters()}
    model = fully_shard_model(whole, fsdp_unit_modules=[Block])
    tokens = batches(1, 1)[0, 0]
    expected = loss_of(model, tokens)
    wanted = [p for name, p in model.named_parameters() if "blocks.1" in name]
    for wait in (False, True):
        model.all_gather_and_wait_parameters_ready(wanted, prefetch=False, wait_bucket_ready=wait)
    for name, parameter in model.module.named_parameters():
        assert isinstance(parameter, DTensor) == ("blocks.1" not in name)
        if "blocks.1" in name:
            assert torch.equal(parameter, weights[name])
    assert torch.equal(loss_of(model, tokens), expected)
    model.all_gather_and_wait_parameters_ready(wanted)
    model.all_gather_and_wait_parameters_ready(list(model.module.parameters()))
    model._replace_param_with_distributed_if_needed()
    assert all(isinstance(p, DTensor) for p in model.parameters())


@on_ranks(2)
def test_zero_grad_drops_gradients_that_are_not_synchronized() -> None:
    model = fully_shard_model(TinyModel().to(device()), fsdp_unit_modules=[Block], sync_model_each_microbatch=False)
    optimizer = fully_shard_optimizer(adamw(model.parameters()))
    tokens = batches(1, 2)[0]

    def gradients() -> list[torch.Tensor]:
        return [p.grad.to_local().clone() for p in model.parameters()]

    loss_of(model, tokens[0]).backward()
    model.finish_grad_sync()
    expected = gradients()
    optimizer.zero_grad()
    for set_to_none in (True, False):
        # Collected by an earlier micro-batch, and not synchronized.
        loss_of(model, tokens[1]).backward()
        optimizer.zero_grad(set_to_none)
        loss_of(model, tokens[0]).backward()
        model.finish_grad_sync()
        torch.testing.assert_close(gradients(), expected)
    optimizer.zero_grad(set_to_none=False)
    assert not any(gradient.any() for gradient in gradients())
    # Kept on request.
    optimizer.zero_grad()
    loss_of(model, tokens[0]).backward()
    optimizer.zero_grad(zero_grad_buffer=False)  # type: ignore
    model.finish_grad_sync()
    torch.testing.assert_close(gradients(), expected)


def _hybrid() -> tuple[int, int]:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("outer", "inner"))
    index = FSDPDistributedIndex(mesh, "inner", "outer", hsdp_outer_dp_shard=True)
    assert index.get_root_mesh() is mesh and index.get_root_mesh(is_expert_parallel=True) is None
    assert index.get_fsdp_group() is index.fsdp_group and index.get_outer_fsdp_group() is index.outer_fsdp_group
    assert index.get_dp_group() is index.hybrid_fsdp_group
    assert index.get_fsdp_group(independent_all_gather=True) is None
    again = dist.new_group(dist.get_process_group_ranks(index.fsdp_group), use_local_synchronization=True)
    with_group = FSDPDistributedIndex(mesh, "inner", "outer", fsdp_group_ag=again)
    assert with_group.get_fsdp_group(independent_all_gather=True) is again
    with pytest.raises(ValueError, match="hsdp_outer_dp_shard"):
        with_group.get_logical_hybrid_fsdp_rank()
    with pytest.raises(ValueError, match="expected dp_outer_dim"):
        _index().get_logical_hybrid_fsdp_rank()
    assert contains_submesh(mesh, ("outer", "inner")) and not contains_submesh(mesh, "tp")
    linear = nn.Linear(64, 8, bias=False).to(device())
    model = fully_shard_model(linear, mesh, "inner", "outer", fsdp_unit_modules=[], outer_dp_sharding_strategy="optim")
    (weight,) = model.engine.params()
    return model.index.get_logical_hybrid_fsdp_rank(), weight.shard_slice.start


def test_index_has_the_originals_getters(ranks: RankPool) -> None:
    # The logical rank is the place of a rank's slice of a parameter.
    found = ranks.run(4, _hybrid)
    assert [128 * logical for logical, _ in found] == [start for _, start in found]


@on_ranks(1)
def test_helpers() -> None:
    model = TinyModel()
    assert find_megatron_fsdp(model) is None
    sharded = fully_shard_model(model)
    assert find_megatron_fsdp(nn.ModuleDict({"module": sharded})["module"]) is sharded
    assert is_submodule(model.head, sharded) and not is_submodule(sharded, sharded)
    assert get_mesh_names(sharded.dist_index.device_mesh) == ["dp_shard"] and get_mesh_names(None) == []
    assert is_torch_min_version("2.0") and not is_torch_min_version(torch.__version__, check_equality=False)


def test_quantized_tensors_of_transformer_engine_are_recognized() -> None:
    base = type("QuantizedTensor", (torch.Tensor,), {"__module__": "transformer_engine.pytorch.quantized_tensor"})
    blockwise = type("Float8BlockwiseQTensor", (base,), {"__module__": "transformer_engine.pytorch.tensor"})
    found: list[torch.Tensor] = [torch.zeros(1).as_subclass(kind) for kind in (torch.Tensor, base, blockwise)]
    assert [mixed_precision.is_float8tensor(tensor) for tensor in found] == [False, True, True]
    assert [mixed_precision.is_blockwise_float8tensor(tensor) for tensor in found] == [False, False, True]
    with pytest.raises(ImportError, match="fp8_quantize: the memory of quantized weights"):
        _ = mixed_precision.fp8_quantize


@on_ranks(2)
def test_model_outlives_its_process_group(tmp_path: Path) -> None:
    model = fully_shard_model(TinyModel().to(device()), fsdp_unit_modules=[Block])
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=size)
    for use in (lambda: loss_of(model, batches(1, 1)[0, 0]), lambda: model.load_state_dict(model.state_dict())):
        with pytest.raises(RuntimeError, match="process group of a sharded model does not exist any more"):
            use()
