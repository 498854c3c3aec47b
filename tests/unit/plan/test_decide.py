"""From a recipe to a plan: the product rule, the batch rule and everything wrong at once."""

import pytest

from ndtrain.errors import ExitCode, MeshError, Problems
from ndtrain.plan.decide import decide
from ndtrain.plan.facts import facts_from_config
from ndtrain.plan.plan import plan_mesh
from ndtrain.recipe.schema import Recipe


def recipe(**keys):
    return Recipe(**{"base_model": "m", "learning_rate": 1e-4, **keys})


def facts(**keys):
    config = {"model_type": "llama", "num_attention_heads": 9, "num_key_value_heads": 3, **keys}
    return facts_from_config({"hidden_size": 576, **config}, name="model", source="recipe")


def test_dp_shard_takes_what_the_others_leave():
    plan = plan_mesh(recipe(tensor_parallel_size=2, dp_replicate_size=2), 16)

    assert plan.sizes == (2, 4, 1, 2)


def test_without_a_world_size_the_recipe_decides():
    assert plan_mesh(recipe(tensor_parallel_size=2), None).sizes == (1, 1, 1, 2)


@pytest.mark.parametrize(
    ("keys", "world", "message"),
    [
        (
            {"dp_shard_size": 2, "context_parallel_size": 2, "tensor_parallel_size": 2},
            4,
            "dp_replicate 1 × dp_shard 2 × cp 2 × tp 2 = 8 ranks, but 4 were started. Set "
            "dp_shard_size: 1, or start 8.",
        ),
        (
            {"tensor_parallel_size": 3},
            8,
            "dp_replicate 1 × dp_shard 2 × cp 1 × tp 3 = 6 ranks, but 8 were started. Set "
            "tensor_parallel_size: 1, 2, 4 or 8, or start 6 ranks.",
        ),
        (
            {"context_parallel_size": 3},
            4,
            "dp_replicate 1 × dp_shard 1 × cp 3 × tp 1 = 3 ranks, but 4 were started. Set "
            "context_parallel_size: 1, 2 or 4, or start 3 ranks.",
        ),
        (
            {"tensor_parallel_size": 2},
            1,
            "dp_replicate 1 × dp_shard 1 × cp 1 × tp 2 = 2 ranks, but 1 were started. Set "
            "tensor_parallel_size: 1, or start 2 ranks.",
        ),
        (
            {"tensor_parallel_size": 4, "context_parallel_size": 4},
            8,
            "dp_replicate 1 × dp_shard 1 × cp 4 × tp 4 = 16 ranks, but 8 were started. Lower one "
            "of tensor_parallel_size, context_parallel_size, dp_replicate_size so that their "
            "product divides 8, or start 16.",
        ),
        # What other tools fill up or round down without a word is refused here.
        (
            {"dp_shard_size": 2},
            8,
            "dp_replicate 1 × dp_shard 2 × cp 1 × tp 1 = 2 ranks, but 8 were started. Set "
            "dp_shard_size: 8, or start 2.",
        ),
        (
            {"dp_shard_size": 8, "context_parallel_size": 8},
            8,
            "dp_replicate 1 × dp_shard 8 × cp 8 × tp 1 = 64 ranks, but 8 were started. Set "
            "dp_shard_size: 1, or start 64.",
        ),
    ],
)
def test_a_wrong_product_says_the_numbers_and_what_works(keys, world, message):
    with pytest.raises(MeshError) as caught:
        plan_mesh(recipe(**keys), world)

    assert str(caught.value) == message


def test_an_explicit_size_of_one_is_kept():
    with pytest.raises(MeshError, match="dp_shard 1 × cp 1 × tp 1 = 1 rank, but 4 were started"):
        plan_mesh(recipe(dp_shard_size=1), 4)


def test_replicate_with_tensor_or_context_parallelism_needs_no_sharding():
    for key in ("tensor_parallel_size", "context_parallel_size"):
        plan = decide(
            recipe(dp_replicate_size=2, **{key: 2}),
            facts(num_key_value_heads=2, num_attention_heads=4),
            world_size=4,
        )
        assert plan.parallel.world_size == 4


def test_the_batch_counts_data_ranks_only():
    plan = decide(
        recipe(micro_batch_size=2, gradient_accumulation_steps=4, tensor_parallel_size=3),
        facts(),
        world_size=12,
    )

    assert (plan.batch.data_ranks, plan.batch.global_batch) == (4, 32)


def test_a_global_batch_gives_the_accumulation_on_every_mesh():
    wanted = recipe(global_batch_size=32, micro_batch_size=2)

    for world in (1, 2, 4, 16):
        batch = decide(wanted, facts(), world_size=world).batch
        assert batch.global_batch == 32
        assert batch.accumulation == 16 // world


def test_a_global_batch_that_cannot_be_dealt_is_refused():
    with pytest.raises(MeshError) as caught:
        decide(recipe(global_batch_size=10), facts(), world_size=4, where=lambda key: f"r:{key}")

    assert str(caught.value) == (
        "r:global_batch_size: global_batch_size 10 is not a multiple of micro_batch_size 1 × 4 "
        "data ranks = 4. Use a multiple of 4, or a smaller micro_batch_size."
    )


def test_everything_wrong_is_said_at_once():
    with pytest.raises(Problems) as caught:
        decide(recipe(tensor_parallel_size=2), facts(), world_size=5)

    assert caught.value.exit_code == ExitCode.MESH
    assert str(caught.value).splitlines() == [
        "dp_replicate 1 × dp_shard 2 × cp 1 × tp 2 = 4 ranks, but 5 were started. Set "
        "tensor_parallel_size: 1, or start 4 ranks.",
        "tensor_parallel_size is 2, but the model has 9 query heads (9 is not divisible by 2). "
        "Use 1, 3 or 9.",
    ]


def test_the_method_of_context_parallelism_is_part_of_the_plan():
    assert decide(recipe(context_parallel_size=3), facts()).parallel.cp_method == "ulysses"
    assert decide(recipe(context_parallel_size=2), facts()).parallel.cp_method == "allgather"


def test_a_row_longer_than_the_model_was_made_for_is_noticed():
    plan = decide(recipe(sequence_len=4096), facts(max_position_embeddings=2048))

    assert plan.notices == (
        "sequence_len 4096 is longer than the 2048 positions model was made for.",
    )


def test_softcap_is_honoured_and_its_price_is_named():
    gemma = facts_from_config({"model_type": "gemma2"}, name="g", source="recipe")

    plan = decide(recipe(context_parallel_size=2, sequence_len=4096), gemma)

    assert plan.notices == (
        "gemma2 attends with softcap: computed with a whole score matrix a head: memory grows "
        "with length².",
    )


def test_without_facts_only_the_sizes_are_checked():
    assert decide(recipe(tensor_parallel_size=2), None, world_size=4).parallel.dp_shard == 2
