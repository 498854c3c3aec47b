"""Adapters on 4-bit and 8-bit bases are the same on every mesh that can hold them."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mesh_cells import (
    assert_same,
    by_world_size,
    names_of,
    tiny_recipe,
    trace_cells,
    with_mesh,
    write_rows,
)

from ndtrain.recipe.schema import Recipe

KINDS: dict[str, dict[str, Any]] = {
    # inputs of 128 divide into blocks of 64; the others' 92 would leave down_proj whole
    "qlora": {"adapter": "qlora", "load_in_4bit": True, "sizes": {"intermediate_size": 128}},
    "8 bits": {"adapter": "lora", "load_in_8bit": True},
}
TP_1 = tuple((*sizes, 1) for sizes in itertools.product((1, 2), repeat=3))
"""Every mesh without tensor parallelism, which low-bit bases are refused with."""


def recipe_of(kind: str, folder: Path) -> Recipe:
    rows = write_rows(folder / "rows.jsonl")
    return tiny_recipe(rows, lora_r=4, lora_target_linear=True, lora_dropout=0.1, **KINDS[kind])


def assert_same_on(recipe: Recipe, meshes: Sequence[tuple[int, ...]], folder: Path) -> list[Recipe]:
    """The cells that gave the numbers of one process."""
    reference = trace_cells([recipe], folder)[0]
    passed = []
    for group in by_world_size(meshes).values():
        cells = [with_mesh(recipe, mesh) for mesh in group]
        for mesh, cell, trace in zip(group, cells, trace_cells(cells, folder), strict=True):
            assert_same(trace, reference, mesh)
            passed.append(cell)
    return passed


@pytest.mark.parametrize("kind", ["qlora", pytest.param("8 bits", marks=pytest.mark.slow)])
def test_low_bit_bases_on_a_mesh(kind: str, tmp_path: Path) -> None:
    recipe = recipe_of(kind, tmp_path)
    whole = recipe.model_copy(
        update={"load_in_4bit": False, "load_in_8bit": False, "adapter": "lora"}
    )
    rounded, exact = (trace_cells([one], tmp_path)[0] for one in (recipe, whole))
    assert abs(exact.losses[0] - rounded.losses[0]) > 1e-4, "nothing was rounded"
    assert_same_on(recipe, ((1, 2, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_low_bit_bases_on_every_mesh(
    kind: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    for cell in assert_same_on(recipe_of(kind, tmp_path), TP_1[1:], tmp_path):
        if kind == "qlora":
            record_property("mesh-cell", names_of(cell))
