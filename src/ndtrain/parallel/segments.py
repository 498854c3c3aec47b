"""Packed documents as runs of queries and the keys they see: what variable-length kernels read.

A run is a stretch of one document's tokens that a rank holds. Its keys are the document from its
start to the run's end, so that a causal kernel aligned at the ends hides exactly what lies ahead.

Letters: B rows, Q queries and K keys of a row, N runs.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

_FEWEST_RUNS = 16
_SHORTEST = 128


@dataclass(frozen=True)
class Segments:
    """Runs over the flattened rows; numbers are rounded up so that compiled code sees few shapes.

    Attributes:
        query_starts: first query of each run, and the end, int32 [N + 1].
        key_starts: first key of each run, and the end, int32 [N + 1].
        longest_query: upper bound of a run's queries.
        longest_key: upper bound of a run's keys.
        key_places: place of each run's keys among the flattened keys [B x K]; None when they
            are the flattened keys as they stand.
    """

    query_starts: torch.Tensor
    key_starts: torch.Tensor
    longest_query: int
    longest_key: int
    key_places: torch.Tensor | None = None

    def mapped(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Segments":
        """The same runs with every tensor moved."""
        return replace(
            self,
            query_starts=move(self.query_starts),
            key_starts=move(self.key_starts),
            key_places=None if self.key_places is None else move(self.key_places),
        )


def _rounded(length: int) -> int:
    return max(_SHORTEST, 1 << (length - 1).bit_length())


def _starts(lengths: list[int]) -> torch.Tensor:
    runs = max(_FEWEST_RUNS, 1 << (len(lengths) - 1).bit_length())
    ends = np.cumsum([0, *lengths] + [0] * (runs - len(lengths)))
    return torch.from_numpy(ends.astype(np.int32))


def build_segments(
    query_documents: torch.Tensor,
    query_columns: torch.Tensor,
    key_columns: torch.Tensor,
    documents: torch.Tensor,
) -> Segments:
    """Find the runs of some rows; on the host.

    Args:
        query_documents: document of each query [B, Q].
        query_columns: place in the row of each query [Q], ascending within each piece.
        key_columns: place in the row of each key [K], in the order attention gets them.
        documents: document of each token of the whole row, in row order [B, K].
    """
    columns, whole = query_columns.numpy(), documents.numpy()
    num_keys = len(key_columns)
    places = np.empty(num_keys, dtype=np.int64)
    places[key_columns.numpy()] = np.arange(num_keys)
    in_order = num_keys == len(columns) and bool((places == np.arange(num_keys)).all())
    query_lengths: list[int] = []
    key_lengths: list[int] = []
    key_places: list[np.ndarray] = []
    for row, own in enumerate(query_documents.numpy()):
        cuts = np.flatnonzero((own[1:] != own[:-1]) | (columns[1:] != columns[:-1] + 1)) + 1
        edges = [0, *cuts.tolist(), len(own)]
        for start, end in itertools.pairwise(edges):
            first = int(np.searchsorted(whole[row], own[start]))
            last = int(columns[end - 1]) + 1
            query_lengths.append(end - start)
            key_lengths.append(last - first)
            if not in_order:
                key_places.append(places[first:last] + row * num_keys)
    return Segments(
        query_starts=_starts(query_lengths),
        key_starts=_starts(key_lengths),
        longest_query=min(_rounded(max(query_lengths)), _rounded(len(columns))),
        longest_key=min(_rounded(max(key_lengths)), _rounded(num_keys)),
        key_places=None if in_order else torch.from_numpy(np.concatenate(key_places)),
    )
