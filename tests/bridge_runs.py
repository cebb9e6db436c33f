"""Runs of Megatron-Bridge for test_megatron_bridge.py: ``torchrun -m tests.bridge_runs COMMAND ...``."""

import sys
from pathlib import Path
from typing import Any

from megatron.fsdp.mcore import install
from tests import bridge_mocks

bridge_mocks.enable()
if "ddp" not in sys.argv:
    install()

import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megatron.bridge import AutoBridge  # noqa: E402
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec  # noqa: E402
from megatron.bridge.peft.lora import LoRA  # noqa: E402
from megatron.bridge.training.callbacks import Callback  # noqa: E402
from megatron.bridge.training.config import (  # noqa: E402
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step  # noqa: E402
from megatron.bridge.training.pretrain import pretrain  # noqa: E402

SEQUENCE = 16
# The fused kernels need CUDA.
KERNELS = (
    "gradient_accumulation_fusion masked_softmax_fusion persist_layer_norm cross_entropy_loss_fusion apply_rope_fusion "
    "bias_dropout_fusion bias_activation_fusion"
).split()
LOCAL: dict[str, Any] = {"transformer_layer_spec": local_layer_spec, **dict.fromkeys(KERNELS, False)}


def gpt() -> Any:
    sizes = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4}
    return GPTModelProvider(
        **sizes, **LOCAL, seq_length=SEQUENCE, vocab_size=64, attention_dropout=0.0, hidden_dropout=0.0
    )


def provider_of(bridge: AutoBridge, tp: int, load_weights: bool = False) -> Any:
    """The model of a Hugging Face folder, in fp32."""
    provider = bridge.to_megatron_provider(load_weights=load_weights)
    dtypes = dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype"), torch.float32)
    settings = {**LOCAL, **dtypes, "bf16": False, "tensor_model_parallel_size": tp, "seq_length": SEQUENCE}
    for name, value in settings.items():
        setattr(provider, name, value)
    return provider


def data_parallel(strategy: str) -> DistributedDataParallelConfig:
    if strategy == "ddp":
        return DistributedDataParallelConfig(use_distributed_optimizer=True)
    return DistributedDataParallelConfig(
        use_megatron_fsdp=True, use_distributed_optimizer=True, data_parallel_sharding_strategy=strategy
    )


def data() -> MockGPTDatasetConfig:
    masks = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    return MockGPTDatasetConfig(seq_length=SEQUENCE, random_seed=1, num_workers=0, dataloader_type="single", **masks)


class ExportsAtEnd(Callback):
    """Exports the model, with its adapters merged, when training ends."""

    def __init__(self, bridge: AutoBridge, file: Path) -> None:
        self.bridge, self.file = bridge, file

    def on_train_end(self, context: Any) -> None:
        tensors = dict(self.bridge.export_hf_weights(context.model, cpu=True, show_progress=False))
        if dist.get_rank() == 0:
            safetensors.torch.save_file(tensors, self.file)


def train(strategy: str, folder: str, iterations: str, llama: str = "", kind: str = "full", tp: str = "1") -> None:
    """Train ``iterations`` of 4 iterations, or continue to there, and save every second one.

    Args:
        strategy: Of FSDP; or ``ddp``, which saves nothing.
        folder: Of the checkpoints.
        iterations: The last iteration.
        llama: A Hugging Face folder to train. Empty: a GPT.
        kind: ``lora`` to train adapters of it.
        tp: Tensor-parallel ranks.
    """
    fsdp = strategy != "ddp"
    bridge = AutoBridge.from_hf_pretrained(llama) if llama else None
    saving = {"save": folder, "load": folder, "ckpt_format": "fsdp_dtensor"} if fsdp else {"ckpt_format": "torch_dist"}
    decay: dict[str, Any] = {"start_weight_decay": 0.1, "end_weight_decay": 0.1, "weight_decay_incr_style": "constant"}
    config = ConfigContainer(
        model=gpt() if bridge is None else provider_of(bridge, int(tp), load_weights=kind == "full"),
        train=TrainingConfig(train_iters=int(iterations), global_batch_size=4, micro_batch_size=1),
        validation=ValidationConfig(eval_iters=0),
        optimizer=OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=0.0, use_distributed_optimizer=True, clip_grad=1.0),
        scheduler=SchedulerConfig(max_steps=4, lr_decay_style="constant", lr_decay_iters=4, lr_warmup_iters=0, **decay),
        ddp=data_parallel(strategy),
        dist=DistributedInitConfig(use_megatron_fsdp=fsdp, distributed_backend="gloo"),
        dataset=data(),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=24),
        checkpoint=CheckpointConfig(save_interval=2, pretrained_checkpoint=llama if kind == "lora" else None, **saving),
        rng=RNGConfig(seed=1),
        peft=LoRA(dim=4, alpha=8, dropout=0.0) if kind == "lora" else None,
    )
    callbacks = [] if bridge is None else [ExportsAtEnd(bridge, Path(f"{folder}_{iterations}.safetensors"))]
    pretrain(config, forward_step, callbacks=callbacks)


def copy(llama: str, out: str, tp: str) -> None:
    """Load a Hugging Face folder into a sharded model and write it again."""
    bridge = AutoBridge.from_hf_pretrained(llama)
    provider = provider_of(bridge, int(tp))
    dist.init_process_group("gloo")
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    model = provider.provide_distributed_model(
        ddp_config=data_parallel("optim_grads_params"), use_megatron_fsdp=True, bf16=False
    )
    bridge.load_hf_weights(model)
    bridge.save_hf_weights(model, out, show_progress=False)


def refused() -> None:
    """Print the errors of contradictory settings."""
    for changes in ({"use_tp_pp_dp_mapping": True}, {"use_torch_fsdp2": True}):
        config = ConfigContainer(
            model=gpt(),
            train=TrainingConfig(train_iters=1, global_batch_size=1, micro_batch_size=1),
            optimizer=OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True),
            scheduler=SchedulerConfig(lr_decay_style="constant"),
            ddp=data_parallel("optim_grads_params"),
            dist=DistributedInitConfig(use_megatron_fsdp=True, **changes),
            dataset=data(),
            logger=LoggerConfig(),
            tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=24),
            checkpoint=CheckpointConfig(),
            rng=RNGConfig(),
        )
        try:
            config.validate()
        except (AssertionError, ValueError) as error:
            print(f"refused: {error}")


if __name__ == "__main__":
    {"train": train, "copy": copy, "refused": refused}[sys.argv[1]](*sys.argv[2:])
