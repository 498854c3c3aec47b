"""The ranked list of meshes: what is in it, in which order, and why."""

from ndtrain.plan.apply import chosen_keys
from ndtrain.plan.book import facts_from_book
from ndtrain.plan.decide import decide
from ndtrain.plan.hardware import GIB, build_cluster, calibration
from ndtrain.plan.search import all_meshes, limit_gib, possible_meshes, search, why_first
from ndtrain.recipe.schema import Recipe

LLAMA = facts_from_book("meta-llama/Llama-3.1-8B")
SMALL = facts_from_book("HuggingFaceTB/SmolLM2-135M")  # 9 query heads, 3 key/value heads


def recipe(**keys):
    return Recipe(**{"base_model": "m", "learning_rate": 1e-4, "sequence_len": 8192, **keys})


def found(facts, world, gpu="h200", **keys):
    return search(recipe(**keys), facts, build_cluster(gpu, world_size=world), calibration())


def test_every_mesh_of_eight_ranks_is_there_once():
    meshes = [mesh.sizes for mesh in all_meshes(8)]

    assert len(meshes) == len(set(meshes)) == 20  # 2^3 over four axes


def test_only_tensor_sizes_that_work_are_proposed():
    assert {mesh.tp for mesh in possible_meshes(recipe(), SMALL, 6)} == {1, 3}
    assert {mesh.tp for mesh in possible_meshes(recipe(), LLAMA, 6)} == {1, 2}


def test_each_mesh_knows_how_it_splits_sequences():
    methods = {mesh.sizes: mesh.cp_method for mesh in possible_meshes(recipe(), SMALL, 6)}

    assert methods[(1, 2, 3, 1)] == "ulysses"
    assert methods[(1, 3, 2, 1)] == "allgather"
    assert methods[(1, 6, 1, 1)] == "none"


def test_a_global_batch_is_kept_on_every_mesh():
    candidates = found(LLAMA, 8, global_batch_size=12)

    assert {c.parallel.data_ranks for c in candidates} == {1, 2, 4}
    assert {c.setting.step_tokens for c in candidates} == {12 * 8192}


def test_what_does_not_fit_comes_last():
    fits = [c.fits for c in found(LLAMA, 8, gpu="a100-40")]

    assert fits == sorted(fits, reverse=True)
    assert True in fits
    assert False in fits


def test_fitting_is_judged_by_what_may_be_filled():
    cluster = build_cluster("a100-40", world_size=8)
    for candidate in found(LLAMA, 8, gpu="a100-40"):
        limit = limit_gib(cluster, calibration()) * GIB
        assert candidate.fits == (candidate.memory.total <= limit)


def test_on_one_node_sharding_beats_context_and_tensor_parallelism():
    order = [c.parallel.sizes for c in found(LLAMA, 4)]

    assert order[0] == (1, 4, 1, 1)
    assert order.index((1, 4, 1, 1)) < order.index((1, 2, 1, 2)) < order.index((1, 1, 1, 4))


def test_a_long_sequence_needs_context_or_tensor_parallelism():
    candidates = found(LLAMA, 4, gpu="h100-80", sequence_len=131072)
    fitting = [c for c in candidates if c.fits]

    assert fitting
    assert all(c.parallel.cp * c.parallel.tp > 1 for c in fitting)


def test_nothing_is_recomputed_where_memory_allows():
    (only,) = found(SMALL, 1, sequence_len=1024)

    assert only.setting.policy in ("none", "budget")


def test_one_sentence_says_why():
    first, second, *_ = found(LLAMA, 4)
    tensor = next(c for c in found(LLAMA, 4) if c.parallel.sizes == (1, 1, 1, 4))

    assert why_first(first, tensor).startswith("The first beats the second by ")
    assert "matrix work, of which it repeats less or which it splits less" in why_first(
        first, tensor
    )
    assert why_first(first, second)


def test_256_gpus_have_many_meshes():
    candidates = found(facts_from_book("meta-llama/Llama-3.1-70B"), 256, gpu="h100-80")

    assert len(candidates) > 100


def test_a_frozen_base_needs_less_memory_and_time():
    (full,) = found(LLAMA, 1, gpu="h100-80")
    (lora,) = found(LLAMA, 1, gpu="h100-80", adapter="lora")

    assert not full.fits  # 16 bytes a parameter are 120 GiB
    assert lora.fits
    assert lora.time.matmul / lora.setting.step_tokens < full.time.matmul / full.setting.step_tokens


def test_an_optimizer_in_the_backward_pass_is_planned_in_one_pass():
    keys = {"optimizer_in_backward": True, "max_grad_norm": None, "global_batch_size": 256}
    candidates = found(SMALL, 8, sequence_len=512, **keys)

    # 64 rows a pass at most, so at least four ranks must read different rows
    assert {c.parallel.data_ranks for c in candidates} == {4, 8}
    assert {c.setting.accumulation for c in candidates} == {1}


def test_meshes_that_a_start_would_refuse_are_not_proposed():
    def sizes(**keys):
        return {c.parallel.tp for c in found(LLAMA, 8, **keys)}

    assert sizes() == {1, 2, 4, 8}
    assert sizes(adapter="qlora", load_in_4bit=True) == {1}
    for tp in sizes(optimizer_state_dtype="8bit"):
        recipe = Recipe(
            base_model="m",
            learning_rate=1e-4,
            optimizer_state_dtype="8bit",
            tensor_parallel_size=tp,
        )
        assert decide(recipe, LLAMA).parallel.tp == tp


def test_mlps_are_tiled_where_a_row_fits_no_other_way():
    long = {"sequence_len": 655_360, "global_batch_size": 2}
    best = found(LLAMA, 8, gpu="h100-80", **long)[0]

    assert best.fits
    assert best.setting.tiled
    assert best.parallel.sizes == (1, 1, 8, 1)
    assert chosen_keys(recipe(**long), best)["tiled_mlp"] == "true"
    short = found(LLAMA, 8, gpu="h100-80", sequence_len=8192)
    assert not any(candidate.setting.tiled for candidate in short if candidate.parallel.cp == 8)


def test_a_recipe_that_tiles_its_mlps_is_held_to_it():
    candidates = found(LLAMA, 8, tiled_mlp=True, tiled_mlp_num_shards=4)

    assert {(c.setting.tiled, c.setting.tiled_shards) for c in candidates} == {(True, 4)}
    assert "tiled_mlp" not in chosen_keys(recipe(tiled_mlp=True), candidates[0])
