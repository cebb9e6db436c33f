"""Train a small Llama on bytes with Hugging Face's Trainer, sharded across ranks.

    torchrun --nproc-per-node 2 trainer.py

A second run continues from the checkpoint of the first. `python trainer.py` trains the same without sharding.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from megatron.fsdp.integrations.transformers import sharded

STEPS, LENGTH, BATCH = 20, 64, 8
folder = sys.argv[1] if len(sys.argv) > 1 else "trainer_output"
ranks = int(os.environ.get("WORLD_SIZE", 1))

text = Path(argparse.__file__).read_bytes()  # some bytes to learn
sequences = torch.tensor([*text][: (STEPS + 1) * BATCH * LENGTH]).view(-1, LENGTH)
dataset = [{"input_ids": sequence, "labels": sequence} for sequence in sequences]

torch.manual_seed(0)  # the same initial model on all ranks
size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **size))

args = TrainingArguments(
    folder,
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),
    per_device_train_batch_size=BATCH // ranks,
    learning_rate=5e-3,
    max_steps=STEPS,
    logging_steps=5,
    save_steps=10,
    eval_strategy="steps",
    eval_steps=10,
    report_to="none",
    disable_tqdm=True,
)
trainer = sharded(Trainer, zero_dp_strategy=3)(
    model=model, args=args, train_dataset=dataset[:-BATCH], eval_dataset=dataset[-BATCH:]
)
trainer.train(resume_from_checkpoint=os.path.isdir(folder) and get_last_checkpoint(folder) is not None)
trainer.save_model(f"{folder}/final")  # a folder for from_pretrained
