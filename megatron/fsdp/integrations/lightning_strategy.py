"""The common part of the strategies for ``lightning`` and ``pytorch_lightning``. It imports neither of the two.

The two packages contain the same code under two names, and a Trainer accepts only strategies of its own package. So
:class:`ShardedStrategy` is the first base of one strategy per package; the second is the package's
``ModelParallelStrategy``, which starts processes, creates the process group and broadcasts objects.
"""

import inspect
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

from megatron.fsdp.api.fully_shard import fully_shard_model, fully_shard_optimizer
from megatron.fsdp.api.megatron_fsdp import MegatronFSDP
from megatron.fsdp.checkpoint.loading import load_with_optimizers
from megatron.fsdp.checkpoint.reader import open_checkpoint
from megatron.fsdp.comm.backends import HOST
from megatron.fsdp.dtensor.ragged_dtensor import same_layout
from megatron.fsdp.forward_methods import register_forward_method
from megatron.fsdp.helpers.spelling import did_you_mean
from megatron.fsdp.runtime.partition import UnitClasses
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy

# Dtypes for each precision of the Trainer. With "-true", the precision plugin has converted the model before.
_SAME = MixedPrecisionPolicy(main_params_dtype=None)
_POLICIES = {
    "32-true": _SAME,
    "64-true": _SAME,
    "bf16-true": _SAME,
    "16-true": _SAME,
    "bf16-mixed": MixedPrecisionPolicy(main_grads_dtype=torch.float32, compute_dtype=torch.bfloat16),
}
_OWN_ARGUMENTS = ("module", "device_mesh", "dp_shard_dim", "dp_outer_dim", "tp_dim", "device")
# Names in a checkpoint folder. Lightning's consolidate_checkpoint reads folders with these names.
_META, _MODEL, _OPTIMIZER = "meta.pt", "model", "optimizer_"
# DTensors of callbacks and hooks, by their place among the leaves of the rest of the checkpoint; and for each the
# parameter that has its layout.
_SHARDS, _LAYOUTS = "megatron_fsdp_shards", "megatron_fsdp_layouts"
# Before keys of hooks that are names in a folder, too.
_ADDED = "megatron_fsdp."
# On a LightningModule, its sharded model, for later calls of fit, test ... by this Trainer or another. The two form a
# cycle, as a LightningModule and its Trainer do anyway.
_SHARDED = "_megatron_fsdp_sharded"
_REPLICAS, _DATA, _TENSOR = "replicas", "data_parallel", "tensor_parallel"

_Base: Any = object


class ShardedStrategy(_Base):
    """Trains a LightningModule whose parameters, gradients and optimizer state are sharded.

    Args:
        fsdp_unit_modules: Module classes, class names, import paths or modules; see
            :func:`megatron_fsdp.fully_shard_model`.
        replicas: Number of groups of ranks that each hold all shards (HSDP).
        tensor_parallel_size: Number of ranks that shard a layer by tensor parallelism. ``configure_model`` must
            parallelize the layers over ``self.device_mesh["tensor_parallel"]``.
        save_distributed_checkpoint: Save a folder into which every rank writes its shards. If False, rank 0 saves one
            file with full tensors, which any strategy can load.
        process_group_backend: Backend of the process group. None: nccl on CUDA, gloo on a CPU.
        timeout: Longest time that a collective may take. None: Lightning's default.
        settings: Other arguments of :func:`megatron_fsdp.fully_shard_model`. ``mixed_precision_policy`` replaces the
            dtypes that follow from the Trainer's ``precision``.

    Raises:
        TypeError: A setting is no argument of ``fully_shard_model``, or the strategy sets it itself.
    """

    def __init__(
        self,
        fsdp_unit_modules: UnitClasses | None = None,
        *,
        replicas: int = 1,
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **settings: Any,
    ) -> None:
        known = inspect.signature(fully_shard_model).parameters.keys() - set(_OWN_ARGUMENTS)
        for name in settings.keys() - known:
            reason = "the strategy sets it" if name in _OWN_ARGUMENTS else "fully_shard_model has no such argument"
            raise TypeError(f"MegatronFSDPStrategy: {name}: {reason}.{did_you_mean(name, known)}")
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            **({} if timeout is None else {"timeout": timeout}),
        )
        self._settings = {"fsdp_unit_modules": fsdp_unit_modules, **settings}
        self._sizes = (replicas, tensor_parallel_size)
        self._weights_may_have_changed = False

    # Set-up ----------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Create the process group, and the mesh that ``configure_model`` sees as ``self.device_mesh``."""
        self._setup_distributed()
        replicas, tensor = self._sizes
        if self.world_size % (replicas * tensor):
            raise ValueError(
                f"MegatronFSDPStrategy: expected replicas * tensor_parallel_size to divide the {self.world_size} ranks;"
                f" got {replicas} * {tensor}."
            )
        shape = (replicas, self.world_size // (replicas * tensor), tensor)
        self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=(_REPLICAS, _DATA, _TENSOR))
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Which part of the data this rank gets: ranks of one tensor-parallel group get the same."""
        replicas, data = self._device_mesh[_REPLICAS], self._device_mesh[_DATA]
        rank = replicas.get_local_rank() * data.size() + data.get_local_rank()
        return {"num_replicas": replicas.size() * data.size(), "rank": rank}

    def setup(self, trainer: Any) -> None:
        """Shard the model, and the optimizers that ``configure_optimizers`` creates from its parameters."""
        self.accelerator.setup(trainer)
        _check_callbacks(trainer.callbacks)
        self.model = self.lightning_module.__dict__.get(_SHARDED) or self._shard(self.lightning_module)
        average_of_shards(trainer.callbacks, self.lightning_module)
        self.barrier()
        fitting = trainer.state.fn == "fit"
        if fitting:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                fully_shard_optimizer(optimizer)
        self.setup_precision_plugin()

    def _shard(self, module: nn.Module) -> MegatronFSDP:
        precision = str(self.precision_plugin.precision)
        policy = self._settings.get("mixed_precision_policy") or _POLICIES.get(precision)
        if policy is None:
            raise NotImplementedError(
                f"Trainer(precision={precision!r}): expected one of {', '.join(_POLICIES)} with MegatronFSDPStrategy."
            )
        if self._layer_sync is not None:
            module = self._layer_sync.apply(module)
        module = self.precision_plugin.convert_module(module)
        on_meta = any(parameter.is_meta for parameter in module.parameters())
        if not on_meta:
            module.to(self.root_device)
        replicas, tensor = self._sizes
        settings = {"init_model_with_meta_device": on_meta, **self._settings, "mixed_precision_policy": policy}
        model = fully_shard_model(
            module,
            device_mesh=self._device_mesh,
            dp_shard_dim=_DATA,
            dp_outer_dim=_REPLICAS if replicas > 1 else None,
            tp_dim=_TENSOR if tensor > 1 else None,
            device=self.root_device,
            **settings,
        )
        module.__dict__[_SHARDED] = model
        if not module.automatic_optimization:
            _unshard_layers_by_themselves(module)
        return model

    # Training --------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step``: as one forward of the sharded model, unless optimization is manual."""
        if self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        # It has several forwards, backwards and steps, after which weights are sharded again.
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context for all micro-batches of ``accumulate_grad_batches`` but the last."""
        with self.model.no_sync():
            yield

    def on_validation_start(self) -> None:
        """Expect callbacks to change the weights before the first batch, as WeightAveraging does."""
        self._weights_may_have_changed = True

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``validation_step``, with the weights that callbacks may have put into the model."""
        if self._weights_may_have_changed:
            self._weights_may_have_changed = False
            self.model.install_optimized_model_weights()
        return super().validation_step(*args, **kwargs)

    def on_validation_end(self) -> None:
        """Use the weights that callbacks may have restored."""
        self.model.install_optimized_model_weights()

    def on_train_end(self) -> None:
        """Use the weights that callbacks may have put into the model."""
        self.model.install_optimized_model_weights()

    # Checkpoints -----------------------------------------------------------------------------------------------

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning passes the loaded state to :meth:`load_optimizer_state_dict`."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state dict, whose parameters are DTensors. :meth:`save_checkpoint` gathers them if needed."""
        state: dict[str, Any] = self.lightning_module.state_dict()
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's state dict, with DTensors."""
        state: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict()
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load full tensors or DTensors into the main weights."""
        self.model.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load full tensors or DTensors into the state of every optimizer."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a folder of shards, or one file with full tensors. A collective: all ranks must call this."""
        path = Path(self.broadcast(filepath))
        self.barrier()  # no rank writes while another still looks at what was there before
        if self._save_distributed_checkpoint:
            if storage_options is not None:
                raise TypeError("storage_options: only checkpoints that are one file (not a folder) have them.")
            self._save_folder(checkpoint, path)
            return
        whole = tree_map(lambda value: _gather(value, self.is_global_zero), checkpoint)
        if self.is_global_zero:
            if _is_folder_of_shards(path):
                shutil.rmtree(path)
            self.checkpoint_io.save_checkpoint(whole, path, storage_options=storage_options)
        self.barrier()

    def _save_folder(self, checkpoint: dict[str, Any], path: Path) -> None:
        if path.is_dir() and any(path.iterdir()) and not _is_folder_of_shards(path):
            raise ValueError(f"Expected an empty folder or an earlier checkpoint to replace; got {str(path)!r}.")
        # The new checkpoint gets its name when it is complete: a run that is killed before leaves the earlier one.
        new = path.with_name(f".{path.name}.new")
        if self.is_global_zero:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
        self.barrier()
        state = {_MODEL: checkpoint.pop("state_dict")}
        state |= {f"{_OPTIMIZER}{i}": each for i, each in enumerate(checkpoint.pop("optimizer_states", []))}
        rest, shards = _without_shards(checkpoint, self.lightning_module.state_dict())
        dcp.save({**state, _SHARDS: shards}, checkpoint_id=new)
        if self.is_global_zero:
            torch.save(rest, new / _META)  # last: a folder without it is no checkpoint
            _replace(path, new)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder of shards or a file with full tensors, saved by any number of ranks."""
        path = Path(self.broadcast(checkpoint_path))
        if path.is_file():
            checkpoint: dict[str, Any] = torch.load(path, map_location=HOST, mmap=True, weights_only=weights_only)
            return _with_shards(checkpoint, checkpoint.pop(_SHARDS, {}))  # which a consolidated folder has
        if not _is_folder_of_shards(path):
            raise ValueError(
                f"Expected the path of a checkpoint: a file, or a folder with {_META} in it; got {str(path)!r}."
            )
        checkpoint = torch.load(path / _META, map_location=HOST, weights_only=weights_only)
        saved = open_checkpoint(path).metadata.state_dict_metadata
        entries = [key.partition(".")[0] for key in saved]
        names = dict.fromkeys(key.removeprefix(f"{_MODEL}.") for key in saved if key.startswith(f"{_MODEL}."))
        optimizers = self.optimizers[: len({entry for entry in entries if entry.startswith(_OPTIMIZER)})]
        current = self.lightning_module.state_dict()
        copies = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in current.items() if n in names}
        state = {_MODEL: copies, _SHARDS: _templates(checkpoint[_LAYOUTS], saved, current)}
        state |= {f"{_OPTIMIZER}{i}": optimizer.state_dict() for i, optimizer in enumerate(optimizers)}
        load_with_optimizers(state, path)
        # With None for what the model lacks, load_state_dict names it.
        checkpoint["state_dict"] = names | state[_MODEL]
        if optimizers:
            checkpoint["optimizer_states"] = [state[f"{_OPTIMIZER}{i}"] for i in range(len(optimizers))]
        return _with_shards(checkpoint, state[_SHARDS])


def _without_shards(checkpoint: dict[str, Any], model: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, DTensor]]:
    """Separate the DTensors that callbacks and hooks have added to a checkpoint. A collective.

    A DTensor without the layout of a parameter, such as the norm of a gradient, becomes a full tensor.

    Args:
        checkpoint: The checkpoint without the states of model and optimizers.
        model: The model's state dict.

    Returns:
        The checkpoint with None for DTensors, and these.
    """
    checkpoint = {_ADDED + key if _is_reserved(key) else key: value for key, value in checkpoint.items()}
    by_shape: dict[torch.Size, list[str]] = {}
    for name, value in model.items():
        if isinstance(value, DTensor):
            by_shape.setdefault(value.shape, []).append(name)
    paths, structure = tree_flatten_with_path(checkpoint)
    leaves: list[Any] = []
    shards, layouts = {}, {}
    for i, (path, leaf) in enumerate(paths):
        alike = by_shape.get(leaf.shape, []) if isinstance(leaf, DTensor) else []
        alike = [name for name in alike if same_layout(leaf, model[name])]
        if alike:
            # With a different number of ranks, parameters that share a layout now may not do so.
            layouts[str(i)] = next((name for name in alike if keystr(path).endswith(f"{name}']")), alike[0])
            shards[str(i)] = leaf
        leaves.append(None if alike else _gather(leaf, keep=True))
    return {**tree_unflatten(leaves, structure), _LAYOUTS: layouts}, shards


def _templates(layouts: Mapping[str, str], saved: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors to load the DTensors of callbacks and hooks into: full ones where the model has no such parameter."""
    templates = {}
    for place, name in layouts.items():
        stored, like = saved[f"{_SHARDS}.{place}"], model.get(name)
        if isinstance(like, DTensor) and like.shape == stored.size:
            templates[place] = torch.empty_like(like, dtype=stored.properties.dtype)
        else:
            templates[place] = torch.empty(stored.size, dtype=stored.properties.dtype)
    return templates


def _with_shards(checkpoint: dict[str, Any], shards: Mapping[str, Any]) -> dict[str, Any]:
    """Undo :func:`_without_shards`."""
    if checkpoint.pop(_LAYOUTS, None) is None:
        return checkpoint  # a file that never was a folder
    states = {key: checkpoint.pop(key) for key in ("state_dict", "optimizer_states") if key in checkpoint}
    leaves, structure = tree_flatten(checkpoint)
    for place, value in shards.items():
        leaves[int(place)] = value
    rest = tree_unflatten(leaves, structure)
    return {key.removeprefix(_ADDED): value for key, value in rest.items()} | states


def _is_reserved(key: str) -> bool:
    return key == _MODEL or key.startswith((_OPTIMIZER, _ADDED))


def _check_callbacks(callbacks: list[Any]) -> None:
    for callback in callbacks:
        if any(base.__name__ == "StochasticWeightAveraging" for base in type(callback).__mro__):
            raise NotImplementedError(
                "StochasticWeightAveraging copies whole models and does not work on a sharded one. Use the callback "
                "WeightAveraging or EMAWeightAveraging."
            )


def _unshard_layers_by_themselves(module: nn.Module) -> None:
    """Make each call of a layer of ``module`` a forward of the unit around it, as if it were called by the model's."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            _unshard_layers_by_themselves(child)
        elif any(True for _ in child.parameters()):
            register_forward_method(child, "forward")


def average_of_shards(callbacks: list[Any], module: nn.Module) -> None:
    """Make WeightAveraging callbacks average shards instead of the full copy of the model that they have made.

    Args:
        callbacks: The callbacks of the Trainer.
        module: The sharded module.
    """
    mains = dict(module.named_parameters(remove_duplicate=False))
    for callback in callbacks:
        average = getattr(callback, "_average_model", None)
        if average is None:
            continue
        for path, owner in average.module.named_modules():
            for name in owner._parameters:
                main = mains.get(f"{path}.{name}" if path else name)
                if main is not None and not isinstance(owner._parameters[name], DTensor):
                    owner._parameters[name] = nn.Parameter(main.detach().clone(), requires_grad=False)


def _gather(value: Any, keep: bool) -> Any:
    """The full tensor of a DTensor, on the CPU, or None on ranks that do not keep it. Other values as they are."""
    if not isinstance(value, DTensor):
        return value
    whole = value.full_tensor()
    return whole.cpu() if keep else None


def _replace(path: Path, new: Path) -> None:
    """Give a folder the name of an earlier checkpoint, which is removed afterwards."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.is_file():
        path.unlink()
    elif path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _is_folder_of_shards(path: Path) -> bool:
    return (path / _META).is_file()
