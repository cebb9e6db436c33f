"""Public path of the command :mod:`megatron.fsdp.tools.trace`: ``torchrun -m megatron.fsdp.trace --out trace``."""

from megatron.fsdp.tools.trace.__main__ import main

if __name__ == "__main__":
    main()
