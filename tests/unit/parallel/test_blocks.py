"""Block masks say the same as the mask of all pairs."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ndtrain.data.batch import MicroBatch
from ndtrain.parallel.blocks import BLOCK
from ndtrain.parallel.context import AttentionRows, SequenceSplit, split_rows


@st.composite
def packed_rows(draw: st.DrawFn) -> torch.Tensor:
    """Documents of two rows of one length, numbered in order."""
    length = draw(st.integers(2, 90)) * 8
    rows = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=6)))
        lengths = torch.tensor([0, *cuts, length]).diff()
        rows.append(torch.repeat_interleave(torch.arange(len(lengths)), lengths))
    return torch.stack(rows)


def rows_of(documents: torch.Tensor, method: str, size: int, rank: int) -> AttentionRows:
    length = documents.shape[1]
    batch = MicroBatch(
        input_ids=torch.zeros_like(documents),
        targets=torch.zeros_like(documents),
        positions=torch.arange(length).expand(2, -1),
        documents=documents,
        row_ids=torch.arange(2),
    )
    return split_rows(batch, SequenceSplit(method, size, rank))[1]


@settings(max_examples=60, deadline=None)
@given(
    packed_rows(),
    st.sampled_from([None, 1, 7, 128, 200]),
    st.sampled_from([("none", 1, 0), ("allgather", 2, 1), ("ulysses", 4, 2)]),
)
def test_blocks_and_their_mask_are_the_mask_of_all_pairs(
    documents: torch.Tensor, window: int | None, split: tuple[str, int, int]
) -> None:
    rows = rows_of(documents, *split)
    (key, blocks), *none_else = rows.with_blocks([window]).blocks.items()
    assert none_else == []
    mask = rows.mask(key)
    num_queries, num_keys = mask.shape[-2:]
    row, _, query, place = torch.meshgrid(
        *(torch.arange(size) for size in mask.shape), indexing="ij"
    )
    assert torch.equal(blocks.mask_mod(row, row, query, place), mask)
    # Listed blocks: a full one hides nothing, one that is not listed shows nothing.
    seen = blocks.to_dense().bool()[:, :1]
    padded = torch.zeros(2, 1, -(-num_queries // BLOCK) * BLOCK, -(-num_keys // BLOCK) * BLOCK)
    padded[:, :, :num_queries, :num_keys] = mask.float()
    by_block = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    any_seen = by_block.amax((-1, -3)).bool()
    assert not (any_seen & ~seen).any()
    for number, row_blocks in enumerate(blocks.full_kv_num_blocks[:, 0]):
        for block, count in enumerate(row_blocks.tolist()):
            for place_block in blocks.full_kv_indices[number, 0, block, :count].tolist():
                first, start = block * BLOCK, place_block * BLOCK
                assert mask[number, 0, first : first + BLOCK, start : start + BLOCK].all()


def test_a_window_as_long_as_the_row_is_none() -> None:
    rows = rows_of(torch.zeros(2, 64, dtype=torch.long), "none", 1, 0)
    assert list(rows.with_blocks([None, 64, 100]).blocks) == [None]
