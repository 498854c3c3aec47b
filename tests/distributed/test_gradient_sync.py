"""Gradients of many micro-batches are summed over ranks once, and are the same gradients."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from mesh_cells import MICRO_TOKENS, micro_batch, plan_of, source_of, tiny_recipe, with_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from ndtrain.data.loader import StepBatch
from ndtrain.parallel.mesh import build_mesh
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import assemble
from ndtrain.train.step import accumulate_gradients

Mesh = tuple[int, int, int, int]
PASSES, UNITS = 3, 5
"""Micro-batches of a step; parts of the model that are gathered and summed at one time: embedding,
two blocks, head and the last norm."""
OTHERS = 2
"""All-reduces of a step beside those of gradients: the loss and the norm; with tp, the norm of
parts that tp does not split once more."""


class Sent(TorchDispatchMode):
    """Counts the collectives of the sharded data axis."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def step(rank: int, recipes: Mapping[str, Recipe]) -> dict[str, Any]:
    """Of each recipe: what was sent for gradients, and the gradients themselves."""
    found = {}
    for name, recipe in recipes.items():
        plan = plan_of(recipe).parallel
        mesh = build_mesh(plan, torch.device("cpu"))
        engine = assemble(recipe, source_of(recipe), mesh)
        own = rank // (plan.cp * plan.tp) * PASSES
        micro = tuple(micro_batch(own + number) for number in range(PASSES))
        tokens = MICRO_TOKENS * PASSES * plan.data_ranks
        batch = StepBatch(micro, tokens, tokens, 0, PASSES, 0.0)
        with Sent() as sent:
            accumulate_gradients(engine, batch, 0, 1.0)
        gradients = [parameter.grad.full_tensor() for parameter in engine.parameters]
        found[name] = +sent.counts, gradients
    return found


@pytest.mark.parametrize(
    ("mesh", "reduced", "copies"),
    [
        ((1, 4, 1, 1), UNITS, OTHERS),
        # copies are summed once in either case
        ((2, 2, 1, 1), UNITS, UNITS + OTHERS),
        ((4, 1, 1, 1), 0, UNITS + OTHERS),
        ((1, 1, 2, 2), UNITS, OTHERS + 1),
    ],
)
def test_once_a_step(mesh: Mesh, reduced: int, copies: int, tmp_path: Path) -> None:
    rows = tmp_path / "unread.jsonl"
    keys: dict[str, Any] = {"gradient_accumulation_steps": PASSES, "global_batch_size": None}
    # shared tokens would have the gradients of norms summed over tp as well
    keys["tensor_sequence_parallel"] = False
    recipe = with_mesh(tiny_recipe(rows, "llama", **keys), mesh)
    recipes = {
        "each": recipe.model_copy(update={"sync_each_batch": True}),
        "once": recipe.model_copy(update={"sync_each_batch": False}),
    }
    for found in run_forked(4, tmp_path, step, recipes):
        for name, times in (("each", PASSES), ("once", 1)):
            sent = found[name][0]
            assert sent["c10d::_reduce_scatter_base_"] == times * reduced, name
            assert sent["c10d::allreduce_"] == copies, name
        for one, other in zip(found["each"][1], found["once"][1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
