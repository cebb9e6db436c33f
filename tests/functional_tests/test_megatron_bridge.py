"""Megatron-Bridge trains through our adapter. It requires Transformer Engine, which requires CUDA."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BRIDGE = importlib.util.find_spec("megatron.bridge") is not None
ENGINE = importlib.util.find_spec("transformer_engine") is not None

SCRIPT = """
import sys

import torch
from megatron.bridge.recipes.utils.tokenizer_utils import DEFAULT_NULL_TOKENIZER_VOCAB_SIZE
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import (
    CheckpointConfig, ConfigContainer, DistributedDataParallelConfig, DistributedInitConfig, LoggerConfig,
    MockGPTDatasetConfig, OptimizerConfig, RNGConfig, SchedulerConfig, TokenizerConfig, TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

from megatron.fsdp.mcore import install

install()
model = GPTModelProvider(
    num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, seq_length=32, bf16=True,
    params_dtype=torch.bfloat16, vocab_size=DEFAULT_NULL_TOKENIZER_VOCAB_SIZE,
)
config = ConfigContainer(
    model=model,
    train=TrainingConfig(train_iters=3, global_batch_size=2, micro_batch_size=1, eval_iters=0),
    optimizer=OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True),
    scheduler=SchedulerConfig(lr_decay_style="constant"),
    ddp=DistributedDataParallelConfig(
        use_megatron_fsdp=True, use_distributed_optimizer=True, data_parallel_sharding_strategy="optim_grads_params",
    ),
    dist=DistributedInitConfig(use_megatron_fsdp=True),
    dataset=MockGPTDatasetConfig(random_seed=1, sequence_length=32, reset_position_ids=False,
                                 reset_attention_mask=False, eod_mask_loss=False),
    logger=LoggerConfig(log_interval=1),
    tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=DEFAULT_NULL_TOKENIZER_VOCAB_SIZE),
    checkpoint=CheckpointConfig(save=sys.argv[1], save_interval=3, ckpt_format="fsdp_dtensor"),
    rng=RNGConfig(seed=1),
)
pretrain(config, forward_step)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not BRIDGE, reason="megatron-bridge is not installed")
@pytest.mark.skipif(not ENGINE, reason="megatron-bridge imports Transformer Engine, which is not installed")
def test_three_steps(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)]
    result = subprocess.run([*command, str(tmp_path / "ckpt")], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "iteration        3/" in result.stdout
    assert (tmp_path / "ckpt" / "iter_0000003" / "checksums.json").exists(), "saved by another backend than ours"
