"""Public path of the script :mod:`megatron.fsdp.tools.pretrain_gpt`: ``torchrun -m megatron.fsdp.pretrain_gpt``."""

from megatron.fsdp.helpers.extras import require

if __name__ == "__main__":
    require("mcore")
    from megatron.fsdp.tools.pretrain_gpt import main

    main()
