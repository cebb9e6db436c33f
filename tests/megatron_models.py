"""A tiny GPT of Megatron-Core, trained with Megatron's own schedule and optimizer, for tests of the adapter.

Imported by rank processes only: it switches Megatron to the CPU before it imports it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fsdp.mcore import cpu

cpu.enable()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed import finalize_model_grads as finalize  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402, F401 - for tests
from megatron.core.rerun_state_machine import destroy_rerun_state_machine, initialize_rerun_state_machine  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.fsdp.mcore import FullyShardedDataParallel, install, uninstall  # noqa: E402
from megatron.fsdp.mcore.checkpoint_state import preprocess_fsdp_dtensor_state_dict  # noqa: E402

VOCABULARY, SEQUENCE = 29, 6

Losses = Callable[[Callable, torch.Tensor], torch.Tensor]


@contextmanager
def megatron(plugin: bool = True, **sizes: int) -> Iterator[None]:
    """Megatron's process groups, of these sizes, and random numbers, and our plugin."""
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1234)
    initialize_rerun_state_machine()
    if plugin:
        install()
    try:
        yield
    finally:
        uninstall()
        destroy_rerun_state_machine()
        parallel_state.destroy_model_parallel()


def transformer_config(**changes: Any) -> TransformerConfig:
    """Sizes that ranks do not divide."""
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 20,
        "ffn_hidden_size": 36,
        "num_attention_heads": 2,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**{**settings, **changes})


def ddp_config(strategy: str | None = "optim_grads_params", **changes: Any) -> DistributedDataParallelConfig:
    """Settings of our FSDP with this strategy, or of DDP with the distributed optimizer if it is None."""
    settings: dict[str, Any] = {"use_distributed_optimizer": True, "check_for_nan_in_grad": True}
    if strategy is not None:
        settings |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}
    return DistributedDataParallelConfig(**{**settings, **changes})


def gpt(config: TransformerConfig, tied: bool = True, vocabulary: int | None = None) -> torch.nn.Module:
    """The unwrapped model, equal on all ranks; in a Float16Module if the config asks for bf16 or fp16."""
    torch.manual_seed(7)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm),
        vocab_size=vocabulary or VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
    )
    return Float16Module(config, model) if config.bf16 or config.fp16 else model


def wrapped(strategy: str | None, build: Callable[..., torch.nn.Module] = gpt, **changes: Any) -> torch.nn.Module:
    """The model in our wrapper, or in DDP if ``strategy`` is None."""
    transformer = {k: v for k, v in changes.items() if k in TransformerConfig.__dataclass_fields__}
    data_parallel = {k: v for k, v in changes.items() if k not in transformer}
    config = transformer_config(**transformer)
    wrapper = DistributedDataParallel if strategy is None else FullyShardedDataParallel
    model = wrapper(config=config, ddp_config=ddp_config(strategy, **data_parallel), module=build(config))
    if config.finalize_model_grads_func is None:
        config.finalize_model_grads_func = finalize
    return model


def optimizer_of(model: torch.nn.Module, **changes: Any) -> Any:
    """Megatron's distributed optimizer, built as its training loop builds it."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.1,
        clip_grad=1.0,
        bf16=model.config.bf16,
        params_dtype=torch.bfloat16 if model.config.bf16 else torch.float32,
        use_distributed_optimizer=True,
        log_num_zeros_in_grad=True,
        # Gradients are far larger than this, and rounding is far smaller: of the latter, Adam makes no whole steps.
        adam_eps=1e-5,
        **changes,
    )
    return get_megatron_optimizer(config, [model])


def tokens(step: int, micro_batches: int) -> torch.Tensor:
    """This rank's micro-batches of one step: [micro_batches, 1, SEQUENCE + 1]."""
    rank = parallel_state.get_data_parallel_rank() if parallel_state.is_initialized() else dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (micro_batches, 1, SEQUENCE + 1), generator=generator)


def gpt_losses(module: Callable, rows: torch.Tensor) -> torch.Tensor:
    """The loss of each token of one micro-batch: [1, SEQUENCE]."""
    positions = torch.arange(SEQUENCE).unsqueeze(0)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5
    return module(rows[:, :-1], positions, mask, labels=rows[:, 1:])


def forward_backward(model: torch.nn.Module, data: torch.Tensor, losses_of: Losses = gpt_losses) -> list[torch.Tensor]:
    """Megatron's schedule over the micro-batches, with the gradients' finalization at the end. Returns their losses."""

    def forward_step(
        iterator: Iterator[torch.Tensor], module: torch.nn.Module, return_schedule_plan: bool = False
    ) -> tuple[torch.Tensor, Callable]:
        losses = losses_of(module.build_schedule_plan if return_schedule_plan else module, next(iterator))

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            total = output.float().sum()
            return total, torch.tensor(output.numel(), dtype=torch.int), {"sum": total.detach()}

        return losses, loss

    model.config.no_sync_func = model.no_sync if model.ddp_config.overlap_grad_reduce else None
    results = forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=iter(data),
        model=[model],
        num_microbatches=len(data),
        seq_length=SEQUENCE,
        micro_batch_size=1,
        forward_only=False,
    )
    return [each["sum"] for each in results]


@dataclass
class Trained:
    """The results of a few steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    zeros: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def train(
    strategy: str | None,
    steps: int = 3,
    micro_batches: int = 2,
    build: Callable[..., torch.nn.Module] = gpt,
    losses_of: Losses = gpt_losses,
    **changes: Any,
) -> Trained:
    """Train with our wrapper, or with DDP if ``strategy`` is None, as Megatron's loop does."""
    model = wrapped(strategy, build, **changes)
    result = run_steps(model, optimizer_of(model), steps, micro_batches, losses_of)
    result.weights = weights_of(model)
    return result


def run_steps(
    model: torch.nn.Module,
    optimizer: Any,
    steps: int = 3,
    micro_batches: int = 2,
    losses_of: Losses = gpt_losses,
    data: Callable[[int, int], torch.Tensor] = tokens,
) -> Trained:
    """Take steps as Megatron's loop does, on the micro-batches that ``data`` has for each."""
    result = Trained()
    for step in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        result.losses += [float(loss) for loss in forward_backward(model, data(step, micro_batches), losses_of)]
        success, norm, zeros = optimizer.step()
        assert success
        result.norms.append(float(norm))
        result.zeros.append(float(zeros or 0))
    return result


def assert_same(found: Trained, expected: Trained, rtol: float = 1e-4, atol: float = 1e-5, norms: float = 2e-6) -> None:
    """Norms, numbers of zeros and weights are equal within these tolerances."""
    torch.testing.assert_close(found.norms, expected.norms, rtol=norms, atol=0)
    # A bias of keys shifts all scores of a query alike: its gradient is zero but for rounding, so that the order of
    # sums decides which of its elements are exactly zero. Zeros of all other parameters are equal.
    has_key_biases = any(name.endswith(("linear_qkv.bias", "k_layernorm.bias")) for name in expected.weights)
    assert found.zeros == pytest.approx(expected.zeros, rel=0, abs=5 if has_key_biases else 0)
    assert expected.norms[0] > 0 and found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def checkpoint_state(model: torch.nn.Module, optimizer: Any = None, **options: Any) -> Any:
    """The state dict that Megatron's loop saves in the format fsdp_dtensor. Options are those of the preparation."""
    raw = {"model": model.module.state_dict_for_save_checkpoint(), "iteration": 3}
    if optimizer is not None:
        metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        raw["optimizer"] = optimizer.sharded_state_dict({}, metadata=metadata)
    return preprocess_fsdp_dtensor_state_dict(SimpleNamespace(), raw, model.module, **options)  # type: ignore[arg-type]


_TRAINED_BY_DDP: dict[tuple, Trained] = {}


def train_ddp(**arguments: Any) -> Trained:
    """:func:`train` with DDP. Tests that train alike with each strategy compute it once per process."""
    # The world size, since ranks that have it in common also have all earlier calls with it in common.
    key = (dist.get_world_size(), *sorted(arguments.items()))
    if key not in _TRAINED_BY_DDP:
        _TRAINED_BY_DDP[key] = train(None, **arguments)
    return _TRAINED_BY_DDP[key]


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full compute weights in fp32, by their names in the model itself."""
    from megatron.fsdp.helpers.spelling import bare_name

    if isinstance(model, FullyShardedDataParallel):
        from tests.models import whole

        compute = {e.name: e.compute.dtype for e in model.module.engine.params()}
        return {bare_name(e.name): whole(e, e.main).to(compute[e.name]).float() for e in model.module.engine.params()}
    return {bare_name(name): p.detach().float().clone() for name, p in model.named_parameters()}
