"""A mesh never changes the maths: every mesh against one process, through train's own assembly."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mesh_cells import (
    ARCHITECTURES,
    assert_same,
    by_world_size,
    names_of,
    tiny_recipe,
    trace_cells,
    with_mesh,
    write_rows,
)

from ndtrain.recipe.schema import Recipe

Mesh = tuple[int, int, int, int]
Compare = Callable[[Recipe, Sequence[Mesh], Path], None]

ALL: tuple[Mesh, ...] = tuple(itertools.product((1, 2), repeat=4))  # type: ignore[arg-type]
WIDE: tuple[Mesh, ...] = ((1, 1, 1, 4), (1, 1, 4, 1), (1, 4, 1, 1), (1, 3, 1, 1))
FEW: tuple[Mesh, ...] = ((1, 1, 1, 2), (1, 2, 1, 2), (1, 2, 2, 1), (2, 1, 1, 2))

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama packed": ("llama", {"sample_packing": True}),
    "llama packed, whole tokens": (
        "llama",
        {"sample_packing": True, "tensor_sequence_parallel": False},
    ),
    "llama packed all-gather": (
        "llama",
        {"sample_packing": True, "context_parallel_method": "allgather"},
    ),
    "qwen3 tied": ("qwen3", {}),
    "qwen3 tied packed": ("qwen3", {"sample_packing": True, "gradient_checkpointing": True}),
}


def accumulating(recipe: Recipe, mesh: Mesh) -> Recipe:
    """The recipe on a mesh, with at least two micro-batches a step."""
    data_ranks = mesh[0] * mesh[1]
    batch = 8 if 8 % data_ranks == 0 else 6
    micro = batch // data_ranks // 2
    return with_mesh(recipe, mesh, micro_batch_size=micro, global_batch_size=batch)


@pytest.fixture
def compare(record_property: Callable[[str, object], None]) -> Compare:
    """Compares each mesh with one process over the same rows; what passed goes into the report."""

    def run(recipe: Recipe, meshes: Sequence[Mesh], folder: Path) -> None:
        references = {}
        for group in by_world_size(meshes).values():
            cells = [accumulating(recipe, mesh) for mesh in group]
            for mesh, cell, trace in zip(group, cells, trace_cells(cells, folder), strict=True):
                size = cell.global_batch_size
                if size not in references:
                    keys = {"micro_batch_size": 2, "global_batch_size": size}
                    alone = with_mesh(recipe, (1, 1, 1, 1), **keys)
                    references[size] = trace_cells([alone], folder)[0]
                assert_same(trace, references[size], mesh)
                record_property("mesh-cell", names_of(cell))

    return run


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("kind", "meshes"),
    [
        ("llama packed", ((1, 1, 1, 2), (1, 1, 2, 1), (2, 1, 1, 1), (1, 2, 1, 1))),
        ("llama packed, whole tokens", ((1, 1, 1, 2),)),
        ("llama packed all-gather", ((1, 1, 2, 1), (1, 2, 2, 1))),
        ("qwen3 tied packed", ((1, 2, 1, 2), (2, 1, 1, 2), (1, 1, 2, 2))),
        ("qwen3 tied", ((1, 1, 1, 4), (1, 3, 1, 1))),
    ],
)
def test_a_covering_set_of_meshes_gives_the_losses_of_one_process(
    compare: Compare, kind: str, meshes: tuple[Mesh, ...], rows: Path, tmp_path: Path
) -> None:
    architecture, keys = KINDS[kind]
    compare(tiny_recipe(rows, architecture, **keys), meshes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_mesh_gives_the_losses_of_one_process(
    compare: Compare, kind: str, rows: Path, tmp_path: Path
) -> None:
    architecture, keys = KINDS[kind]
    compare(tiny_recipe(rows, architecture, **keys), ALL + WIDE, tmp_path)


@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3_moe"])
def test_windows_and_experts_are_the_same_on_a_mesh(
    compare: Compare, architecture: str, rows: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(rows, architecture, sample_packing=True)
    compare(recipe, ((1, 1, 1, 2), (1, 2, 2, 1)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_the_same_on_a_mesh(
    compare: Compare, architecture: str, rows: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(rows, architecture, sample_packing=True)
    compare(recipe, FEW, tmp_path)


@pytest.mark.parametrize(
    ("sizes", "meshes"),
    [
        # more ranks than key/value heads: each keeps k and v whole and takes its own head
        ({"num_key_value_heads": 2}, ((1, 1, 1, 4),)),
        pytest.param({"num_key_value_heads": 2}, ((1, 2, 1, 4),), marks=pytest.mark.slow),
        # 9 query and 3 key/value heads over 3 ranks
        pytest.param(
            {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
            ((1, 1, 1, 3), (1, 2, 1, 3)),
            marks=pytest.mark.slow,
        ),
        ({"vocab_size": 101, "intermediate_size": 90}, ((1, 1, 1, 4),)),
        pytest.param(
            {"vocab_size": 101, "intermediate_size": 90},
            ((1, 2, 1, 4),),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sizes_that_do_not_divide(
    compare: Compare, sizes: dict[str, Any], meshes: tuple[Mesh, ...], rows: Path, tmp_path: Path
) -> None:
    compare(tiny_recipe(rows, "llama", sizes=sizes), meshes, tmp_path)


@pytest.mark.parametrize("method", [pytest.param("ulysses", marks=pytest.mark.slow), "allgather"])
def test_rows_of_odd_length_are_padded_for_ranks_that_share_them(
    compare: Compare, method: str, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "odd.jsonl", longest=7)
    recipe = tiny_recipe(rows, sequence_len=7, pad_to_multiple_of=1, context_parallel_method=method)
    compare(recipe, ((1, 1, 2, 1), (1, 1, 4, 1), (1, 1, 2, 2)), tmp_path)


@pytest.mark.slow
def test_rows_of_odd_length_are_padded_for_tensor_parallelism(
    compare: Compare, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "odd.jsonl", longest=7)
    recipe = tiny_recipe(rows, sequence_len=7, pad_to_multiple_of=1)
    compare(recipe, ((1, 1, 1, 2), (1, 2, 1, 2), (1, 1, 1, 4)), tmp_path)


def test_more_data_ranks_than_rows_of_the_last_step(tmp_path: Path) -> None:
    """5 rows over 4 data ranks: three ranks have nothing but padding in the second step."""
    rows = write_rows(tmp_path / "five.jsonl", rows=5)
    alone = tiny_recipe(rows, micro_batch_size=1, global_batch_size=4)
    reference = trace_cells([alone], tmp_path)[0]
    spread = with_mesh(alone, (1, 4, 1, 1))
    assert_same(trace_cells([spread], tmp_path)[0], reference, "5 rows over 4 ranks")


def test_ranks_without_a_trained_token(compare: Compare, tmp_path: Path) -> None:
    """Only the last token of each row is trained: the ranks of all other parts have no loss."""
    path = tmp_path / "last.jsonl"
    rows = [[3 + (7 * row + place) % 90 for place in range(24)] for row in range(16)]
    labels = [[-100] * 23 + row[-1:] for row in rows]
    lines = [
        json.dumps({"input_ids": ids, "labels": trained})
        for ids, trained in zip(rows, labels, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")
    recipe = tiny_recipe(path, sequence_len=24)
    compare(recipe, ((1, 1, 4, 1), (1, 2, 2, 1), (1, 1, 2, 2)), tmp_path)


LORA = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_modules": (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head",
    ),
}  # fmt: skip


BESIDE = {
    "lora_target_modules": ("q_proj", "down_proj"),
    "unfrozen_parameters": ("norm", r"layers\.0\.mlp\.up_proj", "embed_tokens"),
    "peft_init_lora_weights": "orthogonal",
}


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({}, id="lora"),
        pytest.param({"lora_dropout": 0.2}, id="dropout", marks=pytest.mark.slow),
        pytest.param({"peft_use_rslora": True}, id="rs", marks=pytest.mark.slow),
        pytest.param(BESIDE, id="beside patterns", marks=pytest.mark.slow),
    ],
)
def test_adapters_are_the_same_on_a_mesh(
    compare: Compare, keys: dict[str, Any], rows: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(rows, "llama", sample_packing=True, **{**LORA, **keys})
    compare(recipe, ((1, 1, 1, 2), (1, 2, 2, 1), (1, 2, 1, 2)), tmp_path)


@pytest.mark.parametrize(
    "mesh", [pytest.param((1, 1, 1, 2), marks=pytest.mark.slow), (1, 2, 1, 2)], ids=str
)
def test_dora_is_the_same_on_a_mesh(
    compare: Compare, mesh: Mesh, rows: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(rows, "qwen3", sample_packing=True, peft_use_dora=True, **LORA)
    compare(recipe, (mesh,), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "keys",
    [{"lora_dropout": 0.2}, {"peft_use_rslora": True}, {"peft_use_dora": True}],
    ids=["lora", "rslora", "dora"],
)
def test_adapters_are_the_same_on_every_mesh(
    compare: Compare, architecture: str, keys: dict[str, Any], rows: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(rows, architecture, sample_packing=True, **LORA, **keys)
    compare(recipe, ALL, tmp_path)
