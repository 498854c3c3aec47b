"""ndtrain from Python: `from ndtrain.api import load_recipe, plan, train`.

`ndtrain.plan` and `ndtrain.train` are packages, so the functions live here. Importing this module,
loading and planning are light: torch and transformers are imported by `train` alone.
"""

from collections.abc import Sequence
from pathlib import Path

from ndtrain.errors import ExitCode
from ndtrain.plan.decide import decide
from ndtrain.plan.model_facts import find_facts
from ndtrain.plan.plan import Plan
from ndtrain.recipe.load import LoadedRecipe, load_recipe

__all__ = ["ExitCode", "LoadedRecipe", "Plan", "load_recipe", "plan", "train"]


def plan(loaded: LoadedRecipe, *, world_size: int | None = None) -> Plan:
    """The mesh and the batch arithmetic of a recipe; touches neither weights nor devices.

    Args:
        loaded: what `load_recipe` returned.
        world_size: ranks to plan for; None takes exactly what the recipe's sizes multiply to.

    Raises:
        NdtrainError: the mesh does not work for the model, or the model is not known.
    """
    key = "base_model" if loaded.recipe.model_config_ is None else "model_config"
    facts = find_facts(loaded.recipe, where=loaded.position(key))
    return decide(loaded.recipe, facts, world_size=world_size, where=loaded.position)


def train(
    recipe: Path,
    *,
    overrides: Sequence[str] = (),
    resume: str = "auto",
    restart: bool = False,
    max_steps: int | None = None,
) -> ExitCode:
    """Run a recipe, as `ndtrain train` does: starts the ranks, continues an earlier run.

    Args:
        recipe: the recipe's file.
        overrides: `key=value` texts, as after `--set`.
        resume: `auto`, `never` or a checkpoint.
        restart: move an earlier run of the same folder aside.
        max_steps: last step of this call.

    Returns:
        `ExitCode.OK`, or `SIGINT` or `SIGTERM` when the run was stopped with a checkpoint saved.

    Raises:
        NdtrainError: whatever is wrong; its `exit_code` is the command's.
    """
    from ndtrain.train.command import train as run

    return ExitCode(
        run(recipe, overrides=overrides, resume=resume, restart=restart, max_steps=max_steps)
    )
