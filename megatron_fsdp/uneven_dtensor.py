"""The functions of :mod:`megatron.fsdp.api.uneven_dtensor` under the name that scripts import."""

from megatron.fsdp.api.uneven_dtensor import *  # noqa: F403
