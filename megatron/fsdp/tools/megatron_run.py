"""Runs a Megatron training command with Megatron's DDP or with our FSDP, and records it for a comparison.

Each rank records loss and gradient norm of every iteration, all gradients of the first iteration, and all weights after
the last, gathered over the data-parallel ranks.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.helpers.patches import MEGATRON_CORE, Patches, rows_of
from megatron.fsdp.helpers.spelling import bare_name
from megatron.fsdp.tools.compare_runs import RECORD, Step, run_on_ranks
from megatron.fsdp.tools.script import edited, run

_ROWS = """
    megatron.training.training:train_step -> megatron_run:record_step
        returns loss and gradient norm of a step, which `verify` records
"""
RECORDING = Patches("For comparisons with Megatron's DDP", rows_of(_ROWS, "megatron.fsdp.tools", MEGATRON_CORE))

# Options for FSDP only.
_ONLY_FSDP = """--use-megatron-fsdp --data-parallel-sharding-strategy --outer-dp-sharding-strategy
    --num-distributed-optimizer-instances --expert-data-parallel-sharding-strategy --expert-outer-dp-sharding-strategy
    --expert-num-distributed-optimizer-instances --fsdp-double-buffer --nccl-ub --init-model-with-meta-device
    --ckpt-format --use-distributed-optimizer --overlap-param-gather --megatron-fsdp-main-params-dtype
    --megatron-fsdp-main-grads-dtype --megatron-fsdp-grad-comm-dtype""".split()
# Options that would end the runs early or overwrite the user's files.
_DROPPED = ("--save", "--load", "--save-interval", "--exit-interval", "--tensorboard-dir")


# Recording a run -------------------------------------------------------------------------------------------------


def record_step(
    train_step: Callable[..., Any], step: Any, data: Any, model: list[nn.Module], *rest: Any, **kwargs: Any
) -> Any:
    """Replaces Megatron's ``train_step``: also writes the file of the step."""
    from megatron.core.utils import get_model_config
    from megatron.training import get_args

    folder = Path(os.environ[RECORD])
    number = 1 + len(list(folder.glob(f"*.{dist.get_rank()}.pt")))
    gradients: dict[str, torch.Tensor] = {}
    if number == 1:
        config = get_model_config(model[0])
        config.finalize_model_grads_func = _and_record(config.finalize_model_grads_func, gradients)
    result = train_step(step, data, model, *rest, **kwargs)
    loss = sum(float(value) for value in (result[0] or {}).values())
    norm = next((value for value in result[1:] if isinstance(value, float)), 0.0)
    is_last = number == get_args().train_iters
    weights = dict(full_weights(model)) if is_last else {}
    shifts = {} if _is_ours(model) else key_shifts(model)
    Step({"loss": loss}, gradients, norm, weights, shifts).save(folder, number, dist.get_rank())
    return result


def _and_record(finalize: Callable[..., Any], gradients: dict[str, torch.Tensor]) -> Callable[..., Any]:
    """A ``finalize_model_grads`` that also stores the gradients, the first time that it is called."""

    @functools.wraps(finalize)
    def finalize_and_record(model: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
        result = finalize(model, *args, **kwargs)
        if not gradients:
            gradients.update(full_gradients(model))
        return result

    return finalize_and_record


def _is_ours(model: list[nn.Module]) -> bool:
    from megatron.fsdp.mcore.adapter import FullyShardedDataParallel

    return all(isinstance(chunk, FullyShardedDataParallel) for chunk in model)


def full_gradients(model: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """The gradient of each parameter on this tensor-parallel rank, in fp32, by name."""
    from megatron.fsdp.mcore.adapter import FullyShardedDataParallel

    for number, chunk in enumerate(model):
        if isinstance(chunk, FullyShardedDataParallel):
            for param, tensor in _gather_chunk(chunk, lambda main: main.grad):
                yield _key(number, param.name), tensor.float()
        else:
            for name, parameter in chunk.named_parameters():
                if parameter.requires_grad:
                    yield _key(number, name), parameter.main_grad.detach().float().cpu().clone()  # type: ignore[attr-defined]


def full_weights(model: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter on this tensor-parallel rank, by name."""
    from megatron.fsdp.mcore.adapter import FullyShardedDataParallel

    for number, chunk in enumerate(model):
        if isinstance(chunk, FullyShardedDataParallel):
            chunk.stop_communication()
            for param, tensor in _gather_chunk(chunk, lambda main: main):
                yield _key(number, param.name), tensor.to(param.compute.dtype)
        else:
            for name, parameter in chunk.named_parameters():
                yield _key(number, name), parameter.detach().cpu().clone()


def key_shifts(model: list[nn.Module]) -> dict[str, tuple[torch.Tensor, str, torch.Tensor]]:
    """Find biases of attention keys.

    A bias of the keys adds the same value to all scores of a query, and softmax ignores it, so its exact gradient is
    zero. With rotary embeddings or a softmax offset, the gradient is not zero.

    Args:
        model: Model chunks in Megatron's DDP.

    Returns:
        By name of the bias: a mask of its rows that belong to keys, and name and mask of the bias of the queries.
    """
    from megatron.core import parallel_state
    from megatron.fsdp.mcore.parameter_names import layouts

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    found = {}
    for number, chunk in enumerate(model):
        biases = {name: p for name, p in chunk.named_parameters() if name.endswith(".bias")}
        parts = {name: ranks if getattr(p, "tensor_model_parallel", False) else 1 for name, p in biases.items()}
        shapes = {name: (len(p) * parts[name],) for name, p in biases.items()}
        for name, layout in layouts(chunk, shapes).items():
            kinds = [kind for kind, rows in layout.sections for _ in range(rows)]
            groups, rest = divmod(len(biases[name]), len(kinds))
            if name.endswith("linear_qkv.bias") and not rest:
                key, query = (torch.tensor([kind == one for kind in kinds] * groups) for one in ("key", "query"))
                found[_key(number, name)] = key, _key(number, name), query
        for name, bias in biases.items():
            queries = name.replace(".k_layernorm.", ".q_layernorm.")
            if queries != name and queries in biases:
                everything = torch.ones(len(bias), dtype=torch.bool)
                found[_key(number, name)] = everything, _key(number, queries), everything
    return found


def _key(chunk: int, name: str) -> str:
    return f"chunk {chunk}: {bare_name(name)}" if chunk else bare_name(name)


def _gather_chunk(chunk: Any, choose: Callable[[nn.Parameter], Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Every parameter of a chunk, and the tensor that ``choose`` returns for it, gathered over data-parallel ranks."""
    from megatron.fsdp.dtensor.ragged_dtensor import local_shard

    for group in chunk.module.engine.groups:
        dp_group = group.axes.dp_group
        for param in group.params:
            value = choose(param.main)
            mine = None if value is None else local_shard(value).detach().cpu().reshape(-1)
            shards: list[Any] = [None] * dp_group.size()
            dist.all_gather_object(shards, (param.shard_slice.start, param.shard_slice.stop, mine), group=dp_group)
            whole = torch.zeros(math.prod(param.local_shape))
            for start, stop, shard in shards:
                if shard is not None and stop > start:
                    whole[start:stop] = shard.float()
            if param.trained or value is param.main:
                yield param, whole.view(param.local_shape)


def record(script: Path, arguments: Sequence[str]) -> None:
    """Run a script and record it. :func:`launch` calls this in every rank process."""
    from megatron.fsdp.mcore import install

    install()
    RECORDING.install()
    run(script, arguments)


def launch(script: Path, arguments: Sequence[str], ranks: int, steps: int, folder: Path, ddp: bool) -> str:
    """Train and record into ``folder``. Returns the end of the log if the run fails, else an empty string."""
    wanted = {**dict.fromkeys(_DROPPED), "--train-iters": str(steps), "--log-interval": "1"}
    words, _ = edited(arguments, wanted)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    if ddp:
        words, _ = edited(words, dict.fromkeys(_ONLY_FSDP))
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return run_on_ranks([str(script), *words], ranks, folder, steps, environment)
