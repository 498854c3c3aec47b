"""The probe of untested architectures: causal attention passes on every mesh, nothing else does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from mesh_cells import SIZES, source_of, tiny_recipe
from transformers import CONFIG_MAPPING

from ndtrain.errors import MeshError
from ndtrain.parallel.mesh import build_mesh
from ndtrain.plan.plan import ParallelPlan
from ndtrain.recipe.schema import Recipe
from ndtrain.train.assemble import assemble
from ndtrain.train.probe import check_untested

PLANS = [
    ParallelPlan(cp=2, cp_method="ulysses"),
    ParallelPlan(cp=2, cp_method="allgather"),
    ParallelPlan(dp_shard=2),
]
_GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def said(rank: int, recipe: Recipe) -> list[str]:
    """What the probe says on each mesh, empty where it passes."""
    found = []
    for plan in PLANS:
        engine = assemble(recipe, source_of(recipe), build_mesh(plan, torch.device("cpu")))
        try:
            check_untested(engine)
        except MeshError as error:
            found.append(error.message)
        else:
            found.append("")
        assert engine.trainable.training
    return found


def recipe_of(folder: Path, model_type: str, sizes: dict[str, Any], **keys: Any) -> Recipe:
    """A tiny random model of a type, with those of the usual sizes that it has."""
    default = CONFIG_MAPPING[model_type]()
    usual = {key: value for key, value in SIZES.items() if hasattr(default, key)}
    recipe = tiny_recipe(folder / "unread.jsonl", **keys)
    return recipe.model_copy(update={"model_config_": {"model_type": model_type, **usual, **sizes}})


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"], **_GATED_DELTA}),
        # its attention is a class of its own, which exchanges nothing
        ("xglm", {"ffn_dim": 92, "attention_dropout": 0.0}),
    ],
)
def test_layers_along_the_row_are_found_on_every_rank(
    model_type: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, model_type, sizes)

    for *split, alone in run_forked(2, tmp_path, said, recipe):
        for message in split:
            assert f"context_parallel_size is 2, but tokens of '{model_type}' meet" in message
        assert alone == ""


@pytest.mark.parametrize("keys", [{}, {"bf16": True}], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("starcoder2", {"sliding_window": 8}),
        ("arcee", {}),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_attention_alone_passes(
    model_type: str, sizes: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, model_type, sizes, **keys)

    assert run_forked(2, tmp_path, said, recipe) == [["", "", ""]] * 2


def test_a_dtype_that_an_architecture_cannot_compute_in_is_named(tmp_path: Path) -> None:
    sizes = {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2}
    recipe = recipe_of(tmp_path, "minimax", {"head_dim": 8, **sizes}, bf16=True)

    for messages in run_forked(2, tmp_path, said, recipe):
        for message in messages:
            assert message.startswith("'minimax' cannot be computed in bfloat16: expected m1 and ")


def said_of_flipped(rank: int, recipe: Recipe) -> list[str]:
    """What the probe says where a block hands a part of every row on from behind."""
    found = []
    for plan in PLANS:
        engine = assemble(recipe, source_of(recipe), build_mesh(plan, torch.device("cpu")))
        block = engine.causal_lm.base_model.layers[0]
        block.register_forward_hook(lambda _, __, output: output + 0.01 * output.flip(1))
        try:
            check_untested(engine)
        except MeshError as error:
            found.append(error.message)
    return found


def test_tokens_that_see_later_ones_are_found_on_every_mesh(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "arcee", {})

    for messages in run_forked(2, tmp_path, said_of_flipped, recipe):
        assert len(messages) == len(PLANS)
        for message in messages:
            assert message.startswith(
                "tokens of 'arcee' see later ones: changing the last token of a row moved hidden "
                "states before it by "
            )


def test_the_tested_architectures_are_not_probed(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "llama", {})

    assert run_forked(2, tmp_path, said_of_flipped, recipe) == [[], []]
