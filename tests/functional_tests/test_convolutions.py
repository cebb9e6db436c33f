"""A convolutional network trains the same when sharded as with torch's DDP.

Batch normalization depends on the whole batch, so several ranks do not compute the same as one process with all of
their batches. They compute the same as replicated training: each rank normalizes by its own batch and has its own
running statistics, which are buffers and therefore not sharded. DDP without its broadcast of buffers does the same.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_fsdp import MegatronFSDP, fully_shard
from tests.models import assert_same_training, device, main_weights
from tests.ranks import RankPool, on_ranks

STEPS = 10
CLASSES = 5
# A sum of two fp32 gradients does not depend on the order.
TOLERANCE = 1e-6


class Residual(nn.Module):
    """Two convolutions, the second one depthwise, and a shortcut. Activations work in place."""

    def __init__(self, width: int, out_width: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, out_width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out_width),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_width, out_width, 3, padding=1, groups=out_width),
            nn.BatchNorm2d(out_width),
        )
        # Not 1 x 1: on CPUs without AVX-512, torch 2.13 writes beyond a buffer in the backward of a strided one in
        # channels_last, with or without sharding.
        self.shortcut = nn.Conv2d(width, out_width, 3, stride, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).add_(self.shortcut(x))


class Network(nn.Module):
    """Stem, residual blocks, and a head with a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList([Residual(7, 7, 1), Residual(7, 13, 2), Residual(13, 17, 2)])
        self.head = nn.Linear(17, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x).relu_()  # modifies the output of a unit in place
        return self.head(x.mean((2, 3))) * self.scale


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The usual optimizer for convolutional networks."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def loss_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Cross entropy of classes that are a function of the images' brightness."""
    labels = (images.mean((1, 2, 3)) * 100).long() % CLASSES
    return nn.functional.cross_entropy(model(images), labels)


def images(per_step: int) -> torch.Tensor:
    """Random images, [steps, per_step, 4, 3, 12, 12], repeated in every step so that the network can learn them."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand((1, per_step, 4, 3, 12, 12), generator=generator).expand(STEPS, -1, -1, -1, -1, -1).to(device())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[torch.Tensor]) -> list[float]:
    """Train on this rank's batches and return the losses."""
    losses = []
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def _train_both(memory_format: torch.memory_format, tolerance: float) -> MegatronFSDP:
    model = Network().to(device()).to(memory_format=memory_format)  # type: ignore[call-overload]
    mine = images(dist.get_world_size())[:, dist.get_rank()]
    mine = torch.stack([batch.contiguous(memory_format=memory_format) for batch in mine])
    reference = DistributedDataParallel(copy.deepcopy(model), broadcast_buffers=False)
    expected = train(reference, sgd(reference.parameters()), mine)
    sharded, optimizer = fully_shard(model, sgd(model.parameters()), fsdp_unit_modules=[Residual])
    losses = train(sharded, optimizer, mine)
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    assert losses[-1] < 0.5 * losses[0]
    weights = {name: p.detach().cpu() for name, p in reference.module.named_parameters()}
    assert_same(main_weights(sharded), weights, tolerance)
    assert_same(dict(sharded.module.named_buffers()), dict(reference.module.named_buffers()), tolerance)
    return sharded


def _parity() -> dict[str, Any]:
    sharded = _train_both(torch.contiguous_format, TOLERANCE)
    assert sharded.module.stem[1].num_batches_tracked == STEPS
    sharded.eval()
    with torch.no_grad():
        sharded(images(1)[0, 0])
    return {name: value.cpu() for name, value in sharded.module.named_buffers()}


def test_parity_with_ddp(ranks: RankPool) -> None:
    first, second = ranks.run(2, _parity)
    assert not torch.equal(first["stem.1.running_mean"], second["stem.1.running_mean"]), "statistics are per rank"


@on_ranks(2)
def test_parity_with_ddp_in_channels_last() -> None:
    # Unsharded weights are contiguous and DDP's are not, so convolutions may add in different orders.
    _train_both(torch.channels_last, 1e-4)


@on_ranks(2)
def test_parity_with_one_process_with_fixed_statistics() -> None:
    model = Network()
    train(model, sgd(model.parameters()), images(1)[:, 0].cpu())
    model.eval()  # normalizes by the running statistics, so ranks compute the same as one process
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    data = images(2 * dist.get_world_size())[:3]
    sharded = assert_same_training(model, data, sgd, loss_of, fsdp_unit_modules=[Residual])
    assert_same({name: value.cpu() for name, value in sharded.module.named_buffers()}, buffers, tolerance=0.0)
