"""Rows that are tokenised already, and made-up rows."""

from collections.abc import Callable

from ndtrain.data.prepare import Prepared

Piece = tuple[str, bool]
PrepareRows = Callable[..., Prepared]


def test_tokenised_rows(prepare_rows: PrepareRows) -> None:
    rows = [
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 0], "labels": [-100, 6, 7]},
        {"input_ids": [8, 9], "labels": [9, 8]},
        {"input_ids": [1, 2, 3]},
    ]
    train = prepare_rows(rows, None).train
    assert [[part.tolist() for part in train.row(place)] for place in range(3)] == [
        [[5, 6], [-100, 6]],
        [[8, 9], [9, 8]],
        [[1, 2, 3], [1, 2, 3]],
    ]
    assert train.lengths.tolist() == [2, 2, 3]
    assert train.target_counts.tolist() == [1, 1, 2]


def test_synthetic_rows(prepare_file: PrepareRows) -> None:
    entry = {"length": 3, "sequence_length": 8, "min_input_id": 10, "max_input_id": 12, "seed": 1}
    train = prepare_file("synthetic", "_synthetic", entry=entry).train
    assert train.lengths.tolist() == [8, 8, 8]
    assert {token for row in range(3) for token in train.row(row)[0].tolist()} == {10, 11, 12}
