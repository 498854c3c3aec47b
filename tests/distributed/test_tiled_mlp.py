"""A tiled MLP gives the losses of a plain one, on any mesh and with whatever else a recipe has."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mesh_cells import (
    ARCHITECTURES,
    assert_same,
    by_world_size,
    tiny_recipe,
    trace_cells,
    with_mesh,
    write_rows,
)

from ndtrain.recipe.schema import Recipe

Mesh = tuple[int, int, int, int]
ONE: Mesh = (1, 1, 1, 1)
MESHES: tuple[Mesh, ...] = (
    (1, 2, 1, 1),
    (2, 1, 1, 1),
    (1, 1, 2, 1),
    (1, 1, 1, 2),
    (2, 2, 1, 1),
    (1, 2, 1, 2),
    (1, 1, 2, 2),
)

TILED: dict[str, Any] = {"tiled_mlp": True, "tiled_mlp_num_shards": 3}
LORA = {"adapter": "lora", "lora_r": 4, "lora_target_linear": True, "lora_dropout": 0.2}

KINDS: dict[str, dict[str, Any]] = {
    "one slice for every hidden features": {"tiled_mlp_num_shards": None, "sample_packing": True},
    "more slices than tokens": {"tiled_mlp_num_shards": 1000},
    "rank-stabilised lora": {**LORA, "peft_use_rslora": True},
    "lora that shares inputs": {**LORA, "lora_dropout": 0.0, "sample_packing": True},
    "lora on one linear": {**LORA, "lora_target_linear": None, "lora_target_modules": ["up_proj"]},
    "dora": {**LORA, "peft_use_dora": True},
    "recomputed": {"gradient_checkpointing": True},
    "recomputed lora": {**LORA, "gradient_checkpointing": True},
    "attention kept": {"gradient_checkpointing": "attention"},
    "offloaded": {"gradient_checkpointing": True, "activation_offloading": True},
    "gradients summed once a step": {"sync_each_batch": False},
    "all-gather": {"context_parallel_method": "allgather", "sample_packing": True},
}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


def compare(recipe: Recipe, meshes: Sequence[Mesh], folder: Path) -> None:
    """The tiled recipe on each mesh against the plain one in one process; two passes a step."""
    plain = with_mesh(recipe, ONE, micro_batch_size=4, tiled_mlp=False, tiled_mlp_num_shards=None)
    reference = trace_cells([plain], folder)[0]
    for group in by_world_size(meshes).values():
        cells = [
            with_mesh(recipe, mesh, micro_batch_size=4 // (mesh[0] * mesh[1])) for mesh in group
        ]
        for mesh, trace in zip(group, trace_cells(cells, folder), strict=True):
            assert_same(trace, reference, mesh)


@pytest.mark.parametrize(
    ("kind", "meshes"),
    [
        ("one slice for every hidden features", ((1, 1, 2, 2), (1, 2, 1, 2))),
        pytest.param("rank-stabilised lora", (ONE, (1, 1, 2, 2)), marks=pytest.mark.slow),
    ],
)
def test_slices_change_nothing(
    kind: str, meshes: tuple[Mesh, ...], rows: Path, tmp_path: Path
) -> None:
    compare(tiny_recipe(rows, "llama", **{**TILED, **KINDS[kind]}), meshes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_slices_change_nothing_on_any_mesh(kind: str, rows: Path, tmp_path: Path) -> None:
    compare(tiny_recipe(rows, "llama", **{**TILED, **KINDS[kind]}), (ONE, *MESHES), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_slices_change_no_architecture(architecture: str, rows: Path, tmp_path: Path) -> None:
    keys = {**TILED, "sample_packing": True, "gradient_checkpointing": True}
    compare(tiny_recipe(rows, architecture, **keys), (ONE, (1, 1, 1, 2), (1, 2, 2, 1)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [ONE, (1, 2, 1, 1), (1, 1, 1, 2)])
def test_a_step_in_the_backward_pass_sees_one_gradient(
    mesh: Mesh, rows: Path, tmp_path: Path
) -> None:
    keys = {"optimizer_in_backward": True, "max_grad_norm": None}
    size = {"micro_batch_size": 8 // (mesh[0] * mesh[1])}
    recipe = tiny_recipe(rows, "llama", **keys)
    cells = [with_mesh(recipe.model_copy(update=more), mesh, **size) for more in ({}, TILED)]
    reference, trace = trace_cells(cells, tmp_path)
    assert_same(trace, reference, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_a_base_in_few_bits_is_read_slice_by_slice(bits: str, rows: Path, tmp_path: Path) -> None:
    sizes = {"intermediate_size": 128}
    recipe = tiny_recipe(rows, "llama", **{**TILED, **LORA, bits: True, "sizes": sizes})
    compare(recipe, (ONE, (1, 2, 1, 1), (1, 1, 2, 1)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_8_bit_matmuls_round_a_slice_as_the_whole(kind: str, rows: Path, tmp_path: Path) -> None:
    """But for values too small for the scale of what they stand beside, here a slice."""
    wide = {"hidden_size": 128, "intermediate_size": 256}
    recipe = tiny_recipe(rows, "llama", fp8=kind, sizes=wide)
    plain, tiled = trace_cells([recipe, recipe.model_copy(update=TILED)], tmp_path)
    np.testing.assert_allclose(tiled.losses[0], plain.losses[0], rtol=1e-6)
    np.testing.assert_allclose(tiled.grad_norms[0], plain.grad_norms[0], rtol=1e-4)
    # The second loss holds every gradient of the first step. From there on a sum that differs in
    # its last bit, as slices do, now and then falls to the other side of a rounding to 8 bits.
    np.testing.assert_allclose(tiled.losses[1], plain.losses[1], rtol=1e-5)
