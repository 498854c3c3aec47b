"""Experts fall back to one product each where their widths do not suit the grouped one."""

from collections.abc import Callable

import pytest
import torch

from ndtrain.model.build import build_model
from ndtrain.model.experts import fits_grouped_product, use_experts
from ndtrain.model.grouped_experts import NAME, grouped_outer, grouped_product
from ndtrain.model.weights import load_weights
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
        ({"model_type": "mixtral", "intermediate_size": 92}, 1, "ndtrain", True),
        ({"model_type": "mixtral", "intermediate_size": 92}, 2, "eager", False),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 20}, 2, "eager", False),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 24}, 2, "ndtrain", True),
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


MIXTURES = [
    {"model_type": "mixtral", "intermediate_size": 48, "num_local_experts": 4},
    {"model_type": "qwen3_moe", "moe_intermediate_size": 48, "num_experts": 4},
    {"model_type": "gpt_oss", "intermediate_size": 48, "num_local_experts": 4},
]


@pytest.mark.parametrize("config", MIXTURES, ids=lambda config: config["model_type"])
@pytest.mark.parametrize("compiled", [False, True])
def test_all_experts_at_once_compute_what_each_would(config: dict, compiled: bool) -> None:
    torch._dynamo.reset()
    sizes = {**SIZES, **config}
    recipe = Recipe(model_config=sizes, tokenizer_config="bytes", learning_rate=1e-3)
    source = ModelSource("random", "moe", None, sizes)
    model = build_model(source, recipe, dtype=torch.float32)
    load_weights(model, source, seed=1, device=torch.device("cpu"))
    torch.manual_seed(0)
    (experts,) = (one for one in model.modules() if type(one).__name__.endswith("Experts"))
    hidden = torch.randn(13, 32, requires_grad=True)
    # some expert gets no token, and no number of tokens is a multiple of anything
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(13)])
    shares = torch.rand(13, 2, requires_grad=True)
    given = [hidden, shares, *experts.parameters()]

    def computed(implementation: str, run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        model.set_experts_implementation(implementation)
        outputs = run(hidden, chosen, shares)
        return [outputs, *torch.autograd.grad(outputs.square().sum(), given)]

    wanted = computed("eager", experts)
    assert use_experts(model, tp=1, item_size=4)
    run = torch.compile(experts, fullgraph=True, backend="aot_eager") if compiled else experts
    for found, one in zip(computed(NAME, run), wanted, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-5)


def test_operands_are_laid_out_row_by_row_whatever_the_compiler_hands_over() -> None:
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)
    rows, grads = torch.randn(10, 8), torch.randn(10, 16)
    column_by_column = rows.t().contiguous().t()
    wanted = torch.stack([rows[a:b].T @ grads[a:b] for a, b in ((0, 3), (3, 3), (3, 10))])
    found = grouped_outer(column_by_column, grads.t().contiguous().t(), ends)
    torch.testing.assert_close(found, wanted)
    assert found.is_contiguous()
    torch.library.opcheck(grouped_outer, (rows, grads, ends))
    matrices = torch.randn(3, 16, 8, requires_grad=True)
    given = (rows.requires_grad_(), matrices.transpose(-2, -1), ends)
    torch.library.opcheck(grouped_product, given)
