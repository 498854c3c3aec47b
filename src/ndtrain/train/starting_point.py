"""Which checkpoint a start goes on from."""

from collections.abc import Callable
from pathlib import Path

from ndtrain.recipe.schema import Recipe
from ndtrain.train.checkpoint_files import FoundCheckpoint

AUTO, NEVER = "auto", "never"


def choose_checkpoint(
    resume: str,
    recipe: Recipe,
    *,
    restarted: bool,
    newest: Callable[[], FoundCheckpoint | None],
    find: Callable[[Path], FoundCheckpoint],
) -> FoundCheckpoint | None:
    """The checkpoint that a start goes on from; None: it begins anew.

    The run's own newest comes before the recipe's, so that a rerun never goes back. Where a
    launcher restarts lost ranks, it comes before everything else.

    Args:
        resume: `auto`, `never` or a checkpoint.
        recipe: what is started.
        restarted: it is not this start's first attempt.
        newest: the run's own newest whole checkpoint.
        find: the checkpoint at a path.

    Raises:
        CheckpointError: the named one cannot be used.
    """
    if resume == NEVER and not restarted:
        return None
    if restarted or (resume == AUTO and recipe.auto_resume_from_checkpoints):
        own = newest()
        if own is not None:
            return own
    if resume == NEVER:
        return None
    named = recipe.resume_from_checkpoint if resume == AUTO else resume
    return None if named is None else find(Path(named))
