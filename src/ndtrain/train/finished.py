"""A run started again: whether anything is left to train, and what to say if not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ndtrain.data.report import DataReport
from ndtrain.errors import RecipeError
from ndtrain.launch.status import read_status
from ndtrain.plan.plan import Plan
from ndtrain.recipe.load import load_recipe
from ndtrain.recipe.schema import Recipe
from ndtrain.report.run_directory import RunDirectory
from ndtrain.train.checkpoint_files import FoundCheckpoint, find_checkpoint, newest_checkpoint
from ndtrain.train.recipe_changes import Change, compare_recipes
from ndtrain.train.starting_point import choose_checkpoint
from ndtrain.train.timetable import build_timetable

_LEAVES_MODEL = frozenset({"export", "hub_model_id"})
"""Keys whose change alone is a reason to start a finished run: the model is left anew."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that is over, beside the recipe that is started now.

    Attributes:
        step: its last.
        changes: keys that have another value now.
    """

    path: Path
    step: int
    changes: tuple[Change, ...]

    @classmethod
    def find(cls, run_dir: RunDirectory, recipe: Recipe) -> Self | None:
        """The run in the folder, None when it is not over or its recipe cannot be read."""
        status = read_status(run_dir.status)
        if status is None or status.state != "finished":
            return None
        try:
            before = load_recipe(run_dir.resolved, check=False).recipe
        except RecipeError:
            return None
        sorted_changes = compare_recipes(
            before.model_dump(mode="json", by_alias=True),
            recipe.model_dump(mode="json", by_alias=True),
        )
        changes = (
            *sorted_changes.changes_result,
            *sorted_changes.impossible,
            *sorted_changes.harmless,
        )
        return cls(run_dir.path, status.step, changes)

    def has_nothing_left(self, recipe: Recipe, plan: Plan, rows: DataReport) -> bool:
        """Whether the recipe as it is now ends where the run has ended, or before."""
        if self.changes and {change.key for change in self.changes} <= _LEAVES_MODEL:
            return False
        per_epoch = rows.train_rows if rows.packed_rows is None else rows.packed_rows
        steps_per_epoch = -(-per_epoch // plan.batch.global_batch)
        timetable = build_timetable(recipe, steps_per_epoch, has_eval_rows=False)
        return timetable.total_steps <= self.step

    def __str__(self) -> str:
        """What the user reads when nothing is done."""
        lines = [f"{self.path} is finished after {self.step} steps; nothing to do."]
        if self.changes:
            listed = "; ".join(str(change) for change in self.changes)
            lines.append(f"Changed since then, and not trained: {listed}.")
        lines.append("Train it anew with --restart, or on with a higher num_epochs or max_steps.")
        return " ".join(lines)


def already_past(
    run_dir: RunDirectory, recipe: Recipe, resume: str, last_step: int | None, *, restarted: bool
) -> str | None:
    """What to say when this start would begin after the last step it may take; else None.

    At that very step there may still be an export to write.

    Args:
        run_dir: where the run's own checkpoints are.
        recipe: what is started now.
        resume: `auto`, `never` or a checkpoint.
        last_step: of this start; None: the recipe's.
        restarted: a launcher starts lost ranks again.

    Raises:
        CheckpointError: the named checkpoint cannot be used.
    """
    if last_step is None:
        return None
    status = read_status(run_dir.status)

    def newest() -> FoundCheckpoint | None:
        if status is None:
            return None
        return newest_checkpoint(run_dir.checkpoints, run_id=status.run_id)

    found = choose_checkpoint(
        resume, recipe, restarted=restarted, newest=newest, find=find_checkpoint
    )
    if found is None or found.step <= last_step:
        return None
    return (
        f"{found.path} is past step {last_step} (--max-steps); nothing to do. "
        "To train on, leave --max-steps out or raise it."
    )
