"""An Accelerator of Hugging Face's accelerate whose ``prepare`` shards models and optimizers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from megatron.fsdp.api.fully_shard import fully_shard_model, fully_shard_optimizer
from megatron.fsdp.checkpoint.backend import save
from megatron.fsdp.checkpoint.loading import load_with_optimizers
from megatron.fsdp.forward_methods import register_forward_method
from megatron.fsdp.helpers.spelling import did_you_mean
from megatron.fsdp.model_units import unit_classes
from megatron.fsdp.module import ShardedModel
from megatron.fsdp.optim.hooks import is_attached
from megatron.fsdp.runtime.engine import Engine, engines_of
from megatron.fsdp.runtime.partition import entries_of, is_wrapped

# The folder that ``save_state`` adds for sharded models and optimizers.
FOLDER = "megatron_fsdp"
_PLUGINS = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")


class FSDPAccelerator(Accelerator):
    """An Accelerator that shards models and optimizers with Megatron-FSDP, where accelerate's own uses DDP.

    In a process that no launcher has started, it is a plain Accelerator and shards nothing.

    Args:
        *args: Arguments of ``accelerate.Accelerator``.
        sharding: Arguments of :func:`megatron_fsdp.fully_shard_model`. ``fsdp_unit_modules`` defaults to the classes
            that the model lists in ``_no_split_modules``: a Hugging Face model's transformer blocks. With several
            models, it has the classes of all of them: each takes those that it has.
        **kwargs: Arguments of ``accelerate.Accelerator``.

    Raises:
        ValueError: accelerate is configured for another engine, or for a feature that does not work with this one.
    """

    # Lists of the base class.
    _models: list[nn.Module]
    _optimizers: list[Any]

    def __init__(self, *args: Any, sharding: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._start(sharding or {})

    @classmethod
    def adopt(cls, accelerator: Accelerator, sharding: Mapping[str, Any]) -> None:
        """Make an Accelerator that has not prepared anything yet an instance of this class, in place."""
        accelerator.__class__ = cls
        accelerator._start(sharding)

    def _start(self, sharding: Mapping[str, Any]) -> None:
        self._sharding = sharding
        # During save_state and load_state: the sharded optimizers, which the base class must not see.
        self._hidden: list[Any] | None = None
        started = dist.get_world_size() if self.shards else int(os.environ.get("WORLD_SIZE", "1"))
        if started != self.num_processes:
            raise ValueError(
                f"{started} processes were started, but accelerate distributes over {self.num_processes}: each process "
                "would train alone. On a CPU, set cpu=True; in TrainingArguments, use_cpu=True."
            )
        if self.shards:
            _check_settings(self)

    @property
    def shards(self) -> bool:
        """Whether there are ranks to shard over; a launcher may have started one only."""
        return dist.is_initialized()

    # Preparing -------------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model, unless it is sharded already. A model for evaluation only is sharded as well."""
        if not self.shards:
            return super().prepare_model(model, device_placement, evaluation_mode)
        # The base class applies autocast. Without evaluation_mode, it would also add DDP.
        if is_wrapped(model):
            return super().prepare_model(_wrapper_of(model), device_placement=False, evaluation_mode=True)
        super().prepare_model(model, device_placement=False, evaluation_mode=True)
        self._models.pop()
        place = self.device_placement if device_placement is None else device_placement
        units = unit_classes(model)
        if not units and "fsdp_unit_modules" not in self._sharding:
            warnings.warn(
                f"{type(model).__name__} does not say which of its classes are transformer blocks, so all of it is one "
                "unit, which is unsharded at once. Name the classes: fsdp_unit_modules=[...].",
                stacklevel=3,
            )
        defaults = {"fsdp_unit_modules": units, "device": self.device if place else None}
        sharding = {**defaults, **self._sharding}
        sharding["fsdp_unit_modules"] = _units_in(model, sharding["fsdp_unit_modules"])
        sharded = fully_shard_model(model, **sharding)
        sharded._is_accelerate_prepared = True
        # Makes transformers' generate() run on all ranks until the last one has finished, also inside of an adapter.
        for module in model.modules():
            module._is_fsdp_managed_module = True  # type: ignore[assignment]
        if hasattr(type(model), "generate"):  # which calls an encoder without the model around it
            register_forward_method(sharded, "generate")
        self._models.append(sharded)
        self._shard_optimizers()
        return sharded

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer, and shard it if its model is sharded. Otherwise :meth:`prepare_model` shards it later."""
        if not self.shards:
            return super().prepare_optimizer(optimizer, device_placement)
        # Existing state goes to the device when it is sharded.
        prepared = super().prepare_optimizer(optimizer, device_placement=False)
        self._shard_optimizers()
        return prepared

    def _shard_optimizers(self) -> None:
        for prepared in self._optimizers:
            engines = _engines_of(prepared)
            if engines and not all(is_attached(prepared.optimizer, engine) for engine in engines):
                fully_shard_optimizer(prepared.optimizer)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the model that was sharded. Its parameters are main weights, of which each rank holds its shard."""
        return super().unwrap_model(model.module if isinstance(model, ShardedModel) else model, *args, **kwargs)

    # Training --------------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
        """Clip gradients by their total norm over all ranks, and return that norm as a plain tensor. A collective."""
        norm = super().clip_grad_norm_(*args, **kwargs)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def join_uneven_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error if there are ranks: each must run the same number of forwards."""
        if self.shards:
            raise NotImplementedError(
                "join_uneven_inputs: ranks that shard a model run the same number of batches. Keep even_batches=True, "
                "or drop_last=True in the DataLoader."
            )
        return super().join_uneven_inputs(*args, **kwargs)

    # State -----------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return full main weights in host memory: on rank 0, and an empty dict on other ranks. A collective."""
        if not is_wrapped(model):
            return super().get_state_dict(model, unwrap)
        if self._hidden is not None and len(self._save_model_state_pre_hook) == 1:
            return {}  # save_state saves shards, and there are no hooks of the user, which may read full weights
        module = self.unwrap_model(model) if unwrap else model
        whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        # The names of a tied parameter have one tensor, as in an unsharded model: it is then written to a file once.
        first: dict[nn.Parameter, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if first.setdefault(parameter, name) in whole:
                whole[name] = whole[first[parameter]]
        return whole

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save to a folder. Models and optimizers are saved as shards, which any number of ranks can load.

        The shards are written last, and atomically: a folder without them is from a save that did not finish, and
        :meth:`load_state` raises an error.
        """
        if not self.shards:
            return super().save_state(output_dir, *args, **kwargs)
        # The last hook removes what the base class need not write: those of the user get what they do without sharding.
        with self._hiding_optimizers(), self.register_save_state_pre_hook(lambda models, weights, to: weights.clear()):
            folder = super().save_state(output_dir, *args, **kwargs)
            save(self._sharded_state(self._models), Path(folder) / FOLDER)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what :meth:`save_state` has saved."""
        if not self.shards:
            return super().load_state(input_dir, *args, **kwargs)
        with self._hiding_optimizers(), self.register_load_state_pre_hook(self._load_sharded):
            super().load_state(input_dir, *args, **kwargs)

    def _load_sharded(self, models: list[nn.Module], folder: str) -> None:
        """Load optimizers, and models that no hook of the user has removed from the list, since it has loaded them."""
        state = self._sharded_state(models)
        load_with_optimizers(state, Path(folder) / FOLDER)
        for i, model in enumerate(self._models):
            if f"model_{i}" in state:
                model.load_state_dict(state[f"model_{i}"])
        for i, optimizer in enumerate(self._hidden or ()):
            optimizer.load_state_dict(state[f"optimizer_{i}"])
        models.clear()

    def _sharded_state(self, models: list[nn.Module]) -> dict[str, Any]:
        state = {f"model_{i}": model.state_dict() for i, model in enumerate(self._models) if model in models}
        return state | {f"optimizer_{i}": optimizer.state_dict() for i, optimizer in enumerate(self._hidden or ())}

    @contextmanager
    def _hiding_optimizers(self) -> Iterator[None]:
        """Context in which the base class, which saves and loads the optimizers it knows, knows no sharded ones."""
        everything = self._optimizers
        self._hidden = [optimizer for optimizer in everything if _engines_of(optimizer)]
        self._optimizers = [optimizer for optimizer in everything if not _engines_of(optimizer)]
        try:
            yield
        finally:
            self._optimizers, self._hidden = everything, None


def _engines_of(optimizer: torch.optim.Optimizer) -> list[Engine]:
    return engines_of(p for options in optimizer.param_groups for p in options["params"])


def _wrapper_of(model: nn.Module) -> nn.Module:
    """The wrapper of a sharded model; for a wrapper, a part of a model, and one without a wrapper, the module itself.

    Raises:
        ReferenceError: The wrapper is gone.
    """
    proxies = (getattr(parameter, "_megatron_fsdp_model", None) for parameter in model.parameters())
    proxy = next((each for each in proxies if each is not None), None)
    # A bound method refers to the wrapper itself.
    return proxy.forward.__self__ if proxy is not None and proxy.module is model else model


def _units_in(model: nn.Module, given: Any) -> Any:
    """Those of the given classes and modules that occur in a model: the others may be another model's."""
    entries = entries_of(given)
    if not entries:
        return given
    inside = set(model.modules())
    kinds = {kind for module in inside for kind in type(module).__mro__}
    names = {kind.__name__ for kind in kinds}
    known = kinds | inside
    found = [each for each in entries if each in known or (isinstance(each, str) and each.rpartition(".")[2] in names)]
    if not found and all(isinstance(each, (str, type)) for each in entries):
        missing = ", ".join(each if isinstance(each, str) else each.__name__ for each in entries)
        raise ValueError(
            f"fsdp_unit_modules: {type(model).__name__} has no {missing}. Give the classes of every model that is "
            f"prepared; each takes those that it has.{did_you_mean(missing, sorted(names))}"
        )
    return found or given


def _check_settings(accelerator: Accelerator) -> None:
    """Raise ValueError if accelerate is configured for something that cannot work."""
    state = accelerator.state
    plugins = [name for name in _PLUGINS if getattr(state, name, None) is not None]
    problems = {
        f"{', '.join(plugins)}: leave it out, also in `accelerate config` and in TrainingArguments": bool(plugins),
        "TPUs": accelerator.distributed_type == DistributedType.XLA,
        "parallelism_config: give device_mesh, dp_shard_dim and dp_outer_dim to the sharding": state.parallelism_config
        is not None,
        "torch.compile of the whole model: call compile() of its blocks before prepare": (
            state.dynamo_plugin.backend != DynamoBackend.NO
        ),
        "fp8: give mixed_precision_policy to the sharding": accelerator.mixed_precision == "fp8",
        "save_on_each_node: only rank 0 has full weights": accelerator.project_configuration.save_on_each_node,
    }
    found = [text for text, applies in problems.items() if applies]
    if found:
        raise ValueError(f"Megatron-FSDP shards the model itself and does not work with {'; '.join(found)}.")
