"""Experts fall back to one product each where their widths do not suit the grouped one."""

import pytest

from ndtrain.model.build import build_model
from ndtrain.model.experts import fits_grouped_product, use_experts
from ndtrain.plan.model_source import ModelSource
from ndtrain.recipe.schema import Recipe

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}


@pytest.mark.parametrize(
    ("width", "tp", "item_size", "fits"),
    [(92, 1, 4, True), (92, 2, 4, False), (96, 2, 4, True), (96, 8, 2, False), (1536, 8, 2, True)],
)
def test_rows_are_multiples_of_16_bytes(width: int, tp: int, item_size: int, fits: bool) -> None:
    assert fits_grouped_product(64, width, tp=tp, item_size=item_size) is fits


@pytest.mark.parametrize(
    ("config", "tp", "implementation", "uniform"),
    [
        ({"model_type": "mixtral", "intermediate_size": 92}, 1, "grouped_mm", True),
        ({"model_type": "mixtral", "intermediate_size": 92}, 2, "eager", False),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 20}, 2, "eager", False),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 24}, 2, "grouped_mm", True),
    ],
)
def test_the_implementation_follows_the_local_width(
    config: dict, tp: int, implementation: str, uniform: bool
) -> None:
    sizes = {**SIZES, **config}
    recipe = Recipe(model_config=sizes, tokenizer_config="bytes", learning_rate=1e-3)
    model = build_model(ModelSource("random", "moe", None, sizes), recipe)
    assert use_experts(model, tp=tp, item_size=4) is uniform
    assert model.get_experts_implementation()[""] == implementation


def test_a_dense_model_of_any_width_can_be_compiled() -> None:
    sizes = {**SIZES, "model_type": "llama", "intermediate_size": 91}
    recipe = Recipe(model_config=sizes, tokenizer_config="bytes", learning_rate=1e-3)
    assert use_experts(
        build_model(ModelSource("random", "x", None, sizes), recipe), tp=7, item_size=4
    )
