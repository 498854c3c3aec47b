"""A start takes up a run: its checkpoint, what has changed since then, and what is left behind.

A run has one past. Whoever goes back to an older checkpoint begins another branch: the checkpoints
of the one left behind keep their data under a name that no restart takes for the run's newest.
"""

from collections.abc import Callable

from ndtrain.report.events import Event, Notice
from ndtrain.train.assemble import Engine
from ndtrain.train.checkpoint import Checkpointer
from ndtrain.train.job import Job
from ndtrain.train.recipe_changes import ChangedValues, compare_recipes
from ndtrain.train.starting_point import NEVER, choose_checkpoint
from ndtrain.train.state import Progress


def go_on(
    job: Job,
    checkpointer: Checkpointer,
    engine: Engine,
    emit: Callable[[Event], None],
    *,
    restarted: bool,
) -> tuple[Progress, ChangedValues]:
    """Continue where the run stood, saying what was found and what has changed; else begin.

    Every rank calls it.

    Raises:
        CheckpointError: the checkpoint cannot be used, or not with this recipe.
    """
    found = choose_checkpoint(
        job.resume,
        job.recipe,
        restarted=restarted,
        newest=checkpointer.newest,
        find=checkpointer.find,
    )
    if found is None:
        if job.resume != NEVER:
            for reason in checkpointer.passed_over():
                emit(Notice(reason))
        _leave_behind(checkpointer, emit, "Beginning anew", after=0)
        return Progress(), {}
    changes = compare_recipes(
        found.meta.get("recipe", {}),
        job.about["recipe"],
        saved_batch=found.meta.get("global_batch"),
        current_batch=job.plan.batch.global_batch,
    )
    changes.require_possible(str(found.path))
    for reason in found.skipped:
        emit(Notice(reason))
    for line in changes.notices():
        emit(Notice(line))
    progress = checkpointer.load(found, engine.trainable, engine.optimizer)
    if checkpointer.holds(found):
        _leave_behind(checkpointer, emit, f"Back at step {found.step}", after=found.step)
    else:
        _leave_behind(checkpointer, emit, f"Going on from {found.path}", after=0)
    if job.recipe.load_best_model_at_end:
        _look_for_the_best(checkpointer, progress, emit)
    return progress, changes.values()


def _leave_behind(
    checkpointer: Checkpointer, emit: Callable[[Event], None], why: str, *, after: int
) -> None:
    left = checkpointer.leave_behind(after)
    if left:
        names = ", ".join(path.name for path in left)
        emit(
            Notice(
                f"{why}: what this run had saved of other steps is kept as {names} in "
                f"{checkpointer.folder}, and no longer continued. Remove it when it is not needed."
            )
        )


def _look_for_the_best(
    checkpointer: Checkpointer, progress: Progress, emit: Callable[[Event], None]
) -> None:
    """Where the best evaluation has no checkpoint here, nothing could be loaded at the end."""
    best = progress.best_step
    if best is None or checkpointer.of_step(best) is not None:
        return
    emit(
        Notice(
            f"The best evaluation so far, at step {best}, has no checkpoint in "
            f"{checkpointer.folder}: the best model is looked for from step {progress.step} on."
        )
    )
    progress.best_loss = progress.best_step = None
    progress.evals_without_gain = 0
