"""When a run ends, saves and evaluates, by step numbers alone."""

import math
from dataclasses import dataclass
from fractions import Fraction

from ndtrain.recipe.schema import Recipe


@dataclass(frozen=True)
class Rhythm:
    """So many times in so many steps, evenly spread; never twice after one step."""

    steps: int
    times: int = 1

    def is_due(self, step: int) -> bool:
        """Whether one falls behind this step."""
        return step * self.times // self.steps > (step - 1) * self.times // self.steps


@dataclass(frozen=True)
class Timetable:
    """Steps at which something is due.

    Attributes:
        total_steps: steps of the whole run.
        save_rhythm: of checkpoints; None: only at the end.
        eval_rhythm: of evaluations; None: only at the start and the end.
        saves: whether there are checkpoints at all, apart from a stop's.
        saves_best: save when an evaluation is the best so far.
        evaluates: whether there is anything to evaluate on.
    """

    total_steps: int
    steps_per_epoch: int
    save_rhythm: Rhythm | None = None
    eval_rhythm: Rhythm | None = None
    saves: bool = True
    saves_best: bool = False
    evaluates: bool = False

    def save_is_due(self, step: int) -> bool:
        """Whether a checkpoint follows this step."""
        if not self.saves:
            return False
        if step >= self.total_steps:
            return True
        return self.save_rhythm is not None and self.save_rhythm.is_due(step)

    def eval_is_due(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        if not self.evaluates:
            return False
        if step >= self.total_steps:
            return True
        return self.eval_rhythm is not None and self.eval_rhythm.is_due(step)


def steps_of(share: float, steps: int) -> int:
    """That many times the steps, rounded up: 1.1 x 50 are 55, whatever floats make of it."""
    return math.ceil(Fraction(str(share)) * steps)


def _rhythm(
    steps: float | None, times: int | None, by_epoch: bool, total: int, epoch: int
) -> Rhythm | None:
    if steps is not None:
        return Rhythm(max(1, round(steps * total)) if steps < 1 else round(steps))
    if times is not None:
        return Rhythm(epoch, times)
    return Rhythm(epoch) if by_epoch else None


def build_timetable(recipe: Recipe, steps_per_epoch: int, *, has_eval_rows: bool) -> Timetable:
    """The timetable of a run.

    Args:
        recipe: epochs, steps and strategies.
        steps_per_epoch: optimizer steps of one pass over the rows.
        has_eval_rows: whether there are held-out rows.
    """
    total = steps_of(recipe.num_epochs, steps_per_epoch)
    if recipe.max_steps is not None:
        total = recipe.max_steps if recipe.pretraining_dataset else min(total, recipe.max_steps)
        # an explicit number of steps may also go beyond the epochs that nobody asked for
        if "num_epochs" not in recipe.model_fields_set:
            total = recipe.max_steps
    save_rhythm = _rhythm(
        recipe.save_steps,
        recipe.saves_per_epoch,
        recipe.save_strategy == "epoch",
        total,
        steps_per_epoch,
    )
    eval_rhythm = _rhythm(
        recipe.eval_steps,
        recipe.evals_per_epoch,
        recipe.eval_strategy == "epoch",
        total,
        steps_per_epoch,
    )
    if eval_rhythm is None and (recipe.save_strategy == "best" or recipe.early_stopping_patience):
        eval_rhythm = save_rhythm or Rhythm(steps_per_epoch)
    return Timetable(
        total_steps=total,
        steps_per_epoch=steps_per_epoch,
        save_rhythm=save_rhythm,
        eval_rhythm=eval_rhythm,
        saves=recipe.save_strategy not in ("no", "best"),
        saves_best=recipe.save_strategy == "best" or recipe.load_best_model_at_end,
        evaluates=has_eval_rows and recipe.eval_strategy != "no",
    )
