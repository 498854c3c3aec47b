"""Seconds by part: counted work, and which exchange is exposed on which link."""

from dataclasses import replace

import pytest

from ndtrain.plan.book import facts_from_book
from ndtrain.plan.checks import choose_cp_method
from ndtrain.plan.hardware import build_cluster, calibration
from ndtrain.plan.matrix_work import matmul_parameters
from ndtrain.plan.memory import predict_memory
from ndtrain.plan.plan import BatchPlan, ParallelPlan
from ndtrain.plan.setting import setting_of
from ndtrain.plan.step_time import (
    attended_keys,
    flops_per_token,
    predict_time,
    predict_traffic,
)
from ndtrain.recipe.schema import Recipe

LLAMA = facts_from_book("meta-llama/Llama-3.1-8B")


def setting(parallel=None, facts=LLAMA, **keys):
    parallel = parallel or ParallelPlan()
    method = choose_cp_method(facts, parallel.tp, parallel.cp)
    recipe = Recipe(**{"base_model": "m", "learning_rate": 1e-4, "sequence_len": 8192, **keys})
    batch = BatchPlan(recipe.micro_batch_size, 1, parallel.data_ranks)
    return setting_of(recipe, facts, replace(parallel, cp_method=method), batch)


def times(parallel=None, *, inter=None, intra=None, nodes=None, **keys):
    ranks = (parallel or ParallelPlan()).world_size
    cluster = build_cluster("h200", world_size=ranks, nodes=nodes, intra=intra, inter=inter)
    return predict_time(LLAMA, setting(parallel, **keys), cluster, calibration())


def test_flops_of_a_token_are_the_published_count():
    assert matmul_parameters(LLAMA) == 7_504_658_432
    assert flops_per_token(LLAMA, 8192) / 1e9 == pytest.approx(51.47, abs=0.01)
    assert flops_per_token(LLAMA, 4096) / 1e9 == pytest.approx(48.25, abs=0.01)


def test_only_the_experts_that_see_a_token_count():
    moe = facts_from_book("Qwen/Qwen3-30B-A3B")

    assert matmul_parameters(moe) / 1e9 == pytest.approx(3.0, abs=0.1)  # the A3B of its name


def test_a_window_bounds_what_is_attended_to():
    gemma = facts_from_book("google/gemma-2-9b")  # every second layer, 4096 tokens

    assert attended_keys(gemma, 4096) == 4096
    assert attended_keys(gemma, 131072) == (131072 + 8192) / 2
    assert attended_keys(LLAMA, 131072) == 131072


def test_recomputation_costs_a_forward_pass_of_the_blocks_without_their_last_product():
    full, none = times(gradient_checkpointing=True), times()
    blocks = matmul_parameters(LLAMA) - (128256 + 32 * 14336) * 4096

    assert full.matmul / none.matmul == pytest.approx(1 + blocks / matmul_parameters(LLAMA) / 3)
    assert full.attention / none.attention == pytest.approx(4 / 3)
    kept = times(gradient_checkpointing="attention")
    assert kept.attention == none.attention


def test_accumulation_repeats_all_but_the_optimizer():
    one, one_setting = times(), setting()
    four = predict_time(
        LLAMA,
        replace(one_setting, accumulation=4),
        build_cluster("h200", world_size=1),
        calibration(),
    )

    assert four.matmul == pytest.approx(4 * one.matmul)
    assert four.optimizer == one.optimizer


def test_gradients_are_summed_once_a_step_where_they_may_be():
    """Copies always are; shards where the recipe or their size says so."""

    def sent(mesh, **keys):
        return predict_traffic(LLAMA, replace(setting(mesh, **keys), accumulation=4))

    shards, copies = ParallelPlan(dp_shard=4), ParallelPlan(dp_replicate=2, dp_shard=2)
    gathers, reduction = 4 * 2 * 2 * 3 / 4, 4 * 3 / 4
    parameters = 8_030_261_248
    assert sent(shards).dp_shard == pytest.approx(parameters * (gathers + 4 * reduction))
    once = sent(shards, sync_each_batch=False)
    assert once.dp_shard == pytest.approx(parameters * (gathers + reduction))
    assert sent(copies).dp_replicate == predict_traffic(LLAMA, setting(copies)).dp_replicate

    def held(**keys):
        split = replace(setting(shards, **keys), accumulation=4)
        return predict_memory(LLAMA, split, calibration()).buffers

    assert held(sync_each_batch=False) - held() == pytest.approx(4 * parameters)
    assert held(adapter="lora", lora_r=16) == held(adapter="lora", lora_r=16, sync_each_batch=False)


def test_sums_in_bf16_send_half_and_with_every_micro_batch():
    def sent(mesh, **keys):
        return predict_traffic(LLAMA, replace(setting(mesh, **keys), accumulation=4))

    shards, copies = ParallelPlan(dp_shard=4), ParallelPlan(dp_replicate=2, dp_shard=2)
    gathers, reduction = 4 * 2 * 2 * 3 / 4, 2 * 3 / 4
    halved = sent(shards, reduce_dtype="bf16")
    assert halved.dp_shard == pytest.approx(8_030_261_248 * (gathers + 4 * reduction))
    one = predict_traffic(LLAMA, setting(copies)).dp_replicate
    assert sent(copies, reduce_dtype="bf16").dp_replicate == pytest.approx(4 * one / 2)
    in_fp32 = setting(shards, reduce_dtype="bf16", bf16=False)
    assert in_fp32.precision.reduce == 4


def test_tensor_parallelism_pays_for_its_link():
    fast, slow = times(ParallelPlan(tp=4)), times(ParallelPlan(tp=4), intra="pcie4")

    assert slow.tp > 10 * fast.tp > 0
    assert times(ParallelPlan(tp=4), inter="ethernet-10", nodes=4).tp > 100 * fast.tp


def test_products_hide_the_tokens_that_travel():
    shared = ParallelPlan(tp=4, sequence_parallel=True)
    overlaps = replace(shared, overlaps=True)

    plain, hidden = times(shared), times(overlaps)
    # what a send takes from the product beside it is left
    assert hidden.tp == pytest.approx(0.12 * plain.tp)
    assert replace(hidden, tp=plain.tp) == plain
    # over a slow link there is more to send than there is to compute
    slow = times(shared, intra="pcie4").tp
    left = times(overlaps, intra="pcie4").tp
    assert left == pytest.approx(slow - 0.8 * plain.matmul)
    # what is rebuilt gathers once more, half of a reduction
    rebuilt = {"gradient_checkpointing": True}
    again = predict_traffic(LLAMA, setting(overlaps, **rebuilt)).tp
    assert again == pytest.approx(7 / 6 * predict_traffic(LLAMA, setting(shared, **rebuilt)).tp)


def test_shared_tokens_divide_norms_and_residual_sums():
    whole, shared = times(ParallelPlan(tp=4)), times(ParallelPlan(tp=4, sequence_parallel=True))

    reached, bandwidth = calibration(), build_cluster("h200", world_size=4).gpu.memory_gbs * 1e9
    spared = 8 * 4096 * 3 / 4 * 32 * 8192 * reached.elementwise * reached.elementwise_budget
    assert whole.elementwise - shared.elementwise == pytest.approx(spared / bandwidth)
    assert shared.matmul == whole.matmul


def test_replication_over_a_slow_network_is_exposed():
    mesh = ParallelPlan(dp_replicate=2, dp_shard=4)

    slow = times(mesh, nodes=2, inter="ethernet-10").replicate
    assert slow > 10 * times(mesh, nodes=2).replicate > 0


def test_bytes_by_axis():
    sharded = predict_traffic(LLAMA, setting(ParallelPlan(dp_shard=4)))
    # two gathers in bf16 and one reduction in fp32, three quarters of each
    assert sharded.dp_shard == pytest.approx(8_030_261_248 * 8 * 3 / 4)
    assert (sharded.tp, sharded.cp, sharded.dp_replicate) == (0, 0, 0)

    tensor = predict_traffic(LLAMA, setting(ParallelPlan(tp=4)))
    assert tensor.tp == 32 * 4 * 2 * 3 / 4 * 8192 * 4096 * 2

    # as much in halves, and two more gathers, half of a reduction each, in the backward pass
    shared = predict_traffic(LLAMA, setting(ParallelPlan(tp=4, sequence_parallel=True)))
    assert shared.tp == 32 * 5 * 2 * 3 / 4 * 8192 * 4096 * 2

    ulysses = predict_traffic(LLAMA, setting(ParallelPlan(cp=4)))
    assert ulysses.cp == 32 * 2 * 3 / 4 * (2 * 4096 + 2 * 1024) * 2 * 2048

    copies = predict_traffic(LLAMA, setting(ParallelPlan(dp_replicate=2)))
    assert copies.dp_replicate == pytest.approx(8_030_261_248 * 4)


def test_a_sharded_frozen_base_is_gathered_and_never_reduced():
    keys = {"adapter": "lora", "shard_frozen": True}
    lora = predict_traffic(LLAMA, setting(ParallelPlan(dp_shard=4), **keys))

    adapters = 41_943_040 * 4 * 3 / 4  # their gradients, in fp32
    assert lora.dp_shard == pytest.approx(8_030_261_248 * 2 * 2 * 3 / 4 + adapters)


def test_a_whole_frozen_base_is_not_gathered():
    lora = predict_traffic(LLAMA, setting(ParallelPlan(dp_shard=4), adapter="lora"))

    assert lora.dp_shard == 41_943_040 * 4 * 3 / 4  # the gradients of the adapters


def test_parts_add_up():
    split = times(ParallelPlan(dp_shard=2, cp=2, tp=2))

    assert split.total == pytest.approx(sum(vars(split).values()))


def again_of(facts, **keys):
    """Matrix work done again, as weights of the model that a token is multiplied with once more."""
    cluster = build_cluster("h200", world_size=1)
    none, again = (
        predict_time(facts, setting(facts=facts, **more), cluster, calibration()).matmul
        for more in ({"activation_memory_budget": 1}, {"tiled_mlp": True, **keys})
    )
    return 3 * matmul_parameters(facts) * (again / none - 1)


def test_a_tiled_mlp_is_computed_once_more_and_not_twice_more_in_a_recomputed_block():
    blocks, mlps = matmul_parameters(LLAMA) - 128256 * 4096, 32 * 3 * 4096 * 14336

    assert again_of(LLAMA, activation_memory_budget=1) == pytest.approx(mlps)
    assert again_of(LLAMA, gradient_checkpointing=True) == pytest.approx(blocks)
    gemma = facts_from_book("google/gemma-2-9b")
    blocks, mlps = matmul_parameters(gemma) - 256000 * 3584, 42 * 3 * 3584 * 14336
    # a norm reads what its MLPs give
    assert again_of(gemma, gradient_checkpointing=True) == pytest.approx(blocks + mlps)


def test_the_sum_of_a_tiled_mlp_travels_once_more():
    two = ParallelPlan(tp=2)
    plain = predict_traffic(LLAMA, setting(two)).tp
    full = predict_traffic(LLAMA, setting(two, gradient_checkpointing=True)).tp

    assert predict_traffic(LLAMA, setting(two, tiled_mlp=True)).tp == pytest.approx(plain * 5 / 4)
    tiled = setting(two, gradient_checkpointing=True, tiled_mlp=True)
    assert predict_traffic(LLAMA, tiled).tp == full
