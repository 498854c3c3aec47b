"""Which documents make up each row of an epoch: a pure function of seed, epoch and place.

Nothing here knows how many ranks there are, so every mesh reads the same rows in the same order.
Packed rows keep their pattern of lengths in every epoch; which of the documents of equal length
stands where changes, so neighbours differ from epoch to epoch at no cost in fill.
"""

from functools import lru_cache

import numpy as np

from ndtrain.data.pack import Numbers, Packing, pack
from ndtrain.data.tokens import Ids


class RowOrder:
    """The rows of every epoch.

    Attributes:
        num_rows: rows of an epoch, the same in each.
    """

    def __init__(
        self, lengths: Ids, *, seed: int, shuffle: bool, packed: bool, sequence_len: int
    ) -> None:
        self._lengths = lengths
        self._seed = seed
        self._shuffle = shuffle
        self._packing: Packing | None = pack(lengths, sequence_len) if packed else None
        self.num_rows = len(lengths) if self._packing is None else len(self._packing)
        self.epoch = lru_cache(maxsize=2)(self._epoch)

    def _epoch(self, epoch: int) -> Packing:
        """The rows of an epoch, counted from 0; without packing, each holds one document."""
        count = len(self._lengths)
        if self._packing is None:
            order = self._shuffled(epoch, 0, count)
            return Packing(order, np.arange(count + 1, dtype=np.int64))
        packing = self._packing
        order = packing.order
        if self._shuffle:
            descending = np.argsort(-self._lengths, kind="stable")
            slot_of = np.empty(count, dtype=np.int64)
            slot_of[descending] = np.arange(count)
            tie_break = self._shuffled(epoch, 0, count)
            exchanged = np.lexsort((tie_break, -self._lengths))
            order = exchanged[slot_of[order]]
        rows = self._shuffled(epoch, 1, len(packing))
        sizes = np.diff(packing.starts)[rows]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        within = np.arange(count) - np.repeat(starts[:-1], sizes)
        return Packing(order[np.repeat(packing.starts[:-1][rows], sizes) + within], starts)

    def _shuffled(self, epoch: int, purpose: int, count: int) -> Numbers:
        """A permutation of `count` numbers, or their own order when nothing is shuffled."""
        if not self._shuffle:
            return np.arange(count, dtype=np.int64)
        return np.random.default_rng([self._seed, epoch, purpose]).permutation(count)
