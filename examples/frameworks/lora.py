"""Fine-tunes LoRA adapters of PEFT on a sharded model, saves them alone, and merges them into the weights.

torchrun --nproc-per-node 2 lora.py adapters           # trains, saves the adapters and the merged model
torchrun --nproc-per-node 2 lora.py adapters --resume  # goes on in a new process, on any number of ranks
"""

import argparse
import os
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_fsdp import fully_shard

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


def load_base() -> LlamaForCausalLM:
    """Stands for ``from_pretrained``: the same base on all ranks."""
    torch.manual_seed(0)
    size = {"hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, **size))


base = load_base().to(device)
if args.resume:
    model = peft.PeftModel.from_pretrained(base, args.folder, is_trainable=True)
else:
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear"))
optimizer: torch.optim.Optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
sharded, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=["LlamaDecoderLayer"])

generator = torch.Generator().manual_seed(1)
for step in range(5):
    tokens = torch.randint(61, (4, 12), generator=generator).tensor_split(ranks)[rank].to(device)
    loss = sharded(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss := loss.detach())
    if rank == 0:
        print(f"step {step}: loss {loss.item() / ranks:.5f}", flush=True)

adapters = {name: value.full_tensor() for name, value in peft.get_peft_model_state_dict(model).items()}  # a collective
if rank == 0:
    model.save_pretrained(args.folder, state_dict=adapters)
    merged = peft.PeftModel.from_pretrained(load_base(), args.folder).merge_and_unload()
    merged.save_pretrained(args.folder / "merged")
dist.destroy_process_group()
