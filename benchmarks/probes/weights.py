"""Fingerprints of a peer's weights, to compare optimizers. Called through ``benchmarks.worker``."""

import torch

from benchmarks import training


def fingerprints() -> dict[str, list[float]]:
    """The sum and the norm of each parameter, by its name in the plain model."""
    found = {}
    for name, value in training.running().trainable.model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        exact = whole.detach().to(torch.float64)
        found[name.replace("module.", "")] = [exact.sum().item(), exact.norm().item()]
    return found
