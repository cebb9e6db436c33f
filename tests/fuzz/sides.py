"""The two sides of a program: a plain model on every rank, whose gradients are averaged by hand, and a sharded one."""

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from . import settings
from .network import WIDTH, Net
from .settings import DTYPES, Meshes, Setting

# The one error of plain torch that a sharded program must not answer: its weights would be others.
WRITTEN = "modified by an inplace operation"


class RaisedElsewhere(RuntimeError):
    """The program is not valid in plain torch on another rank."""


def full(tensor: Any) -> torch.Tensor:
    """The full tensor of a DTensor; another tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_sharded(tensor: Any) -> bool:
    """Whether the engine has sharded a tensor. By name: programs may run with the engine of another folder."""
    return type(tensor).__name__ == "RaggedDTensor"


class Shard(NamedTuple):
    """This rank's part of a tensor, which is compared with the same part of the plain one."""

    local: torch.Tensor
    part: Any  # takes it from the full tensor


class Side:
    """The state that the steps of a program work on.

    Attributes:
        models, optimizers: All of them; ``model`` is the one in use, and ``net`` the module that was sharded.
        losses: Losses whose backward has not run.
        old: Parameters listed before the model was sharded.
        kept: What steps leave for later ones: states, averages, handles of hooks.
        copied: Whether a loss was computed with a copy of the weights.
        uneven: Whether ranks have run different blocks.
        reordered: Whether ranks have run blocks in a different order than that of their registration.
    """

    plain = True

    def __init__(self, setting: Setting, place: Meshes, choices: list[Any]) -> None:
        self.setting, self.place, self.choices = setting, place, choices
        self.losses: list[torch.Tensor] = []
        self.kept: dict[str, Any] = {}
        self.models: list[Any] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.firsts: dict[int, torch.optim.Optimizer] = {}
        self.old: list[nn.Parameter] = []
        self.folders: list[tempfile.TemporaryDirectory] = []
        # Whether gradients may differ between ranks until the next synchronization.
        self.pending = False
        self.accumulating = False
        self.copied = self.uneven = self.reordered = False
        self.add_model()
        torch.manual_seed(1000 + place.rank)

    def add_model(self) -> None:
        """Build a model and its optimizer, and use them."""
        number = len(self.models)
        # Where ranks start differently, the first one's weights count, as in DDP.
        alike = self.plain or self.setting.start == "same"
        net = self.build(seed=number if alike else number + 10 * self.place.rank)
        self.old = self.old or list(net.parameters())
        self.net = net
        self.model, self.optimizer = self.shard(net)
        self.models.append((self.model, net))
        self.optimizers.append(self.optimizer)
        self.firsts[id(net)] = self.optimizer

    def rebuild(self, **changes: Any) -> None:
        """Replace the model in use by a new one, as in a new process with other settings."""
        place = next(index for index, (model, _) in enumerate(self.models) if model is self.model)
        self.setting = self.setting._replace(**changes).valid()
        trained, self.net = [p.requires_grad for p in self.net.parameters()], self.build(seed=50)
        for parameter, value in zip(self.net.parameters(), trained, strict=True):
            parameter.requires_grad_(value)
        self.old = list(self.net.parameters())
        self.model, optimizer = self.shard(self.net)
        self.optimizers[self.optimizers.index(self.optimizer)] = self.optimizer = optimizer
        self.models[place], self.firsts[id(self.net)] = (self.model, self.net), optimizer
        self.losses.clear()
        self.kept.clear()

    def build(self, seed: int) -> Net:
        """A model that is not sharded."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return settings.build(self.setting, self.place, self.plain)

    def switch(self) -> None:
        """Use another model from now on."""
        if len(self.models) == 1:
            self.add_model()
            return
        model, net = self.models[0] if self.net is self.models[1][1] else self.models[1]
        self.model, self.net = model, net
        self.optimizer = self.firsts[id(net)]

    def folder(self) -> str:
        """A folder for a checkpoint, the same on all ranks."""
        if not self.folders:
            self.folders.append(tempfile.TemporaryDirectory(prefix="fuzz-"))
        self.agree()
        names = [self.folders[0].name]
        dist.broadcast_object_list(names)
        return names[0]

    def shard(self, net: Net) -> tuple[Any, torch.optim.Optimizer]:
        return net, settings.make_optimizer(net, self.setting)

    def parameters(self, what: str = "all") -> list[nn.Parameter]:
        """The model's parameters, or a part of them; "old": those listed before the first model was sharded."""
        if what == "old":
            return self.old
        parts = {"all": self.net, "block": self.net.blocks[0], "head": self.net.head, "up": self.net.blocks[1].up}
        return list(parts[what].parameters())

    def batch(self, number: int) -> torch.Tensor:
        """One of a few batches of this data-parallel rank."""
        generator = torch.Generator().manual_seed(100 * number + self.place.rank)
        return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(DTYPES[self.setting.precision])

    def decide(self, value: Callable[[], bool]) -> bool:
        """A decision of the plain side, which the sharded side repeats."""
        self.choices.append(value())
        return self.choices[-1]

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        return output.float().pow(2).mean() if output.dtype == torch.bfloat16 else output.pow(2).mean()

    def written(self, hidden: bool = False) -> None:
        """Weights have changed. Forget losses whose backward only seems valid without sharding.

        Autograd does not see writes through ``.data``, the plain side of mixed precision saves casts of weights, and a
        part that is called outside of its unit computes with copies of weights that every rank has. Where ranks have
        run other blocks, backward raises at other places, and ranks would wait for each other.
        """
        if hidden or self.setting.mixed or self.copied or self.uneven:
            self.losses.clear()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients."""
        self.accumulating = True
        try:
            with self.without_sync():
                yield
        finally:
            self.accumulating = False

    def without_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, **arguments: Any) -> None:
        """Run backward. Gradients are synchronized unless they are accumulated."""
        loss.backward(**arguments)
        self.pending = True
        if not self.accumulating and self.setting.sync_each:
            self.synchronized()

    def agree(self, error: BaseException | None = None) -> bool:
        """Tell the other ranks whether plain torch raises here. All ranks come to this at the same places.

        Returns:
            Whether every rank raises that a tensor was written in place.

        Raises:
            RaisedElsewhere: Only another rank raises.
        """
        counts = torch.tensor([error is not None, WRITTEN in str(error)], dtype=torch.int32)
        dist.all_reduce(counts)
        if counts[0] and error is None:
            raise RaisedElsewhere("plain torch raises on another rank")
        return bool(counts[1] == dist.get_world_size())

    def synchronized(self) -> None:
        """The program has come to where gradients are the same on all ranks."""
        if self.pending:
            self.agree()
            self.average()
        self.pending = False

    def read(self) -> None:
        """Have gradients ready to be read."""
        self.synchronized()

    def average(self) -> None:
        """Average gradients over the data-parallel ranks. One that no rank has stays None."""
        parameters = [p for _, net in self.models for p in net.parameters()]
        has = torch.tensor([float(p.grad is not None) for p in parameters], dtype=torch.float64)
        flat = [full_local(p.grad).flatten().double() if p.grad is not None else _zeros(p) for p in parameters]
        total = torch.cat([has, *flat])
        for group in self.place.data.get_all_groups():
            dist.all_reduce(total, group=group)
        offset = len(parameters)
        for index, parameter in enumerate(parameters):
            size = full_local(parameter).numel()
            if total[index]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local = full_local(parameter.grad)
                local.copy_((total[offset : offset + size] / self.place.data.size()).view(local.shape))
            offset += size

    def observe(self) -> dict[str, Any]:
        """All state that a program leaves."""
        seen: dict[str, Any] = {"rng": hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()}
        for number, (model, net) in enumerate(self.models):
            for name, value in model.state_dict().items():
                seen[f"weights {number} {name.removeprefix('module.')}"] = self.seen(value)
            for name, parameter in net.named_parameters() if not self.pending else ():
                gradient = parameter.grad
                seen[f"grad {number} {name}"] = None if gradient is None else self.seen(gradient)
        for number, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                for name, value in state.items():
                    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value or 0))
                    seen[f"state {number} {index} {name}"] = self.seen(tensor)
        return seen

    def seen(self, tensor: torch.Tensor) -> Any:
        """A copy of a tensor's values."""
        return full(tensor).detach().clone()


def full_local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros(full_local(parameter).numel(), dtype=torch.float64)


class Sharded(Side):
    """The same with the engine, or with torch's FSDP2."""

    plain = False

    def __init__(self, setting: Setting, place: Meshes, choices: list[Any], torchs: bool = False) -> None:
        self.torchs = torchs
        super().__init__(setting, place, choices)

    def shard(self, net: Net) -> tuple[Any, torch.optim.Optimizer]:
        return settings.shard(net, self.setting, self.place, self.torchs)

    def decide(self, value: Callable[[], bool]) -> bool:
        return self.choices.pop(0)

    def agree(self, error: BaseException | None = None) -> bool:
        return False

    def seen(self, tensor: torch.Tensor) -> Any:
        """This rank's part of a sharded tensor: gathering every tensor takes most of a program's time."""
        if not is_sharded(tensor):
            return super().seen(tensor)
        from megatron.fsdp.dtensor.placements import local_slice

        return Shard(full_local(tensor).clone(), local_slice(tensor._spec))  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        if hasattr(self.model, "no_sync"):
            with self.model.no_sync():
                yield
            return
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def synchronized(self) -> None:
        self.pending = False

    def read(self) -> None:
        if self.pending and not self.setting.sync_each:
            # What the documentation asks for before gradients are read.
            for model, _ in self.models:
                model.finish_grad_sync()
        self.pending = False
