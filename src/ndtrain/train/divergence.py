"""A loss or gradient that is not finite ends the run before it reaches the weights."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ndtrain.data.batch import StepBatch
from ndtrain.errors import DivergedError
from ndtrain.parallel.linear import local
from ndtrain.train.assemble import Engine
from ndtrain.train.deferred import Reading
from ndtrain.train.state import Progress
from ndtrain.train.step import StepResult

_HINT = (
    "This step did not reach the weights. Look at these rows, lower learning_rate, or allow some "
    "with skip_nonfinite."
)
_EARLY_HINT = (
    "Finite gradients of this step have reached the weights: optimizer_in_backward steps before "
    "all are known. Look at these rows, lower learning_rate, and continue from the last checkpoint."
)


def check_finite(
    engine: Engine, batch: StepBatch, progress: Progress, result: StepResult, output: Path
) -> bool:
    """Whether a step may change the weights; the same answer on every rank. Waits for the device.

    Args:
        engine: the model on its mesh, with this step's gradients.
        batch: this rank's rows of the step.
        progress: counts the steps that are left out.
        result: the step's loss and norm.
        output: where the offending rows are written.

    Raises:
        DivergedError: more steps are not finite than `skip_nonfinite` allows.
    """
    loss, norm = result.loss.item(), result.grad_norm.item()
    if math.isfinite(loss) and math.isfinite(norm):
        return True
    own_finite = all(
        bool(torch.isfinite(local(parameter.grad)).all())
        for parameter in engine.parameters
        if parameter.grad is not None
    ) and (engine.early is None or engine.early.is_finite())
    _left_out(engine, batch, progress, progress.step + 1, (loss, norm, own_finite), output)
    return False


def check_reading(
    engine: Engine,
    batch: StepBatch,
    progress: Progress,
    reading: Reading,
    step: int,
    output: Path,
) -> None:
    """The same for a step that the device has left out by itself when it had to.

    Args:
        engine: the model on its mesh.
        batch: this rank's rows of the step.
        progress: counts the steps that are left out.
        reading: the step's numbers.
        step: number of the step.
        output: where the offending rows are written.

    Raises:
        DivergedError: more steps are not finite than `skip_nonfinite` allows.
    """
    if math.isfinite(reading.loss) and math.isfinite(reading.grad_norm):
        return
    numbers = (reading.loss, reading.grad_norm, reading.local_finite)
    _left_out(engine, batch, progress, step, numbers, output)


def _left_out(
    engine: Engine,
    batch: StepBatch,
    progress: Progress,
    step: int,
    numbers: tuple[float, float, bool],
    output: Path,
) -> None:
    """Count a step that did not change the weights; end the run when there are too many."""
    loss, norm, own_finite = numbers
    progress.skipped_nonfinite += 1
    allowed = engine.recipe.skip_nonfinite
    if progress.skipped_nonfinite <= allowed:
        return
    row_ids = [int(row) for micro in batch.micro for row in micro.row_ids]
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (own_finite, row_ids))
    file = output / f"diverged-step-{step}.rank-{dist.get_rank()}.json"
    file.write_text(json.dumps(_rows(batch)), encoding="utf-8")
    ranks = [rank for rank, (finite, _) in enumerate(places) if not finite]
    rows = sorted({row for finite, ids in places if not finite for row in ids})
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
    skipped = f" after {allowed} skipped" if allowed else ""
    raise DivergedError(
        f"step {step} has {what}{skipped}; seen on ranks {ranks}, rows {rows[:16]}.",
        where=str(file),
        hint=_HINT if engine.early is None else _EARLY_HINT,
    )


def _rows(batch: StepBatch) -> list[dict[str, Any]]:
    return [
        {"row": int(row), "input_ids": ids.tolist(), "targets": targets.tolist()}
        for micro in batch.micro
        for row, ids, targets in zip(micro.row_ids, micro.input_ids, micro.targets, strict=True)
    ]
