"""Gradients summed over ranks in bf16: what is sent, and what comes of it; fp32 stays default."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from mesh_cells import MICRO_TOKENS, micro_batch, plan_of, source_of, tiny_recipe, with_mesh
from test_gradient_sync import PASSES, UNITS
from torch.utils._python_dispatch import TorchDispatchMode

from ndtrain.data.loader import StepBatch
from ndtrain.parallel.mesh import build_mesh
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import assemble
from ndtrain.train.step import accumulate_gradients, update

COPIES_AND_SHARDS = (2, 2, 1, 1)
STEPS = 8


class Sent(TorchDispatchMode):
    """Counts what gradients are sent with, by collective and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "c10d::_reduce_scatter_base_":
            self.counts["reduce_scatter", args[1].dtype] += 1
        # the loss and the norms of the whole gradient are a few numbers
        if name == "c10d::allreduce_" and args[0][0].numel() > 8:
            self.counts["all_reduce", args[0][0].dtype] += 1
        return func(*args, **(kwargs or {}))


def train(rank: int, recipes: Mapping[str, Recipe]) -> dict[str, Any]:
    """Of each recipe: what its first step sent, its gradients, and the losses of all steps."""
    found = {}
    for name, recipe in recipes.items():
        plan = plan_of(recipe).parallel
        engine = assemble(recipe, source_of(recipe), build_mesh(plan, torch.device("cpu")))
        micro = tuple(micro_batch(rank * PASSES + number) for number in range(PASSES))
        tokens = MICRO_TOKENS * PASSES * plan.data_ranks
        batch = StepBatch(micro, tokens, tokens, 0, PASSES, 0.0)
        losses = []
        for step in range(STEPS):
            with Sent() as sent:
                result = accumulate_gradients(engine, batch, step, 1.0)
            if step == 0:
                first = +sent.counts
                gradients = [parameter.grad.full_tensor() for parameter in engine.parameters]
            losses.append(result.loss.item())
            update(engine, result)
        found[name] = first, gradients, losses
    return found


@pytest.mark.slow
def test_bf16_halves_what_is_sent_and_trains_alike(tmp_path: Path) -> None:
    keys = {"gradient_accumulation_steps": PASSES, "global_batch_size": None, "bf16": True}
    # drawn as models are: weights of 0.2 would make bf16 products the larger error by far
    keys |= {"sizes": {"initializer_range": 0.05}, "learning_rate": 1e-3}
    default = with_mesh(tiny_recipe(tmp_path / "unread.jsonl", "llama", **keys), COPIES_AND_SHARDS)
    recipes = {
        "default": default,
        "fp32": default.model_copy(update={"reduce_dtype": "fp32", "sync_each_batch": True}),
        "bf16": default.model_copy(update={"reduce_dtype": "bf16"}),
    }
    for found in run_forked(4, tmp_path, train, recipes):
        exact, rounded = torch.float32, torch.bfloat16
        assert {dtype for _, dtype in found["default"][0]} == {exact}
        shards, copies = ("reduce_scatter", exact), ("all_reduce", exact)
        assert found["fp32"][0] == {shards: PASSES * UNITS, copies: UNITS}
        # nothing waits for the last micro-batch, where it would be added up in bf16
        shards, copies = ("reduce_scatter", rounded), ("all_reduce", rounded)
        assert found["bf16"][0] == {shards: PASSES * UNITS, copies: PASSES * UNITS}
        for one, other in zip(found["bf16"][1], found["fp32"][1], strict=True):
            assert one.dtype == torch.float32
            # three sums of two numbers, of 8 bits each
            assert 0 < (one - other).norm() <= 2**-7 * other.norm()
        losses = found["bf16"][2]
        assert losses == pytest.approx(found["fp32"][2], rel=0.005)
        assert losses[-1] < 0.9 * losses[0]
