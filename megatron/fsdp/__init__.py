"""Fully sharded data parallelism (FSDP) for any torch model.

Words, used in this package with one meaning each:

* **unit**: a module whose parameters are gathered and released together; the root is the unit of everything that no
  other unit holds.
* **parameter group**: parameters of one unit with equal dtype, ``requires_grad`` and mesh.
* **compute weight**: what forward and backward read, in the model's dtype. **main weight**: what the optimizer
  updates (float32 by default). **main grad**: what it reads. A **shard** is the part of each that a rank owns.
* **gather**: all-gather compute weights. **release**: drop the gathered storage. **reduce**: reduce-scatter (or
  all-reduce) gradients. **resting**: everything sharded, nothing in flight.
* **inner**, **outer**: the ``dp_shard`` and ``dp_outer`` data-parallel axes.
"""

from megatron.fsdp._old_paths import install as _install_old_paths
from megatron.fsdp.api import fully_shard, fully_shard_model, fully_shard_optimizer
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.forward_methods import register_forward_method
from megatron.fsdp.init.deferred import deferred_init
from megatron.fsdp.module import MegatronFSDP
from megatron.fsdp.optim.classes import register_optimizer
from megatron.fsdp.sharding.mesh import FSDPDistributedIndex
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.state.export import save_safetensors
from megatron.fsdp.version import __version__

__all__ = [
    "FSDPConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "__version__",
    "deferred_init",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "register_forward_method",
    "save_safetensors",
    "register_optimizer",
]

_install_old_paths()
