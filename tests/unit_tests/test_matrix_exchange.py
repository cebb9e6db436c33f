"""Work on full matrices is balanced over their owners, in rounds of limited size."""

import itertools

import pytest

from megatron.fsdp.optim.matrix_exchange import assign_owners, plan_rounds

# Rows and columns of a layer's matrices, with the parts of the fused QKV projection, which are computed apart.
LLAMA_8B = 32 * [[(4096, 4096), (1024, 4096), (1024, 4096)], [(4096, 4096)], [(28672, 4096)], [(4096, 14336)]]
LLAMA_70B = 80 * [[(8192, 8192), (1024, 8192), (1024, 8192)], [(8192, 8192)], [(57344, 8192)], [(8192, 28672)]]


def _work(model: list[list[tuple[int, int]]]) -> list[float]:
    return [float(sum(rows * columns * min(rows, columns) for rows, columns in parts)) for parts in model]


@pytest.mark.parametrize("model", [LLAMA_8B, LLAMA_70B], ids=["8b", "70b"])
@pytest.mark.parametrize("ranks", [8, 16, 32, 64, 128, 256])
def test_no_rank_has_more_than_the_mean_or_one_matrix(model: list[list[tuple[int, int]]], ranks: int) -> None:
    work = _work(model)
    loads = [0.0] * ranks
    for owner, each in zip(assign_owners(work, ranks), work, strict=True):
        loads[owner] += each
    # A matrix is not split, so no assignment is better than the largest one.
    assert max(loads) <= max(1.2 * sum(work) / ranks, max(work))


def test_the_rank_with_the_least_work_takes_the_next_matrix() -> None:
    assert assign_owners([1.0, 5.0, 4.0, 4.0, 2.0], 3) == [2, 0, 1, 2, 1]
    assert assign_owners([2.0, 2.0], 4) == [0, 1]


def test_rounds_have_every_matrix_once_and_respect_the_limit() -> None:
    sizes = [3, 8, 5, 5, 1, 2, 9]
    rounds = plan_rounds([float(size) for size in sizes], sizes, 2, limit=9)
    owners = assign_owners([float(size) for size in sizes], 2)
    assert sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(rounds))) == list(range(7))
    for of_owner in rounds:
        for owner, matrices in enumerate(of_owner):
            assert all(owners[i] == owner for i in matrices)
            assert sum(sizes[i] for i in matrices) <= 9
    # Later rounds are only begun when earlier ones are full.
    assert rounds == [[[6], [1]], [[3, 5, 4], [2, 0]]]
