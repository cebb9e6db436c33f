"""Loading a state dict of full or sharded tensors into a sharded model."""

import hashlib
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.dtensor.placements import EXPERT_NAMES, local_slice, require_own_name
from megatron.fsdp.dtensor.ragged_dtensor import is_sharded, local_shard, reduced, same_layout
from megatron.fsdp.dtensor.unsupported import OWNER
from megatron.fsdp.helpers.codes import check_values
from megatron.fsdp.helpers.spelling import did_you_mean, shortened
from megatron.fsdp.runtime.agreement import LOADED, Agreement, propagate_errors, samples
from megatron.fsdp.runtime.engine import Engine, engines_of
from megatron.fsdp.runtime.partition import public_name


class WrongShape(ValueError, RuntimeError):
    """A value in a state dict has a different shape. PyTorch's modules raise a RuntimeError."""


def _check(param: ShardedParameter, value: torch.Tensor, key: str) -> None:
    """Raise ValueError if ``value``, named ``key`` in the message, cannot be a value of the parameter."""
    check_values(key, value.dtype, param.main.dtype)
    main: DTensor = param.main  # type: ignore[assignment]  # a Parameter that is a DTensor
    own = local_shard(main).shape
    if not isinstance(value, DTensor) or value.device_mesh != main.device_mesh:
        require_own_name(main.device_mesh, key)
    if is_sharded(value) and same_layout(value, main) and local_shard(value).shape != own:
        raise ValueError(
            f"{key}: expected this rank's shard, of shape {tuple(own)}; got another rank's. torch.save writes what "
            "one rank has: save and load a file per rank, or use torch.distributed.checkpoint."
        )
    if value.shape != param.main.shape:
        raise _other_shape(key, param, value)


def _shape_of(target: ShardedParameter | torch.Tensor) -> torch.Size:
    return target.main.shape if isinstance(target, ShardedParameter) else target.shape


def _other_shape(key: str, target: ShardedParameter | torch.Tensor, value: torch.Tensor) -> WrongShape:
    return WrongShape(
        f"{key}: expected shape {tuple(_shape_of(target))}; got {tuple(value.shape)}. Give the state of a model of the "
        "same sizes."
    )


def own_shard(param: ShardedParameter, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a value of a parameter, in the shape of the main weight's local tensor.

    Args:
        param: The parameter.
        value: The full tensor on any device, or a DTensor. A DTensor with another layout than the parameter's is
            all-gathered, so all ranks must call this for it.
    """
    main: DTensor = param.main  # type: ignore[assignment]  # a Parameter that is a DTensor
    if is_sharded(value) and same_layout(value, main):
        return local_shard(value)
    return local_slice(main._spec).take_from(reduced(value))


def copy_shard(param: ShardedParameter, shard: torch.Tensor) -> None:
    """Copy ``shard`` into this rank's shard of a parameter's main weight."""
    local = local_shard(param.main)
    # torch.distributed.checkpoint loads in place: ``shard`` may already be the memory of the main weight.
    if shard.data_ptr() != local.data_ptr() or shard.dtype != local.dtype:
        local.copy_(shard)
    torch._C._increment_version([param.main])  # the copy counts for the shard only; see Unit._set_versions


def ignored_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters in a module that belong to no sharded model, by all of their names."""
    found = module.named_parameters(remove_duplicate=False)
    return {public_name(name): parameter for name, parameter in found if not hasattr(parameter, OWNER)}


def unsharded_state(module: nn.Module) -> dict[str, torch.Tensor | nn.Module]:
    """Return the unsharded entries of a module's state dict.

    These are ignored parameters, persistent buffers, and modules that have extra state.
    """
    state: dict[str, torch.Tensor | nn.Module] = {**ignored_parameters(module)}
    for prefix, owner in _owners(module):
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                state[prefix + name] = buffer
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            state[f"{prefix}_extra_state"] = owner
    return state


def _require_fit(missing: list[str], unexpected: list[str], tied: Container[str], hint: str = "") -> None:
    """Raise RuntimeError if keys are missing or unexpected; the message names the first of them."""
    # Extra state is never required: whether a layer has any depends on its version and settings. A tied parameter needs
    # an entry under only one of its names.
    missing = [key for key in missing if key not in tied and not key.endswith("_extra_state")]
    unexpected = [key for key in unexpected if not key.endswith("_extra_state")]
    if missing or unexpected:
        raise RuntimeError(
            f"state_dict does not fit the model. Missing: {shortened(missing) or 'none'}. "
            f"Unexpected: {shortened(unexpected) or 'none'}.{_renamed(missing, unexpected)} Give the state of the same "
            f"model, or strict=False to load what fits.{hint}"
        )


def _renamed(missing: list[str], unexpected: list[str]) -> str:
    for name in unexpected[:1] if missing else ():
        if hint := did_you_mean(name, missing, cutoff=0.8):
            return f" {name}:{hint}"
    return ""


def with_prefix(state_dict: Mapping[str, Any], prefix: str, params: Iterable[ShardedParameter]) -> dict[str, Any]:
    """Return the state dict with ``prefix`` in front of every name that lacks it, and of the versions' paths.

    ``torch.distributed.checkpoint.state_dict.set_model_state_dict`` passes entries under both names: the values to load
    under the model's names, and the current weights under the wrapper's names. The current weights are dropped.

    Raises:
        ValueError: A parameter has an entry under both names, and the one with the prefix is not its current weight.
    """
    result = OrderedDict((key, value) for key, value in state_dict.items() if key.startswith(prefix))
    current = {prefix + name: local_shard(param.main) for param in params for name in param.names}
    for key, value in state_dict.items():
        other = result.get(prefix + key)
        if key in result:
            continue
        if isinstance(other, DTensor) and local_shard(other).data_ptr() != current[prefix + key].data_ptr():
            raise ValueError(f"load_state_dict: expected one of them; got both {key} and {prefix + key}.")
        result[prefix + key] = value
    if (versions := getattr(state_dict, "_metadata", None)) is not None:
        place = prefix.removesuffix(".")
        moved = {f"{prefix}{path}".removesuffix("."): found for path, found in versions.items()}
        result._metadata = versions if place in versions else moved  # type: ignore[attr-defined]
    return result


def hook_state_dict(engine: Engine, modules: Iterable[nn.Module]) -> None:
    """Hook the modules: ``state_dict`` then returns main weights, and ``load_state_dict`` updates compute weights."""

    def show_main(*unused: Any) -> None:
        if (engine := reference()) is not None:
            engine.schedule.show_main()

    def invalidate(*unused: Any) -> None:
        if (engine := reference()) is not None:
            engine.invalidate_weights()

    # The modules hold these hooks. A strong reference would keep the engine alive in modules that outlive the model.
    reference = weakref.ref(engine)
    for module in modules:
        module.register_state_dict_pre_hook(show_main)
        module.register_load_state_dict_post_hook(invalidate)


def compare_expert_names(engine: Engine) -> None:
    """Find out which names of experts other expert-parallel ranks use for others: these cannot be saved. A collective.

    Megatron-Core's adapter numbers experts across ranks when it saves them.
    """
    index, experts = engine.index, [param for param in engine.params() if param.key.expert]
    if not experts or not index.divides_experts or not index.expects_experts:
        return
    names = [name for param in experts for name in param.names]
    hashes = {name: int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big") for name in names}
    rows = engine.context.exchange(list(hashes.values()))
    alike = dist.get_process_group_ranks(index.experts.dp_group)
    ranks = zip(dist.get_process_group_ranks(index.dense.dp_group), rows, strict=False)
    others = {number for rank, row in ranks if rank not in alike for number in row}
    found = {name: number not in others for name, number in hashes.items()}
    for mesh in {param.main.device_mesh for param in experts}:  # type: ignore[attr-defined]  # DTensors
        setattr(mesh, EXPERT_NAMES, getattr(mesh, EXPERT_NAMES, {}) | found)  # those of another model stay


def require_all_experts(engine: Engine, what: str) -> None:
    """Check that ranks can gather or distribute the full model, for ``what``.

    Raises:
        RuntimeError: Other expert-parallel ranks have other experts under the same names.
        NotImplementedError: They have other experts.
    """
    for param in engine.params() if engine.index.divides_experts else ():
        if param.key.expert:
            require_own_name(param.main.device_mesh, param.name)  # type: ignore[attr-defined]  # a DTensor
            raise NotImplementedError(
                f"{what}: {param.name}: every expert-parallel rank has other experts, and none has the full model. "
                "Save shards with torch.distributed.checkpoint, or gather all with full_weights(expert_group=...)."
            )


def before_state_dict(original: Callable[..., Any], model: nn.Module, *args: Any, **options: Any) -> Any:
    """Shard what is not sharded yet, before PyTorch notes the model's parameters to save or load state by name."""
    for module in model.modules():
        module.named_parameters()  # of a module that fully_shard has marked: shards it
    if getattr(options.get("options"), "full_state_dict", False):
        for engine in engines_of(model.parameters()):
            require_all_experts(engine, "full_state_dict=True")
    return original(model, *args, **options)


def _named(engine: Engine, module: nn.Module, prefix: str | None) -> list[tuple[ShardedParameter, list[str]]]:
    """The parameters of a module, each with its names in a state dict of the module."""
    if prefix is not None:
        return [(param, [prefix + name for name in param.names]) for param in engine.params()]
    engine.schedule.show_main()
    found: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(public_name(name))
    return [(param, found.get(id(param.main), [])) for param in engine.params()]


@torch.no_grad()
def load(engine: Engine, module: nn.Module, prefix: str | None, state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Copy a state dict into main weights and buffers, and mark compute weights as out of date.

    Args:
        engine: The engine of the model.
        module: The module whose buffers have the names that ``state_dict`` uses.
        prefix: Prefix of parameter names in ``state_dict``. None: ``module`` is a part of the model, and only its
            parameters are loaded.
        state_dict: Full tensors or DTensors, by name.
        strict: Every parameter and buffer must be present, and nothing else.
    """
    engine.agree()
    named = _named(engine, module, prefix)
    wanted: dict[str, Any] = {name: param for param, names in named for name in names}
    wanted |= unsharded_state(module)
    original, result = state_dict, _IncompatibleKeys([], [])
    # Check all values before the first copy, so that an error leaves the model unchanged.
    with propagate_errors(engine.index):
        state_dict = _changed_by_hooks(module, original, result)
        tied = {name for _, names in named if any(n in state_dict for n in names) for name in names}
        keys = [key for key in wanted if key in state_dict]
        missing, unexpected = [k for k in wanted if k not in state_dict], [k for k in state_dict if k not in wanted]
        if strict and not any(_may_forgive(owner) for _, owner in _owners(module)):
            hint = f" With broadcast_from_rank0, names on rank 0 must begin with {prefix!r}, as in state_dict()."
            hint = hint if prefix and not original else ""
            _require_fit(result.missing_keys + missing, result.unexpected_keys + unexpected, tied, hint)
        convert = tuple(key for key, owner in _owners(module) if _loads_itself(owner))
        fits = {key: _fits(wanted[key], state_dict[key], key, convert) for key in keys}
    _compare(engine, wanted, state_dict)
    engine.wait_before_write()
    for key in keys:
        if fits[key]:
            _copy(wanted[key], state_dict[key])
    visit = _Visit(wanted, original, _by_module(module, missing, unexpected), result)
    visit.module(module, "", OrderedDict(original))
    engine.invalidate_weights()
    left = [key for key in keys if not fits[key] and key not in visit.handled]
    _raise_first([*visit.errors, *(str(_other_shape(key, wanted[key], state_dict[key])) for key in left)])
    if strict:
        _require_fit(*result, tied)
    return result


def _fits(target: Any, value: Any, key: str, convert: tuple[str, ...]) -> bool:
    """Whether a value can be copied now. Modules that load their own entries may change its shape first.

    Raises:
        ValueError: It cannot be a value of ``target``.
    """
    if isinstance(target, nn.Module):
        return True
    if key.startswith(convert) and isinstance(value, torch.Tensor) and value.shape != _shape_of(target):
        return False
    if isinstance(target, ShardedParameter):
        _check(target, value, key)
    elif value.shape != target.shape:
        raise _other_shape(key, target, value)
    return True


def _copy(target: Any, value: Any) -> None:
    if isinstance(target, ShardedParameter):
        copy_shard(target, own_shard(target, value))
    elif isinstance(target, nn.Module):
        target.set_extra_state(value)
    else:
        target.copy_(value)


def _loads_itself(owner: nn.Module) -> bool:
    return type(owner)._load_from_state_dict.__module__.partition(".")[0] != "torch"


def _may_forgive(owner: nn.Module) -> bool:
    """Whether a module may take keys off those that are missing or unexpected, which is known after a load only."""
    hooks = owner._load_state_dict_post_hooks.values()
    return _loads_itself(owner) or any(getattr(hook, "__module__", "") != __name__ for hook in hooks)


def _by_module(module: nn.Module, *kinds: list[str]) -> dict[str, tuple[list[str], list[str]]]:
    """Sort missing and unexpected keys by the modules that find them."""
    found: dict[str, tuple[list[str], list[str]]] = {key: ([], []) for key, _ in _owners(module)}
    for kind, keys in enumerate(kinds):
        for parts in (key.split(".") for key in keys):
            homes = ("".join(f"{part}." for part in parts[:n]) for n in reversed(range(len(parts))))
            found[next(home for home in homes if home in found)][kind].append(".".join(parts))
    return found


class _Visit:
    """Does for each module what torch does once its parameters and buffers are loaded, in torch's order.

    A hook therefore sees no keys of later modules, and may clear both lists.

    Args:
        wanted: What each entry is loaded into.
        given: The state dict as the user gave it.
        apart: Missing and unexpected keys of each module.
        result: Gets these.

    Attributes:
        errors: What modules that load their own entries could not load.
        handled: The entries that these have loaded or changed.
    """

    def __init__(self, wanted: Mapping[str, Any], given: Mapping[str, Any], apart: Any, result: Any) -> None:
        self._wanted, self._apart, self._result = wanted, apart, result
        self._versions = _versions(given)
        self.errors: list[str] = []
        self.handled: set[str] = set()

    def module(self, owner: nn.Module, path: str, given: OrderedDict[str, Any]) -> None:
        """Visit a module and those inside. It may change ``given`` for the latter."""
        key = public_name(path)
        mine = self._apart.pop(key, ([], []))
        if _loads_itself(owner):
            before, own = _inside(given, key), (list[str](), list[str]())
            owner._load_from_state_dict(given, key, self._versions.get(key, {}), True, *own, self.errors)
            mine = [[key for key in keys if key in found] for keys, found in zip(mine, own, strict=True)]
            self._follow(key, before, _inside(given, key))
        self._result.missing_keys.extend(mine[0])
        self._result.unexpected_keys.extend(mine[1])
        for name, child in owner._modules.items():
            if child is not None:
                self.module(child, f"{path}{name}.", given)
        for hook in owner._load_state_dict_post_hooks.values():
            hook(owner, self._result)

    def _follow(self, key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Load the entries of a module's children that it has added or replaced. It has loaded its own."""
        changed = [n for n in {**before, **after} if after.get(n) is not before.get(n) and "." in n[len(key) :]]
        self.handled |= {n for n in after if "." not in n[len(key) :]} | set(changed)
        for name in changed:
            for keys in itertools.chain(*self._apart.values()):
                keys[:] = [each for each in keys if each != name]
            if name in after and name in self._wanted and _fits(self._wanted[name], after[name], name, ()):
                _copy(self._wanted[name], after[name])


def _inside(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The entries of a module, whose keys begin with ``key``."""
    return {name: value for name, value in given.items() if name.startswith(key)}


def _owners(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules in a module, each with the beginning of its keys in a state dict."""
    return [
        (public_name(f"{path}." if path else ""), owner) for path, owner in module.named_modules(remove_duplicate=False)
    ]


def _versions(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of modules in a state dict, such as their versions, by the beginnings of their keys."""
    found = getattr(state_dict, "_metadata", None) or {}
    return {public_name(f"{path}." if path else ""): each for path, each in found.items()}


def _changed_by_hooks(module: nn.Module, state_dict: Mapping[str, Any], found: _IncompatibleKeys) -> dict[str, Any]:
    """A state dict after the modules' hooks before a load, which may rename or change values."""
    changed, errors = dict(state_dict), list[str]()
    versions = _versions(state_dict)
    for key, owner in _owners(module):
        before = list(changed)
        for hook in owner._load_state_dict_pre_hooks.values():
            hook(changed, key, versions.get(key, {}), True, *found, errors)
        if list(changed) != before:  # wrappers, such as those of activation checkpointing, add their own names
            changed = {public_name(name): value for name, value in changed.items()}
    _raise_first(errors)
    return changed


def _raise_first(errors: list[str]) -> None:
    if errors:
        raise RuntimeError(f"load_state_dict: {errors[0]}")


def _compare(engine: Engine, wanted: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ValueError unless all ranks that shard a parameter load the same full tensor, or shards, into it.

    Otherwise each rank would take its shard of another tensor. Up to 32 elements of each full tensor are compared:
    reading all of it would take longer than copying a shard of it. Buffers may differ.
    """
    index, full = engine.index, {}
    found: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for key, target in wanted.items():
        value, is_weight = given.get(key), isinstance(target, ShardedParameter)
        apart = index.experts is not index.dense
        if apart and not is_weight:
            continue  # buffers of experts may have names that other ranks lack
        expert = apart and target.key.expert
        found[expert][f"{LOADED} {key}"] = "exists" if key in given else "does not exist"
        if is_weight and is_sharded(value):
            found[expert][f"{LOADED} {key}"] = "is sharded"
        elif is_weight and value is not None:
            full[f"{LOADED} {key}"] = reduced(value)
    texts = samples(full)
    dense, experts = ({name: texts.get(name, text) for name, text in each.items()} for each in found)
    Agreement(index, dense, experts).wait(engine.context.channel)


NO_PICKLE = (
    "A sharded model cannot be pickled. Save its state with torch.distributed.checkpoint.save, or with "
    "torch.save(model.state_dict()) on every rank, which a run with the same number of ranks can load."
)
