"""The arithmetic of flat buffers: literal offsets, and properties of every layout."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fsdp.layout import Layout, Slot, plan_layout


def test_literal_offsets_of_a_small_group() -> None:
    layout = plan_layout([(3, 5), (7,), (4, 4), (5,)], num_shards=3, alignment=1)
    # 43 elements: 15 for each rank would do, but (4, 4) would then be cut wherever it lies; 16 let it be whole. The
    # first matrix ends before the boundary at 16, the second begins there; the vectors follow and the last is cut.
    assert [slot.offset for slot in layout.slots] == [0, 32, 16, 39]
    assert (layout.shard_numel, layout.numel, layout.padding) == (16, 48, 5)


def test_a_matrix_is_shifted_until_a_boundary_meets_its_rows_and_a_vector_fills_the_gap() -> None:
    layout = plan_layout([(5, 4), (3, 7), (1,)], num_shards=2, alignment=1)
    # 42 elements, 21 each. (3, 7) from 20 on would be cut at 21, inside its first row; from 21 on it is not cut.
    # The vector of one element fills what that leaves.
    assert [slot.offset for slot in layout.slots] == [0, 21, 20]
    assert (layout.shard_numel, layout.padding) == (21, 0)


def test_literal_pieces() -> None:
    layout = Layout((Slot(0, (4, 3)), Slot(12, (5,))), num_shards=2, shard_numel=9)
    first, second = layout.piece(0, 0), layout.piece(0, 1)
    assert (first.start, first.stop, first.row_start, first.shape, first.shard_offset) == (0, 9, 0, (3, 3), 0)
    assert (second.start, second.stop, second.row_start, second.shape, second.shard_offset) == (9, 12, 3, (1, 3), 0)
    nothing, all_of_it = layout.piece(1, 0), layout.piece(1, 1)
    assert (nothing.shape, nothing.stop - nothing.start) == ((0,), 0)
    assert (all_of_it.start, all_of_it.stop, all_of_it.shape, all_of_it.shard_offset) == (0, 5, (5,), 3)


def test_a_cut_inside_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="boundary 7 cuts a row of the slot at 0"):
        Layout((Slot(0, (4, 3)),), num_shards=2, shard_numel=7)


def test_overlapping_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="slots overlap at element 2"):
        Layout((Slot(0, (3,)), Slot(2, (3,))), num_shards=1, shard_numel=8)


def test_a_buffer_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="slots need 9 elements, the buffer has 8"):
        Layout((Slot(0, (9,)),), num_shards=2, shard_numel=4)


SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(shapes=SHAPES, num_shards=st.integers(1, 9), alignment=st.sampled_from([1, 4, 16]))
def test_every_element_is_owned_exactly_once_and_in_place(
    shapes: list[tuple[int, ...]], num_shards: int, alignment: int
) -> None:
    layout = plan_layout(shapes, num_shards, alignment)
    used: set[int] = set()
    for index, shape in enumerate(shapes):
        covered = 0
        for rank in range(num_shards):
            piece = layout.piece(index, rank)
            assert piece.start == covered or piece.stop == piece.start
            covered = max(covered, piece.stop)
            if piece.stop > piece.start:
                assert math.prod(piece.shape) == piece.stop - piece.start
                assert piece.shape[1:] == shape[1:]
                assert 0 <= piece.shard_offset <= layout.shard_numel - (piece.stop - piece.start)
                place = rank * layout.shard_numel + piece.shard_offset
                assert place == layout.slots[index].offset + piece.start
                elements = set(range(place, place + piece.stop - piece.start))
                assert not elements & used
                used |= elements
        assert covered == math.prod(shape)
    assert layout.numel == num_shards * layout.shard_numel
    assert layout.shard_numel % alignment == 0


def test_one_rank_gets_no_padding_but_alignment() -> None:
    assert plan_layout([(5, 7), (3,)], num_shards=1, alignment=1).padding == 0


def test_padding_is_small_for_common_models_where_ranks_own_many_rows() -> None:
    llama3_8b = [(4096,), (6144, 4096), (4096, 4096), (4096,), (28672, 4096), (4096, 14336)]
    gpt2_xl = [(1600,), (4800, 1600), (4800,), (1600, 1600), (1600,), (6400, 1600), (6400,), (1600, 6400), (1600,)]
    for shapes, num_shards in itertools.product((llama3_8b, gpt2_xl), (2, 3, 8)):
        layout = plan_layout(shapes, num_shards)
        assert layout.padding <= 0.002 * layout.numel


def test_planning_is_fast_for_many_ranks() -> None:
    import time

    experts = [(768, 2048), (2048, 768), (1536,)] * 130
    start = time.perf_counter()
    plan_layout(experts, 4096)
    assert time.perf_counter() - start < 1.0
