"""What one optimizer step trains on, as the loop sees it.

Shape letters: B rows of a micro-batch, S tokens of a row.
"""

from dataclasses import dataclass

import torch

IGNORED = -100
"""Target value of a token that is not trained."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward pass of one data rank, whole along the sequence.

    `targets` are already shifted: `targets[b, s]` is the token that follows `input_ids[b, s]` in
    the same document, or `IGNORED`. Padding is a document of its own without targets.

    Attributes:
        input_ids: token ids, int64 [B, S].
        targets: next tokens, int64 [B, S].
        positions: positions that restart at each document, int64 [B, S].
        documents: number of the document each token belongs to, ascending in a row, int64 [B, S].
        row_ids: place of each row in the whole run (mesh-independent; keys dropout), int64 [B].
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor
    row_ids: torch.Tensor

    def pinned(self) -> "MicroBatch":
        """The same rows in host memory that a device can copy from directly."""
        return MicroBatch(*(getattr(self, name).pin_memory() for name in self.__dataclass_fields__))

    def to(self, device: torch.device) -> "MicroBatch":
        """The same rows on `device`; the copy does not block when the source is pinned."""
        return MicroBatch(
            *(
                getattr(self, name).to(device, non_blocking=True)
                for name in self.__dataclass_fields__
            )
        )


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step of one data rank, with the counts of the whole step over all ranks.

    Attributes:
        micro: the micro-batches of this data rank; every rank has equally many.
        num_targets: trained tokens of the step over all ranks; every rank knows it from the plan.
        num_tokens: tokens that are not padding, over all ranks.
        position: rows consumed before this step, counted over all epochs and ranks.
        next_position: the same after it.
        epoch: passes over the rows after this step, e.g. 1.25.
    """

    micro: tuple[MicroBatch, ...]
    num_targets: int
    num_tokens: int
    position: int
    next_position: int
    epoch: float
