"""What the prepared rows say of a run's size."""

import pytest

from ndtrain.data.report import DataReport
from ndtrain.recipe.schema import Recipe
from ndtrain.train.row_lengths import row_lengths


def report(lengths):
    bins = {}
    for length in lengths:
        top = 8
        while top < length:
            top *= 2
        bins[top] = bins.get(top, 0) + 1
    return DataReport(
        sources=(),
        train_rows=len(lengths),
        eval_rows={},
        tokens=sum(lengths),
        trained_tokens=sum(lengths),
        longest=max(lengths),
        lengths=tuple(sorted(bins.items())),
    )


def recipe(**keys):
    return Recipe(base_model="m", learning_rate=1e-4, sequence_len=1024, **keys)


def test_rows_that_are_not_packed_are_as_long_as_they_are():
    found = row_lengths(report([100, 300]), recipe())

    assert (found.longest, found.mean, found.document) == (300, 200, None)


def test_packed_rows_are_full_and_hold_documents():
    found = row_lengths(report([200] * 10), recipe(sample_packing=True))

    assert (found.longest, found.mean) == (1024, 1024)
    assert found.document == pytest.approx(200)


def test_padded_rows_attend_to_their_document_only():
    found = row_lengths(report([200] * 10), recipe(pad_to_sequence_len=True))

    assert (found.longest, found.mean) == (1024, 1024)
    assert found.document == pytest.approx(200)


def test_long_documents_weigh_more():
    found = row_lengths(report([96] * 6 + [768]), recipe(sample_packing=True))

    # sum of squares over sum: (6 x 96² + 768²) / (6 x 96 + 768)
    assert found.document == pytest.approx((6 * 96**2 + 768**2) / (6 * 96 + 768))
