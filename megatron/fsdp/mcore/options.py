"""Options of Megatron-LM's main branch, which the command line takes or refuses by name with every version."""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NoReturn

from megatron.core import __version__
from megatron.fsdp.api.ddp_config import FLAGS
from megatron.fsdp.sharding.strategy import INNER, OUTER

EXPERT_INSTANCES = "expert_num_distributed_optimizer_instances"
ROOT_EMBEDDINGS = "fsdp_embeddings_in_root"
# The settings of experts that differ from those of dense parameters, and how the command line takes them.
EXPERTS: dict[str, dict[str, Any]] = {
    "expert_data_parallel_sharding_strategy": {
        "choices": tuple(INNER),
        "help": "Sharding strategy of experts. Default: --data-parallel-sharding-strategy.",
    },
    "expert_outer_dp_sharding_strategy": {
        "choices": tuple(OUTER),
        "help": "Strategy of experts across optimizer instances. Default: --outer-dp-sharding-strategy.",
    },
    EXPERT_INSTANCES: {
        "type": int,
        "help": "Optimizer instances of experts. Default: --num-distributed-optimizer-instances.",
    },
}
# Those and others that have a meaning here.
OPTIONS: dict[str, dict[str, Any]] = {
    **EXPERTS,
    "fsdp_buffer_count": {"type": int, "help": "Buffers of --fsdp-double-buffer, which units use in turn. Default: 2."},
    ROOT_EMBEDDINGS: {
        "action": "store_true",
        "help": "Keep embedding and output layer unsharded during a step, instead of sharding them as units.",
    },
    "megatron_fsdp_version": {"type": int, "choices": (1, 2), "help": "No effect: this engine replaces both."},
    "ckpt_drop_redundant_extra_state": {"action": "store_true", "help": "No effect with Megatron FSDP."},
}
# Options that need code of Megatron-Core's main branch, seen in August 2026.
LATER = """
    --batch-invariant-backend --ckpt-fully-parallel-load-per-rank-objects --ckpt-pg-tensors-cache-create
    --ckpt-pg-tensors-cache-path --enable-mhc-connections --gdp-cutedsl-kernel --gdp-num-chunk-states-to-recompute
    --gdp-num-householder --grad-norm-skip-threshold --gtp-expert-remat-nccl-ub --gtp-remat-nccl-ub
    --gtp-remat-opt-in-modules --gtp-remat-reduce-scatter-with-fp32-accumulation --mhc-init-gating-factor
    --mhc-num-residual-streams --mhc-recompute-layer-num --mhc-sinkhorn-iterations --moe-combine-bwd-dtype
    --moe-dispatch-fwd-dtype --moe-use-grouped-tensor --mtp-hsm --muon-use-syrk --otel-enabled --otel-service-name
    --otel-span-groups --output-logit-dtype --rl-durable-rollout-bank --rl-max-inflight-requests --rl-rollout-bank-dir
    --rl-rollout-bank-max-bytes --use-gigatoken
""".split()
# The options that the command line lacked.
added: set[str] = set()


def _explaining(error: Callable[[str], NoReturn], message: str) -> NoReturn:
    """Replaces a parser's ``error``: says that an option which the parser does not know is one of a later version."""
    for option in message.split() if message.startswith("unrecognized arguments:") else ():
        if option.partition("=")[0] in LATER:
            error(
                f"{option}: expected an option of megatron-core {__version__}; got one of Megatron-LM's main branch. "
                "Leave it out, or put a checkout of that branch in front of PYTHONPATH."
            )
    error(message)


def add_megatron_arguments(original: Callable[..., Any], parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add Megatron's options, and those here that its version lacks."""
    made: argparse.ArgumentParser = original(parser)
    # Without a default: Megatron's configs take every argument that has the name of one of their fields.
    group = made.add_argument_group(title="options of later versions, with Megatron FSDP")
    for name, options in OPTIONS.items():
        option = f"--{name.replace('_', '-')}"
        if option not in made._option_string_actions:
            group.add_argument(option, default=argparse.SUPPRESS, **options)
            added.add(name)
    made.error = functools.partial(_explaining, made.error)  # type: ignore[method-assign]
    return made


def get_megatron_ddp_config(original: Callable[..., Any], args: Any) -> Any:
    """Build the wrapper's settings, with the options here and with the optimizer's settings of offloading."""
    config = original(args)
    for name in (
        FLAGS["offload_optimizer"],
        FLAGS["offload_fraction"],
        FLAGS["max_unsharded_units"],
        *EXPERTS,
        ROOT_EMBEDDINGS,
    ):
        setattr(config, name, getattr(args, name, None))
    return config
