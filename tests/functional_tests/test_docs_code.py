"""The code blocks of the documentation's pages run."""

from pathlib import Path

import pytest

from tests.docs_code import Command, Page, PageError, doctor_commands, read_page, run_command, run_scripts
from tests.doctor_cases import run as run_doctor
from tests.ranks import ROOT

PATHS = sorted((ROOT / "docs").rglob("*.md"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def readable(path: Path) -> Page:
    try:
        return read_page(path)
    except PageError:
        return Page(path)  # fails in test_every_block_is_marked


PAGES = [readable(path) for path in PATHS]
COMMANDS = [(page, command) for page in PAGES for command in page.commands]


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_every_block_is_marked(path: Path) -> None:
    read_page(path)


@pytest.mark.parametrize("page", [page for page in PAGES if page.scripts], ids=lambda page: name(page.path))
def test_python_blocks_run(page: Page, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    run_scripts(page, folder)


@pytest.mark.parametrize(
    ("page", "command"),
    [
        pytest.param(page, command, id=f"{name(page.path)}:{command.line}")
        for page, command in COMMANDS
        if command.doctor is None
    ],
)
def test_bash_blocks_run(page: Page, command: Command, tmp_path: Path) -> None:
    run_command(page, command, tmp_path)


def rejected(blocks: list[tuple[Page, Command]], folder: Path) -> list[str]:
    """The doctor's answers to commands that it does not accept."""
    asked = [
        (f"{name(page.path)}:{command.line}", words)
        for page, command in blocks
        for words in doctor_commands(page, command, folder)
    ]
    results = [(where, run_doctor(words)) for where, words in asked]
    return [f"{where}: {result.out}{result.err}" for where, result in results if result.code]


@pytest.mark.slow
def test_the_doctor_accepts_the_commands(tmp_path: Path) -> None:
    blocks = [(page, command) for page, command in COMMANDS if command.doctor is not None]
    assert len(blocks) > 10
    wrong = (PAGES[0], Command(1, "torchrun train.py --no-such-flag", 8))
    *answers, last = rejected([*blocks, wrong], tmp_path)
    assert not answers, "\n".join(answers)
    assert "--no-such-flag" in last


# The collector and the runner themselves.

SAMPLE = """\
# A page

```python
import torch.distributed as dist

dist.init_process_group("gloo")
```

<!-- hidden
size = dist.get_world_size()
-->

=== "A tab"

    ```python title="more"
    assert size == 2
    open(f"{dist.get_rank()}.txt", "w").close()
    dist.barrier()
    ```

*Not run: needs a GPU.*

```python
torch.zeros(1, device="cuda")
```

<!-- script: later.py on 1 rank -->

```python
import os, sys

assert sys.argv == ["later.py"] and os.environ["WORLD_SIZE"] == "1"
assert sorted(os.listdir()) == ["0.txt", "1.txt", "later.py", "script.py"]
```

<!-- run -->
```bash
test -f pretrain_gpt.py
python -c 'print(6 * 7)'
```

<!-- doctor: 8 -->
```bash
torchrun --nproc-per-node 8 train.py
```

```text
not code
```
"""


def page_of(text: str, folder: Path) -> Page:
    path = folder / "page.md"
    path.write_text(text)
    return read_page(path)


def test_a_page_is_divided_into_scripts_and_commands(tmp_path: Path) -> None:
    page = page_of(SAMPLE, tmp_path)
    assert [(script.name, script.ranks) for script in page.scripts] == [("script.py", 2), ("later.py", 1)]
    first = page.scripts[0].lines
    assert (first[10], first[16]) == ("size = dist.get_world_size()", "assert size == 2")
    assert not any("cuda" in line for line in first.values())
    assert [(command.line, command.doctor) for command in page.commands] == [(37, None), (43, 8)]


def test_a_page_runs_in_one_folder(tmp_path: Path) -> None:
    page = page_of(SAMPLE, tmp_path)
    folder = tmp_path / "empty"
    folder.mkdir()
    run_scripts(page, folder)
    assert run_command(page, page.commands[0], tmp_path) == "42"


def test_an_error_names_the_line_of_the_page(tmp_path: Path) -> None:
    page = page_of(SAMPLE.replace("size == 2", "size == 3  # wrong"), tmp_path)
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(PageError) as error:
        run_scripts(page, folder)
    assert str(error.value).startswith(f"{page.path}:16: rank 0: exit code 1\n")
    assert "    assert size == 3  # wrong\n" in str(error.value)
    page.commands[0].code = "python -c 'raise SystemExit(3)'"
    with pytest.raises(PageError, match=r"page\.md:37: exit code 3"):
        run_command(page, page.commands[0], tmp_path)


def test_a_rank_that_waits_is_ended(tmp_path: Path) -> None:
    page = page_of("```python\nimport time\n\ntime.sleep(100)\n```\n", tmp_path)
    with pytest.raises(PageError, match="rank 1: did not end in time"):
        run_scripts(page, tmp_path, timeout=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n```bash\nls\n```\n", r"page.md:2: a bash block needs"),
        ("<!-- run -->\n\nText.\n\n```bash\nls\n```\n", r"page.md:5: a bash block needs"),
        ("<!-- doctor: many -->\n```bash\nls\n```\n", r"page.md:2: a bash block needs"),
        ("<!-- not run -->\n```bash\nls\n```\n", r"page.md:2: 'not run' needs a reason"),
        ("<!-- not run: no GPU -->\n```python\n1\n```\n", r"page.md:2: .* tell readers: \*Not run: no GPU\.\*"),
        ("<!-- not run: tests/no.py runs it -->\n```bash\nls\n```\n", r"page.md:2: the comment names no test"),
        ("```yaml\na: 1\n```\n", r"page.md:1: 'not run' needs a reason"),
        ("<!-- runs -->\n```bash\nls\n```\n", r"page.md:2: the comment before the block is not a mark"),
        ("<!-- run -->\n```python\n1\n```\n", r"page.md:2: a python block is run without a mark"),
        ("<!-- script: x -->\n```python\n1\n```\n", r"page.md:1: expected 'script: NAME.py'"),
        ("```sh\nls\n```\n", r"page.md:1: the block's language is 'sh': write bash"),
        ("```\nls\n```\n", r"page.md:1: the block's language is ''"),
        ("```python\n1\n", r"page.md:1: the block does not end"),
    ],
)
def test_a_block_without_a_mark_is_an_error(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PageError, match=message):
        page_of(text, tmp_path)
