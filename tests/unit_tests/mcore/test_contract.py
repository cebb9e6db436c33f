"""The interface that Megatron-Core expects of a data-parallel wrapper: one test per attribute or method."""

import copy
import gc
import inspect
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import tests.megatron_models as mm
from megatron.core import rerun_state_machine, tensor_parallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model, get_model_config, unwrap_model
from megatron.fsdp import MegatronFSDP
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from tests.models import STRATEGIES, logged
from tests.nccl_recorder import Recorder
from tests.ranks import RankPool, on_ranks
from tests.slow import all_but_slow

# Training is DDP's -----------------------------------------------------------------------------------------------


def _equals_ddp(strategy: str, changes: dict, micro_batches: int) -> None:
    with mm.megatron():
        expected = mm.train_ddp(micro_batches=micro_batches, **changes)
        found = mm.train(strategy, micro_batches=micro_batches, **changes)
    mm.assert_same(found, expected, rtol=1e-5, atol=1e-4, norms=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_norm_zeros_and_weights_equal_ddps(ranks: RankPool, strategy: str, world_size: int) -> None:
    ranks.run(world_size, _equals_ddp, strategy, {}, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "changes",
    [
        {"calculate_per_token_loss": True},
        {"overlap_grad_reduce": True},
        {"overlap_grad_reduce": True, "calculate_per_token_loss": True},
        {"average_in_collective": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_settings_of_reductions(ranks: RankPool, strategy: str, changes: dict) -> None:
    ranks.run(2, _equals_ddp, strategy, changes, 3)


@pytest.mark.parametrize("strategy", all_but_slow(STRATEGIES, "optim_grads_params"))
@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"qk_layernorm": True, "normalization": "LayerNorm"},
        {"gated_linear_unit": True, "add_bias_linear": False},
        {"fsdp_double_buffer": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_settings_of_the_model(ranks: RankPool, strategy: str, changes: dict) -> None:
    ranks.run(2, _equals_ddp, strategy, changes, 3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_reduces_in_fp32_as_ddp_does(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _equals_ddp, strategy, {"bf16": True, "grad_reduce_in_fp32": True}, 2)


# The wrapper's attributes and methods ----------------------------------------------------------------------------


def class_and_wrapper_chain() -> None:
    for bf16 in (False, True):
        model = mm.wrapped("optim_grads_params", bf16=bf16)
        assert isinstance(model, _BaseDataParallel) and not isinstance(model, mm.DistributedDataParallel)
        # Unwrapping removes one wrapper only, and names in checkpoints depend on that.
        assert unwrap_model([model])[0] is model.module
        assert isinstance(model.module, MegatronFSDP)
        inner = model.module.module.module if bf16 else model.module.module
        assert isinstance(inner, GPTModel)
        assert get_model_config(model) is model.config is inner.config
        assert get_attr_wrapped_model(model, "pre_process") is True


def configs_are_the_ones_given() -> None:
    config, data_parallel = mm.transformer_config(), mm.ddp_config()
    model = mm.FullyShardedDataParallel(config=config, ddp_config=data_parallel, module=mm.gpt(config))
    assert model.config is config and model.ddp_config is data_parallel


def attributes_are_the_originals() -> None:
    model = mm.wrapped("optim_grads_params", bf16=True)
    assert model.mp_policy is model.module.mp_policy
    assert model.module.ddp_config is model.ddp_config
    assert model.megatron_fsdp_dist_index is model.module.dist_index
    assert [kind.__name__ for kind in model.fsdp_unit_modules] == ["TransformerLayer"]


def named_parameters_are_the_same_objects_throughout() -> None:
    model = mm.wrapped("optim_grads_params", qk_layernorm=True, normalization="LayerNorm")
    at_build = dict(model.named_parameters())
    assert all(isinstance(p, DTensor) for p in at_build.values())
    optimizer = mm.optimizer_of(model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in at_build.values()}
    mm.forward_backward(model, mm.tokens(0, 2))
    after_sync = dict(model.named_parameters())
    optimizer.step()
    after_step = dict(model.named_parameters())
    for later in (after_sync, after_step):
        assert later.keys() == at_build.keys()
        assert all(later[name] is at_build[name] for name in at_build)
    assert all(name.startswith("module.module.") for name in at_build)
    assert any("q_layernorm" in name for name in at_build) and any("k_layernorm" in name for name in at_build)


def modules_and_buffers_are_reached() -> None:
    model = mm.wrapped("optim_grads_params")
    assert sum(isinstance(m, TransformerLayer) for m in model.modules()) == 2
    # Megatron's DDP has a list of communication buffers under this name, which hides the method of nn.Module.
    assert type(model).buffers is torch.nn.Module.buffers
    assert not hasattr(model, "expert_parallel_buffers") and not hasattr(model, "bucket_groups")


def no_sync_can_be_entered_again() -> None:
    model = mm.wrapped("optim")
    data = mm.tokens(0, 2)
    with model.no_sync():
        with model.no_sync():
            _without_finalizing(model, data[:1])
    with model.no_sync():
        pass
    mm.forward_backward(model, data[1:])
    twice = {name: local_shard(p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad_buffer()
    model.config.no_sync_func = None
    mm.forward_backward(model, data)
    for name, parameter in model.named_parameters():
        # The schedule divides the loss by the number of micro-batches, which was one in each of the runs above.
        torch.testing.assert_close(2 * local_shard(parameter.grad), twice[name])


def _without_finalizing(model: torch.nn.Module, data: torch.Tensor) -> None:
    with patch.object(model.config, "finalize_model_grads_func", None):
        mm.forward_backward(model, data)


def finish_grad_sync_attaches_gradients() -> None:
    for strategy in STRATEGIES:
        model = mm.wrapped(strategy)
        _without_finalizing(model, mm.tokens(0, 1))
        model.start_grad_sync()
        model.finish_grad_sync(force_all_reduce=False)
        for parameter in model.parameters():
            grad = parameter.grad
            assert isinstance(grad, DTensor)
            assert grad.dtype == parameter.dtype == torch.float32
            assert (grad.device_mesh, grad.placements) == (parameter.device_mesh, parameter.placements)
            assert (grad.shape, grad.stride()) == (parameter.shape, parameter.stride())
            assert local_shard(grad).shape == local_shard(parameter).shape
        with pytest.raises(NotImplementedError, match="force_all_reduce"):
            model.finish_grad_sync(force_all_reduce=True)


def trainable_parameter_without_gradient_gets_zeros() -> None:
    config = mm.transformer_config()
    module = mm.gpt(config)
    module.spare = torch.nn.Parameter(torch.ones(7, 3))
    module.decoder.layers[0].spare = torch.nn.Parameter(torch.ones(5))
    model = mm.FullyShardedDataParallel(config=config, ddp_config=mm.ddp_config(), module=module)
    _without_finalizing(model, mm.tokens(0, 1))
    model.finish_grad_sync()
    spare = {name: p for name, p in model.named_parameters() if "spare" in name}
    assert len(spare) == 2
    assert all(not local_shard(p.grad).any() for p in spare.values())


def buffers_are_registered_when_the_loop_asks_for_it() -> None:
    for asked_for in (True, False):
        with Recorder().installed() as recorder:
            model = mm.wrapped("optim_grads_params", nccl_ub=True, fsdp_manual_registration=asked_for)
            mm.forward_backward(model, mm.tokens(0, 1))
            assert bool(recorder.registered) is not asked_for
            model.param_and_grad_buffer.manual_buffer_registration()
            assert len(recorder.registered) == 1
            mm.forward_backward(model, mm.tokens(1, 1))
            del model
            gc.collect()
            assert recorder.registered == []


def scale_gradients_acts_once_and_in_place() -> None:
    for strategy in STRATEGIES:
        model = mm.wrapped(strategy)
        mm.forward_backward(model, mm.tokens(0, 1))
        grads = [p.grad for p in model.parameters()]
        before = [local_shard(grad).clone() for grad in grads]
        pointers = [local_shard(grad).data_ptr() for grad in grads]
        model.scale_gradients(torch.tensor(0.25))
        model.scale_gradients(torch.tensor([2.0]))
        assert [p.grad for p in model.parameters()] == grads
        assert [local_shard(grad).data_ptr() for grad in grads] == pointers
        torch.testing.assert_close([local_shard(grad) for grad in grads], [0.5 * value for value in before])


def zero_grad_buffer_may_be_called_twice() -> None:
    for strategy in STRATEGIES:
        model = mm.wrapped(strategy)
        mm.forward_backward(model, mm.tokens(0, 1))
        expected = [local_shard(p.grad).clone() for p in model.parameters()]
        _without_finalizing(model, mm.tokens(1, 1))
        model.zero_grad_buffer()
        model.zero_grad_buffer()
        assert all(p.grad is None for p in model.parameters())
        mm.forward_backward(model, mm.tokens(0, 1))
        torch.testing.assert_close([local_shard(p.grad) for p in model.parameters()], expected)


def start_param_sync_takes_megatrons_arguments() -> None:
    for strategy in STRATEGIES:
        model = mm.wrapped(strategy)
        model.start_param_sync()
        model.start_param_sync("unused", force_sync=True)
        model.start_param_sync(force_dispatch=True)
        model.synchronize_param_gather()
        assert all(unit.state.value == "sharded" for unit in model.module.engine.units)
        assert all(isinstance(p, DTensor) for p in model.parameters())


def start_param_sync_prefetches_unless_disabled() -> None:
    for wanted in (True, False):
        model = mm.wrapped("optim_grads_params", fsdp_all_gather_in_start_param_sync=wanted)
        model.start_param_sync()
        states = [unit.state.value for unit in model.module.engine.units]
        assert (states[:2] == ["unsharding", "unsharding"]) == wanted
        model.synchronize_param_gather()


def optimizer_step_reaches_compute_weights() -> None:
    for strategy in STRATEGIES:
        model = mm.wrapped(strategy, bf16=True)
        seen: dict[str, torch.Tensor] = {}

        def look(module: torch.nn.Module, args: object, into: dict = seen) -> None:
            into["weight"] = module.weight.detach().clone()

        layer = model.module.module.module.decoder.layers[0].mlp.linear_fc1
        layer.register_forward_pre_hook(look)
        _forward(model)
        before = seen["weight"]
        with torch.no_grad():
            for entry in model.module.engine.params():
                local_shard(entry.main).mul_(2.0)
        model.param_and_grad_buffer.copy_main_weights_to_model_weights()
        model.start_param_sync()
        _forward(model)
        torch.testing.assert_close(seen["weight"], 2 * before)


def step_without_synchronized_gradients_raises() -> None:
    def of_torch(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    for build in (of_torch, mm.optimizer_of):
        model = mm.wrapped("optim_grads_params")
        optimizer = build(model)
        _without_finalizing(model, mm.tokens(0, 1))
        with pytest.raises(RuntimeError, match="finish_grad_sync"):
            optimizer.step()
        model.finish_grad_sync()
        optimizer.step()


def sharded_state_dict_raises() -> None:
    with pytest.raises(NotImplementedError, match="fsdp_dtensor"):
        mm.wrapped("optim_grads_params").sharded_state_dict()


def _forward(model: torch.nn.Module) -> torch.Tensor:
    rows = torch.arange(mm.SEQUENCE + 1).unsqueeze(0) % mm.VOCABULARY
    mask = torch.ones(1, 1, mm.SEQUENCE, mm.SEQUENCE).tril() < 0.5
    with torch.no_grad():
        return model(rows[:, :-1], torch.arange(mm.SEQUENCE).unsqueeze(0), mask)


def state_dict_has_main_weights_and_loads_back() -> None:
    for bf16 in (False, True):
        model = mm.wrapped("optim_grads_params", bf16=bf16)
        output = _forward(model)
        state = model.module.state_dict_for_save_checkpoint()
        assert all(key.startswith("module.") and not key.startswith("module.module.") for key in state)
        weights = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        assert all(isinstance(v, DTensor) and v.dtype == torch.float32 for v in weights.values())
        saved = {k: v.clone() for k, v in weights.items()}
        with torch.no_grad():
            for entry in model.module.engine.params():
                local_shard(entry.main).zero_()
        assert not torch.equal(_forward(model), output) or not bf16
        model.load_state_dict(saved, strict=True)
        assert torch.equal(_forward(model), output)
        with pytest.raises(RuntimeError, match="Missing"):
            model.load_state_dict({}, strict=True)
        model.load_state_dict({}, strict=False)


def stop_communication_leaves_main_weights() -> None:
    model = mm.wrapped("optim_grads_params")
    model.start_param_sync()
    model.stop_communication()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert all(unit.state.value == "sharded" for unit in model.module.engine.units)
    model.start_param_sync()
    model.free_overlap_buffers()
    assert all(unit.state.value == "sharded" for unit in model.module.engine.units)


def broadcast_params_makes_ranks_agree() -> None:
    for strategy in STRATEGIES:
        config = mm.transformer_config()
        module = mm.gpt(config)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(dist.get_rank())
        model = mm.FullyShardedDataParallel(config=config, ddp_config=mm.ddp_config(strategy), module=module)
        model.broadcast_params()
        outputs: list[torch.Tensor] = [torch.empty(0)] * dist.get_world_size()
        dist.all_gather_object(outputs, _forward(model))
        assert all(torch.equal(outputs[0], output) for output in outputs), strategy


def set_is_first_microbatch_comes_from_megatrons_module() -> None:
    mm.wrapped("optim_grads_params").set_is_first_microbatch()


# Parameters ------------------------------------------------------------------------------------------------------


def attributes_are_on_main_weights() -> None:
    config = mm.transformer_config()
    module = mm.gpt(config)
    for number, parameter in enumerate(module.parameters()):
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        parameter.sequence_parallel = bool(number % 2)
        parameter.average_gradients_across_tp_domain = True
    before = {name: copy.copy(vars(p)) for name, p in module.named_parameters()}
    model = mm.FullyShardedDataParallel(config=config, ddp_config=mm.ddp_config(), module=module)
    for name, parameter in model.named_parameters():
        found = vars(parameter)
        expected = before[name.removeprefix("module.module.")]
        assert {key: found[key] for key in expected} == expected
        assert parameter.requires_grad and parameter.__fsdp_param__ is True
    embedding = dict(model.named_parameters())["module.module.embedding.word_embeddings.weight"]
    assert embedding.is_embedding_or_output_parameter


def shapes_are_those_of_the_whole_parameter() -> None:
    shapes = {name: p.shape for name, p in mm.gpt(mm.transformer_config()).named_parameters()}
    model = mm.wrapped("optim_grads_params")
    for name, parameter in model.named_parameters():
        assert parameter.shape == shapes[name.removeprefix("module.module.")]
    # Megatron gives vectors no weight decay.
    for group in mm.optimizer_of(model).param_groups:
        expected = {1} if group["wd_mult"] == 0.0 else {2}
        assert {p.dim() for p in group["params"]} == expected


def slices_and_mesh_are_on_main_weights() -> None:
    whole = dict(mm.gpt(mm.transformer_config()).named_parameters())
    model = mm.wrapped("optim_grads_params")
    for name, parameter in model.named_parameters():
        expected = whole[name.removeprefix("module.module.")].detach().reshape(-1)[parameter.megatron_fsdp_slice]
        assert torch.equal(local_shard(parameter).detach().reshape(-1), expected)
        index = parameter.megatron_fsdp_dist_index
        assert index.get_submesh([index.tp_dim]).mesh.numel() == 1
        assert index.get_submesh(index.dp_shard_dim).size() == dist.get_world_size()
        assert index.get_submesh(index.dp_shard_dim) is index.get_submesh([index.dp_shard_dim]), "made once"
        assert index.dp_outer_dim is None and not index.use_hybrid_fsdp and not index.hsdp_outer_dp_shard


def compute_weights_have_nothing_of_fused_kernels_unless_asked() -> None:
    model = mm.wrapped("optim_grads_params")
    mm.forward_backward(model, mm.tokens(0, 1))
    for entry in model.module.engine.params():
        assert not hasattr(entry.compute, "__fsdp_param__") and not hasattr(entry.compute, "main_grad")


def layers_follow_settings_that_were_adjusted_after_they_were_built() -> None:
    """Megatron's linear layers stand for Transformer Engine's, with the attributes of its modules and operations."""

    def build(config: TransformerConfig) -> torch.nn.Module:
        module = mm.gpt(config)
        config.fp8 = "hybrid"
        for layer in module.decoder.layers:
            layer.mlp.linear_fc1.fuse_wgrad_accumulation = True
            layer.mlp.linear_fc1.disable_parameter_transpose_cache = False
            layer.mlp.linear_fc2._accumulate_into_main_grad = True
        return module

    for strategy in STRATEGIES:
        model = mm.wrapped(strategy, build)
        layers = [layer for layer in model.modules() if hasattr(layer, "linear_fc1")]
        assert len(layers) > 1
        # A rank that keeps full weights may keep quantized copies, too.
        disabled = strategy == "optim_grads_params"
        assert model.config.disable_parameter_transpose_cache == disabled
        for layer in layers:
            assert layer.linear_fc1.disable_parameter_transpose_cache == disabled
            assert not layer.linear_fc1.fuse_wgrad_accumulation
            assert not layer.linear_fc2._accumulate_into_main_grad
            assert not hasattr(layer.linear_fc2, "fuse_wgrad_accumulation")


def optimizer_state_has_equal_keys_on_all_ranks() -> None:
    """Ranks that own nothing of a parameter have state for it too: otherwise saving would exchange different things."""
    model = mm.wrapped("optim_grads_params")
    optimizer = mm.optimizer_of(model)
    mm.forward_backward(model, mm.tokens(0, 1))
    optimizer.step()
    assert any(local_shard(p).numel() == 0 for p in model.parameters()), "no rank owns nothing: the test shows nothing"
    states = {name: sorted(optimizer.optimizer.state[p]) for name, p in model.named_parameters()}
    of_all_ranks: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_all_ranks, states)
    assert all(each == states for each in of_all_ranks)


def nan_in_a_gradient_is_reported_with_the_parameters_name() -> None:
    model = mm.wrapped("optim_grads_params", check_for_nan_in_grad=True)
    _without_finalizing(model, mm.tokens(0, 1))
    group = model.module.engine.groups[-1]
    group.gradients.wait()
    group.gradients.reduced.fill_(float("nan"))
    with pytest.raises(RuntimeError, match=r"found NaN in gradient norm.*not finite in .*layers.1"):
        model.finish_grad_sync()


def a_nan_that_a_rerun_does_not_reproduce_is_reported_as_such() -> None:
    """Megatron finds the check that had failed by its message, which the names of gradients must not be part of."""
    machine = rerun_state_machine.get_rerun_state_machine()
    machine.set_mode(rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    machine.first_iteration_complete = True
    model = mm.wrapped("optim_grads_params", check_for_nan_in_grad=True)
    reported: list[str] = []
    machine._log_validation_error_to_file = lambda status, **unused: reported.append(status.name)
    for value in (float("nan"), 1.0):
        assert machine.should_run_forward_backward(None)
        model.zero_grad_buffer()
        _without_finalizing(model, mm.tokens(0, 1))
        group = model.module.engine.groups[-1]
        group.gradients.wait()
        group.gradients.reduced.mul_(value)
        model.finish_grad_sync()
    assert reported == ["INITIAL_RUN", "FIRST_RERUN_NOT_REPRODUCIBLE"]


def gradients_are_checked_where_everything_is_frozen() -> None:
    """As on a pipeline stage that is not trained."""
    model = mm.wrapped(
        "optim_grads_params", lambda config: mm.gpt(config).requires_grad_(False), check_for_nan_in_grad=True
    )
    model.finish_grad_sync()
    assert all(param.grad is None for param in model.parameters())


def large_gradients_are_reported_and_no_error() -> None:
    machine = rerun_state_machine.get_rerun_state_machine()
    model = mm.wrapped("optim_grads_params", check_for_nan_in_grad=False, check_for_large_grads=True)
    with logged(by=rerun_state_machine.logger.name) as warnings:
        for largest in (1e9, 1e-9):
            # As if a hundred steps had been seen.
            machine.large_value_counts["grads"], machine.max_values["grads"] = 100, largest
            _without_finalizing(model, mm.tokens(0, 1))
            model.finish_grad_sync()
            assert ["unexpectedly large value" in warning for warning in warnings] == [True] * (largest < 1)


# The functions above that have names of their own.
CASES = [
    function
    for name, function in list(globals().items())
    if inspect.isfunction(function) and function.__module__ == __name__ and not name.startswith(("_", "test_"))
]


@on_ranks(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_row(case: Callable[[], None]) -> None:
    with mm.megatron():
        case()
