"""The fine-tuning example with each launcher, and its checkpoint as the README's code reads it."""

import math
import re
from pathlib import Path

import pytest
import torch

from tests.launch import ROOT, printed, python

FOLDER = ROOT / "examples" / "finetune"
SCRIPT = FOLDER / "finetune.py"
PAGE = (FOLDER / "README.md").read_text()
STEPS = 20
# The README loads a checkpoint in one process on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def launch(launcher: list[str], output: Path, *options: str) -> list[str]:
    """Runs the example in the folder of ``output`` and returns the lines of its output."""
    words = [*launcher, SCRIPT, "--steps", STEPS, "--output", output.name, *options]
    return printed(python(*words, folder=output.parent, HF_HUB_OFFLINE="1")).splitlines()


def losses(lines: list[str], ranks: int) -> list[float]:
    """Parses the losses that a run with ``ranks`` ranks printed."""
    found = [re.fullmatch(rf"ranks {ranks}  step +(\d+)  loss (\S+)", line) for line in lines]
    assert [match and int(match[1]) for match in found] == [1, 10, STEPS], lines
    return [float(match[2]) for match in found if match]


def loss_of_checkpoint(folder: Path) -> float:
    """Loads the checkpoint into a plain model with the README's code; returns its loss on standard-library text."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict = {}
    exec(code.replace('"finetune_output"', repr(str(folder))), names)  # noqa: S102 - code from our own README
    text = Path(re.__file__).read_bytes()[: 8 * 128]
    tokens = torch.tensor(list(text)).view(8, 128)
    with torch.no_grad():
        return names["model"](input_ids=tokens, labels=tokens).loss.item()


def accelerate(device: str) -> list[str]:
    """Accelerate's launcher with the README's options."""
    (options,) = re.findall(rf"^    accelerate launch (--{device} .*) finetune\.py$", PAGE, flags=re.MULTILINE)
    port = ["--main_process_port", "0"] if device == "multi_gpu" else []
    return ["-m", "accelerate.commands.launch", *options.split(), *port]


def check(lines: list[str], ranks: int, output: Path) -> None:
    found = losses(lines, ranks)
    # An untrained model assigns the same probability to all 256 bytes.
    assert found[0] == pytest.approx(math.log(256), abs=0.2)
    assert found[-1] < found[1] < found[0] - 1
    assert loss_of_checkpoint(output) < found[0] - 1


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [(TORCHRUN, 2), (accelerate("multi_gpu"), 2), (accelerate("cpu"), 1)],
    ids=["torchrun", "accelerate", "accelerate, one process"],
)
def test_with_a_launcher(launcher: list[str], ranks: int, tmp_path: Path) -> None:
    output = tmp_path / "output"
    check(launch(launcher, output), ranks, output)
    assert {part.name for part in output.glob("*.distcp")} == {f"__{rank}_0.distcp" for rank in range(ranks)}


def save_pretrained(folder: Path) -> None:
    """Saves a tiny GPT-2, another architecture than the example's default, with a tokenizer."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(SCRIPT)], vocab_size=300, show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer).save_pretrained(folder)
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=16, n_layer=2, n_head=2, n_positions=128)).save_pretrained(folder)


@pytest.mark.slow
def test_with_pretrained_weights_and_no_launcher(tmp_path: Path) -> None:
    save_pretrained(tmp_path / "pretrained")
    found = losses(launch([], tmp_path / "output", "--model", "pretrained"), 1)
    # At the learning rate for fine-tuning, twenty steps change almost nothing.
    assert found == pytest.approx([math.log(300)] * 3, abs=0.2)


def test_the_script_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 60


def test_the_readme_shows_the_line_that_shards() -> None:
    (line,) = [line for line in SCRIPT.read_text().splitlines() if "fully_shard(" in line]
    assert line.partition("  #")[0] in PAGE
