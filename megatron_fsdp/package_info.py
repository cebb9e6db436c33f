"""Version and description of the package that provides ``megatron_fsdp``."""

MAJOR, MINOR, PATCH, PRE_RELEASE = 0, 1, 0, ""
VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)

__shortversion__ = f"{MAJOR}.{MINOR}.{PATCH}"
__version__ = __shortversion__ + PRE_RELEASE

__package_name__ = "megatron-fsdp-engine"
__description__ = "Fully sharded data parallelism for Megatron-Core and plain PyTorch."
__license__ = "Apache-2.0"
__contact_names__ = "the Megatron-FSDP engine developers"
__keywords__ = "deep learning, distributed training, FSDP, ZeRO, Megatron, PyTorch"
