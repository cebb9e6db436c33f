"""NVIDIA's functions for uneven DTensors, with which Megatron-Bridge exports, take ours."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp.mcore import cpu, install
from megatron_fsdp import fully_shard_model

# Rank processes import this module, and with it Megatron.
cpu.enable()

from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor as theirs  # noqa: E402
from tests.ranks import DEVICE, on_ranks  # noqa: E402


@on_ranks(4)
@pytest.mark.parametrize("hybrid", [False, True])
def test_functions_of_megatron_core(hybrid: bool) -> None:
    install()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)).to(DEVICE)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    more = {}
    if hybrid:
        mesh = init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
        more = {"device_mesh": mesh, "dp_outer_dim": "outer", "dp_shard_dim": "inner", "outer_dp_sharding_strategy": 1}
    sharded = fully_shard_model(model, fsdp_unit_modules=[nn.Linear], **more)
    for name, whole in expected.items():
        value = sharded.state_dict()[f"module.{name}"]
        assert torch.equal(theirs.uneven_dtensor_to_full_tensor(value.clone()), whole)
        replicated = theirs.redistribute_uneven_dtensor_to_replicated(value.clone())
        assert torch.equal(replicated.to_local(), whole)
        pieces = list(theirs.split_dtensor(value.clone(), 16, update_uneven_dtensor_chunk_meta=True))
        for shard_slice, part in zip(pieces, whole.split(16), strict=True):
            assert torch.equal(theirs.uneven_dtensor_to_full_tensor(shard_slice), part)
    state = theirs.preprocess_state_dict_for_uneven_dtensor(sharded.state_dict())
    assert all(value.shape == expected[name.removeprefix("module.")].shape for name, value in state.items())
