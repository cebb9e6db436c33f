"""Memory of GPUs by name, and sizes of memory as people write them."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from megatron.fsdp.helpers.spelling import did_you_mean

MIB, GIB = 1 << 20, 1 << 30

# Total memory in MiB that nvidia-smi reports, which is less than the number in the product's name times 1,024: ECC and
# firmware take a part. Drivers differ by some hundred MiB. Second, the compute capability.
GPUS = {
    "v100-16": (16384, (7, 0)),
    "v100-32": (32768, (7, 0)),
    "t4": (15360, (7, 5)),
    "a10": (23028, (8, 6)),
    "l4": (23034, (8, 9)),
    "l40s": (46068, (8, 9)),
    "a100-40": (40960, (8, 0)),
    "a100-80": (81920, (8, 0)),
    "h100": (81559, (9, 0)),
    "h100-nvl": (95830, (9, 0)),
    "h200": (143771, (9, 0)),
    "b200": (183359, (10, 0)),
    "gb200": (189471, (10, 0)),
    "rtx3090": (24576, (8, 6)),
    "rtx4090": (24564, (8, 9)),
    "rtx5090": (32607, (12, 0)),
}
_UNITS = {"": 10**9, "gb": 10**9, "gib": GIB, "mb": 10**6, "mib": MIB, "tb": 10**12, "tib": 1 << 40}


class Capacity(int):
    """Bytes of a GPU's memory.

    Attributes:
        gpu: Its name.
        capability: Its compute capability.
    """

    gpu: str
    capability: tuple[int, int]


def gpu_memory(name: str) -> Capacity:
    """Bytes of a GPU in the table. Capitals, spaces and underscores do not matter.

    Raises:
        ValueError: The name is not in the table. The message lists the names.
    """
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    if key not in GPUS:
        raise ValueError(
            f"expected one of {', '.join(GPUS)}; got {name!r}.{did_you_mean(key, GPUS)} "
            "Give any other device's memory with --device-memory."
        )
    mebibytes, capability = GPUS[key]
    found = Capacity(mebibytes * MIB)
    found.gpu, found.capability = key, capability
    return found


def parse_memory(text: str) -> int:
    """Bytes of a size such as ``80`` or ``80GB`` (10^9 bytes each), ``79.6GiB`` (2^30 bytes each) or ``81559MiB``.

    Raises:
        ValueError: It is not a positive number with one of these units.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f"expected a size such as 80, 80GB (10^9 bytes) or 79.6GiB (2^30 bytes); got {text!r}.")
    return int(float(match[1]) * _UNITS[match[2]])


def positive(text: str) -> int:
    """An integer above 0.

    Raises:
        ValueError: It is not.
    """
    if not re.fullmatch("0*[1-9][0-9]*", text):
        raise ValueError(f"expected an integer above 0; got {text!r}.")
    return int(text)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a device, whose bytes become ``device_memory``."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--gpu", dest="device_memory", type=reported(gpu_memory), metavar="NAME", help="compare with a GPU, as in h100"
    )
    group.add_argument(
        "--device-memory", type=reported(parse_memory), metavar="SIZE", help="or with a size, as in 80GB or 79.6GiB"
    )


def reported(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter whose message argparse shows."""

    def converted(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted
