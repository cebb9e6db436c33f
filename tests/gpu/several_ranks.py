"""Several ranks that share one GPU: over gloo, and over NCCL if it agrees to take them for separate hosts."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.gpu.verdict import Setup, Skipped, Verdict, judge
from tests.models import (
    FP32_GRADS,
    STRATEGIES,
    TinyModel,
    adamw,
    assert_same_training,
    batches,
    device,
    main_weights,
    train_sharded,
)
from tests.ranks import DEVICE, RankFailure, RankPool

SECONDS_OF_PROBE = 50.0


def over_gloo(setup: Setup) -> Verdict:
    """Every strategy trains as one process does, on CUDA tensors that gloo exchanges. Values, not overlap."""
    cases: list[tuple[int, str]] = [(ranks, strategy) for ranks in (2, 4) for strategy in STRATEGIES]
    return _run_all(setup, "gloo", _same_training, cases[:2] if setup.dry_run else cases)


def _same_training(strategy: str) -> None:
    assert_same_training(TinyModel(width=64), batches(2, dist.get_world_size()), zero_dp_strategy=strategy)


def probe_nccl(setup: Setup) -> Verdict:
    """Whether NCCL connects two ranks on one device. It is not meant to; ``nccl`` runs only if it does."""
    with _pool("nccl" if setup.on_cuda else "gloo", SECONDS_OF_PROBE) as pool:
        try:
            pool.run(2, _sum)
        except RankFailure as failure:
            print(failure)
            return Verdict("skipped", "NCCL does not connect two ranks on one device", {"error": str(failure)[-3000:]})
    return Verdict("passed", "two ranks on one device sum a tensor")


def _sum() -> None:
    ones = torch.ones(1000, device=device())
    dist.all_reduce(ones)
    assert ones.eq(dist.get_world_size()).all()


def over_nccl(setup: Setup) -> Verdict:
    """Options of NCCL and the strategies train as gloo does, bit by bit where two summands have one order."""
    probe = setup.out / "probe.json"
    found = Verdict.load(probe) if probe.exists() else probe_nccl(setup)
    if found.outcome != "passed":
        raise Skipped(found.line)
    backend = "nccl" if setup.on_cuda else "gloo"
    names = [name for name in VARIANTS if setup.on_cuda or name not in NEEDS_NCCL]
    problems, done = [], 0
    with _pool(backend, setup.seconds / 4) as tested, _pool("gloo", setup.seconds / 4) as reference:
        for ranks, name in itertools.product((2,) if setup.dry_run else (2, 4), names):
            try:
                _compare(ranks, name, tested, reference)
            except (AssertionError, RankFailure) as error:
                problems.append(f"{ranks} ranks, {name}: {str(error)[-1000:]}")
            done += 1
            print(f"{ranks} ranks, {name}: {len(problems)} problems so far", flush=True)
    return judge(problems, f"{done} cases train as over gloo", {"cases": done})


def _compare(ranks: int, name: str, tested: RankPool, reference: RankPool) -> None:
    found = tested.run(ranks, _trained, name)[0]
    # Over gloo, the options of NCCL change nothing that they should change over NCCL.
    expected = reference.run(ranks, _trained, PLAIN.get(name, name))[0]
    bound = 0.0 if ranks == 2 else 1e-5
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def _trained(variant: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = TinyModel(width=64).to(device())
    sharded, _ = train_sharded(model, batches(3, dist.get_world_size()), adamw, **VARIANTS[variant]())
    return main_weights(sharded)


def _hsdp() -> dict[str, Any]:
    mesh = init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    return {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}


def _two_communicators() -> dict[str, Any]:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("dp",))
    return {"device_mesh": mesh, "dp_shard_dim": "dp", "fsdp_group_ag": dist.new_group()}


# By name, the arguments of fully_shard, which ranks make because some are process groups.
VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    **{strategy: lambda strategy=strategy: {"zero_dp_strategy": strategy} for strategy in STRATEGIES},
    "fp32 gradients": lambda: {"mixed_precision_policy": FP32_GRADS},
    "HSDP": _hsdp,
    "two communicators": _two_communicators,
    "average": lambda: {"average_in_collective": True},
    "registered": lambda: {"nccl_ub": True},
    "registered, not symmetric": lambda: {"nccl_ub": True, "disable_symmetric_registration": True},
}
NEEDS_NCCL = ("average", "registered", "registered, not symmetric")
# What these are compared with.
PLAIN = dict.fromkeys(NEEDS_NCCL, "optim_grads_params")


@contextmanager
def _pool(backend: str, seconds: float) -> Iterator[RankPool]:
    pool = RankPool()
    pool.backend, pool.timeout = backend, seconds
    try:
        yield pool
    finally:
        pool.close()


def _run_all(setup: Setup, backend: str, function: Callable[..., None], cases: list[tuple[int, str]]) -> Verdict:
    problems = []
    with _pool(backend, setup.seconds / 3) as pool:
        for ranks, case in cases:
            try:
                pool.run(ranks, function, case)
            except RankFailure as failure:
                problems.append(f"{ranks} ranks, {case}: {str(failure)[-1000:]}")
    return judge(problems, f"{len(cases)} cases train as one process does", {"cases": cases})
