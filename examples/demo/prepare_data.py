"""Builds the demo's data: Python's source and documentation as Megatron indexed datasets, with a tokenizer.

Steps, in this order: collect the documents, split them by file, write the two text files, train a byte-pair tokenizer
on the training text, write one indexed dataset per split, measure the unigram entropy, write ``meta.json``. The last
step marks the folder as complete: a folder with ``meta.json`` is reused as it is.
"""

import argparse
import ast
import hashlib
import json
import math
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from files import DataMeta, dataset_prefix, meta_path, read_meta, tokenizer_path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
SPLITS = ("train", "validation")
SUFFIXES = (".py", ".txt", ".rst", ".md")
# Installed packages are not part of the standard library. Its tests and character tables are most of its bytes, and
# would teach the model test data and hexadecimal numbers instead of code and prose.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
)
SKIPPED_PREFIXES = ("_sysconfigdata",)


class Document(NamedTuple):
    """One text. ``path`` is relative to the corpus root and decides the split."""

    path: str
    text: str


@dataclass(frozen=True)
class DataSettings:
    """Sources and sizes of the data. ``validation_percent`` is a share of files, not of bytes."""

    corpus: Path
    output: Path
    vocab_size: int = 4096
    validation_percent: int = 5

    def __post_init__(self) -> None:
        if not self.corpus.is_dir():
            raise ValueError(f"corpus: expected a folder, got {self.corpus}")
        if not 256 < self.vocab_size <= 65536:
            raise ValueError(f"vocab_size: expected 257 to 65536 (bytes, {END_OF_TEXT}, merges), got {self.vocab_size}")
        if not 0 < self.validation_percent < 100:
            raise ValueError(f"validation_percent: expected 1 to 99, got {self.validation_percent}")


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def help_topics(source: str) -> str:
    """The documentation inside ``pydoc_data/topics.py``: the strings of its one dictionary, unescaped."""
    texts: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            texts += [
                value.value for value in node.values if isinstance(value, ast.Constant) and isinstance(value.value, str)
            ]
    return "\n\n".join(texts)


def read_text(path: Path) -> str:
    """The text of a file in the encoding that it declares; empty if it cannot be decoded."""
    try:
        if path.suffix != ".py":
            return path.read_text(encoding="utf-8")
        with tokenize.open(path) as file:
            text = file.read()
        return help_topics(text) if path.parts[-2:] == ("pydoc_data", "topics.py") else text
    except (UnicodeDecodeError, SyntaxError, PermissionError):
        return ""


def collect_documents(corpus: Path) -> list[Document]:
    """Every non-empty text below ``corpus``, sorted by path, so that every run sees the same order."""
    documents: list[Document] = []
    for path in sorted(corpus.rglob("*")):
        relative = path.relative_to(corpus)
        if path.suffix not in SUFFIXES or not SKIPPED_FOLDERS.isdisjoint(relative.parts) or not path.is_file():
            continue
        if path.name.startswith(SKIPPED_PREFIXES):
            continue
        text = read_text(path)
        if text.strip():
            documents.append(Document(relative.as_posix(), text))
    return documents


def split_documents(documents: list[Document], validation_percent: int) -> dict[str, list[Document]]:
    """Assigns each file to a split by a hash of its path, so that a file's split never depends on other files.

    If the corpus is so small that a split would be empty, the file with the lowest (or highest) hash goes there.

    Raises:
        ValueError: fewer than two documents.
    """
    if len(documents) < 2:
        raise ValueError(f"expected at least two documents to split, got {len(documents)}")

    def position(document: Document) -> float:
        return int.from_bytes(hashlib.sha256(document.path.encode()).digest()[:8], "big") / 2**64

    ranked = sorted(documents, key=position)
    chosen = sum(position(document) < validation_percent / 100 for document in ranked)
    chosen = min(max(chosen, 1), len(ranked) - 1)
    return {"train": sorted(ranked[chosen:]), "validation": sorted(ranked[:chosen])}


def write_text(documents: list[Document], path: Path) -> None:
    """Writes a split as JSON lines (``path``, ``text``), the input format of Megatron's preprocessing tool."""
    with path.open("w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps(document._asdict(), ensure_ascii=False) + "\n")


def train_tokenizer(documents: list[Document], vocab_size: int, output: Path) -> PreTrainedTokenizerFast:
    """Trains a byte-level byte-pair tokenizer and saves it in the layout of a Hugging Face model folder."""
    tokenizer = Tokenizer(models.BPE())
    # An indentation becomes a single token. Digits are separate tokens, so numbers take no vocabulary.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)
    wrapped.save_pretrained(tokenizer_path(output))
    return wrapped


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[Document], batch: int = 64) -> Iterator[numpy.ndarray]:
    """Token ids of each document, in order, each ending with the end-of-text token."""
    for start in range(0, len(documents), batch):
        texts = [document.text for document in documents[start : start + batch]]
        for encoding in tokenizer.backend_tokenizer.encode_batch(texts):
            yield numpy.array([*encoding.ids, tokenizer.eos_token_id], dtype=numpy.int64)


def write_dataset(tokenizer: PreTrainedTokenizerFast, documents: list[Document], prefix: Path) -> numpy.ndarray:
    """Writes one indexed dataset and returns how often each token occurs in it, shape ``(vocabulary,)``."""
    # Imported here because it takes seconds, which a run with complete data can save.
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

    vocabulary = len(tokenizer)
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=DType.optimal_dtype(vocabulary))
    counts = numpy.zeros(vocabulary, dtype=numpy.int64)
    for ids in encode(tokenizer, documents):
        builder.add_document(torch.from_numpy(ids), [len(ids)])
        counts += numpy.bincount(ids, minlength=vocabulary)
    builder.finalize(get_idx_path(str(prefix)))
    return counts


def cross_entropy(counts: numpy.ndarray, model_counts: numpy.ndarray) -> float:
    """Nats per token of a text with ``counts`` if each token is predicted from ``model_counts`` alone.

    One is added to each of ``model_counts``, so that the cost of a token that does not occur in training is finite.
    """
    probabilities = (model_counts + 1) / (model_counts.sum() + len(model_counts))
    return float(-(counts / counts.sum() * numpy.log(probabilities)).sum())


def build(settings: DataSettings) -> DataMeta:
    """Builds everything into ``settings.output`` and overwrites existing files."""
    settings.output.mkdir(parents=True, exist_ok=True)
    splits = split_documents(collect_documents(settings.corpus), settings.validation_percent)
    for split in SPLITS:
        write_text(splits[split], settings.output / f"{split}.jsonl")
    tokenizer = train_tokenizer(splits["train"], settings.vocab_size, settings.output)
    counts = {
        split: write_dataset(tokenizer, splits[split], dataset_prefix(settings.output, split)) for split in SPLITS
    }
    meta = DataMeta(
        corpus=str(settings.corpus),
        requested_vocab_size=settings.vocab_size,
        validation_percent=settings.validation_percent,
        vocab_size=len(tokenizer),
        unigram_entropy=cross_entropy(counts["validation"], counts["train"]),
        corpus_entropy=cross_entropy(counts["train"], counts["train"]),
        files={split: len(splits[split]) for split in SPLITS},
        characters={split: sum(len(document.text) for document in splits[split]) for split in SPLITS},
        tokens={split: int(counts[split].sum()) for split in SPLITS},
    )
    meta_path(settings.output).write_text(json.dumps(asdict(meta), indent=2) + "\n")
    return meta


def prepare(settings: DataSettings) -> DataMeta:
    """Returns the data in ``settings.output``; builds it first if it is not complete.

    Raises:
        ValueError: the data was built with other settings, so a checkpoint trained on it would not match new data.
    """
    if not meta_path(settings.output).exists():
        return build(settings)
    meta = read_meta(settings.output)
    expected = (settings.vocab_size, settings.validation_percent)
    got = (meta.requested_vocab_size, meta.validation_percent)
    if expected != got:
        raise ValueError(
            f"{settings.output} was built with (vocab_size, validation_percent) {got}, expected {expected}: "
            "remove the folder (`make clean-demo`) to build it again"
        )
    return meta


def main() -> None:
    """Command line: prepares the data and prints its description."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--corpus", type=Path, default=standard_library(), help="folder with the text (default: stdlib)"
    )
    parser.add_argument("--output", type=Path, default=Path("demo_output/data"), help="folder to write to")
    parser.add_argument("--vocab-size", type=int, default=DataSettings.vocab_size)
    parser.add_argument("--validation-percent", type=int, default=DataSettings.validation_percent)
    arguments = parser.parse_args()
    meta = prepare(DataSettings(**vars(arguments)))
    print(json.dumps(asdict(meta), indent=2))
    print(f"a uniform guess costs {math.log(meta.vocab_size):.3f} nats per token, unigrams {meta.unigram_entropy:.3f}")


if __name__ == "__main__":
    main()
