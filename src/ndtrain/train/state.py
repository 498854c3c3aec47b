"""What a run must remember beside its tensors."""

from dataclasses import dataclass


@dataclass
class Progress:
    """Counters that a checkpoint carries; all of them count over the whole run and every rank.

    Attributes:
        position: rows consumed, over all epochs (the place in the data order).
        seen_tokens: trained tokens.
        best_loss: lowest evaluation loss so far, None before the first evaluation.
        evals_without_gain: evaluations since `best_loss`.
        owes_evaluation: the one after this step was cut off by a stop.
        skipped_nonfinite: steps left out because a loss or gradient was not finite.
    """

    step: int = 0
    position: int = 0
    seen_tokens: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    evals_without_gain: int = 0
    skipped_nonfinite: int = 0
    owes_evaluation: bool = False
