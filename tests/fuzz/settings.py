"""How a model is sharded: what is chosen at random, and the calls that do it."""

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .network import Block, Embedding, Features, Linear, Net

# Of batches. "bf16" casts fp32 weights to compute; "main" has bf16 ones, and fp32 main weights.
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "main": torch.bfloat16}
TOLERANCES = {"fp64": 1e-9, "fp32": 2e-5, "bf16": 5e-2, "main": 5e-2}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    # A small epsilon turns differences of rounding into differences of direction.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-3, amsgrad=True, foreach=False),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, eps=1e-3),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, eps=1e-3, centered=True, momentum=0.5),
}


class Setting(NamedTuple):
    """Everything but the steps. The first choice of each is the plainest, and what a program is reduced to."""

    ranks: int = 2
    mesh: str = "flat"  # "hsdp": 2 copies; "tp": 2 tensor-parallel ranks
    interface: str = "own"
    strategy: int = 3
    outer: int = 0  # 1: HSDP shards the optimizer state over the copies, too
    units: str = "block"  # "fine": one module each; "nested": blocks, and linear layers inside
    double_buffer: bool = False
    offload: bool = False
    overlap: bool = True
    granularity: str = "row"
    sync_each: bool = True
    precision: str = "fp64"
    optimizer: str = "sgd"
    groups: str = "all"  # "part": the head's parameters may be added later
    start: str = "same"  # "own": every rank builds another model
    replicated: bool = False  # a block's first layer is full on every rank
    within: bool = False  # pairs of ranks hold weights between forward and backward
    slow: str = "no"  # communication begins late on all ranks, or on the first one
    watch: bool = False  # compare all state after every step, not only in the end, though that synchronizes
    features: Features = Features()

    @property
    def in_torch(self) -> bool:
        """Whether torch's FSDP2 can do the same."""
        same = self.strategy >= 2 and self.units != "none" and self.start == "same" and self.precision != "main"
        return same and not (self.double_buffer or self.replicated) and self.sync_each and self.outer == 0

    @property
    def mixed(self) -> bool:
        """Whether the model computes in a different dtype than that of its main weights."""
        return self.precision in ("bf16", "main")

    def valid(self) -> "Setting":
        """The nearest setting that exists."""
        own, many = self.interface == "own", self.ranks == 4 and self.mesh != "flat"
        tp = many and self.mesh == "tp"
        changes: dict[str, Any] = {"mesh": self.mesh if many else "flat", "precision": self.precision}
        if not (own and many and self.mesh == "hsdp" and self.strategy):
            changes |= {"outer": 0}
        if not own:
            changes |= {"strategy": max(2, self.strategy), "double_buffer": False, "sync_each": True}
            changes |= {"overlap": True, "granularity": "row"}
            changes |= {"precision": "bf16" if self.precision == "main" else self.precision}
            changes |= {"units": "block" if self.units == "none" else self.units}
        # torch adds DTensors of the tensor-parallel axis and plain tensors in no reduction, so all weights are simple.
        odd = self.features
        if tp:
            odd = odd._replace(tied="no", odd="no", dropout=False, forces="no", extra="no")
        if odd.checkpoint == "around" and odd.reentrant:
            # Autograd sees only tensors that such a checkpoint returns.
            odd = odd._replace(returns="tensor")
        if tp:
            changes |= {"precision": "fp64"}
        elif self.precision != "fp64":
            # The gradient of a bias before a BatchNorm is a rounding error.
            odd = odd._replace(batchnorm=False, forces="no")
            changes |= {"optimizer": "sgd"} if self.mixed else {}
            odd = odd._replace(extra="no") if self.mixed else odd
        changes |= {"features": odd}
        pairs = self.ranks == 4 and not many and self.units != "none" and not (own and self.double_buffer)
        changes |= {"within": True, "strategy": 3} if self.within and pairs else {"within": False}
        return self._replace(**changes)


CHOICES: dict[str, tuple[Any, ...]] = {
    "ranks": (2, 2, 2, 2, 1, 3, 4, 4, 4),
    "mesh": ("flat", "flat", "hsdp", "hsdp", "tp"),
    "interface": ("own", "own", "own", "fsdp2"),
    "strategy": (3, 2, 1, 0),
    "outer": (0, 1, 1),
    "units": ("block", "block", "none", "whole", "fine", "nested"),
    "double_buffer": (False, False, False, True),
    "offload": (False, False, False, False, True),
    "overlap": (True, True, True, False),
    "granularity": ("row", "row", "row", "element", "tensor"),
    "sync_each": (True, True, True, True, True, False),
    "precision": ("fp64", "fp64", "fp64", "fp64", "fp32", "bf16", "main"),
    "optimizer": ("sgd", "momentum", "momentum", "adamw", "adamw", "amsgrad", "adagrad", "rmsprop"),
    "groups": ("all", "all", "part"),
    "start": ("same",) * 5 + ("own",),
    "replicated": (False, False, True),
    "within": (False, True, True),
    "slow": ("no", "no", "no", "first", "all"),
    "watch": (False, True),
}


def values_of(word: str) -> tuple[str, tuple[Any, ...]]:
    """The name and the values in a word such as ``strategy=3,1``."""
    name, _, values = word.partition("=")
    return name, tuple(_value(value) for value in values.split(","))


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class Meshes(NamedTuple):
    """This rank's place."""

    mesh: DeviceMesh
    data: DeviceMesh  # the axes over which gradients are averaged

    @property
    def rank(self) -> int:
        """The data-parallel rank: ranks with the same one have the same batches."""
        return dist.get_rank() // (self.mesh.size() // self.data.size())


def meshes(setting: Setting) -> Meshes:
    if setting.mesh == "flat":
        mesh = init_device_mesh("cpu", (setting.ranks,), mesh_dim_names=("shard",))
        return Meshes(mesh, mesh)
    inner = "tp" if setting.mesh == "tp" else "shard"
    outer = "shard" if setting.mesh == "tp" else "copies"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(outer, inner))
    return Meshes(mesh, mesh["shard"] if setting.mesh == "tp" else mesh)


def build(setting: Setting, place: Meshes, plain: bool) -> Net:
    """The model before it is sharded. The plain side of mixed precision has the main weights."""
    net = Net(setting.features).to(torch.float32 if setting.precision == "bf16" else DTYPES[setting.precision])
    if plain and setting.precision == "main":
        net = net.to(torch.float32)
    if setting.mesh == "tp":
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(net, place.mesh["tp"], plan)
    return net


def make_optimizer(net: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    """An optimizer of the parameters; with groups="part" all but the head's, which may be added later."""
    parameters = [p for name, p in net.named_parameters() if setting.groups == "all" or not name.startswith("head")]
    return OPTIMIZERS[setting.optimizer](parameters)


def shard(net: Net, setting: Setting, place: Meshes, torchs: bool) -> tuple[Any, torch.optim.Optimizer]:
    """Shard the model and its optimizer: with this engine, or with torch's FSDP2."""
    if setting.interface == "fsdp2" or torchs:
        # Ours finds an optimizer from before.
        before = None if torchs else make_optimizer(net, setting)
        _mark(net, setting, place, torchs)
        return net, before or make_optimizer(net, setting)
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    arguments: dict[str, Any] = {"dp_shard_dim": "shard", "device_mesh": place.mesh}
    if setting.mesh == "hsdp":
        arguments["outer_dp_sharding_strategy"] = setting.outer
    if setting.mesh != "flat":
        arguments |= {"dp_outer_dim": "copies"} if setting.mesh == "hsdp" else {"tp_dim": "tp"}
    classes: list[type[nn.Module]] = [Block, *([Embedding] if setting.features.embedded else [])]
    units: Any = {"none": None, "whole": [], "nested": [Block, Linear]}.get(setting.units, classes)
    compute = torch.bfloat16 if setting.precision == "bf16" else None
    main = torch.float32 if setting.precision == "main" else None
    arguments["reshard_after_forward"] = 2 if setting.within else None
    arguments["replicated_params"] = _replicated(net, setting)
    return fully_shard(
        net,
        make_optimizer(net, setting),
        **arguments,
        fsdp_unit_modules=units,
        enable_fine_grained_param_gather=setting.units == "fine",
        zero_dp_strategy=setting.strategy,
        fsdp_double_buffer=setting.double_buffer,
        offload_optimizer=setting.offload,
        overlap_grad_reduce=setting.overlap,
        overlap_param_gather=setting.overlap,
        shard_granularity=setting.granularity,
        sync_model_each_microbatch=setting.sync_each,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=main, compute_dtype=compute),
    )


def _replicated(net: Net, setting: Setting) -> set[nn.Parameter]:
    return set(net.blocks[0].up.parameters()) if setting.replicated else set()


def _mark(net: Net, setting: Setting, place: Meshes, torchs: bool) -> None:
    api: Any
    if torchs:
        import torch.distributed.fsdp as api
    else:
        import megatron.fsdp.fsdp2 as api
    arguments: dict[str, Any] = {"mesh": place.data, "reshard_after_forward": setting.strategy == 3}
    if not torchs:
        arguments["replicated_params"] = _replicated(net, setting)
    if setting.within:
        arguments["reshard_after_forward"] = 2
    if setting.precision == "bf16":
        arguments["mp_policy"] = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if setting.offload:
        arguments["offload_policy"] = api.CPUOffloadPolicy(pin_memory=False)
    # They have no forward, or FSDP2 refuses them, or another module reads their weights.
    no_units = nn.ModuleList, nn.ParameterList, nn.ParameterDict, NonDynamicallyQuantizableLinear
    parts = [m for m in net.blocks.modules() if any(True for _ in m.parameters(False)) and not isinstance(m, no_units)]
    fine = {"fine": parts, "nested": [m for m in parts if isinstance(m, Linear)]}.get(setting.units, [])
    embedding = [] if net.embedding is None else [net.embedding]
    for module in [*fine, *([*embedding, *net.blocks] if setting.units != "whole" else [])]:
        api.fully_shard(module, **arguments)
    api.fully_shard(net, **arguments)
