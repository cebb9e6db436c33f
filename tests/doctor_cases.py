"""Runs the doctor on many command lines in one process, which imports Megatron once and forks for each."""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.launch import ROOT, environment


class Result(NamedTuple):
    """The exit code and output of one command."""

    code: int
    out: str
    err: str


def run(words: list[str], folder: Path = ROOT, change: str = "") -> Result:
    """Run the doctor.

    Args:
        words: Its command line, without the program.
        folder: Where it runs.
        change: Code that it runs before, with the modules of ``megatron.fsdp.tools.predict``.
    """
    process = _process()
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([words, str(folder), change]) + "\n")
        process.stdin.flush()
        return Result(*json.loads(process.stdout.readline()))
    except BaseException:  # its answer to this command must not be taken for the next one's
        process.kill()
        _process.cache_clear()
        raise


@cache
def _process() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.doctor_cases"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    atexit.register(process.kill)
    return process


def _run_one(words: list[str], folder: str, change: str) -> Result:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            from megatron.fsdp.tools import doctor
            from megatron.fsdp.tools.predict import command, replay

            os.chdir(folder)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            sys.argv = ["doctor", *words]
            code = 70
            try:
                exec(change, {"command": command, "replay": replay})
                code = doctor.main()
            except SystemExit as end:
                code = int(end.code or 0)
            except Exception:
                traceback.print_exc()
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

    cpu.enable()
    # What takes seconds is shared by all.
    import megatron.core.tokenizers.text.text_tokenizer
    import megatron.training.training  # noqa: F401
    from megatron.fsdp.tools.predict import command  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(_run_one(*json.loads(line))), flush=True)


if __name__ == "__main__":
    _main()
