"""Collects the code blocks of the documentation and runs them. CONTRIBUTING.md describes the convention."""

import json
import os
import re
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from tests.launch import start
from tests.ranks import PRELOADED, ROOT, path_for_children

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,}) *\{?\.?(?P<language>[\w+-]*)")
# Readers see the second form: the code was never run as shown, for want of a machine or of files.
COMMENT = re.compile(r"^ *(?:<!-- *(?P<text>.*?) *-->|\*(?P<seen>Not run: .*?)\.?\*)$")
HIDDEN = re.compile(r"^ *<!-- *hidden$")
SCRIPT = re.compile(r"script: (?P<name>[\w-]+\.py)(?: on (?P<ranks>\d+) ranks?)?")
COMMAND = re.compile(r"(?P<kind>run|doctor|not run|Not run)(?:: (?P<value>.+))?")
# Spellings that would slip through as languages that are not run.
MISTAKEN = {"": "give its language, for example text", "py": "write python", "python3": "write python"}
MISTAKEN |= dict.fromkeys(("sh", "shell", "console", "zsh"), "write bash")
# The page with the block that the guide's examples import, and the one that defines GPT for commands.
GUIDE = ROOT / "docs" / "guide" / "index.md"
MEGATRON = ROOT / "docs" / "start" / "megatron.md"
TIMEOUT = 250.0
LINES_OF_OUTPUT = 40


class PageError(AssertionError):
    """A block that cannot be run, or fails, with the page and the line."""


@dataclass
class Script:
    """The Python blocks between two names, each line at the line of the page that it is from."""

    name: str = "script.py"
    ranks: int = 2
    lines: dict[int, str] = field(default_factory=dict)

    def code(self) -> str:
        """The script. Lines of the page that are not code are empty, so that errors name the page's lines."""
        return "\n".join(self.lines.get(number, "") for number in range(1, max(self.lines) + 1)) + "\n"


@dataclass
class Command:
    """A bash block that is run, or whose Megatron command ``doctor`` checks for a number of ranks."""

    line: int
    code: str
    doctor: int | None = None


@dataclass
class Page:
    """The scripts and commands of a page, from top to bottom."""

    path: Path
    scripts: list[Script] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)


def read_page(path: Path) -> Page:
    """Collect the code of a page.

    Raises:
        PageError: A block lacks a mark that it needs, or has one that means nothing.
    """
    script = Script()
    page, mark = Page(path, [script]), ""
    lines = path.read_text().splitlines()
    number = 0
    while number < len(lines):
        number += 1
        line = lines[number - 1]
        if HIDDEN.match(line):
            indent = len(line) - len(line.lstrip())
            block = _block(path, lines, number, indent, re.compile(r" *-->$"))
            script.lines.update(block)
            number += len(block) + 1
        elif fence := FENCE.match(line):
            end = re.compile(f" *{fence['ticks']}{fence['ticks'][0]}* *$")
            block = _block(path, lines, number, len(fence["indent"]), end)
            _add(page, fence["language"], mark, number, block)
            number += len(block) + 1
        elif comment := COMMENT.match(line):
            mark = comment["text"] or comment["seen"]
            if mark.startswith("script"):
                script, mark = _named_script(page, mark, number), ""
            continue
        elif not line.strip():
            continue
        mark = ""
    page.scripts = [script for script in page.scripts if script.lines]
    return page


def _named_script(page: Page, mark: str, number: int) -> Script:
    found = SCRIPT.fullmatch(mark)
    if found is None:
        where = f"{page.path}:{number}"
        raise PageError(f"{where}: expected 'script: NAME.py' or 'script: NAME.py on N ranks', got {mark!r}")
    script = Script(found["name"], int(found["ranks"] or 2))
    page.scripts.append(script)
    return script


def _block(path: Path, lines: list[str], start: int, indent: int, end: re.Pattern[str]) -> dict[int, str]:
    """Numbered lines after line ``start`` up to the one that ends the block."""
    block: dict[int, str] = {}
    for number, line in enumerate(lines[start:], start + 1):
        if end.match(line):
            return block
        block[number] = line[indent:] if not line[:indent].strip() else line
    raise PageError(f"{path}:{start}: the block does not end")


def _add(page: Page, language: str, mark: str, number: int, block: dict[int, str]) -> None:
    where = f"{page.path}:{number}"
    if language in MISTAKEN:
        raise PageError(f"{where}: the block's language is {language!r}: {MISTAKEN[language]}")
    if language not in ("python", "bash", "yaml"):
        return
    found = COMMAND.fullmatch(mark)
    if mark and found is None:
        raise PageError(f"{where}: the comment before the block is not a mark that is known: {mark!r}")
    kind, value = (found["kind"], found["value"]) if found else ("", None)
    if kind.lower() == "not run" or language == "yaml":
        _check_that_readers_know(where, kind, value)
    elif language == "python":
        if kind:
            raise PageError(f"{where}: a python block is run without a mark, got {mark!r}")
        page.scripts[-1].lines.update(block)
    elif kind == "doctor" and value is not None and value.isdigit():
        page.commands.append(Command(number, "\n".join(block.values()), int(value)))
    elif kind == "run" and value is None:
        page.commands.append(Command(number, "\n".join(block.values())))
    else:
        raise PageError(f"{where}: a bash block needs 'run', 'doctor: N' or 'not run: REASON', got {mark!r}")


def _check_that_readers_know(where: str, kind: str, value: str | None) -> None:
    """A block that is not run here says so visibly, unless a test runs it."""
    if not kind or value is None:
        raise PageError(f"{where}: 'not run' needs a reason")
    tests = re.findall(r"tests/[\w/.]+", value)
    if kind == "not run" and not (tests and all((ROOT / test).exists() for test in tests)):
        raise PageError(f"{where}: the comment names no test that runs it; tell readers: *Not run: {value}.*")


def run_scripts(page: Page, folder: Path, timeout: float = TIMEOUT) -> None:
    """Run the scripts of a page one after the other in one folder, each in new processes.

    Raises:
        PageError: A rank raised an error or took too long.
    """
    if any("from guide_setup import" in script.code() for script in page.scripts):
        (setup,) = (script for script in read_page(GUIDE).scripts if script.name == "guide_setup.py")
        (folder / setup.name).write_text(setup.code())
    for script in page.scripts:
        (folder / script.name).write_text(script.code())
        _run_script(page, script, folder, timeout)


def _run_script(page: Page, script: Script, folder: Path, timeout: float) -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    # As under torchrun, the store outlives the first rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outputs = [folder.parent / f"{folder.name}-{script.name}.{rank}.log" for rank in range(script.ranks)]
    with path_for_children():
        # Not daemons: a script may start processes of its own, as a DataLoader does.
        ranks = [
            context.Process(target=_be_rank, args=(page, script, folder, rank, store.port, output))
            for rank, output in enumerate(outputs)
        ]
        for process in ranks:
            process.start()
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
        if any(process.exitcode for process in ranks):
            # The others may notice by themselves, or wait for the failed one.
            deadline = min(deadline, time.monotonic() + 2)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    failed = [rank for rank, code in enumerate(codes) if code != 0]
    if failed:
        raise PageError("\n".join(_report(page, rank, codes[rank], outputs[rank]) for rank in failed))


def _report(page: Page, rank: int, code: int | None, output: Path) -> str:
    text = output.read_text(errors="replace") if output.exists() else ""
    ended = "did not end in time" if code is None else f"exit code {code}"
    found = re.findall(rf'File "{re.escape(str(page.path))}", line (\d+)', text)
    where = f"{page.path}:{found[-1]}" if found else str(page.path)
    return "\n".join([f"{where}: rank {rank}: {ended}", *text.splitlines()[-LINES_OF_OUTPUT:]])


def _be_rank(page: Page, script: Script, folder: Path, rank: int, port: int, output: Path) -> None:
    """Run a script as ``torchrun`` would start it on this rank."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": script.ranks, "LOCAL_WORLD_SIZE": script.ranks}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(ROOT)]
    sys.argv = [script.name]
    # What a script defines is in its main module, where pickle looks for it.
    main = ModuleType("__main__")
    main.__file__ = str(folder / script.name)
    sys.modules["__main__"] = main
    try:
        exec(compile(script.code(), str(page.path), "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


# Stands for torchrun: prints what the doctor is asked, as JSON. What comes before the script is the launcher's. A
# script of the reader's own is taken for ours.
TORCHRUN = """
torchrun() {
    while [[ $# -gt 0 && $1 != *.py ]]; do shift; done
    local script=pretrain_gpt.py
    if [[ -e $1 ]]; then script=$1; fi
    shift
    python -c 'import json, sys; print(json.dumps(sys.argv[1:]))' --world-size %d "$script" "$@"
}
export -f torchrun
"""


def doctor_commands(page: Page, command: Command, folder: Path) -> list[list[str]]:
    """The doctor's arguments for a bash block, as words of its command lines.

    Raises:
        PageError: The block starts nothing with torchrun, or fails.
    """
    found = re.search(r"^GPT=\(\n.*?^\)$", MEGATRON.read_text(), flags=re.DOTALL | re.MULTILINE)
    code = TORCHRUN % command.doctor + (f"{found[0]}\n" if found else "") + command.code
    output = run_command(page, Command(command.line, code), folder)
    asked = [json.loads(line) for line in output.splitlines() if line.startswith('["--world-size"')]
    if not asked:
        raise PageError(f"{page.path}:{command.line}: 'doctor' needs a command that begins with torchrun\n{output}")
    return asked


def run_command(page: Page, command: Command, folder: Path, timeout: float = TIMEOUT) -> str:
    """Run a bash block from the repository's root, with temporary files in a folder of its own.

    Returns:
        What it printed.

    Raises:
        PageError: A command of it failed.
    """
    shell = ["bash", "-euo", "pipefail", "-c", f"exec 2>&1\n{command.code}"]
    where = f"{page.path}:{command.line}"
    try:
        result = start(shell, timeout, TMPDIR=str(folder))
    except subprocess.TimeoutExpired:
        raise PageError(f"{where}: the command takes over {timeout:.0f} s") from None
    output = "\n".join(result.stdout.splitlines()[-LINES_OF_OUTPUT:])
    if result.returncode:
        raise PageError(f"{where}: exit code {result.returncode}\n{output}")
    return output
