"""Fine-tune a small Llama with TRL's SFTTrainer, sharded across ranks. The loss is that of the answers.

    torchrun --nproc-per-node 2 sft.py

`python sft.py` trains the same without sharding. `--lora` trains low-rank adapters only.
"""

import os
import random
import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from megatron.fsdp.integrations.transformers import sharded

STEPS, BATCH = 20, 8
folder = sys.argv[1] if len(sys.argv) > 1 else "sft_output"
lora = LoraConfig(r=4, target_modules="all-linear") if "--lora" in sys.argv else None
ranks = int(os.environ.get("WORLD_SIZE", 1))

# The task is to repeat words in the opposite order.
vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(30))])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
random.seed(0)
questions = [random.choices(list(vocabulary)[2:], k=random.randint(2, 6)) for _ in range(STEPS * BATCH)]
rows = [{"prompt": " ".join(words), "completion": " " + " ".join(reversed(words))} for words in questions]

torch.manual_seed(0)  # the same initial model on all ranks
size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), pad_token_id=0, eos_token_id=1, **size))

args = SFTConfig(
    folder,
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),
    per_device_train_batch_size=BATCH // ranks,
    learning_rate=5e-3,
    max_steps=STEPS,
    logging_steps=5,
    completion_only_loss=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = sharded(SFTTrainer, zero_dp_strategy=3)(
    model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, peft_config=lora
)
trainer.train()
trainer.save_model(f"{folder}/final")  # a folder for from_pretrained, or the adapters
