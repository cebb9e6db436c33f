"""Logits of Megatron-Core's GPT with imported weights, for tests of the import.

    python -m tests.huggingface_logits FOLDER CASE ...

FOLDER/CASE has ``checkpoint``, a torch_dist checkpoint that was imported for Megatron's own layers, and ``tokens.pt``.
The model is built from the flags of ``checkpoint/args.sh``, by Megatron's parser and builder, and Megatron's own reader
of checkpoints fills it. Its logits go to ``logits.pt``, what its layer for a further token computes to ``further.pt``.
"""

import re
import shlex
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from megatron.fsdp.mcore import cpu

cpu.enable()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args  # noqa: E402
from megatron.training.arguments import parse_args, validate_args  # noqa: E402
from megatron.training.models.gpt import GPTModelBuilder  # noqa: E402

# What a training script needs besides the model's flags, and what Megatron leaves to Transformer Engine or CUDA.
TRAINING = (
    "--micro-batch-size 2 --global-batch-size 2 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer --mock-data "
    "--seq-length 16 --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion "
    "--no-bias-swiglu-fusion --no-persist-layer-norm --no-rope-fusion --distributed-backend gloo"
)


def plain_query_projection(resolver: QKNormConfigResolver) -> dict[str, Any]:
    """Megatron's modules of latent attention without a query rank, but for the second norm of queries' input.

    megatron-core 0.19.2 puts a norm into ``linear_q_proj``, which its own layers do not have: they cannot be built.
    """
    return {
        "linear_q_proj": resolver.linear_impl,
        "linear_q_up_proj": IdentityOp,
        "linear_kv_up_proj": resolver.linear_impl,
        "q_layernorm": IdentityOp,
        "kv_layernorm": resolver.submodules.kv_layernorm,
    }


def build(checkpoint: Path) -> torch.nn.Module:
    """The model of the flags that the import wrote, in evaluation mode."""
    words = shlex.split(re.sub(r"^MODEL_ARGS=\(|^\)$", "", (checkpoint / "args.sh").read_text(), flags=re.MULTILINE))
    sys.argv = ["pretrain_gpt.py", *words, *shlex.split(TRAINING)]
    args = validate_args(parse_args())
    model = GPTModelBuilder(gpt_config_from_args(args)).build_model(ProcessGroupCollection.use_mpu_process_groups())
    return model.eval()


def load(model: Any, checkpoint: Path) -> None:
    """Fill the model as Megatron does, strictly."""
    wanted = model.sharded_state_dict(prefix="", metadata={"dp_cp_group": parallel_state.get_data_parallel_group()})
    state = dist_checkpointing.load({"model": wanted}, str(checkpoint / "release"))
    model.load_state_dict(state["model"], strict=True)


class Computed(NamedTuple):
    """The outputs of a model.

    Attributes:
        logits: [sequences, tokens, padded vocabulary].
        further: Normalized output of the layer for a further token, [tokens, sequences, hidden size], if there is one.
    """

    logits: torch.Tensor
    further: torch.Tensor | None


def computed(case: Path) -> Computed:
    """The outputs of a case's model."""
    tokens = torch.load(case / "tokens.pt")
    length = tokens.shape[1]
    resolve = plain_query_projection if "no-query-rank" in case.name else QKNormConfigResolver.resolve
    with patch.object(QKNormConfigResolver, "resolve", resolve):
        model = build(case / "checkpoint")
        load(model, case / "checkpoint")
    positions = torch.arange(length).expand(tokens.shape)
    mask = torch.ones(1, 1, length, length).tril() < 0.5
    outputs: list[torch.Tensor] = []
    if hasattr(model, "mtp"):
        # It hands the decoder's output on with its own.
        model.mtp.register_forward_hook(lambda module, inputs, output: outputs.append(output[length:].detach()))
    with torch.no_grad():
        logits = model(tokens, positions, mask)
    return Computed(logits, *(outputs or [None]))


def main(folder: Path, cases: list[str]) -> None:
    """Write what each case computes, or the error that Megatron raised to ``error.txt``."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    for case in cases:
        try:
            result = computed(folder / case)
        except (Exception, CheckpointException):
            # The other cases are other tests.
            (folder / case / "error.txt").write_text(traceback.format_exc())
            continue
        torch.save(result.logits, folder / case / "logits.pt")
        torch.save(result.further, folder / case / "further.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
