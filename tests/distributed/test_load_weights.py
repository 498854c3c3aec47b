"""Every rank reads its own part; together they hold the files bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from ndtrain.model.adapters import apply_adapter
from ndtrain.model.build import build_model
from ndtrain.model.regions import local_tensor, region_of, take_region
from ndtrain.model.split_plan import split_plan
from ndtrain.model.weights import load_weights
from ndtrain.parallel.mesh import build_mesh
from ndtrain.parallel.shard import apply_sharding
from ndtrain.parallel.tensor import apply_tensor_parallel
from ndtrain.plan.model_source import find_model
from ndtrain.plan.plan import ParallelPlan
from ndtrain.recipe.schema import Recipe

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 99,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "qwen3 tied": {"model_type": "qwen3", "tie_word_embeddings": True, **SIZES},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        **SIZES,
    },
}
MESHES = {
    1: [ParallelPlan()],
    2: [ParallelPlan(dp_shard=2), ParallelPlan(tp=2), ParallelPlan(dp_replicate=2)],
    4: [
        ParallelPlan(dp_shard=2, tp=2),
        ParallelPlan(dp_replicate=2, dp_shard=2),
        ParallelPlan(dp_replicate=2, tp=2),
        ParallelPlan(dp_shard=4),
    ],
}


def random_recipe(config: dict[str, Any], **keys: Any) -> Recipe:
    return Recipe(model_config=config, learning_rate=1e-3, tokenizer_config="bytes", **keys)


def sharded_model(recipe: Recipe, plan: ParallelPlan, adapter: Path | None = None) -> nn.Module:
    """The model as the engine splits it, loaded."""
    source = find_model(recipe)
    model = build_model(source, recipe)
    if recipe.adapter:
        apply_adapter(model, recipe)
    mesh = build_mesh(plan, torch.device("cpu"))
    if plan.tp > 1:
        apply_tensor_parallel(model, split_plan(model, model, plan.tp), mesh.tp)
    apply_sharding(model, list(model.model.layers), mesh, compute_dtype=torch.float32)
    load_weights(model, source, seed=recipe.seed, device=torch.device("cpu"), adapter=adapter)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(
    _: int, plans: list[ParallelPlan], recipe: Recipe, expected: dict[str, torch.Tensor]
) -> list[str]:
    """Names of tensors that differ from what one process holds, per mesh."""
    wrong = []
    for plan in plans:
        model = sharded_model(recipe, plan)
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        assert set(named) == set(expected), set(named) ^ set(expected)
        for name, tensor in named.items():
            if not torch.equal(whole(tensor.detach()), expected[name]):
                wrong.append(f"{plan}: {name} whole")
            part = take_region(expected[name], region_of(tensor)) if tensor.ndim else tensor
            own = local_tensor(tensor)
            if (part is None) != (own.numel() == 0):
                wrong.append(f"{plan}: {name} emptiness")
            elif part is not None and not torch.equal(own, part):
                wrong.append(f"{plan}: {name} part")
    return wrong


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Real model folders, written by transformers."""
    made = {}
    for name, config in CONFIGS.items():
        recipe = random_recipe(config)
        model = build_model(find_model(recipe), recipe)
        load_weights(model, find_model(recipe), seed=3, device=torch.device("cpu"))
        made[name] = tmp_path_factory.mktemp("models") / name.replace(" ", "-")
        model.save_pretrained(made[name])
    return made


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_gathered_weights_equal_the_files(
    name: str, world_size: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    expected = dict(reference.named_parameters()) | dict(reference.named_buffers())
    expected = {key: value.detach().clone() for key, value in expected.items()}
    recipe = Recipe(base_model=str(folders[name]), learning_rate=1e-3)
    results = run_forked(world_size, tmp_path, compare, MESHES[world_size], recipe, expected)
    assert results == [[]] * world_size


@pytest.mark.parametrize("name", ["qwen3 tied", "qwen3_moe"])
def test_random_weights_and_adapters_do_not_depend_on_the_mesh(name: str, tmp_path: Path) -> None:
    targets = ("q_proj", "o_proj", "lm_head") if name != "qwen3_moe" else ("q_proj", "o_proj")
    recipe = random_recipe(
        CONFIGS[name], adapter="lora", lora_r=3, lora_target_modules=targets, peft_use_dora=True
    )
    (expected,) = run_forked(1, tmp_path, whole_state, recipe)
    recipes = run_forked(4, tmp_path, compare, MESHES[4], recipe, expected)
    assert recipes == [[]] * 4


UNRULED: dict[str, dict[str, Any]] = {
    "apertus": {},
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
"""Types with parameters that keep what they were built with, or that an outer module sets."""


@pytest.mark.parametrize("model_type", list(UNRULED))
def test_first_values_beside_the_rule_do_not_depend_on_the_mesh(
    model_type: str, tmp_path: Path
) -> None:
    recipe = random_recipe({"model_type": model_type, **SIZES, **UNRULED[model_type]})
    (expected,) = run_forked(1, tmp_path, whole_state, recipe)
    assert all(tensor.isfinite().all() for tensor in expected.values())
    plans = [ParallelPlan(dp_shard=2), ParallelPlan(dp_replicate=2)]
    assert run_forked(2, tmp_path, compare, plans, recipe, expected) == [[]] * 2


def whole_state(_: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    model = sharded_model(recipe, ParallelPlan())
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: whole(tensor.detach()).clone() for name, tensor in named.items()}
