"""Trains a small Llama and, now and then, generates text with transformers' generate() on the sharded model.

torchrun --nproc-per-node 2 generate_in_training.py
"""

import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_fsdp import fully_shard

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same initial model on all ranks
size = {"hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=61, **size)).to(device)
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
sharded, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=["LlamaDecoderLayer"])

generator = torch.Generator().manual_seed(1)
for step in range(6):
    # The same batches for any number of ranks, which divides each of them.
    starts = torch.randint(61, (4, 1), generator=generator)
    tokens = (starts + torch.arange(12)).remainder(61).tensor_split(ranks)[rank].to(device)
    loss = sharded(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss := loss.detach())
    if rank == 0:
        print(f"step {step}: loss {loss.item() / ranks:.5f}", flush=True)
    if step % 3 == 2:
        prompt = torch.arange(7, 10 + 2 * rank, device=device)[None]  # of a different length on each rank
        with sharded.unsharded():  # every rank holds all weights: forwards do not communicate
            answer = model.generate(prompt, do_sample=False, max_new_tokens=4 + 3 * rank, pad_token_id=0)
        print(f"step {step}, rank {rank}: {answer[0].tolist()}\n", end="", flush=True)

dist.destroy_process_group()
