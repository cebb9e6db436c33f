"""Fine-tunes a Hugging Face causal language model on the source of Python's standard library, sharded across ranks."""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatron_fsdp import fully_shard

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="name or folder of a pretrained model (default: a small Llama on bytes)")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--output", default="finetune_output", help="folder of the checkpoint")
args = parser.parse_args()

if "RANK" not in os.environ:  # started without a launcher, or by one that starts a single process
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
backend, device, dtype = "gloo", torch.device("cpu"), torch.float32
if torch.cuda.is_available():
    backend, device, dtype = "nccl", torch.device("cuda", int(os.environ["LOCAL_RANK"])), torch.bfloat16
    torch.cuda.set_device(device)
dist.init_process_group(backend)

torch.manual_seed(0)  # the same initial model on all ranks
text = "".join(path.read_text("utf-8", "ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
if args.model:
    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokens = torch.tensor(AutoTokenizer.from_pretrained(args.model)(text)["input_ids"])
else:
    size = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **size))
    tokens = torch.tensor(list(text.encode()))
model = model.to(device, dtype).train()
layers = {type(module) for module in model.modules() if type(module).__name__ in model._no_split_modules}
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5 if args.model else 2e-3)
sharded, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[*layers])  # the main weights are fp32

generator = torch.Generator().manual_seed(dist.get_rank())  # different data on each rank
for step in range(1, args.steps + 1):
    starts = torch.randint(len(tokens) - 128, (8,), generator=generator)
    batch = torch.stack([tokens[start : start + 128] for start in starts]).to(device)
    loss = sharded(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total := loss.detach())
    if dist.get_rank() == 0 and (step % 10 == 0 or step in (1, args.steps)):
        print(f"ranks {dist.get_world_size()}  step {step:4}  loss {total.item() / dist.get_world_size():.3f}")

dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=args.output)
if dist.get_rank() == 0:
    model.config.save_pretrained(args.output)
dist.destroy_process_group()
