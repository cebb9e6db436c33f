"""Builds engines: checks a model and splits it into units, then allocates their buffers."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.buffers.pool import FixedPool, HostPool, Pool
from megatron.fsdp.buffers.quantizing import QuantizationBatch
from megatron.fsdp.comm.backends import HOST, backend_of, compute_device, is_on_host, offload_device
from megatron.fsdp.comm.context import CommContext
from megatron.fsdp.comm.journal import Channel, watch
from megatron.fsdp.comm.process_groups import require_process_group
from megatron.fsdp.comm.registered_memory import check_can_register
from megatron.fsdp.config import OF_EXPERTS, FSDPConfig
from megatron.fsdp.dtensor import torch_patches
from megatron.fsdp.dtensor.unsupported import OWNER
from megatron.fsdp.init.deferred import drop_recipes
from megatron.fsdp.init.materialize import (
    check_can_materialize,
    comes_last,
    draw_shards,
    initialize,
    materialize_buffers,
)
from megatron.fsdp.quantized.storage import drop_copies_after_forward
from megatron.fsdp.runtime.agreement import Agreement, compare_values, fingerprint, give_from_first, propagate_errors
from megatron.fsdp.runtime.engine import Engine
from megatron.fsdp.runtime.partition import (
    UnitClasses,
    UnitPart,
    check_and_partition,
    check_not_wrapped,
    log_nested_units,
    offloaded_units,
    parameters_of,
    root_modules,
)
from megatron.fsdp.runtime.registration import BufferRegistration, groups_of
from megatron.fsdp.runtime.structure import reject_structural_changes
from megatron.fsdp.runtime.unit import Unit
from megatron.fsdp.sharding.mesh import MeshIndex, default_index
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnitSettings:
    """Settings that may differ between the units of a model.

    Attributes:
        policy: Dtypes.
        shard_granularity: The smallest unit of a parameter that is not split between ranks.
        keeps_weights: Weights stay unsharded from a forward until its backward. None: those of the root do.
        ranks_after_forward: Number of ranks that hold the weights together in between. None: all.
        divisor: Divides the sum of gradients. None: the number of ranks.
    """

    policy: MixedPrecisionPolicy
    shard_granularity: str
    keeps_weights: bool | None = None
    ranks_after_forward: int | None = None
    divisor: float | None = None


@dataclass(frozen=True)
class Blueprint:
    """A model that passed all checks and was split into units. Nothing is allocated, and no rank has been waited for.

    Attributes:
        module: The model.
        root: Its units.
        config: Settings.
        index: Mesh and process groups.
        device: Device of the computation.
        tp_mesh: Tensor-parallel mesh; None if no parameter is split over one.
        settings_of: Settings of one unit.
        reshards: Weights of units are freed between passes; False if every rank keeps full compute weights.
        channel: Records the model's collectives.
        agreement: Comparison of the model between ranks; not started yet.
        from_first: Whether the first data-parallel rank gives initial values to the others: dense ones, and experts.
    """

    module: nn.Module
    root: UnitPart
    config: FSDPConfig
    index: MeshIndex
    device: torch.device
    tp_mesh: DeviceMesh | None
    settings_of: Callable[[UnitPart], UnitSettings]
    reshards: bool
    channel: Channel
    agreement: Agreement
    from_first: tuple[bool, bool] = (False, False)


def make_blueprint(
    module: nn.Module,
    config: FSDPConfig,
    index: MeshIndex | None = None,
    unit_modules: UnitClasses | None = None,
    device: torch.device | str | None = None,
    settings_of: Callable[[UnitPart], UnitSettings] | None = None,
    unit_key: Callable[[nn.Module], object] = id,
) -> Blueprint:
    """Check that a model can be sharded, and split it into units.

    Args:
        module: The model.
        config: Settings.
        index: Mesh and process groups. None: one axis over all ranks.
        unit_modules: Classes of the modules that are units. None: the model is one unit whose weights stay unsharded.
        device: Device of the computation. None: that of the parameters, or the current CUDA device if there is one.
        settings_of: Settings of one unit. None: those of ``config``.
        unit_key: Modules of these classes are one unit if this is equal for them.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: The model or a setting is invalid. Ranks that wait for this one raise the error, too.
    """
    require_process_group()
    torch_patches.apply()
    device = compute_device(module, device)
    params = parameters_of(module, config)
    check_not_wrapped(module, params)
    index = index or default_index(device)
    channel = watch(index.dense.dp_group, device, watches=not config.cuda_graph_mode)
    number = config.reshard_after_forward
    keeps = True if number == 1 else None
    common = UnitSettings(config.mixed_precision_policy, config.shard_granularity, keeps, number)
    settings = settings_of or (lambda part: common)
    with propagate_errors(index):
        _check_settings(module, config, index, device)
        root, tp_mesh = check_and_partition(
            module, params, config, index, unit_modules, device, lambda part: settings(part).policy, unit_key
        )
    reshards = unit_modules is not None or bool(root.children)
    if settings_of is None and dist.get_rank() == 0:
        _log_surprises(root, config, index, reshards)

    def settings_to_compare(part: UnitPart) -> str:
        if settings_of is not None:
            own = settings_of(part)
            divisor = "" if own.divisor is None else f", gradients divided by {own.divisor}"
            reshards_to = own.ranks_after_forward or (None if own.keeps_weights is None else not own.keeps_weights)
            return f"{own.policy}, reshard_after_forward={reshards_to}{divisor}"
        return f"weights are resharded: {reshards}" if part is root else ""

    agreement = Agreement(index, *fingerprint(root, config, index, settings_to_compare))
    return Blueprint(module, root, config, index, device, tp_mesh, settings, reshards, channel, agreement)


def _log_surprises(root: UnitPart, config: FSDPConfig, index: MeshIndex, reshards: bool) -> None:
    """Log what users of another FSDP, or of the defaults, may not expect of the units and of the experts."""
    if config.sharding.inner.shards_parameters and not reshards and dist.get_world_size() > 1:
        logger.warning(
            "FSDP: fsdp_unit_modules is None: every rank keeps full compute weights, although the strategy shards "
            "them. Give the classes of the model's layers, or [] for a single unit."
        )
    given = [name for name in OF_EXPERTS if index.expects_experts and getattr(config, name) is not None]
    if given and not any(param.key.expert for part in root.walk() for param in part.params):
        logger.warning(
            "FSDP: %s: no parameter is an expert. Give expt_device_mesh, the mesh of experts, or leave it out.",
            ", ".join(given),
        )
    if not config.enable_fine_grained_param_gather:
        log_nested_units(root)


def _check_settings(module: nn.Module, config: FSDPConfig, index: MeshIndex, device: torch.device) -> None:
    """Raise ValueError if the ranks, their backends or the model's modules cannot do what the settings ask for."""
    if (ranks := index.dense.inner.size()) % (config.reshard_after_forward or 1):
        raise ValueError(
            f"reshard_after_forward: expected a divisor of the {ranks} ranks of dp_shard_dim; got "
            f"{config.reshard_after_forward}."
        )
    if config.average_in_collective and not backend_of(index.dense.inner, device).can_average:
        raise ValueError("average_in_collective: gloo can sum only. Leave it off; the result is the same.")
    if config.nccl_ub:
        check_can_register(groups_of([index.dense, index.experts]), device)
    if config.offloads_gradients and not backend_of(index.dense.inner, HOST).name:
        raise ValueError(
            "offload_optimizer: the process group has no backend for tensors in host memory, which clipping and saving "
            'send. Initialize it with init_process_group("cpu:gloo,cuda:nccl").'
        )
    if config.init_model_with_meta_device:
        check_can_materialize(module)


def build_engine(blueprint: Blueprint) -> Engine:
    """Shard the model: allocate buffers, move parameters into them, and hook the units' modules."""
    module, config, device = blueprint.module, blueprint.config, blueprint.device
    given = compare_values(blueprint.root, config, blueprint.index, device, blueprint.channel)
    blueprint = dataclasses.replace(blueprint, from_first=given)
    context = CommContext.of(
        device,
        offload_device() if config.offload_optimizer else device,
        blueprint.index.dense.dp_group,
        blueprint.channel,
        separate_unshards=blueprint.index.has_gather_group,
        has_outer=blueprint.index.dense.outer is not None,
    )
    modules_without_parameters = materialize_buffers(module, device)
    for buffer in module.buffers():
        if buffer.device != device:
            buffer.data = buffer.data.to(device)
    pool = None
    if config.fsdp_double_buffer:
        # Two passes at once go through the units in opposite orders, each in another half until they cross.
        half = (sum(1 for _ in blueprint.root.walk()) + 1) // 2 if config.interleaves_micro_batches else None
        pool = FixedPool(config.max_unsharded_units, device, half)
    units = _build_units(blueprint, context, pool, modules_without_parameters)
    give_from_first(module, blueprint.index, context.stream, given)
    groups = [group for unit in units for group in unit.groups]
    registration = None
    if config.nccl_ub and pool is not None and groups:
        registration = BufferRegistration(pool, groups, blueprint.index, context, config)
    unit_of: weakref.WeakKeyDictionary[nn.Module, Unit] = weakref.WeakKeyDictionary()
    for unit, part in zip(units, blueprint.root.walk(), strict=True):
        # walk() yields inner units later, so each module ends up with the innermost unit around it.
        unit_of.update((each, unit) for one in part.modules for each in one.modules())
    for unit in units:
        users = {unit_of[owner] for group in unit.groups for param in group.params for owner, _ in param.sites}
        for user in users - {unit}:
            user.is_open = True  # a tied weight of another unit
    engine = Engine(units, config, blueprint.index, context, pool, registration, blueprint.agreement, unit_of)
    _install(engine, blueprint)
    if config.init_model_with_meta_device:
        drop_recipes(module)
    reject_structural_changes(module, engine)
    return engine


def _install(engine: Engine, blueprint: Blueprint) -> None:
    """Hook the units' modules, make main weights their parameters, and mark these as the engine's."""
    for unit, part in zip(engine.units, blueprint.root.walk(), strict=True):
        unit.channel = blueprint.channel
        unit.install_hooks(root_modules(part.module) if unit.is_root else part.modules, engine.schedule)
        if unit.gathers_twice:
            drop_copies_after_forward(unit.layers())
    for group in engine.groups:
        group.show(compute=False)
        if engine.config.fused_weight_gradients:  # also for frozen groups, which may be unfrozen later
            group.enable_fused_gradients()
    for param in engine.params():
        for parameter in (param.original, param.compute, param.main):
            setattr(parameter, OWNER, weakref.ref(engine))


def creation_order(part: UnitPart, follow_recording: bool) -> list[UnitPart]:
    """Return units in the order in which their parameters are initialized.

    It is that of :meth:`UnitPart.walk`, except where the model was built in a different order. Random numbers are drawn
    in the order of building, so a unit comes after those inside it if it has the last parameter: the others need not be
    drawn twice.

    Args:
        part: The root of the units to order.
        follow_recording: Whether to use the recorded order of initialization (:mod:`megatron.fsdp.init.deferred`).
    """
    inside = [unit for child in part.children for unit in creation_order(child, follow_recording)]
    params_inside = [param for unit in inside for param in unit.params]
    last = follow_recording and comes_last(part.params, params_inside)
    return [*inside, part] if last else [part, *inside]


def _build_units(
    blueprint: Blueprint, context: CommContext, fixed: FixedPool | None, modules_without_parameters: list[nn.Module]
) -> list[Unit]:
    config, index = blueprint.config, blueprint.index
    parts = list(blueprint.root.walk())
    offloaded = offloaded_units(blueprint.root, config.offload_fraction if config.offload_optimizer else 0.0)
    on_device = dataclasses.replace(context, main_device=context.device)
    common = HostPool(not config.sharding.inner.shards_optimizer) if is_on_host(blueprint.device) else Pool()
    apart = config.fsdp_db_use_persist_buf_on_alloc_fail
    units: dict[int, Unit] = {}
    for part in creation_order(blueprint.root, config.init_model_with_meta_device):
        place, settings = part.index, blueprint.settings_of(part)
        own = dataclasses.replace(
            config,
            mixed_precision_policy=settings.policy,
            shard_granularity=settings.shard_granularity,
            reshard_after_forward=settings.ranks_after_forward,
        )
        own = own if blueprint.reshards else own.with_full_weights()
        pool = common if fixed is None else fixed.for_unit(place, part.depth, apart)
        chosen = context if place in offloaded else on_device
        shared = own, index, chosen, pool, blueprint.tp_mesh, blueprint.from_first
        groups = [ParameterGroup(params, *shared) for params in part.groups]
        empty = [group for group in groups if not group.initialized]
        if empty or (place == 0 and modules_without_parameters):
            for group in (group for group in empty if group.draws_shards):
                draw_shards(group.params, group.shards(), group.weights.owned.index or 0, blueprint.device)
            params = [param for group in empty if not group.draws_shards for param in group.params]
            initialize(params, blueprint.device, modules_without_parameters)
            modules_without_parameters = []
        for group in empty:
            group.initialize_main()
        units[place] = unit = Unit(part.name, groups, place, pool.slot)
        unit.is_offloaded = place in offloaded
        if settings.keeps_weights is not None:
            unit.keeps_weights = settings.keeps_weights
        if settings.divisor is not None:
            unit.rescale_gradients(index.size / settings.divisor)
    _nest(units, parts)
    batch = QuantizationBatch()
    for group in (group for place in range(len(parts)) for group in units[place].groups):
        if group.storage is not None:
            group.quantize_with(batch)
    return [units[place] for place in range(len(parts))]


def _nest(units: dict[int, Unit], parts: list[UnitPart]) -> None:
    """Tell units which others are inside them, and behind which they end."""
    for part in parts:
        unit = units[part.index]
        unit.children += [units[child.index] for child in part.children]
        unit.is_open = bool(unit.children)
        unit.ends_behind = max(part.index, part.behind.index if part.behind else 0)
