"""Whether the checkpoints and the export of a run fit the disk."""

import shutil
from pathlib import Path

from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.shapes import count_parameters, lora_parameters
from ndtrain.recipe.schema import Recipe

_WEIGHT_BYTES = {"fp32": 4, "bf16": 2}
_STATES_BYTES = {"fp32": 8, "bf16": 4, "8bit": 2}
"""Bytes of a trained parameter in a checkpoint: the weight, and its two moments."""
_EXPORT_BYTES = 2
_UNLIMITED = 3
"""Checkpoints assumed where save_total_limit does not bound them: what a user will at least see."""


def checkpoint_bytes(recipe: Recipe, facts: ModelFacts) -> int:
    """Size of one checkpoint."""
    states = _STATES_BYTES[recipe.optimizer_state_dtype]
    if recipe.adapter is not None:
        return lora_parameters(facts, recipe.lora_r) * (_WEIGHT_BYTES["fp32"] + states)
    return count_parameters(facts) * (_WEIGHT_BYTES[recipe.param_dtype] + states)


def advise_disk(recipe: Recipe, facts: ModelFacts, folder: Path) -> list[str]:
    """A warning when the disk under `folder` has less room than the run would fill."""
    place = next((p for p in (folder, *folder.absolute().parents) if p.is_dir()), None)
    if place is None:
        return []
    one = checkpoint_bytes(recipe, facts)
    kept = _checkpoints(recipe)
    # The next checkpoint is complete before the oldest is removed.
    copies = kept + 1 if kept and recipe.save_total_limit else kept
    export = count_parameters(facts) * _EXPORT_BYTES if recipe.export and not recipe.adapter else 0
    needed, free = copies * one + export, shutil.disk_usage(place).free
    if needed <= free:
        return []
    plural = "s" if copies > 1 else ""
    return [
        f"{copies} checkpoint{plural} of {one / 1e9:.1f} GB and the export need "
        f"{needed / 1e9:.0f} GB, but '{place}' has {free / 1e9:.0f} GB free. Set "
        "save_total_limit, or another output_dir."
    ]


def _checkpoints(recipe: Recipe) -> int:
    """How many checkpoints lie on the disk at one time, at least."""
    if recipe.save_strategy == "no":
        return 0
    several = recipe.save_steps or recipe.saves_per_epoch or recipe.save_strategy
    return (recipe.save_total_limit or _UNLIMITED) if several else 1
