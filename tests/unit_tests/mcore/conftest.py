"""Enables the tests of the adapter without CUDA. It must run before any of Megatron's modules is imported."""

import pytest

from megatron.fsdp.mcore import cpu

cpu.enable()

from tests.ranks import DEVICE  # noqa: E402

# Tests that run no code of Megatron, or that say themselves where they run.
EVERYWHERE = ("test_cpu", "test_estimate", "test_original_signatures", "test_uneven_dtensor")


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest) -> None:
    """Skip tests where tensors are on CUDA."""
    if DEVICE == "cuda" and request.path.stem not in EVERYWHERE:
        pytest.skip("Megatron runs on the CPU here")
