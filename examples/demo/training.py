"""The demo's training run: the model's size, the batch, the schedule, and the command line for Megatron."""

import importlib.util
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from files import Paths, dataset_prefix, tokenizer_path

ROOT = Path(__file__).resolve().parents[2]
IMPLEMENTATIONS = ("this", "megatron-core")
CPU_RANKS = 2


def has_bf16(cpuinfo: str) -> bool:
    """Whether a CPU (x86 or ARM) multiplies bf16 matrices in hardware, given the kernel's description of it."""
    flags = set(cpuinfo.split())
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True)
class Machine:
    """Where the ranks run: one per CUDA device, or two on the CPU.

    The demo trains in bf16, except on a CPU without instructions for it: emulated bf16 is 25 times slower than fp32,
    and training would take an hour.
    """

    cuda_devices: int
    cores: int
    bf16: bool = True

    @classmethod
    def detect(cls) -> "Machine":
        """Describes the devices and cores that this process may use."""
        import torch  # takes seconds, so the demo prints something before

        devices, cpuinfo = torch.cuda.device_count(), Path("/proc/cpuinfo")
        bf16 = devices > 0 or not cpuinfo.exists() or has_bf16(cpuinfo.read_text())
        return cls(devices, len(os.sched_getaffinity(0)), bf16)

    @property
    def ranks(self) -> int:
        """Number of training processes."""
        return self.cuda_devices or CPU_RANKS

    @property
    def name(self) -> str:
        """Description for the output."""
        if self.cuda_devices:
            return f"{self.ranks} rank{'s' if self.ranks > 1 else ''} on CUDA over NCCL, bf16"
        precision = "bf16" if self.bf16 else "fp32, because this CPU has no instructions for bf16"
        return f"{self.ranks} ranks on CPU over gloo, {precision}"

    @property
    def iterations(self) -> int:
        """Iterations per invocation: about a minute on CUDA, three minutes on two cores."""
        if self.cuda_devices:
            return 1000
        return 300 if self.bf16 else 200

    @property
    def evaluation_interval(self) -> int:
        """Iterations between validations. Megatron derives from it how much of the validation data earlier runs have
        used, so it may not depend on the length of a run. No run of the default length ends with one, because Megatron
        adds another at the end.
        """
        return self.iterations // 4 + 1

    @property
    def micro_batch_size(self) -> int:
        """Sequences per rank and iteration. On a CPU, small batches make better use of the few tokens."""
        return 16 if self.cuda_devices else 4

    def environment(self) -> dict[str, str]:
        """Environment of the training processes."""
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        # With a single hardware queue, communication could not overlap with compute; Megatron rejects FSDP then.
        variables.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        if not self.cuda_devices:
            variables["OMP_NUM_THREADS"] = str(max(1, self.cores // self.ranks))
            if "lo" in (name for _, name in socket.if_nameindex()):
                # Both ranks are on this machine. This avoids other interfaces and host names that do not resolve.
                variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return variables


@dataclass(frozen=True)
class Training:
    """The run: sizes of the model (6.8 million parameters with 4096 tokens), and the schedule.

    Each invocation adds ``iterations``, or fewer if ``minutes`` elapse first. The first one begins with a warm-up. In
    every invocation the learning rate is constant and decays over the last quarter ("WSD"), so that each ends with a
    good model and the next one can continue at the constant rate.
    """

    iterations: int
    minutes: int = 4
    implementation: str = "this"
    layers: int = 6
    hidden: int = 256
    feed_forward: int = 688
    heads: int = 8
    sequence: int = 256
    learning_rate: float = 2e-3
    warmup: int = 20
    evaluation_batches: int = 20

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"iterations: expected at least 1, got {self.iterations}")
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation: expected one of {IMPLEMENTATIONS}, got {self.implementation!r}")


def model_flags(training: Training) -> list[str]:
    """A Llama-like GPT: RoPE, RMSNorm, SwiGLU, no biases, separate input and output embeddings."""
    return [
        *("--num-layers", str(training.layers), "--hidden-size", str(training.hidden)),
        *("--ffn-hidden-size", str(training.feed_forward), "--num-attention-heads", str(training.heads)),
        *("--seq-length", str(training.sequence), "--max-position-embeddings", str(training.sequence)),
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        *("--untie-embeddings-and-output-weights", "--attention-dropout", "0", "--hidden-dropout", "0"),
    ]


def kernel_flags() -> list[str]:
    """Without Transformer Engine: Megatron's PyTorch layers, without the fusions that need an extension."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return []
    return [
        *("--transformer-impl", "local", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
        *("--no-persist-layer-norm", "--no-rope-fusion"),
    ]


def sharding_flags(training: Training, machine: Machine) -> list[str]:
    """ZeRO-3 in bf16 with fp32 main weights and gradients, saved sharded."""
    flags = [
        *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"),
        *("--use-distributed-optimizer", "--ckpt-format", "fsdp_dtensor"),
        *("--fsdp-implementation", training.implementation),
    ]
    return flags + (["--bf16"] if machine.bf16 else [])


def schedule_flags(training: Training, machine: Machine, done: int) -> list[str]:
    """Batch, optimizer, schedule and validation of the invocation that starts after iteration ``done``."""
    decay = max(1, training.iterations // 4)
    return [
        *("--micro-batch-size", str(machine.micro_batch_size)),
        *("--global-batch-size", str(machine.micro_batch_size * machine.ranks)),
        *("--train-iters", str(done + training.iterations), "--exit-duration-in-mins", str(training.minutes)),
        "--exit-signal-handler",  # at SIGTERM, the ranks finish their iteration, save and exit
        *("--lr", str(training.learning_rate), "--min-lr", str(training.learning_rate / 20)),
        *("--lr-warmup-iters", str(min(training.warmup, training.iterations // 2))),
        *("--lr-decay-style", "WSD", "--lr-wsd-decay-style", "linear", "--lr-wsd-decay-iters", str(decay)),
        # The schedule in the checkpoint ends with the invocation that saved it.
        "--override-opt-param-scheduler",
        *("--weight-decay", "0.1", "--adam-beta2", "0.95", "--clip-grad", "1.0"),
        *("--eval-interval", str(machine.evaluation_interval), "--eval-iters", str(training.evaluation_batches)),
    ]


def file_flags(paths: Paths, machine: Machine) -> list[str]:
    """Data, checkpoints, and a log line per iteration."""
    flags = [
        *("--train-data-path", "1.0", str(dataset_prefix(paths.data, "train"))),
        *("--valid-data-path", "1.0", str(dataset_prefix(paths.data, "validation"))),
        *("--data-cache-path", str(paths.data / "cache"), "--num-workers", "1" if machine.cuda_devices else "0"),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer_path(paths.data))),
        *("--save", str(paths.checkpoints), "--load", str(paths.checkpoints), "--save-interval", "1000000"),
        *("--log-interval", "1", "--tensorboard-dir", str(paths.tensorboard), "--log-timers-to-tensorboard"),
    ]
    return flags + (["--log-memory-interval", "1"] if machine.cuda_devices else [])


def command(training: Training, machine: Machine, paths: Paths, done: int) -> list[str]:
    """The complete command line: torchrun, this project's ``pretrain_gpt.py`` and Megatron's flags."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(machine.ranks)),
        str(ROOT / "pretrain_gpt.py"),
        *sharding_flags(training, machine),
        *model_flags(training),
        *kernel_flags(),
        *schedule_flags(training, machine, done),
        *file_flags(paths, machine),
    ]
