"""Runs of documents, with a slow kernel in place of the device's: the same result as the mask."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from ndtrain.data.batch import MicroBatch
from ndtrain.model.attention import attention
from ndtrain.parallel.context import AttentionRows, SequenceSplit, split_rows
from ndtrain.parallel.segments import Segments

HEADS, FEATURES = 2, 4


def packed_rows(lengths: list[list[int]]) -> MicroBatch:
    """Rows of documents with the given lengths; every row has the same total."""
    documents = torch.stack(
        [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    )
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ids = torch.arange(documents.numel()).view_as(documents)
    return MicroBatch(ids, ids, positions, documents, torch.arange(len(lengths)))


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def by_bounded_runs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments
) -> torch.Tensor:
    """One dense call a run, causal and aligned at the ends; as long as the kernel was told."""
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    if segments.key_places is not None:
        flat[1:] = [tensor[segments.key_places] for tensor in flat[1:]]
    output = torch.zeros_like(flat[0])
    starts = zip(segments.query_starts.tolist(), segments.query_starts[1:].tolist(), strict=False)
    keys = zip(segments.key_starts.tolist(), segments.key_starts[1:].tolist(), strict=False)
    for (first, end), (first_key, end_key) in zip(starts, keys, strict=True):
        queries, seen = end - first, end_key - first_key
        assert queries <= segments.longest_query
        assert seen <= segments.longest_key
        if not queries:
            continue
        mask = torch.ones(queries, seen, dtype=torch.bool).tril(seen - queries)
        part = functional.scaled_dot_product_attention(
            flat[0][first:end].transpose(0, 1)[None],
            flat[1][first_key:end_key].transpose(0, 1)[None],
            flat[2][first_key:end_key].transpose(0, 1)[None],
            attn_mask=mask,
        )
        output[first:end] = part[0].transpose(0, 1)
    return output.unflatten(0, query.shape[::2][:2]).transpose(1, 2)


LENGTHS = [
    [[24]],
    [[1, 5, 10, 8]],
    [[3, 3, 3, 3, 3, 9], [24], [23, 1]],
    [[1] * 24, [12, 12]],
]


def heads_of(rows: AttentionRows, key_heads: int) -> Heads:
    """Random queries, keys and values."""
    num_rows, num_keys = rows.num_rows, len(rows.key_columns)
    query = torch.randn(num_rows, HEADS, len(rows.query_columns), FEATURES)
    key, value = torch.randn(2, num_rows, key_heads, num_keys, FEATURES)
    return query, key, value


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("method", "size", "rank"),
    [("none", 1, 0), ("ulysses", 2, 1), *(("allgather", 2, rank) for rank in range(2)),
     *(("allgather", 4, rank) for rank in range(4))],
)  # fmt: skip
def test_runs_give_what_the_mask_gives(
    lengths: list[list[int]], method: str, size: int, rank: int
) -> None:
    torch.manual_seed(0)
    _, rows = split_rows(packed_rows(lengths), SequenceSplit(method, size, rank), segmented=True)
    assert rows.segments is not None
    query, key, value = heads_of(rows, HEADS)
    expected = functional.scaled_dot_product_attention(query, key, value, attn_mask=rows.mask(None))
    torch.testing.assert_close(by_bounded_runs(query, key, value, rows.segments), expected)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", [None, 1, 4, 23])
@pytest.mark.parametrize("method", ["none", "allgather"])
def test_a_cpu_reads_runs_with_the_masks_result_and_gradients(
    lengths: list[list[int]], window: int | None, method: str
) -> None:
    size = 1 if method == "none" else 2
    batch, alone = packed_rows(lengths), SequenceSplit(method, size, 0)
    _, masked = split_rows(batch, alone)
    _, by_runs = split_rows(batch, alone, segmented=True)
    parts = heads_of(masked, 1)
    by_runs._masks[window] = torch.zeros(0)  # to read it would fail
    results = []
    for rows in (masked, by_runs):
        inputs = [part.clone().requires_grad_() for part in parts]
        query, key, value = inputs
        output, _ = attention(
            nn.Module(), query, key, value, None, rows=rows, scaling=0.3, sliding_window=window
        )
        (output * torch.arange(output.numel()).view_as(output).sin()).sum().backward()
        results.append([output.detach(), *(part.grad for part in inputs)])
    torch.testing.assert_close(results[1], results[0])


def test_numbers_are_rounded_up_so_that_compiled_code_sees_few_shapes() -> None:
    shapes = set()
    for documents in range(1, 17):
        batch = packed_rows([[64 - documents + 1] + [1] * (documents - 1)])
        _, rows = split_rows(batch, SequenceSplit(), segmented=True)
        assert rows.segments is not None
        shapes.add((len(rows.segments.query_starts), rows.segments.longest_query))
    assert shapes == {(17, 128)}
