"""Token rows dealt out as optimizer steps; the whole state is one integer, the row position.

Which rows make up a step depends on seed, epoch and position alone. How they are dealt to the
data ranks depends on the mesh, but no number does: losses are sums over the step's rows.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ndtrain.data.batch import IGNORED, MicroBatch, StepBatch
from ndtrain.data.order import RowOrder
from ndtrain.data.pack import Numbers, Packing
from ndtrain.data.prefetch import map_ahead, prefetch
from ndtrain.data.token_rows import TokenRows
from ndtrain.errors import DataError
from ndtrain.plan.plan import BatchPlan

_FILLER = -1
"""Stands for a row without tokens; fills the last step of an epoch."""


class StepBatches:
    """The steps of one data rank.

    Args:
        batch: rows of a micro-batch, micro-batches of a step, and data ranks.
        data_rank: this rank among those that read different rows.
        sequence_len: tokens of a packed row.
        packed: whether several documents share a row.
        row_multiple: every row's length is a multiple of this.
        shuffle: whether each epoch has an order of its own; else the rows keep theirs.
        pad_to: length that every row has at least; None pads to the longest of its micro-batch.
        balance: deal packed rows so that the ranks get equal attention work.
        prefetch_steps: steps assembled ahead of the one in use.
        workers: threads that assemble steps; 0 or 1 is one thread.
        pin_memory: hold batches in memory that a device can copy from directly.

    Attributes:
        rows_per_epoch: rows of an epoch; packed rows when packed.
        steps_per_epoch: optimizer steps of an epoch; the last may be filled with empty rows.

    Raises:
        DataError: there are no rows, or one is too long.
    """

    def __init__(
        self,
        rows: TokenRows,
        *,
        batch: BatchPlan,
        data_rank: int,
        seed: int,
        sequence_len: int,
        packed: bool,
        row_multiple: int = 1,
        shuffle: bool = True,
        pad_to: int | None = None,
        balance: bool = False,
        prefetch_steps: int = 2,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if not len(rows):
            raise DataError("there are no rows to make batches of.")
        self._rows = rows
        self._batch = batch
        self._data_rank = data_rank
        self._multiple = row_multiple
        self._pad_to = pad_to or 0
        self._balance = balance
        self._packed = packed
        self._prefetch_steps = prefetch_steps
        self._workers = workers
        self._pin_memory = pin_memory
        self._order = RowOrder(
            rows.lengths, seed=seed, shuffle=shuffle, packed=packed, sequence_len=sequence_len
        )
        self.rows_per_epoch = self._order.num_rows
        self.steps_per_epoch = -(-self.rows_per_epoch // batch.global_batch)

    def at(self, position: int) -> StepBatch:
        """The step that starts at a row position, counted over all epochs and ranks."""
        epoch, offset = divmod(position, self.rows_per_epoch)
        rows = self._order.epoch(epoch)
        count = min(self._batch.global_batch, self.rows_per_epoch - offset)
        documents = rows.order[rows.starts[offset] : rows.starts[offset + count]]
        dealt = self._deal(rows, offset, count)
        return StepBatch(
            micro=tuple(
                self._assemble(rows, offset, position, places)
                for places in dealt[:, self._data_rank].tolist()
            ),
            num_targets=int(self._rows.target_counts[documents].sum()),
            num_tokens=int(self._rows.lengths[documents].sum()),
            position=position,
            next_position=position + count,
            epoch=(position + count) / self.rows_per_epoch,
        )

    def iterate(self, position: int, steps: int) -> Iterator[StepBatch]:
        """Consecutive steps from a position on; the next ones are assembled meanwhile."""
        positions = self._positions(position, steps)
        if self._workers > 1:
            ahead = self._prefetch_steps
            return map_ahead(self.at, positions, workers=self._workers, ahead=ahead)
        return prefetch(map(self.at, positions), self._prefetch_steps)

    def _positions(self, position: int, steps: int) -> Iterator[int]:
        """Where consecutive steps start; the last of an epoch ends with the epoch."""
        for _ in range(steps):
            yield position
            left = self.rows_per_epoch - position % self.rows_per_epoch
            position += min(self._batch.global_batch, left)

    def _deal(self, rows: Packing, offset: int, count: int) -> Numbers:
        """Places of the step's rows as [micro-batch, data rank, row]; empty places are filled.

        Rows of like work come together, so that little is padded and no rank waits for long.
        """
        plan = self._batch
        places = np.full(plan.global_batch, _FILLER, dtype=np.int64)
        work = np.zeros(count, dtype=np.int64)
        if not self._packed or self._balance:
            for place in range(count):
                lengths = self._rows.lengths[rows.documents(offset + place)].astype(np.int64)
                work[place] = (lengths**2).sum()
        places[:count] = np.argsort(-work, kind="stable")
        dealt = places.reshape(plan.accumulation, plan.micro_batch, plan.data_ranks)
        dealt[:, 1::2] = dealt[:, 1::2, ::-1]  # there and back, so that no rank is always first
        return dealt.transpose(0, 2, 1)

    def _assemble(
        self, rows: Packing, offset: int, position: int, places: Sequence[int]
    ) -> MicroBatch:
        """One micro-batch from the places of its rows in the step."""
        contents = [
            rows.documents(offset + place) if place != _FILLER else np.zeros(0, dtype=np.int64)
            for place in places
        ]
        longest = max(int(self._rows.lengths[documents].sum()) for documents in contents)
        width = _round_up(max(longest, self._pad_to, 1), self._multiple)
        shape = (len(places), width)
        ids = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.empty(shape, dtype=np.int64)
        numbers = np.empty(shape, dtype=np.int64)
        for line, documents in enumerate(contents):
            self._fill(documents, ids[line], targets[line], positions[line], numbers[line])
        row_ids = [position + max(place, 0) for place in places]
        micro = MicroBatch(
            input_ids=torch.from_numpy(ids),
            targets=torch.from_numpy(targets),
            positions=torch.from_numpy(positions),
            documents=torch.from_numpy(numbers),
            row_ids=torch.tensor(row_ids, dtype=torch.int64),
        )
        return _pinned(micro) if self._pin_memory else micro

    def _fill(
        self,
        documents: Numbers,
        ids: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.int64],
    ) -> None:
        """Write documents into one row, one after the other, and padding as a last document."""
        start = 0
        for number, document in enumerate(documents.tolist()):
            tokens, labels = self._rows.row(document)
            stop = start + len(tokens)
            ids[start:stop] = tokens
            targets[start : stop - 1] = labels[1:]
            positions[start:stop] = np.arange(len(tokens))
            numbers[start:stop] = number
            start = stop
        positions[start:] = np.arange(len(ids) - start)
        numbers[start:] = len(documents)


def _round_up(length: int, multiple: int) -> int:
    """The next multiple."""
    return -(-length // multiple) * multiple


def _pinned(micro: MicroBatch) -> MicroBatch:
    """The same rows in page-locked memory."""
    return MicroBatch(*(getattr(micro, name).pin_memory() for name in micro.__dataclass_fields__))
