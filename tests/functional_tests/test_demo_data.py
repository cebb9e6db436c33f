"""The demo's data: collecting, splitting, and reading it back with Megatron."""

import json
import math
from pathlib import Path

import numpy
import pytest
from prepare_data import (
    END_OF_TEXT,
    DataMeta,
    DataSettings,
    Document,
    collect_documents,
    cross_entropy,
    dataset_prefix,
    prepare,
    split_documents,
    tokenizer_path,
)
from transformers import PreTrainedTokenizerFast

from megatron.fsdp.mcore import cpu

# Must precede every import of Megatron, because other tests in this process may run it on the CPU.
cpu.enable()

VOCAB_SIZE = 300


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 small modules in two folders, help topics, and files that must be excluded."""
    root = tmp_path_factory.mktemp("corpus")
    for index in range(30):
        path = root / ("package" if index % 2 else ".") / f"module_{index}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'"""Module {index}: größer."""\n\n\ndef double_{index}(value):\n    return {index} * value\n')
    (root / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'größer'\n".encode("latin-1"))
    (root / "pydoc_data").mkdir()
    (root / "pydoc_data" / "topics.py").write_text("topics = {'if': 'The \"if\" statement\\nbranches.'}\n")
    for excluded in ("test/test_module.py", "site-packages/other.py", "data.json", "empty.py"):
        (root / excluded).parent.mkdir(exist_ok=True)
        (root / excluded).write_text("" if excluded == "empty.py" else "excluded = True\n")
    return root


@pytest.fixture(scope="module")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DataMeta]:
    """The folder that `prepare` built from the corpus, and its return value."""
    output = tmp_path_factory.mktemp("data")
    return output, prepare(DataSettings(corpus, output, vocab_size=VOCAB_SIZE, validation_percent=20))


def read_split(output: Path, split: str) -> list[Document]:
    lines = (output / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Document(**json.loads(line)) for line in lines]


def test_collects_source_and_documentation(corpus: Path) -> None:
    documents = {document.path: document.text for document in collect_documents(corpus)}
    assert len(documents) == 32
    assert "größer" in documents["module_0.py"]
    assert "größer" in documents["latin.py"]
    assert documents["pydoc_data/topics.py"] == 'The "if" statement\nbranches.'
    assert not any("excluded" in text for text in documents.values())


def test_splits_are_disjoint_and_complete(corpus: Path, prepared: tuple[Path, DataMeta]) -> None:
    output, meta = prepared
    train, validation = read_split(output, "train"), read_split(output, "validation")
    assert {document.path for document in train}.isdisjoint(document.path for document in validation)
    assert sorted(train + validation) == sorted(collect_documents(corpus))
    assert meta.files == {"train": len(train), "validation": len(validation)}
    assert validation


def test_a_file_keeps_its_split_when_files_are_added() -> None:
    few = [Document(f"module_{index}.py", "x") for index in range(50)]
    more = few + [Document(f"later_{index}.py", "x") for index in range(50)]
    assert set(split_documents(few, 20)["validation"]) <= set(split_documents(more, 20)["validation"])


def test_no_split_is_empty() -> None:
    splits = split_documents([Document("a.py", "x"), Document("b.py", "x")], 1)
    assert len(splits["train"]) == len(splits["validation"]) == 1
    with pytest.raises(ValueError, match="two documents"):
        split_documents([Document("a.py", "x")], 1)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_megatron_reads_back_the_text(prepared: tuple[Path, DataMeta], split: str) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    output, meta = prepared
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_path(output))
    dataset = IndexedDataset(str(dataset_prefix(output, split)))
    documents = read_split(output, split)
    assert len(dataset) == len(documents) == len(dataset.document_indices) - 1
    assert int(dataset.sequence_lengths.sum()) == meta.tokens[split]
    for ids, document in zip((dataset[index] for index in range(len(dataset))), documents, strict=True):
        assert ids.dtype == numpy.uint16
        assert tokenizer.decode(ids.tolist()) == document.text + END_OF_TEXT


def test_megatron_loads_the_tokenizer(prepared: tuple[Path, DataMeta]) -> None:
    from megatron.core.tokenizers import MegatronTokenizer

    output, meta = prepared
    path = str(tokenizer_path(output))
    tokenizer = MegatronTokenizer.from_pretrained(tokenizer_path=path, metadata_path={"library": "huggingface"})
    assert tokenizer.vocab_size == meta.vocab_size == VOCAB_SIZE
    assert tokenizer.detokenize([tokenizer.eod]) == END_OF_TEXT


def test_builds_are_reproducible(corpus: Path, prepared: tuple[Path, DataMeta], tmp_path: Path) -> None:
    output, meta = prepared
    again = prepare(DataSettings(corpus, tmp_path, vocab_size=VOCAB_SIZE, validation_percent=20))
    assert again == meta
    for name in ("train.bin", "train.idx", "validation.bin", "train.jsonl", "tokenizer/tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (output / name).read_bytes(), name


def test_complete_data_is_reused_unless_settings_differ(corpus: Path, prepared: tuple[Path, DataMeta]) -> None:
    output, meta = prepared
    before = (output / "train.bin").stat().st_mtime_ns
    assert prepare(DataSettings(corpus, output, vocab_size=VOCAB_SIZE, validation_percent=20)) == meta
    assert (output / "train.bin").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="make clean"):
        prepare(DataSettings(corpus, output, vocab_size=VOCAB_SIZE + 1, validation_percent=20))


def test_entropy() -> None:
    uniform = numpy.array([1000, 1000, 1000, 1000])
    assert cross_entropy(uniform, uniform) == pytest.approx(math.log(4))
    assert cross_entropy(numpy.array([1, 0]), numpy.array([0, 98])) == pytest.approx(math.log(100))


@pytest.mark.parametrize("wrong", [{"vocab_size": 256}, {"validation_percent": 0}, {"corpus": Path("/nowhere")}])
def test_settings_are_checked(corpus: Path, tmp_path: Path, wrong: dict[str, int | Path]) -> None:
    arguments: dict = {"corpus": corpus, "output": tmp_path, **wrong}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DataSettings(**arguments)
