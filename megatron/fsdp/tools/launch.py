"""Runs an unmodified Megatron training script with this FSDP in place of Megatron-Core's.

    torchrun --nproc-per-node 8 -m megatron.fsdp.launch SCRIPT ARGS...

``--use-megatron-fsdp`` then selects this project's FSDP. Without a CUDA device, the script runs on the CPU.
"""

import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from megatron.fsdp.tools.script import prepare_megatron, run


@record
def main() -> None:
    """Run the script named on the command line as ``__main__``."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__, end="")
        sys.exit(0 if len(sys.argv) > 1 else 2)
    script = Path(sys.argv[1])
    if not script.is_file():
        print(f"megatron.fsdp.launch: no such script: {script}", file=sys.stderr)
        sys.exit(2)
    prepare_megatron()
    from megatron.fsdp.mcore import install
    from megatron.fsdp.mcore.ending import leaving_outcome

    install()
    with leaving_outcome():
        run(script, sys.argv[2:])


if __name__ == "__main__":
    main()
