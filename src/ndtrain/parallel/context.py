"""Context parallelism: which tokens of a row a rank holds, and how ranks exchange them.

Two methods. Ulysses (Jacobs et al. 2023) trades heads for tokens around the attention kernel: each
rank attends over whole rows with a part of the heads. All-gather collects the keys and values of
whole rows and attends with the rank's own queries; the rows are cut into 2 x cp pieces of which
rank i takes pieces i and 2 x cp - 1 - i, so that each has the same share of a causal triangle.

Shape letters: B rows, S tokens of a whole row, L local tokens, H heads, D head features.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import BlockMask

from ndtrain.data.batch import IGNORED, MicroBatch
from ndtrain.parallel.blocks import build_block_mask
from ndtrain.parallel.collectives import exchange, gather_parts
from ndtrain.parallel.segments import Segments, build_segments
from ndtrain.plan.plan import row_multiple


@dataclass(frozen=True)
class SequenceSplit:
    """How rows are shared out over the ranks of one cp group.

    Attributes:
        method: `none`, `ulysses` or `allgather`.
        group: the ranks that share a row; None when there is only one.
        slices: tp ranks that share a rank's tokens where nothing is split by features.
    """

    method: str = "none"
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    slices: int = 1

    @property
    def row_multiple(self) -> int:
        """Rows are padded to a multiple of this many tokens."""
        return row_multiple(self.size, self.method, self.slices)

    def columns(self, length: int, rank: int, device: torch.device) -> torch.Tensor:
        """Places in a row of `length` tokens that `rank` holds, int64 [L]."""
        places = torch.arange(length, device=device)
        if self.method == "allgather":
            pieces = places.chunk(2 * self.size)
            return torch.cat([pieces[rank], pieces[2 * self.size - 1 - rank]])
        return places.chunk(self.size)[rank]


@dataclass(frozen=True)
class AttentionRows:
    """Where the tokens of one micro-batch stand, for masks; handed to the attention function.

    Attributes:
        split: how rows are shared out.
        query_columns: place in the row of each query that attention sees [Q].
        key_columns: the same of each key [K].
        query_documents: document of each query [B, Q].
        key_documents: document of each key [B, K].
        single_document: all trained tokens stand in the first document of their row.
        segments: the documents for kernels of variable length; None where a mask is used.
        blocks: per window who sees whom, for kernels that read blocks; empty elsewhere.
    """

    split: SequenceSplit
    query_columns: torch.Tensor
    key_columns: torch.Tensor
    query_documents: torch.Tensor
    key_documents: torch.Tensor
    single_document: bool
    segments: Segments | None = None
    blocks: Mapping[int | None, BlockMask] = field(default_factory=dict, repr=False)
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def num_rows(self) -> int:
        """B."""
        return self.query_documents.shape[0]

    def to(self, device: torch.device) -> "AttentionRows":
        """The same rows on `device`."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "AttentionRows":
        """The same rows in host memory that a device can copy from directly."""
        return self._mapped(torch.Tensor.pin_memory)

    def _mapped(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "AttentionRows":
        return AttentionRows(
            split=self.split,
            query_columns=move(self.query_columns),
            key_columns=move(self.key_columns),
            query_documents=move(self.query_documents),
            key_documents=move(self.key_documents),
            single_document=self.single_document,
            segments=None if self.segments is None else self.segments.mapped(move),
        )

    def with_blocks(self, windows: Iterable[int | None]) -> "AttentionRows":
        """The same rows with block masks on their device; a window as long as a row is none."""
        longest = len(self.key_columns)
        wanted = {None if window is None or window >= longest else window for window in windows}
        places = self.query_columns, self.key_columns, self.query_documents, self.key_documents
        return replace(self, blocks={one: build_block_mask(*places, one) for one in wanted})

    def mask(self, window: int | None) -> torch.Tensor:
        """Who sees whom, bool [B, 1, Q, K]: same document, not later, within the window."""
        if torch.compiler.is_compiling():
            # a block that is computed again must be the graph it was: it may not find more here
            return self._build_mask(window)
        if window not in self._masks:
            self._masks[window] = self._build_mask(window)
        return self._masks[window]

    def _build_mask(self, window: int | None) -> torch.Tensor:
        distance = self.query_columns[:, None] - self.key_columns[None, :]
        near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        same = self.query_documents[:, :, None] == self.key_documents[:, None, :]
        return (near[None] & same)[:, None]


def split_rows(
    batch: MicroBatch, split: SequenceSplit, *, segmented: bool = False
) -> tuple[MicroBatch, AttentionRows]:
    """This rank's part of a micro-batch, and what attention must know about the whole.

    Args:
        batch: whole rows on the host; their length must be a multiple of `split.row_multiple`.
        split: how rows are shared out.
        segmented: describe the documents for kernels of variable length too.
    """
    documents, device = batch.documents, batch.documents.device
    length = documents.shape[1]
    # without a trained token past the first document, plain causality already hides all there is
    single = not bool(((documents > 0) & (batch.targets != IGNORED)).any())
    if split.size == 1:
        columns = torch.arange(length, device=device)
        segments = build_segments(documents, columns, columns, documents) if segmented else None
        return batch, AttentionRows(split, columns, columns, documents, documents, single, segments)
    assert length % split.row_multiple == 0, "rows are padded to what the split needs"
    own = split.columns(length, split.rank, device)
    part = MicroBatch(
        input_ids=batch.input_ids[:, own],
        targets=batch.targets[:, own],
        positions=batch.positions[:, own],
        documents=documents[:, own],
        row_ids=batch.row_ids,
    )
    gathered = torch.cat([split.columns(length, rank, device) for rank in range(split.size)])
    queries = gathered if split.method == "ulysses" else own
    seen = documents[:, queries]
    segments = build_segments(seen, queries, gathered, documents) if segmented else None
    rows = AttentionRows(split, queries, gathered, seen, documents[:, gathered], single, segments)
    return part, rows


def to_whole_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, split: SequenceSplit
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give attention the tokens it needs.

    Args:
        query: local queries [B, H, L, D].
        key: local keys, with as many or fewer heads.
        value: local values.
        split: how rows are shared out.

    Returns:
        Ulysses: whole rows of a part of the heads. All-gather: own queries, whole keys and values.
    """
    if split.group is None:
        return query, key, value
    if split.method == "allgather":
        # gradients are summed in fp32: each rank adds its share of the same keys' gradient
        gather = partial(gather_parts, dim=-2, group=split.group, sum_in=torch.float32)
        if key.shape == value.shape:
            key, value = gather(torch.stack([key, value]))
            return query, key, value
        return query, gather(key), gather(value)
    return _exchange_heads(query, key, value, split)


def _exchange_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, split: SequenceSplit
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One all-to-all for queries, keys and values together."""
    assert split.group is not None
    heads = [tensor.shape[1] // split.size for tensor in (query, key, value)]
    if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        swapped = (exchange(tensor, 1, 2, split.group) for tensor in (query, key, value))
        return tuple(swapped)  # type: ignore[return-value]
    fused = torch.cat(
        [
            part
            for parts in zip(
                *(tensor.chunk(split.size, 1) for tensor in (query, key, value)), strict=True
            )
            for part in parts
        ],
        1,
    )
    whole = exchange(fused, 1, 2, split.group)
    query, key, value = torch.split(whole, heads, 1)
    return query, key, value


def from_whole_rows(output: torch.Tensor, split: SequenceSplit) -> torch.Tensor:
    """Attention's output [B, H, Q, D] back to this rank's tokens and all its heads."""
    if split.group is None or split.method == "allgather":
        return output
    return exchange(output, 2, 1, split.group)
