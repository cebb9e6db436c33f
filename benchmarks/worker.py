"""A rank process: calls functions that it is told on its standard input, and answers on a pipe, one JSON line each.

    python -P -m benchmarks.worker <file descriptor of the answers>

It waits for the next call blocked in a read, so that it costs no CPU while another peer is measured.
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
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller has to know
                answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
    # Threads of process groups may wait for ranks that have gone.
    os._exit(0)


if __name__ == "__main__":
    main()
