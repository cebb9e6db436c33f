"""A rank process: reads function calls from standard input and writes the results to a pipe, one JSON line each.

    python -P -m benchmarks.worker <file descriptor of the pipe>

It blocks in a read between calls, so that it uses no CPU while another peer is measured.
"""

import importlib
import json
import os
import sys
import traceback


def main() -> None:
    """Answer calls until the input ends."""
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:
        for line in sys.stdin:
            call = json.loads(line)
            try:
                module, _, name = call["function"].partition(":")
                answer = {"result": getattr(importlib.import_module(module), name)(**call["arguments"])}
            except Exception as error:  # noqa: BLE001 - any error is reported to the caller
                answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
    # Skip destructors: threads of process groups may be waiting for ranks that have ended.
    os._exit(0)


if __name__ == "__main__":
    main()
