"""Trains a small Llama and refreshes the weights of a transformers model in another process, which generates.

torchrun --nproc-per-node 2 refresh_generator.py
"""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_fsdp import fully_shard


def new_model() -> LlamaForCausalLM:
    """A small Llama, the same in all processes."""
    torch.manual_seed(0)
    size = {"hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, **size))


def generate(buckets: Any, answers: Any) -> None:
    """The other process: copies each bucket into its model; None asks for an answer."""
    model = new_model()
    weights = dict(model.named_parameters())
    while (bucket := buckets.get()) != "end":
        if bucket is None:
            prompt = torch.arange(7, 10)[None]
            answers.put(model.generate(prompt, do_sample=False, max_new_tokens=6, pad_token_id=0)[0].tolist())
            continue
        for name, tensor in bucket.items():
            weights[name].data.copy_(tensor)
        answers.put(len(bucket))  # the trainer may use the bucket's memory again


def main() -> None:
    """Choose the device and join the process group."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(device, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


def train(device: torch.device, rank: int, ranks: int) -> None:
    """Train, and let the other process generate after every third step."""
    context = mp.get_context("spawn")
    buckets, answers = context.Queue(), context.Queue()
    if rank == 0:
        other = context.Process(target=generate, args=(buckets, answers), daemon=True)
        other.start()

    model = new_model().to(device)
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
            # All ranks iterate, rank 0 gets the weights. The queue passes a handle of the shared memory.
            for bucket in sharded.full_weights(bucket_bytes=1 << 16, to_rank=0):
                if rank == 0:
                    buckets.put({name: t.to("cpu", copy=True).share_memory_() for name, t in bucket.items()})
                    answers.get()
            if rank == 0:
                buckets.put(None)
                print(f"step {step}: {answers.get()}", flush=True)
    if rank == 0:
        buckets.put("end")
        other.join()


if __name__ == "__main__":
    main()
