"""Pretrains a GPT or hybrid model with Megatron's training loop, sharded by this project's FSDP or by Megatron-Core's.

    torchrun --nproc-per-node 8 -m megatron.fsdp.pretrain_gpt --use-megatron-fsdp ... (Megatron's arguments)

All of Megatron's arguments keep their meaning. Without a CUDA device, the same command line runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from megatron.fsdp.config import SYNCHRONOUS
from megatron.fsdp.mcore import cpu, install

cpu.enable()  # does nothing if CUDA is available; must precede the imports of Megatron

from megatron.core import mpu  # noqa: E402
from megatron.core.datasets import utils  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: E402
from megatron.core.rerun_state_machine import get_rerun_state_machine  # noqa: E402
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank  # noqa: E402
from megatron.core.utils import (  # noqa: E402
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.fsdp.mcore.ending import compile_if_missing, leaving_outcome  # noqa: E402
from megatron.training import (  # noqa: E402
    argument_utils,  # noqa: E402
    get_args,
    get_timers,
    get_tokenizer,
    pretrain,
    print_rank_0,
)
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage  # noqa: E402

STRAGGLERS = StragglerDetector()  # a singleton that --log-straggler enables

Batch = dict[str, torch.Tensor | None]

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")

# Arguments of Megatron that need more keys in a batch than BATCH_KEYS.
UNSUPPORTED = ("sft", "fim_data", "dataloader_inter_document_masking", "hybrid_context_parallel")

# Defaults for arguments without which Megatron fails during its set-up.
DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer", "eval_interval": 1000}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this script's options to Megatron's."""
    group = parser.add_argument_group(title="fsdp implementation")
    group.add_argument(
        "--fsdp-implementation",
        choices=("this", "megatron-core"),
        default="this",
        help="The FSDP that --use-megatron-fsdp selects: this project's, or the one inside Megatron-Core.",
    )
    group.add_argument(
        "--fsdp-synchronous",
        action="store_true",
        help="Turn off prefetch, overlap, double buffer, registered memory and CUDA graphs, to find a wrong result.",
    )
    return parser


def device_of_this_rank() -> torch.device:
    """Return the device of this rank's model."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


# Data ------------------------------------------------------------------------------------------------------------


def dataset_config(args: argparse.Namespace) -> GPTDatasetConfig:
    """Return the dataset configuration for Megatron's arguments."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequences_per_dataset=sequences_per_dataset,
    )


def reads_data(vp_stage: int | None) -> bool:
    """Whether this rank reads batches from a dataset: tensor rank 0 of a stage that takes tokens or labels."""
    return is_first_or_last_pipeline_stage(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build the datasets for training, validation and testing, each with at least ``num_samples`` samples."""
    args = get_args()
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0(f"> building {dataset.__name__} for training, validation and testing ...")
    builder = BlendedMegatronDatasetBuilder(dataset, num_samples, partial(reads_data, vp_stage), dataset_config(args))
    return builder.build()


# Every rank calls it; the builder decides which ranks read.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def get_batch(data_iterator: Iterator[Batch] | None, model: torch.nn.Module) -> Batch:
    """Return this rank's shard of the next batch. Values that this pipeline stage does not need are None.

    Tokens, labels, loss mask and position ids are [batch, sequence], the attention mask [batch, 1, sequence, sequence].
    """
    args = get_args()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    config = get_attr_wrapped_model(model, "config")
    layout, layers = config.pipeline_model_parallel_layout, config.mtp_num_layers
    predicts_more = mtp_on_this_rank(layout, layers, ignore_virtual=False, vp_stage=vp_stage)
    if not is_first_or_last_pipeline_stage(vp_stage) and not predicts_more:
        return dict.fromkeys(BATCH_KEYS)

    batch: Batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None, "tensor rank 0 has no data iterator"
        data, device = next(data_iterator), device_of_this_rank()
        for key in BATCH_KEYS:
            value = data.get(key)
            batch[key] = value.to(device, non_blocking=True) if value is not None else None
    batch = get_batch_on_this_tp_rank(
        batch,
        False,  # no packed sequences; megatron-core 0.18 has another name for it
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size if model.training else args.eval_micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts_more,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


# One step --------------------------------------------------------------------------------------------------------


def loss_func(
    loss_mask: torch.Tensor | None, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Sum the losses of the unmasked tokens.

    Args:
        loss_mask: [batch, sequence], 1 for tokens that count and 0 for the others.
        losses: [batch, sequence], the cross entropy of each token.

    Returns:
        The sum, the number of unmasked tokens, and both in one tensor for the log. Megatron's schedules divide the sum
        by the tokens of the micro-batch or, with --calculate-per-token-loss, by those of the global batch.
    """
    assert loss_mask is not None, "only the last pipeline stage has a loss"
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for rejected in (torch.isnan, torch.isinf):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"found by {rejected.__name__} in the local forward loss",
                tolerance=0.0,
                fatal=True,
            )
    return loss, num_tokens, {"lm loss": torch.stack((loss.detach(), num_tokens.float()))}


def forward_step(
    data_iterator: Iterator[Batch] | None, model: GPTModel, return_schedule_plan: bool = False
) -> tuple[torch.Tensor, partial[Any]]:
    """Run the model on the next batch; return its output and the loss function to apply to it.

    With ``return_schedule_plan``, return a plan in place of the output, by which the schedule of
    --overlap-moe-expert-parallel-comm runs the model.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with STRAGGLERS(bdata=True):
        batch = get_batch(data_iterator, model)
    timers("batch-generator").stop()
    loss_mask = batch["loss_mask"]
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    with STRAGGLERS:
        run = model.build_schedule_plan if return_schedule_plan else model
        output = run(*inputs, labels=batch["labels"], loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask)


# The model -------------------------------------------------------------------------------------------------------


def model_provider(
    pre_process: bool, post_process: bool, vp_stage: int | None = None, config: Any = None, pg_collection: Any = None
) -> GPTModel:
    """Build one pipeline stage of the model: megatron-core 0.18 has no configuration from which it builds a GPT."""
    args = get_args()
    config = config or argument_utils.core_transformer_config_from_args(args)
    with_te = config.transformer_impl == "transformer_engine"
    layers = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, with_te, args.normalization, args.qk_l2_norm, vp_stage=vp_stage
    )
    mtp = None
    if args.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, layers, with_te, vp_stage=vp_stage)
    return GPTModel(
        config,
        layers,
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process,
        post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


# The run ---------------------------------------------------------------------------------------------------------


def install_chosen_implementation() -> None:
    """Make Megatron use this project's FSDP, unless the command line chooses Megatron-Core's.

    This must precede Megatron's parsing of the command line, which our checks of its arguments extend.
    """
    chosen, _ = add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False)).parse_known_args()
    if chosen.fsdp_synchronous:
        os.environ[SYNCHRONOUS] = "1"
    if chosen.fsdp_implementation == "this":
        install()
    else:  # one of the things that install() replaces is needed by everyone who has megatron-core as a wheel
        utils.compile_helpers = partial(compile_if_missing, utils.compile_helpers)


@record
def main() -> None:
    """Parse the command line and train."""
    install_chosen_implementation()
    args = parse_and_validate_args(extra_args_provider=add_arguments, args_defaults=DEFAULTS)
    if args.fsdp_synchronous:
        args.cuda_graph_impl = "none"
    for name in UNSUPPORTED:
        if getattr(args, name, False):
            raise NotImplementedError(f"pretrain_gpt.py does not support {name}: expected False, got True")
    run: dict[str, Any] = {"model_type": ModelType.encoder_or_decoder, "forward_step_func": forward_step}
    kind = "gpt" if getattr(args, "hybrid_layer_pattern", None) is None else "hybrid"
    config_from_args = getattr(argument_utils, f"{kind}_config_from_args", None)
    model = config_from_args(args) if config_from_args is not None else None
    if model is None:
        if kind == "hybrid":
            raise NotImplementedError("pretrain_gpt.py builds hybrid models with megatron-core 0.19 or later")
        run["model_provider"] = model_provider
    container = argument_utils.pretrain_cfg_container_from_args(args, model)
    try:
        with leaving_outcome():
            pretrain(container, datasets_provider, **run)
    except SystemExit:  # how Megatron ends at --exit-interval and its like
        torch.distributed.destroy_process_group()
        raise
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
