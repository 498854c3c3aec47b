"""Blocks of 8-bit states, and the meshes that would cut one."""

import pytest

from ndtrain.plan.book import facts_from_book
from ndtrain.plan.small_states import block_length, check_small_states
from ndtrain.recipe.schema import Recipe


def recipe(**keys):
    return Recipe(base_model="m", learning_rate=1e-4, **keys)


@pytest.mark.parametrize(
    ("shape", "length"),
    [
        ((4096, 4096), 256),
        ((4096, 14336), 256),
        ((896, 4864), 32),
        ((4864, 896), 16),
        ((576, 576), 64),
        ((4096,), None),
        ((64, 63), None),
        ((4096, 17), None),
        ((8, 64, 128), 16),
    ],
)
def test_blocks_follow_from_the_whole_shape(shape: tuple[int, ...], length: int | None) -> None:
    assert block_length(shape) == length


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_usual_sizes_are_cut_between_blocks(tp):
    for name in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B"):
        facts = facts_from_book(name)
        assert check_small_states(recipe(optimizer_state_dtype="8bit"), facts, tp, str) == []


def test_a_mesh_that_cuts_a_block_is_refused_before_the_launch():
    facts = facts_from_book("meta-llama/Llama-3.1-8B")
    small = recipe(optimizer_state_dtype="8bit")

    (problem,) = check_small_states(small, facts, 32, lambda name: f"r:{name}")

    assert str(problem) == (
        "r:optimizer_state_dtype: 8-bit states of 'model.layers.0.self_attn.o_proj.weight' share "
        "a scale over 256 elements, and tensor_parallel_size 32 leaves ranks rows of 128. Use "
        "optimizer_state_dtype: bf16, or dp_shard_size instead."
    )
    assert check_small_states(recipe(optimizer_state_dtype="bf16"), facts, 32, str) == []
    assert check_small_states(recipe(), facts, 32, str) == []
