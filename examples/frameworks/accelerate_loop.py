"""Train a small GPT-2 on bytes in a loop of Hugging Face's accelerate, sharded across ranks.

    torchrun --nproc-per-node 2 accelerate_loop.py

`python accelerate_loop.py` trains the same without sharding.
"""

import argparse
import sys
from pathlib import Path

import torch
from accelerate import DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from megatron.fsdp.integrations.accelerate import FSDPAccelerator

STEPS, LENGTH, BATCH, ACCUMULATED = 15, 64, 8, 2
folder = sys.argv[1] if len(sys.argv) > 1 else "accelerate_output"

torch.manual_seed(0)  # the same initial model on all ranks
accelerator = FSDPAccelerator(
    sharding={"zero_dp_strategy": 3},
    cpu=not torch.cuda.is_available(),
    gradient_accumulation_steps=ACCUMULATED,
    # Ranks divide each batch, and draw the same order of samples.
    dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=0),
)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=LENGTH, bos_token_id=0, eos_token_id=0)
)
model.eval()  # without dropout: a run on one rank then prints the same losses
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
text = Path(argparse.__file__).read_bytes()  # some bytes to learn
sequences = torch.tensor([*text][: STEPS * ACCUMULATED * BATCH * LENGTH]).view(-1, LENGTH)
batches = DataLoader(sequences, batch_size=BATCH, shuffle=True)

model, optimizer, scheduler, batches = accelerator.prepare(model, optimizer, scheduler, batches)
for number, batch in enumerate(batches, 1):
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    mean = accelerator.gather(loss.detach()).mean().item()
    if number % 10 == 0:
        accelerator.print(f"ranks {accelerator.num_processes}  batch {number:3}  loss {mean:.3f}")

accelerator.save_state(f"{folder}/state")  # for load_state, on any number of ranks
accelerator.unwrap_model(model).save_pretrained(  # a folder for from_pretrained
    f"{folder}/final", is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
)
accelerator.end_training()
