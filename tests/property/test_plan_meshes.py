"""Whatever the model and the number of ranks: each proposed mesh multiplies and divides."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ndtrain.plan.checks import check_tensor_parallel, local_heads, valid_tensor_sizes
from ndtrain.plan.decide import decide
from ndtrain.plan.facts import facts_from_config
from ndtrain.plan.hardware import build_cluster, calibration
from ndtrain.plan.plan import ParallelPlan, row_multiple
from ndtrain.plan.search import all_meshes, possible_meshes, search
from ndtrain.recipe.schema import Recipe

families = st.sampled_from(["llama", "qwen3", "gemma2", "olmo2", "qwen3_moe", "gpt_oss"])
worlds = st.integers(1, 24)


@st.composite
def models(draw):
    kv_heads = draw(st.integers(1, 6))
    heads = kv_heads * draw(st.integers(1, 6))
    config = {
        "model_type": draw(families),
        "hidden_size": 16 * heads,
        "head_dim": 16,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 2,
        "vocab_size": draw(st.integers(100, 400)),
    }
    return facts_from_config(config, name="m", source="recipe")


def recipe(**keys):
    return Recipe(**{"base_model": "m", "learning_rate": 1e-4, "sequence_len": 64, **keys})


@given(worlds)
def test_meshes_are_all_factorisations_once(world):
    meshes = [mesh.sizes for mesh in all_meshes(world)]

    assert len(meshes) == len(set(meshes))
    assert all(mesh.world_size == world for mesh in all_meshes(world))


@given(models(), worlds)
def test_every_possible_mesh_passes_the_checks_of_a_run(facts, world):
    for mesh in possible_meshes(recipe(), facts, world):
        keys = {
            "dp_replicate_size": mesh.dp_replicate,
            "dp_shard_size": mesh.dp_shard,
            "context_parallel_size": mesh.cp,
            "tensor_parallel_size": mesh.tp,
        }

        plan = decide(recipe(**keys), facts, world_size=world)

        assert plan.parallel == mesh
        queries, keys_of_rank = local_heads(facts, mesh.tp)
        assert queries >= 1
        assert queries % keys_of_rank == 0
        if mesh.cp_method == "ulysses":
            assert queries % mesh.cp == keys_of_rank % mesh.cp == 0


@given(models(), st.integers(1, 40))
def test_the_sizes_named_as_working_are_those_that_pass(facts, tp):
    assert (check_tensor_parallel(facts, tp) == []) == (tp in valid_tensor_sizes(facts))


@settings(max_examples=20, deadline=None)  # a busy machine is no failure
@given(models(), worlds, st.sampled_from(["h100-80", "l40s", "a10"]))
def test_the_ranked_list_has_each_mesh_once_and_is_sorted(facts, world, gpu):
    found = search(recipe(), facts, build_cluster(gpu, world_size=world, nodes=1), calibration())

    assert sorted(c.parallel.sizes for c in found) == sorted(
        mesh.sizes for mesh in possible_meshes(recipe(), facts, world)
    )
    assert [c.fits for c in found] == sorted((c.fits for c in found), reverse=True)
    speeds = [c.tokens_per_second for c in found if c.fits]
    # Predictions within 0.3 % count as equal and are ordered by fewer exchanges.
    assert all(first >= 0.993 * second for first, second in pairwise(speeds))


@given(worlds, st.integers(1, 8), st.sampled_from(["none", "ulysses", "allgather"]))
def test_ranks_have_coordinates_that_tell_them_apart(world, cp, method):
    for mesh in all_meshes(world):
        places = {tuple(mesh.coordinates(rank).values()) for rank in range(world)}
        assert len(places) == world
    assert row_multiple(cp, method) % (cp if method != "none" else 1) == 0


def test_tp_is_innermost():
    mesh = ParallelPlan(2, 2, 2, 2)

    assert [mesh.coordinates(rank)["tp"] for rank in range(4)] == [0, 1, 0, 1]
    assert [mesh.coordinates(rank)["dp_replicate"] for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
