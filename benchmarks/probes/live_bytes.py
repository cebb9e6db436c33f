"""Counts live bytes of tensors over real steps of a small model, by category. Called through ``benchmarks.worker``.

The total is exact: the allocator is counted, in all threads. A second run tells it apart at every operation of the
model: weights and gradients are buffers of the engine, activations what autograd has saved. The rest is temporary
memory and buffers of communication.
"""

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import psutil
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import training
from benchmarks.job import Job
from benchmarks.peers import adamw
from benchmarks.probes.heap import Heap
from benchmarks.zoo import MODELS, Model
from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer

WARM_UP, STEPS = 3, 5


def start(job: dict[str, Any], rank: int, store: str) -> None:
    """Create the process group."""
    training.join(Job.from_json(job), rank, store)


def measure(model: str, zero: int, outer: int) -> dict[str, float]:
    """Train a model of ``benchmarks.zoo``; bytes of this rank."""
    kind = MODELS[model]
    data = kind.batch()
    kind.loss(kind.build(), data).backward()  # kernels allocate scratch memory in their first call and keep it
    gc.collect()
    heap = Heap()
    # The rest of the heap: objects of Python and C++, and memory that gloo and kernels take by malloc.
    others = heap.whole - heap.tensors
    sharded, optimizer = _shard(kind, zero, outer)
    gc.collect()
    found: dict[str, float] = {"built": heap.tensors}
    peaks = []
    for _ in range(WARM_UP + STEPS):
        heap.reset()
        _step(kind, sharded, optimizer, data)
        peaks.append(heap.peak)
    gc.collect()
    categories = _by_category(kind, sharded, optimizer, data, heap)
    found |= {"resting": heap.tensors, "most": max(peaks[WARM_UP:])}
    found |= {"overhead": heap.whole - heap.tensors - others, "resident": psutil.Process().memory_info().rss}
    del sharded, optimizer
    gc.collect()
    return {**found, **categories, "left": heap.tensors}


def _shard(kind: Model, zero: int, outer: int) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    mesh: dict[str, Any] = {}
    if outer > 1:
        names = ("replicas", "shards")
        shape = (outer, torch.distributed.get_world_size() // outer)
        made = init_device_mesh("cpu", shape, mesh_dim_names=names)
        mesh = {"device_mesh": made, "dp_outer_dim": names[0], "dp_shard_dim": names[1]}
    sharded = fully_shard_model(
        kind.build(), fsdp_unit_modules=list(kind.units), zero_dp_strategy=zero, **mesh, **kind.settings
    )
    return sharded, fully_shard_optimizer(adamw(sharded.parameters()))


def _step(kind: Model, sharded: MegatronFSDP, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    kind.loss(sharded, data).backward()
    optimizer.step()
    optimizer.zero_grad()


class _Categories(TorchDispatchMode):
    """Looks at the live bytes of every category after each operation."""

    def __init__(self, sharded: MegatronFSDP, optimizer: torch.optim.Optimizer, heap: Heap) -> None:
        super().__init__()
        self._sharded = sharded
        self._heap = heap
        self._saved: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._optimizer = _bytes(_tensors(optimizer.state))
        self.most: dict[str, int] = {}
        self.at_peak: dict[str, int] = {"total": 0}

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember a tensor that autograd keeps."""
        if type(tensor) is torch.Tensor:
            storage = tensor.untyped_storage()
            self._saved[storage._cdata] = weakref.ref(storage)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.look()
        return result

    def look(self) -> None:
        """Count now."""
        now = self.now()
        self.most = {name: max(count, self.most.get(name, 0)) for name, count in now.items()}
        if now["total"] > self.at_peak["total"]:
            self.at_peak = now

    def now(self) -> dict[str, int]:
        """Live bytes by category."""
        total = self._heap.tensors
        seen: set[int] = set()
        groups = list(self._sharded.engine.groups)
        planes = [plane for group in groups for plane in group.weights.planes]
        resident = [group.weights.main for group in groups]
        resident += [
            t for plane in planes if plane.is_resident for t in (plane.shard, plane.buffer.flat) if t is not None
        ]
        counts = {"shards": _bytes(resident, seen), "optimizer": self._optimizer}
        counts["unsharded units"] = _bytes((plane.buffer.flat for plane in planes), seen)
        buffers = [group.gradients for group in groups]
        kept = [t for b in buffers for t in (b.unreduced, b.for_kernels, b.inner_sum, b.reduced) if t is not None]
        kept += [_local(p.grad) for p in self._sharded.parameters() if p.grad is not None]
        counts["gradients"] = _bytes(kept, seen)
        self._saved = {key: ref for key, ref in self._saved.items() if ref() is not None}
        alive = [storage for ref in self._saved.values() if (storage := ref()) is not None]
        # The storage of freed weights refuses access to its address.
        counts["activations"] = sum(s.nbytes() for s in alive if s.nbytes() and s.data_ptr() not in seen)
        return {**counts, "rest": total - sum(counts.values()), "total": total}


def _by_category(
    kind: Model, sharded: MegatronFSDP, optimizer: torch.optim.Optimizer, data: torch.Tensor, heap: Heap
) -> dict[str, float]:
    counter = _Categories(sharded, optimizer, heap)
    with saved_tensors_hooks(counter.save, lambda tensor: tensor), counter:
        _step(kind, sharded, optimizer, data)
    most = {f"most_{name.replace(' ', '_')}": float(count) for name, count in counter.most.items()}
    return {**{f"at_peak_{name.replace(' ', '_')}": float(count) for name, count in counter.at_peak.items()}, **most}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _tensors(state: Any) -> Iterable[torch.Tensor]:
    for own in state.values():
        yield from (_local(value) for value in own.values() if isinstance(value, torch.Tensor))


def _bytes(tensors: Iterable[torch.Tensor], seen: set[int] | None = None) -> int:
    """Bytes of all storages that are not in ``seen``, to which they are added."""
    seen = set() if seen is None else seen
    count = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            count += storage.nbytes()
    return count
