"""Every mesh that `ndtrain plan` proposes really trains, with the loss of one process."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from mesh_cells import plan_of, tiny_recipe, trace_cells, with_mesh, write_rows

from ndtrain.plan.apply import chosen_keys
from ndtrain.plan.hardware import build_host, calibration
from ndtrain.plan.search import Candidate, search
from ndtrain.recipe.schema import Recipe

LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"sample_packing": True}),
    "llama LoRA": ("llama", {**LORA, "sample_packing": True}),
    "qwen3 LoRA": ("qwen3", LORA),
}
ROOMY, TIGHT = 64.0, 0.01
"""GiB of a process: all fits without recomputing, or nothing does and the smallest is proposed."""
QUICK = [("llama LoRA", 2, TIGHT), ("qwen3", 4, ROOMY)]
ALL = [
    (kind, world, memory)
    for number, kind in enumerate(KINDS)
    for world in range(1, 9)
    # both of each kind and of each world
    for memory in ((ROOMY, TIGHT)[(number + world) % 2],)
]


def proposed(recipe: Recipe, world: int, memory: float) -> list[Candidate]:
    """What `plan` lists for processes of a host."""
    facts = plan_of(recipe).facts
    assert facts is not None
    return search(
        recipe, facts, build_host("cpu", memory_gib=memory, world_size=world), calibration()
    )


def applied(recipe: Recipe, candidate: Candidate) -> Recipe:
    """The recipe as `plan --apply` writes it."""
    keys = yaml.safe_load("\n".join(f"{k}: {v}" for k, v in chosen_keys(recipe, candidate).items()))
    given = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return Recipe.model_validate({**given, **keys})


def check(kind: str, world: int, memory: float, folder: Path) -> None:
    architecture, keys = KINDS[kind]
    rows = write_rows(folder / "rows.jsonl")
    # A batch that the ranks of any mesh of this size can share evenly.
    batch = 2 * world if world < 6 else world
    base = tiny_recipe(rows, architecture, global_batch_size=batch, **keys)
    candidates = proposed(base, world, memory)
    assert all(math.prod(candidate.parallel.sizes) == world for candidate in candidates)
    assert len(candidates) > (world > 1)
    assert all(candidate.fits == (memory == ROOMY) for candidate in candidates)
    if memory == TIGHT:
        assert {candidate.setting.policy for candidate in candidates} == {"full"}
    alone = with_mesh(base, (1, 1, 1, 1), micro_batch_size=1)
    reference = trace_cells([alone], folder, steps=2)[0]

    cells = [applied(base, candidate) for candidate in candidates]
    traces = trace_cells(cells, folder, steps=2)

    for candidate, cell, trace in zip(candidates, cells, traces, strict=True):
        assert plan_of(cell).parallel == candidate.parallel
        np.testing.assert_allclose(
            trace.losses, reference.losses, rtol=1e-5, err_msg=str(candidate.parallel)
        )
        np.testing.assert_allclose(
            trace.grad_norms, reference.grad_norms, rtol=1e-4, err_msg=str(candidate.parallel)
        )


@pytest.mark.parametrize(
    ("kind", "world", "memory"), [QUICK[0], pytest.param(*QUICK[1], marks=pytest.mark.slow)]
)
def test_proposed_meshes_train(kind: str, world: int, memory: float, tmp_path: Path) -> None:
    check(kind, world, memory, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world", "memory"), [one for one in ALL if one not in QUICK])
def test_every_proposed_mesh_trains(kind: str, world: int, memory: float, tmp_path: Path) -> None:
    check(kind, world, memory, tmp_path)
