"""Fully sharded data parallelism (FSDP) for any torch model.

Start with :func:`fully_shard`, or with :func:`fully_shard_model` and :func:`fully_shard_optimizer`. Terms, each used
with one meaning throughout the package:

* **unit**: a module whose parameters are unsharded and resharded together. Everything outside the units belongs to the
  **root** unit.
* **parameter group**: the parameters of one unit that have the same dtype, ``requires_grad`` and mesh. A group has one
  flat buffer for each of the following.
* **compute weights**: what forward and backward read, in the model's dtype. **Main weights**: what the optimizer
  updates, float32 by default. **Main gradients**: what the optimizer reads.
* **shard**: the slice of a group's buffer that one rank holds.
* **unshard**: all-gather a unit's compute weights. **Reshard**: free the gathered memory, keeping the shard.
* **reduce**: reduce-scatter a unit's gradients, or all-reduce them where they are not sharded.
* **sharded**: the state of a unit outside of forward and backward; its modules then have main weights as parameters.
* **inner** and **outer axis**: the mesh dimensions ``dp_shard_dim``, over which parameters are sharded, and
  ``dp_outer_dim``, over which the shards are replicated or sharded again.
"""

from megatron.fsdp.api.ddp_config import DistributedDataParallelConfig
from megatron.fsdp.api.fully_shard import fully_shard, fully_shard_model, fully_shard_optimizer
from megatron.fsdp.api.index import FSDPDistributedIndex
from megatron.fsdp.api.megatron_fsdp import MegatronFSDP
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.forward_methods import register_forward_method
from megatron.fsdp.init.deferred import deferred_init
from megatron.fsdp.model_units import unit_classes
from megatron.fsdp.optim.classes import register_optimizer
from megatron.fsdp.runtime.partition import Outermost
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.state.export import save_safetensors
from megatron.fsdp.version import __version__

__all__ = [
    "DistributedDataParallelConfig",
    "FSDPConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "Outermost",
    "__version__",
    "deferred_init",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "register_forward_method",
    "register_optimizer",
    "save_safetensors",
    "unit_classes",
]
