"""Public path of the command :mod:`megatron.fsdp.tools.selftest`: ``torchrun -m megatron.fsdp.selftest``."""

from megatron.fsdp.tools.selftest import main

if __name__ == "__main__":
    main()
