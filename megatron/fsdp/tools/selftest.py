"""Tries the engine on the machines that will train with it. Needs no extra; about a minute.

    torchrun --nproc-per-node 8 -m megatron.fsdp.selftest [--out selftest.txt] [--folder SHARED]

Every strategy trains a small model, and is compared with torch's DDP on the same data. A checkpoint is saved, and
loaded with a different strategy. On GPUs, buffers are registered with NCCL and a step is captured in a CUDA graph.
A line is printed for each check, then one verdict. The file for a report has the versions, the devices and all errors.

Exit codes: 0 everything passed; 1 something failed, or hung.
"""

import argparse
import contextlib
import faulthandler
import functools
import math
import os
import platform
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp.api.fully_shard import fully_shard
from megatron.fsdp.comm.backends import local_device
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.sharding.strategy import INNER
from megatron.fsdp.tools.versions import versions

STEPS, VOCABULARY, TOKENS = 4, 96, 33
# Relative differences from DDP. Sums over ranks are taken in a different order; bf16 has 8 bits.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class Skip(Exception):
    """A check that these machines cannot run."""


class Outcome(NamedTuple):
    """The result of a check."""

    state: str  # "ok", "skipped" or "FAILED"
    name: str
    detail: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.state:8}{self.name:42}{self.detail}  ({self.seconds:.1f} s)"


class Block(nn.Module):
    """A residual block, which is a unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the input."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Machine:
    """This rank, and what all checks use."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.on_gpu = torch.cuda.is_available() and not options.cpu
        self.device = local_device("cuda" if self.on_gpu else "cpu")
        if "RANK" not in os.environ:
            os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
        backend = "cpu:gloo,cuda:nccl" if self.on_gpu else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=options.limit))
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.width = 1024 if self.on_gpu else 48
        self.folder = options.folder
        places: list[str] = [""] * self.ranks
        dist.all_gather_object(places, f"{socket.gethostname()} {_device_name(self.device)}")
        self.places = places

    def model(self) -> nn.Module:
        """The same weights on every rank."""
        torch.manual_seed(1)
        blocks = (Block(self.width) for _ in range(4))
        return nn.Sequential(nn.Embedding(VOCABULARY, self.width), *blocks, nn.Linear(self.width, VOCABULARY)).to(
            self.device
        )

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """The loss of this rank's tokens."""
        draw = torch.Generator().manual_seed(1000 * step + self.rank)
        tokens = (torch.randint(VOCABULARY, (4, 1), generator=draw) + 5 * torch.arange(TOKENS)) % VOCABULARY
        tokens = tokens.to(self.device)
        logits = model(tokens[:, :-1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def mean(self, loss: torch.Tensor) -> float:
        """The mean over all ranks."""
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.ranks

    @functools.cached_property
    def reference(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Losses, norms and the last weights of torch's DDP in fp32."""
        net = self.model()
        ddp = nn.parallel.DistributedDataParallel(net)
        return self.train(ddp, _optimizer(net)), {name: p.detach() for name, p in net.named_parameters()}

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS), micro_batches: int = 1
    ) -> list[float]:
        """Train, and return the mean loss and the gradients' norm of every step. Every second step clips."""
        numbers = []
        for step in steps:
            for number in range(micro_batches):
                last = number == micro_batches - 1
                with contextlib.nullcontext() if last else model.no_sync():  # type: ignore[operator]
                    loss = self.loss(model, step)
                    (loss / micro_batches).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 if step % 2 else math.inf)
            optimizer.step()
            optimizer.zero_grad()
            numbers += [self.mean(loss), norm.item()]
        return numbers


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # A large epsilon: Adam divides by it where a gradient is a rounding error.
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3)


def _sharded(machine: Machine, dtype: torch.dtype = torch.float32, **arguments: Any) -> tuple[Any, Any]:
    net = machine.model().to(dtype)
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    arguments = {"zero_dp_strategy": "optim_grads_params", **arguments}
    return fully_shard(net, _optimizer(net), fsdp_unit_modules=[Block], mixed_precision_policy=policy, **arguments)


# Checks ------------------------------------------------------------------------------------------------------------


def collectives(machine: Machine) -> str:
    """Sums and gathers of numbers whose result is known."""
    for size in (1, 1000, 2**20):
        ranks = torch.arange(machine.ranks, device=machine.device, dtype=torch.float32)
        own = torch.full((size,), float(machine.rank), device=machine.device)
        gathered = torch.empty(machine.ranks * size, device=machine.device)
        dist.all_gather_into_tensor(gathered, own)
        _expect(torch.equal(gathered, ranks.repeat_interleave(size)), f"all-gather of {size} elements")
        reduced = torch.empty(size, device=machine.device)
        dist.reduce_scatter_tensor(reduced, gathered)
        _expect(bool((reduced == machine.rank * machine.ranks).all()), f"reduce-scatter of {size} elements")
        dist.all_reduce(own)
        _expect(bool((own == ranks.sum()).all()), f"all-reduce of {size} elements")
    return "all-gather, reduce-scatter and all-reduce are right"


def training(machine: Machine, dtype: torch.dtype = torch.float32, micro_batches: int = 1, **arguments: Any) -> str:
    """Train, and compare losses and weights with those of DDP in fp32."""
    model, optimizer = _sharded(machine, dtype, **arguments)
    wanted, weights = machine.reference
    numbers = _near(machine.train(model, optimizer, micro_batches=micro_batches), wanted, dtype)
    if dtype is not torch.float32:
        return f"losses and norms within {numbers:.0e} of DDP's in fp32"
    furthest = 0.0
    for name, parameter in model.named_parameters():
        want, got = weights[name.removeprefix("module.")], parameter.full_tensor().to(machine.device)
        apart = ((got - want).abs().max() / want.abs().max().clamp(min=1e-2)).item()
        _expect(apart <= TOLERANCES[dtype], f"{name} is {apart:.1e} from DDP's")
        furthest = max(furthest, apart)
    return f"losses and norms within {numbers:.0e}, weights within {furthest:.0e} of DDP's"


def _near(got: list[float], wanted: list[float], dtype: torch.dtype = torch.float32) -> float:
    apart = max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))
    _expect(apart <= TOLERANCES[dtype], f"losses and norms {got}; expected {wanted}")
    return apart


def hsdp(machine: Machine, outer: str) -> str:
    """Two replicas, or shards of them."""
    if machine.ranks < 4 or machine.ranks % 2:
        raise Skip("needs an even number of ranks, at least 4")
    shape = (2, machine.ranks // 2)
    mesh = init_device_mesh(machine.device.type, shape, mesh_dim_names=("replicas", "shards"))
    axes: dict[str, Any] = {"device_mesh": mesh, "dp_shard_dim": "shards", "dp_outer_dim": "replicas"}
    return training(machine, outer_dp_sharding_strategy=outer, **axes)


def checkpoint(machine: Machine) -> str:
    """Save, and go on from the files with a different strategy: as if the run had not ended."""
    with _shared_folder(machine) as folder:
        model, optimizer = _sharded(machine)
        machine.train(model, optimizer, range(2))
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
        kept = {name: p.full_tensor() for name, p in model.named_parameters()}
        expected = machine.train(model, optimizer, range(2, STEPS))
        model, optimizer = _sharded(machine, zero_dp_strategy="optim")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for name, parameter in model.named_parameters():
            _expect(torch.equal(parameter.full_tensor(), kept[name]), f"{name} is not what was saved")
        apart = _near(machine.train(model, optimizer, range(2, STEPS)), expected)
    return f"saved by ZeRO-3, loaded by ZeRO-1; losses within {apart:.0e} of a run that went on"


@contextlib.contextmanager
def _shared_folder(machine: Machine) -> Iterator[str]:
    """A new folder that all ranks see."""
    made = [tempfile.mkdtemp(prefix="selftest-", dir=machine.folder) if machine.rank == 0 else ""]
    dist.broadcast_object_list(made)
    try:
        seen: list[bool] = [False] * machine.ranks
        dist.all_gather_object(seen, Path(made[0]).is_dir())
        if not all(seen):
            raise Skip(f"not all ranks see {made[0]}: give a folder that they share, with --folder")
        yield made[0]
    finally:
        dist.barrier()
        if machine.rank == 0:
            shutil.rmtree(made[0])


def on_gpu(machine: Machine, **arguments: Any) -> str:
    """Training with what only a GPU has."""
    if not machine.on_gpu:
        raise Skip("needs a GPU")
    return training(machine, **arguments)


def speed(machine: Machine) -> str:
    """The time of a step against DDP's, in turns."""
    net = machine.model()
    ddp = nn.parallel.DistributedDataParallel(net), _optimizer(net)
    seconds: dict[str, list[float]] = {"DDP": [], "ZeRO-3": []}
    both = {"DDP": ddp, "ZeRO-3": _sharded(machine)}
    for turn in range(8):
        for name, (model, optimizer) in both.items():
            dist.barrier()
            start = time.perf_counter()
            machine.train(model, optimizer, range(1))
            seconds[name] += [time.perf_counter() - start] if turn > 1 else []
    medians = {name: sorted(times)[len(times) // 2] for name, times in seconds.items()}
    return ", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in medians.items()) + " per step of a small model"


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def checks() -> dict[str, Callable[[Machine], str]]:
    """All checks by name, in their order."""
    of = functools.partial
    strategies = {f"ZeRO-{number}, {name}": name for number, name in enumerate(INNER)}
    return {
        "collectives": collectives,
        **{f"{title}, fp32": of(training, zero_dp_strategy=name) for title, name in strategies.items()},
        **{
            f"{title}, bf16": of(training, dtype=torch.bfloat16, zero_dp_strategy=name)
            for title, name in strategies.items()
        },
        "ZeRO-3 with gradient accumulation": of(training, micro_batches=2),
        "ZeRO-3 with double buffer": of(training, fsdp_double_buffer=True),
        "ZeRO-3 with optimizer in host memory": of(training, offload_optimizer=True),
        "ZeRO-3 without overlap": of(training, overlap_grad_reduce=False, overlap_param_gather=False),
        "HSDP": of(hsdp, outer="no_shard"),
        "hybrid FSDP": of(hsdp, outer="optim"),
        "checkpoint": checkpoint,
        "buffers registered with NCCL": of(on_gpu, nccl_ub=True, fsdp_double_buffer=True),
        "CUDA graphs": of(on_gpu, cuda_graph_mode=True, fsdp_double_buffer=True),
        "speed": speed,
    }


# Running them ------------------------------------------------------------------------------------------------------


class Watch:
    """Ends the process if a check hangs, or if it failed on another rank and this one waits for it.

    Args:
        limit: Seconds that a check may take.
        hung: Called with a message before the process ends.
    """

    def __init__(self, limit: float, hung: Callable[[str], None]) -> None:
        self._limit, self._hung = limit, hung
        # A client that waits for keys keeps its other users waiting.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store, self._watching = store, store.clone()
        self._number, self._since, self._name = -1, 0.0, ""
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, number: int, name: str) -> None:
        """A check begins."""
        self._number, self._since, self._name = number, time.monotonic(), name

    def end(self, error: str) -> str:
        """A check has ended on this rank. Waits for the others; returns the first error of any rank."""
        me, check = dist.get_rank(), f"selftest/{self._number}"
        if error:
            self._store.compare_set(f"{check}/failed", "", f"rank {me}: {error}")
        self._store.set(f"{check}/{me}", "")
        # If a thousand ranks read each other's keys, the store would answer a million times.
        if self._store.add(f"{check}/ended", 1) == dist.get_world_size():
            self._store.set(f"{check}/over", "")
        self._store.wait([f"{check}/over"], timedelta(seconds=2 * self._limit))
        self._number = -1
        return self._store.get(f"{check}/failed").decode() if self._store.check([f"{check}/failed"]) else ""

    def _watch(self) -> None:
        failed = 0.0
        while True:
            time.sleep(0.5)
            number, now = self._number, time.monotonic()
            if number < 0:
                failed = 0.0
                continue
            late = now - self._since > self._limit
            if not failed and self._watching.check([f"selftest/{number}/failed"]):
                failed = now
            if number == self._number and (late or failed and now - failed > 5):
                # This rank may have ended, and wait for another.
                ranks = range(dist.get_world_size())
                absent = [rank for rank in ranks if not self._watching.check([f"selftest/{number}/{rank}"])]
                slow = absent[0] if absent else dist.get_rank()
                message = f"rank {slow}: {self._name} did not end within {self._limit:.0f} s"
                if failed:
                    message = self._watching.get(f"selftest/{number}/failed").decode()
                self._watching.set(f"selftest/{number}/failed", message)
                self._hung(message)


def main() -> None:
    """Run all checks. Exits with 0 or 1."""
    parser = argparse.ArgumentParser(
        prog="megatron.fsdp.selftest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("selftest.txt"), help="the file to attach (%(default)s)")
    parser.add_argument("--folder", help="a folder that all ranks share, for a checkpoint (or the system's temporary)")
    parser.add_argument("--limit", type=float, default=90, help="seconds that a check may take (%(default)s)")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    sys.exit(run(parser.parse_args(), checks()))


def run(options: argparse.Namespace, chosen: dict[str, Callable[[Machine], str]]) -> int:
    """Run checks on this rank. Returns the exit code."""
    machine = Machine(options)
    found: list[Outcome] = []
    errors: list[str] = []

    def hung(message: str) -> None:
        if machine.rank == 0:
            seconds = time.monotonic() - watch._since
            found.append(Outcome("FAILED", watch._name, message.splitlines()[-1], seconds))
            print(found[-1], flush=True)
            _finish(machine, options.out, found, [*errors, f"{watch._name}\n{message}"])
        else:
            time.sleep(10)  # the launcher ends all ranks when one ends, and rank 0 has to write the file
        faulthandler.dump_traceback(file=sys.stderr)
        os._exit(1)

    watch = Watch(options.limit, hung)
    for number, (name, check) in enumerate(chosen.items()):
        watch.begin(number, name)
        state, detail, error = "ok", "", ""
        start = time.monotonic()
        try:
            detail = check(machine)
        except Skip as reason:
            state, detail = "skipped", str(reason)
        except Exception:  # noqa: BLE001 - any error is the result
            error = traceback.format_exc()
        error = watch.end(error)
        if error:
            state, detail = "FAILED", error.strip().splitlines()[-1]
            errors.append(f"{name}\n{error}")
        found.append(Outcome(state, name, detail, time.monotonic() - start))
        if machine.rank == 0:
            print(found[-1], flush=True)
    failed = _finish(machine, options.out, found, errors) if machine.rank == 0 else bool(errors)
    dist.destroy_process_group()
    return int(failed)


def _finish(machine: Machine, out: Path, found: list[Outcome], errors: list[str]) -> bool:
    """Write the file and print the verdict. Returns whether a check failed."""
    failed = [each.name for each in found if each.state == "FAILED"]
    skipped = sum(each.state == "skipped" for each in found)
    hosts = len({place.split()[0] for place in machine.places})
    where = f"{machine.ranks} ranks on {hosts} {'host' if hosts == 1 else 'hosts'}, {_device_name(machine.device)}"
    passed = len(found) - len(failed) - skipped
    verdict = f"FAILED: {', '.join(failed)}" if failed else f"PASSED: {passed} checks, {skipped} skipped"
    settings = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_NCCL", "CUDA_", "GLOO_"))}
    nccl = {"NCCL": ".".join(map(str, torch.cuda.nccl.version()))} if machine.on_gpu else {}
    facts = {**versions(), **nccl, **settings}
    lines = [f"{verdict} ({where})", "", *(f"{name}: {value}" for name, value in facts.items()), ""]
    lines += [f"rank {rank}: {place}" for rank, place in enumerate(machine.places)]
    lines += ["", *map(str, found), "", *errors]
    out.write_text("\n".join(lines) + "\n")
    print(f"{verdict} ({where}). Details: {out.resolve()}", flush=True)
    if failed:
        print(
            "With MEGATRON_FSDP_SYNCHRONOUS=1 the engine overlaps nothing: run it so as well, and attach both files "
            "to a report.",
            flush=True,
        )
    return bool(failed)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


if __name__ == "__main__":
    main()
