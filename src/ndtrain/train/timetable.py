"""When a run ends, saves and evaluates, by step numbers alone."""

import math
from dataclasses import dataclass

from ndtrain.recipe.schema import Recipe


@dataclass(frozen=True)
class Timetable:
    """Steps at which something is due.

    Attributes:
        total_steps: steps of the whole run.
        save_every: steps between checkpoints; None: only at the end.
        eval_every: steps between evaluations; None: only at the start and the end.
        saves: whether there are checkpoints at all, apart from a stop's.
        saves_best: save when an evaluation is the best so far.
        evaluates: whether there is anything to evaluate on.
    """

    total_steps: int
    steps_per_epoch: int
    save_every: int | None = None
    eval_every: int | None = None
    saves: bool = True
    saves_best: bool = False
    evaluates: bool = False

    def save_is_due(self, step: int) -> bool:
        """Whether a checkpoint follows this step."""
        if not self.saves:
            return False
        if step >= self.total_steps:
            return True
        return self.save_every is not None and step % self.save_every == 0

    def eval_is_due(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        if not self.evaluates:
            return False
        if step >= self.total_steps:
            return True
        return self.eval_every is not None and step % self.eval_every == 0


def _every(
    steps: float | None, times: int | None, by_epoch: bool, total: int, epoch: int
) -> int | None:
    if steps is not None:
        return max(1, round(steps * total)) if steps < 1 else round(steps)
    if times is not None:
        return max(1, epoch // times)
    return epoch if by_epoch else None


def build_timetable(recipe: Recipe, steps_per_epoch: int, *, has_eval_rows: bool) -> Timetable:
    """The timetable of a run.

    Args:
        recipe: epochs, steps and strategies.
        steps_per_epoch: optimizer steps of one pass over the rows.
        has_eval_rows: whether there are held-out rows.
    """
    total = math.ceil(recipe.num_epochs * steps_per_epoch)
    if recipe.max_steps is not None:
        total = recipe.max_steps if recipe.pretraining_dataset else min(total, recipe.max_steps)
        # an explicit number of steps may also go beyond the epochs that nobody asked for
        if "num_epochs" not in recipe.model_fields_set:
            total = recipe.max_steps
    save_every = _every(
        recipe.save_steps,
        recipe.saves_per_epoch,
        recipe.save_strategy == "epoch",
        total,
        steps_per_epoch,
    )
    eval_every = _every(
        recipe.eval_steps,
        recipe.evals_per_epoch,
        recipe.eval_strategy == "epoch",
        total,
        steps_per_epoch,
    )
    if eval_every is None and (recipe.save_strategy == "best" or recipe.early_stopping_patience):
        eval_every = save_every or steps_per_epoch
    return Timetable(
        total_steps=total,
        steps_per_epoch=steps_per_epoch,
        save_every=save_every,
        eval_every=eval_every,
        saves=recipe.save_strategy not in ("no", "best"),
        saves_best=recipe.save_strategy == "best" or recipe.load_best_model_at_end,
        evaluates=has_eval_rows and recipe.eval_strategy != "no",
    )
