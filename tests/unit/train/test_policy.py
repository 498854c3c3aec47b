"""What a run says about its numbers before its first step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ndtrain.plan.plan import ParallelPlan
from ndtrain.recipe.schema import Recipe
from ndtrain.train.policy import Policy, decide_policy


def policy_of(**keys: Any) -> Policy:
    recipe = Recipe(
        model_config={"model_type": "llama"},
        tokenizer_config="bytes",
        learning_rate=1e-4,
        **{"bf16": True, **keys},
    )
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), plan=ParallelPlan())
    return decide_policy(recipe, mesh)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"bf16": False}, "everything is computed and kept in fp32"),
        ({}, "precision is fp32, except computation bf16"),
        (
            {"param_dtype": "bf16", "optimizer_state_dtype": "8bit"},
            "precision is fp32, except trained weights bf16, computation bf16, gradients added "
            "up over micro-batches bf16, optimizer states 8-bit; rounded by chance when updated",
        ),
        (
            {"param_dtype": "bf16", "optimizer": "sgd"},
            "precision is fp32, except trained weights bf16, computation bf16, gradients added "
            "up over micro-batches bf16; updated weights are rounded to the nearest bf16",
        ),
        (
            {"adapter": "lora", "param_dtype": "bf16"},
            "precision is fp32, except frozen weights bf16, computation bf16",
        ),
        (
            {"fp8": True},
            "precision is fp32, except computation bf16, matmuls of the blocks fp8, tensorwise",
        ),
        (
            {"fp8": "rowwise"},
            "precision is fp32, except computation bf16, matmuls of the blocks fp8, rowwise",
        ),
    ],
)
def test_the_dtypes_are_said_in_a_line(keys: dict[str, Any], line: str) -> None:
    assert policy_of(**keys).describe() == line


def test_a_rank_alone_keeps_what_it_computes_with_unless_it_is_told_to_free_it() -> None:
    assert not policy_of().reshard
    assert policy_of(reshard_after_forward=True).reshard


@pytest.mark.parametrize(
    ("wanted", "budget"), [(False, 0.7), ("budget", 0.7), ("attention", 0.2), (True, 0.0)]
)
def test_a_compiled_block_keeps_what_its_recomputation_leaves(
    wanted: bool | str, budget: float
) -> None:
    keys = {"activation_memory_budget": 0.7, "activation_offloading": wanted is True}
    policy = policy_of(gradient_checkpointing=wanted, torch_compile=True, **keys)
    assert (policy.budget, policy.compiles, policy.offloads) == (budget, True, wanted is True)


def test_a_compiled_block_with_a_tiled_mlp_is_recomputed_from_outside() -> None:
    keys = {"gradient_checkpointing": True, "torch_compile": True}
    plain, tiled = policy_of(**keys), policy_of(**keys, tiled_mlp=True)
    assert not plain.recomputes_outside(True)
    assert (plain.budget, tiled.budget) == (0.0, 1.0)
    assert tiled.recomputes_outside(True)
    kept = policy_of(**{**keys, "gradient_checkpointing": "attention"}, tiled_mlp=True)
    assert not kept.recomputes_outside(True)
    assert kept.recomputes_outside(False)
