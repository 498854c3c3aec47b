"""Compiling, recomputing and taking the loss in chunks leave fp32 training as it is."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))

from mesh_cells import tiny_recipe, trace_cells, trace_cells_apart, with_mesh, write_rows

from ndtrain.recipe.schema import Recipe
from ndtrain.train.cells import Trace

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="compiling for the CPU needs g++"
)

WHOLE = 10_000
"""More tokens than a step has: the logits exist all at once."""
CHUNKED: dict[str, Any] = {"loss_chunk_tokens": 7}

COMPILED: dict[str, dict[str, Any]] = {
    "none": {"activation_memory_budget": 1.0},
    "budget": {"gradient_checkpointing": "budget", "activation_memory_budget": 0.5},
    "attention": {"gradient_checkpointing": "attention"},
    "full": {"gradient_checkpointing": "full"},
    "offloading": {"gradient_checkpointing": "full", "activation_offloading": True},
}


def plain(folder: Path, **keys: Any) -> Recipe:
    """Eager, nothing recomputed, whole logits; full rows, so that all have one shape."""
    rows = write_rows(folder / "rows.jsonl")
    fixed = {"sample_packing": True, "micro_batch_size": 2, "global_batch_size": 4}
    values = {"torch_compile": False, "loss_chunk_tokens": WHOLE, **fixed, **keys}
    return tiny_recipe(rows, "llama", **values)


def assert_rounding(trace: Trace, reference: Trace, what: str) -> None:
    """Losses to 2e-6 and norms to 1e-5 relative: a few last bits of fp32.

    Adam makes more of the last bits of a gradient below its epsilon: parameters to 1e-4, as for
    meshes.
    """
    np.testing.assert_allclose(trace.losses, reference.losses, rtol=2e-6, err_msg=what)
    np.testing.assert_allclose(trace.grad_norms, reference.grad_norms, rtol=1e-5, err_msg=what)
    for name, parameter in reference.parameters.items():
        apart = (trace.parameters[name] - parameter).abs().max().item()
        assert apart < 1e-4, (what, name, apart)


def test_policies_and_chunks_change_nothing_without_the_compiler(tmp_path: Path) -> None:
    recipe = plain(tmp_path)
    policies = ("attention", "full")
    changed = [recipe.model_copy(update={**CHUNKED, "gradient_checkpointing": p}) for p in policies]
    reference, *traces = trace_cells([recipe, *changed], tmp_path)
    for policy, trace in zip(policies, traces, strict=True):
        assert_rounding(trace, reference, policy)


@pytest.mark.usefixtures("compiler_backend")
def test_compiled_blocks_with_a_budget_and_chunks_change_nothing(tmp_path: Path) -> None:
    recipe = plain(tmp_path)
    keys = {**CHUNKED, **COMPILED["budget"], "torch_compile": True}
    # a model of other sizes, compiled before in the same process, changes nothing either
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    other = plain(tmp_path, sizes=heads, **keys)
    reference, _, trace = trace_cells([recipe, other, recipe.model_copy(update=keys)], tmp_path)
    assert_rounding(trace, reference, "budget")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "attention", "full", "offloading"])
def test_compiled_blocks_with_every_policy_change_nothing(policy: str, tmp_path: Path) -> None:
    recipe = plain(tmp_path)
    keys = {**CHUNKED, **COMPILED[policy], "torch_compile": True}
    reference, trace = trace_cells([recipe, recipe.model_copy(update=keys)], tmp_path)
    assert_rounding(trace, reference, policy)


SPLIT: list[tuple[tuple[int, int, int, int], dict[str, Any]]] = [
    ((1, 1, 1, 2), {}),
    ((1, 1, 2, 1), {"context_parallel_method": "ulysses"}),
    ((1, 1, 2, 1), {"context_parallel_method": "allgather"}),
]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policies", "meshes"),
    [
        (["budget"], SPLIT[:1]),
        pytest.param([*COMPILED], SPLIT, id="all"),
    ],
)
def test_compiled_blocks_that_hold_collectives_change_nothing(
    policies: Sequence[str],
    meshes: Sequence[tuple[tuple[int, int, int, int], dict[str, Any]]],
    tmp_path: Path,
) -> None:
    recipe = plain(tmp_path)
    (reference,) = trace_cells([recipe], tmp_path)
    cells = [
        with_mesh(recipe, mesh, torch_compile=True, **COMPILED[policy], **keys)
        for policy in policies
        for mesh, keys in meshes
    ]
    for cell, trace in zip(cells, trace_cells_apart(cells, tmp_path), strict=True):
        assert_rounding(trace, reference, str(cell.gradient_checkpointing))


TILED: dict[str, Any] = {"tiled_mlp": True, "tiled_mlp_num_shards": 3}
ADAPTERS: dict[str, dict[str, Any]] = {
    # computed together: of the slice at hand
    "shared inputs": {"lora_target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "dropout": {"lora_target_modules": ["up_proj"], "lora_dropout": 0.2},
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("policy", COMPILED)
def test_slices_of_a_compiled_block_change_nothing(policy: str, tmp_path: Path) -> None:
    recipe = plain(tmp_path)
    keys = {**CHUNKED, **COMPILED[policy], **TILED, "torch_compile": True}
    reference, trace = trace_cells([recipe, recipe.model_copy(update=keys)], tmp_path)
    assert_rounding(trace, reference, policy)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_in_slices_of_a_compiled_block_change_nothing(kind: str, tmp_path: Path) -> None:
    recipe = plain(tmp_path, adapter="lora", lora_r=4, **ADAPTERS[kind])
    keys = {**COMPILED["full"], **TILED, "torch_compile": True}
    reference, trace = trace_cells([recipe, recipe.model_copy(update=keys)], tmp_path)
    assert_rounding(trace, reference, kind)
