"""Packing: few rows, quickly, the same each time."""

import numpy as np
import pytest

from ndtrain.data.order import RowOrder
from ndtrain.data.pack import pack
from ndtrain.errors import DataError


def rows_of(lengths: list[int], capacity: int) -> list[list[int]]:
    packing = pack(lengths, capacity)
    return [packing.documents(row).tolist() for row in range(len(packing))]


def test_the_fullest_row_with_room_is_taken() -> None:
    """7 and 6 open rows; 3 fits only beside 7 or 6 and takes the fuller; 4 the other."""
    assert rows_of([6, 4, 7, 3], 10) == [[2, 3], [0, 1]]


def test_equal_lengths_keep_their_order() -> None:
    assert rows_of([5, 5, 5], 10) == [[0, 1], [2]]


def test_nothing_to_pack() -> None:
    assert rows_of([], 10) == []


def test_a_document_of_the_whole_row() -> None:
    assert rows_of([10, 10], 10) == [[0], [1]]


def test_too_long_is_an_error() -> None:
    with pytest.raises(DataError, match="a document of 11 tokens does not fit into a row of 10"):
        pack([3, 11], 10)


def instruction_lengths(count: int) -> np.ndarray:
    """Lengths spread as those of instruction data are: log-normal, about 200 tokens a row."""
    drawn = np.random.default_rng(0).lognormal(5.1, 0.75, count)
    return np.clip(drawn, 30, 2000).astype(np.int32)


def test_a_hundred_thousand_documents() -> None:
    lengths = instruction_lengths(100_000)
    packing = pack(lengths, 4096)
    assert lengths.sum() / (len(packing) * 4096) >= 0.995


def test_a_thousand_documents_need_at_most_one_row_more_than_their_tokens() -> None:
    lengths = instruction_lengths(999)
    assert len(pack(lengths, 4096)) <= -(-int(lengths.sum()) // 4096) + 1


def test_neighbours_change_from_epoch_to_epoch() -> None:
    order = RowOrder(
        np.full(64, 5, dtype=np.int32), seed=1, shuffle=True, packed=True, sequence_len=10
    )
    pairs = [
        {frozenset(order.epoch(epoch).documents(row).tolist()) for row in range(32)}
        for epoch in range(2)
    ]
    assert len(pairs[0]) == len(pairs[1]) == 32
    assert len(pairs[0] & pairs[1]) < 8
