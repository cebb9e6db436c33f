"""Runs the doctor on many command lines in one process, which imports Megatron once and forks for each.

    python -m tests.doctor_cases < COMMANDS.json

The commands are a list of lists of words, without the program. It prints the exit code, stdout and stderr of each.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.launch import printed, python


class Result(NamedTuple):
    """The exit code and output of one command."""

    code: int
    out: str
    err: str


def run(commands: list[list[str]], folder: Path) -> list[Result]:
    """Run the doctor once per command, in ``folder``."""
    ended = python("-m", "tests.doctor_cases", given=json.dumps(commands), folder=folder)
    return [Result(*found) for found in json.loads(printed(ended))]


def _run_one(words: list[str]) -> Result:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            from megatron.fsdp.tools import doctor

            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            sys.argv = ["doctor", *words]
            code = 70  # of a traceback
            try:
                code = doctor.main()
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        out.seek(0)
        err.seek(0)
        return Result(os.waitstatus_to_exitcode(status), out.read(), err.read())


def _main() -> None:
    from megatron.fsdp.mcore import cpu

    commands = json.load(sys.stdin)
    cpu.enable()
    # What takes seconds is shared by all.
    import megatron.core.tokenizers.text.text_tokenizer
    import megatron.training.training  # noqa: F401

    print(json.dumps([_run_one(words) for words in commands]))


if __name__ == "__main__":
    _main()
