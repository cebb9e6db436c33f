"""Public path of :mod:`megatron.fsdp.tools.launch`: ``torchrun -m megatron.fsdp.launch SCRIPT ARGS...``."""

from megatron.fsdp.tools.launch import main

if __name__ == "__main__":
    main()
