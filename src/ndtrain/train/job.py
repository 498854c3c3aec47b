"""What every rank gets from the process that was started by the user."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndtrain.plan.model_source import ModelSource
from ndtrain.plan.own_run import OwnRun
from ndtrain.plan.plan import AXES, Plan
from ndtrain.recipe.load import LoadedRecipe
from ndtrain.recipe.schema import Recipe
from ndtrain.report.run_directory import RunDirectory


@dataclass(frozen=True)
class Job:
    """One run, decided before any rank exists.

    Attributes:
        source: the model, ready on this machine.
        run_id: the same over every resume.
        prepared: folder of the tokenised rows.
        num_tokens: size of the tokenizer.
        resume: `auto`, `never` or a path.
        stop_after: last step of this start, whatever the recipe's own end is.
        max_seconds: longest time of this start.
        notices: what the user should know beside what the ranks find.
        prediction: what the run was predicted to need, None where that is not known.
    """

    loaded: LoadedRecipe
    plan: Plan
    source: ModelSource
    run_dir: RunDirectory
    run_id: str
    prepared: Path
    num_tokens: int
    resume: str = "auto"
    stop_after: int | None = None
    max_seconds: float | None = None
    notices: tuple[str, ...] = ()
    prediction: OwnRun | None = None

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self.loaded.recipe

    @property
    def about(self) -> dict[str, Any]:
        """What a checkpoint keeps of how it was made."""
        return {
            "mesh": dict(zip(AXES, self.plan.parallel.sizes, strict=True)),
            "global_batch": self.plan.batch.global_batch,
            "recipe": self.recipe.model_dump(mode="json", by_alias=True),
        }
