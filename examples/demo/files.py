"""Where the demo's files lie, and its description of the data. Imports nothing that takes time."""

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Paths:
    """The files that the demo writes, below one folder."""

    output: Path

    @property
    def data(self) -> Path:
        """Text, tokenizer, indexed datasets and Megatron's index cache."""
        return self.output / "data"

    @property
    def checkpoints(self) -> Path:
        """Megatron's --save and --load."""
        return self.output / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Megatron's --tensorboard-dir."""
        return self.output / "tensorboard"

    @property
    def log(self) -> Path:
        """Output of the training processes."""
        return self.output / "train.log"

    @property
    def history(self) -> Path:
        """The losses of all runs so far, one JSON object per line."""
        return self.output / "history.jsonl"

    @property
    def plot(self) -> Path:
        """The plot of ``history``."""
        return self.output / "loss.png"

    @property
    def sample(self) -> Path:
        """Text written by the trained model."""
        return self.output / "sample.txt"


@dataclass(frozen=True)
class DataMeta:
    """Description of the data. Entropies are in nats per token; ``vocab_size`` is the tokenizer's actual size."""

    corpus: str
    requested_vocab_size: int
    validation_percent: int
    vocab_size: int
    unigram_entropy: float
    corpus_entropy: float
    files: dict[str, int] = field(default_factory=dict)
    characters: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)


def tokenizer_path(output: Path) -> Path:
    """The tokenizer's folder, which Megatron's HuggingFaceTokenizer reads."""
    return output / "tokenizer"


def dataset_prefix(output: Path, split: str) -> Path:
    """The path of a split's indexed dataset without ``.bin`` and ``.idx``: what Megatron's data flags take."""
    return output / split


def meta_path(output: Path) -> Path:
    """The file whose presence marks the data in ``output`` as complete."""
    return output / "meta.json"


def read_meta(output: Path) -> DataMeta:
    """Reads the description of the data in ``output``."""
    return DataMeta(**json.loads(meta_path(output).read_text()))


def latest_iteration(checkpoints: Path) -> int:
    """The iteration of the newest complete checkpoint below ``checkpoints``; 0 if there is none."""
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def iteration_folder(checkpoints: Path, iteration: int) -> Path:
    """The folder of the checkpoint of ``iteration``."""
    return checkpoints / f"iter_{iteration:07d}"
