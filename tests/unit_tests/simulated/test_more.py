"""Actions of scripts between and around steps, on the simulated device: no unordered accesses to memory."""

import gc
import tempfile
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.optim import matrix_exchange
from megatron.fsdp.optim.full_matrices import FullMatrices
from megatron.fsdp.state.consistency import inconsistent_weights
from megatron.fsdp.state.export import save_safetensors
from megatron_fsdp import fully_shard_model, fully_shard_optimizer, register_forward_method
from tests.models import Block, TinyModel, batches, loss_of, train_step
from tests.ranks import DEVICE as REAL_DEVICE
from tests.ranks import RankPool, on_ranks
from tests.simulated.device import DEVICE, simulated_device
from tests.simulated.models import BF16, adamw, assert_clean, on_device, sharded
from tests.simulated.ranks import fake_ranks

pytestmark = [
    pytest.mark.skipif(REAL_DEVICE == "cuda", reason="computes on CPU tensors"),
]
Optimizer = torch.optim.Optimizer
ZERO_1, ZERO_3 = {"zero_dp_strategy": "optim"}, {"zero_dp_strategy": "optim_grads_params"}
SETTINGS: dict[str, dict[str, Any]] = {
    "ZeRO-3": ZERO_3,
    "ZeRO-1": ZERO_1,
    "offload": {**ZERO_3, **BF16, "offload_optimizer": True},
    "double buffer, bf16": {**ZERO_3, **BF16, "fsdp_double_buffer": True},
    "quantized": {**ZERO_3, "format": "mx"},
    "quantized, ZeRO-1, delayed": {**ZERO_1, "format": "delayed"},
    "quantized, double buffer": {**ZERO_3, "format": "mx", "fsdp_double_buffer": True},
}


class Model(TinyModel):
    """Skips blocks if asked to, has a method besides forward, and a buffer."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth=depth)
        self.skipped: tuple[int, ...] = ()
        self.register_buffer("mean", torch.zeros(13))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.1)
        for number, block in enumerate(self.blocks):
            x = x if number in self.skipped else block(x)
        return self.head(self.norm(x + self.mean))

    def look(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


def _use_memory() -> None:
    """Compute writes to whatever memory of its own is free."""
    # Kept until the end, so that every one is other memory.
    _ = [torch.zeros(100, device=DEVICE) for _ in range(300)]


def _full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# What happens in each step -----------------------------------------------------------------------------------------


def _evaluate_between_steps(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    train_step(model, optimizer, tokens, tokens)
    with torch.no_grad():
        model(tokens)


def _skip_a_unit_before_the_step(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    loss_of(model, tokens).backward()
    model.module.skipped = (3,)
    with torch.no_grad():
        model(tokens)
    model.module.skipped = ()
    optimizer.step()
    optimizer.zero_grad()


def _start_param_sync_before_the_step(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    loss_of(model, tokens).backward()
    model.start_param_sync()
    optimizer.step()
    optimizer.zero_grad()


def _step_twice(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    loss_of(model, tokens).backward()
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()


def _load_after_start_param_sync(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    state = _full_state(model)
    train_step(model, optimizer, tokens, tokens)
    model.start_param_sync()
    model.load_state_dict(state)
    optimizer.load_state_dict(optimizer.state_dict())


def _broadcast_after_start_param_sync(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    train_step(model, optimizer, tokens, tokens)
    model.start_param_sync()
    model.broadcast_params()


def _state_between_forward_and_backward(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    loss = loss_of(model, tokens)
    _full_state(model)
    loss.backward()
    _full_state(model)
    optimizer.step()
    optimizer.zero_grad()


def _export_after_start_param_sync(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    train_step(model, optimizer, tokens, tokens)
    model.start_param_sync()
    with tempfile.TemporaryDirectory() as folder:
        save_safetensors(model, folder)


def _compare_ranks(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    loss_of(model, tokens).backward()
    model.engine.context.any_rank([True, False]).read()
    # Dropped while it is in flight.
    model.engine.context.any_rank([True])
    _use_memory()
    optimizer.step()
    inconsistent_weights(model.engine)
    model.average_buffers()
    optimizer.zero_grad()


def _clear_while_reducing(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    for auto_sync in (True, False):
        model.set_model_auto_sync(auto_sync)
        with model.no_sync():
            loss_of(model, tokens).backward()
        loss_of(model, tokens).backward()
        optimizer.zero_grad()
        _use_memory()
    model.set_model_auto_sync(True)
    train_step(model, optimizer, tokens, tokens)


def _freeze_and_unfreeze(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    for name, parameter in model.named_parameters():
        if "blocks.1" in name or "embedding" in name:
            parameter.requires_grad_(not parameter.requires_grad)
    train_step(model, optimizer, tokens, tokens)


def _scale(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    loss_of(model, tokens).backward()
    model.scale_gradients(0.5)
    model.scale_gradients(torch.ones(1, device=DEVICE))
    optimizer.step()
    optimizer.zero_grad()


def _unshard_by_hand(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    train_step(model, optimizer, tokens, tokens)
    model.all_gather_and_wait_parameters_ready(model.parameters(), wait_bucket_ready=False)
    model.all_gather_and_wait_parameters_ready(model.parameters())
    for parameter in model.module.parameters():
        parameter.sum()
    model.synchronize_param_gather()


def _call_another_method(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    register_forward_method(model, "look")
    model.look(tokens).float().sum().backward()
    train_step(model, optimizer, tokens, tokens)


def _hook_gradients(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    handles = [parameter.register_hook(lambda grad: grad * 2.0) for parameter in model.parameters()]
    train_step(model, optimizer, tokens, tokens)
    for handle in handles:
        handle.remove()


def _fail(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    def failing(*unused: Any) -> None:
        raise ArithmeticError

    norm = model.module.blocks[1].norm
    for hook in (norm.register_forward_hook(failing), norm.register_full_backward_hook(failing)):
        with pytest.raises(ArithmeticError):
            loss_of(model, tokens).backward()
        hook.remove()
        gc.collect(1)  # what the exception has kept goes before the device has run its kernels
        optimizer.zero_grad()
    train_step(model, optimizer, tokens, tokens)


IN_EACH_STEP: dict[str, Callable[[nn.Module, Optimizer, torch.Tensor], None]] = {
    "evaluation between steps": _evaluate_between_steps,
    "evaluation that skips a unit before the step": _skip_a_unit_before_the_step,
    "start_param_sync before the step": _start_param_sync_before_the_step,
    "two steps": _step_twice,
    "load after start_param_sync": _load_after_start_param_sync,
    "broadcast after start_param_sync": _broadcast_after_start_param_sync,
    "state between forward and backward": _state_between_forward_and_backward,
    "export after start_param_sync": _export_after_start_param_sync,
    "comparison of ranks": _compare_ranks,
    "zero_grad while reducing": _clear_while_reducing,
    "freezing": _freeze_and_unfreeze,
    "scaling": _scale,
    "unshard by hand": _unshard_by_hand,
    "another method": _call_another_method,
    "gradient hooks": _hook_gradients,
    "exceptions": _fail,
}
# Quantized weights are in a model without another method and skipped blocks.
OF_QUANTIZED = (
    "start_param_sync before the step",
    "two steps",
    "load after start_param_sync",
    "unshard by hand",
    "exceptions",
)
STEPS = [
    (what, name)
    for name, settings in SETTINGS.items()
    for what in (OF_QUANTIZED if "format" in settings else IN_EACH_STEP)
]


@on_ranks(1)
@pytest.mark.parametrize(("what", "settings"), STEPS)
def test_steps(what: str, settings: str) -> None:
    with fake_ranks(4), simulated_device(5.0) as sim:
        model, optimizer = sharded(Model, **SETTINGS[settings])
        for tokens in batches(3, 1).to(DEVICE).flatten(0, 1):
            IN_EACH_STEP[what](model, optimizer, tokens)
        assert_clean(sim)


@on_ranks(1)
def test_full_matrices_whose_computation_fails() -> None:
    """The next round's matrices are on their way when the computation of one raises an error."""
    with fake_ranks(4), simulated_device(5.0) as sim, patch.object(matrix_exchange, "ROUND", 1):
        model, _ = sharded(Model)
        mains = [param.main for param in model.engine.params() if len(param.local_shape) == 2]
        matrices = FullMatrices(mains, lambda main: float(main.numel()))
        with pytest.raises(ZeroDivisionError):
            matrices.map(
                lambda main, share: share.copy_(local_shard(main).view(-1)),
                lambda main, matrix: matrix / (1 // 0),
                lambda main, share: None,
            )
        _use_memory()
        assert_clean(sim)


@on_ranks(1)
@pytest.mark.parametrize("settings", SETTINGS)
def test_full_matrices(settings: str) -> None:
    """Matrices are exchanged in several rounds, whose buffers are free memory afterwards."""
    with fake_ranks(4), simulated_device(5.0) as sim, patch.object(matrix_exchange, "ROUND", 1):
        model, optimizer = sharded(Model, **SETTINGS[settings])
        mains = [param.main for param in model.engine.params() if len(param.local_shape) == 2]
        sums = {main: torch.zeros_like(local_shard(main)) for main in mains}
        matrices = FullMatrices(mains, lambda main: float(main.numel()))
        for tokens in batches(3, 1).to(DEVICE).flatten(0, 1):
            train_step(model, optimizer, tokens, tokens)
            matrices.map(
                lambda main, share: share.copy_(local_shard(main).view(-1)),
                lambda main, matrix: matrix @ matrix.mT @ matrix,
                lambda main, share: sums[main].view(-1).add_(share.to(main.device)),
            )
            _use_memory()
        assert_clean(sim)


# Several models and optimizers, and the end of one -----------------------------------------------------------------


def _two_models(settings: dict[str, Any]) -> None:
    with fake_ranks(4), simulated_device(5.0) as sim:
        (first, optimizer), (second, other) = sharded(Model, **settings), sharded(Model, **settings)
        for tokens in batches(3, 1).to(DEVICE).flatten(0, 1):
            (loss_of(first, tokens) + loss_of(second, tokens)).backward()
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
        assert_clean(sim)


@pytest.mark.parametrize("settings", SETTINGS)
def test_two_models_share_the_streams(ranks: RankPool, settings: str) -> None:
    ranks.run(1, _two_models, SETTINGS[settings])


def _two_optimizers(settings: dict[str, Any]) -> None:
    with fake_ranks(4), simulated_device(5.0) as sim:
        settings = dict(settings)
        module = on_device(Model, settings.pop("dtype", torch.float32), settings.pop("format", ""))
        model = fully_shard_model(module, fsdp_unit_modules=[Block], device=DEVICE, **settings)
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        optimizers = [fully_shard_optimizer(adamw(parameters)) for parameters in (matrices, vectors)]
        for tokens in batches(3, 1).to(DEVICE).flatten(0, 1):
            loss_of(model, tokens).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        assert_clean(sim)


@pytest.mark.parametrize("settings", SETTINGS)
def test_two_optimizers(ranks: RankPool, settings: str) -> None:
    ranks.run(1, _two_optimizers, SETTINGS[settings])


def _start_unshards(model: nn.Module, tokens: torch.Tensor) -> None:
    model.start_param_sync()


def _start_reductions(model: nn.Module, tokens: torch.Tensor) -> None:
    model.set_model_auto_sync(False)
    loss_of(model, tokens).backward()


IN_FLIGHT = {"unshards": _start_unshards, "reductions": _start_reductions}


@on_ranks(1)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("what", IN_FLIGHT)
def test_a_model_is_deleted_while_tasks_are_in_flight(what: str, settings: str) -> None:
    with fake_ranks(4), simulated_device(5.0) as sim:
        model, optimizer = sharded(Model, **SETTINGS[settings])
        tokens = batches(1, 1).to(DEVICE)[0, 0]
        train_step(model, optimizer, tokens, tokens)
        IN_FLIGHT[what](model, tokens)
        before = sim.memory.allocator.active
        del model, optimizer
        gc.collect()
        assert sim.memory.allocator.active < before / 2
        _use_memory()
        assert_clean(sim)


@on_ranks(1)
@pytest.mark.parametrize("settings", SETTINGS)
def test_forwards_on_two_streams(settings: str) -> None:
    """The caller orders each stream after the step, and none after the other."""
    with fake_ranks(4), simulated_device(5.0) as sim:
        model, optimizer = sharded(**SETTINGS[settings])
        tokens, streams = batches(1, 1).to(DEVICE)[0, 0], [torch.cuda.Stream(), torch.cuda.Stream()]
        for with_gradients in (False, True):
            train_step(model, optimizer, tokens, tokens)
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
            for stream in streams:
                with torch.cuda.stream(stream), torch.set_grad_enabled(with_gradients):
                    model(tokens).sum()
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
        assert_clean(sim)
