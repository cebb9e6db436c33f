"""A training script for Megatron without any reference to this project. It prints the class that wraps the model."""

from typing import Any

import torch

from megatron.core.distributed import FullyShardedDataParallel
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from pretrain_gpt import DEFAULTS, datasets_provider, forward_step


def reporting_forward_step(data_iterator: Any, model: torch.nn.Module) -> Any:
    if get_args().curr_iteration == 0:
        print_rank_0(f"wrapped by {FullyShardedDataParallel.__module__}: {isinstance(model, FullyShardedDataParallel)}")
    assert torch.ones(1).cuda(non_blocking=True).sum() == 1, "scripts move their batches"
    return forward_step(data_iterator, model)


if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults=DEFAULTS)
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(container, datasets_provider, ModelType.encoder_or_decoder, reporting_forward_step)
