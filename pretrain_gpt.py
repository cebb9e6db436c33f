"""Runs ``python -m megatron.fsdp.pretrain_gpt`` in a checkout, where this path is shorter."""

from megatron.fsdp.tools.pretrain_gpt import DEFAULTS, datasets_provider, forward_step, main

__all__ = ["DEFAULTS", "datasets_provider", "forward_step", "main"]

if __name__ == "__main__":
    main()
