"""What a run that ran out of memory is told."""

import json
import re

from ndtrain.errors import ExitCode
from ndtrain.plan.book import facts_from_book
from ndtrain.plan.hardware import build_cluster, build_host, calibration
from ndtrain.plan.out_of_memory import cheapest_changes, explain_out_of_memory
from ndtrain.plan.plan import BatchPlan, ParallelPlan, plan_mesh
from ndtrain.plan.search import evaluate
from ndtrain.plan.setting import setting_of
from ndtrain.recipe.load import load_recipe
from ndtrain.recipe.schema import Recipe

LLAMA = facts_from_book("meta-llama/Llama-3.1-8B")


def situation(parallel, gpu="h100-80", **keys):
    given = {"base_model": "m", "learning_rate": 1e-4, "sequence_len": 8192, **keys}
    recipe = Recipe(**given)
    batch = BatchPlan(recipe.micro_batch_size, 1, parallel.data_ranks)
    cluster = build_cluster(gpu, world_size=parallel.world_size)
    return recipe, LLAMA, setting_of(recipe, LLAMA, parallel, batch), cluster, calibration()


def test_the_message_has_the_planned_split_and_three_changes_that_fit():
    error = explain_out_of_memory(
        *situation(ParallelPlan(dp_shard=4), micro_batch_size=4), where="rank 3, step 12"
    )

    assert error.exit_code == ExitCode.MEMORY
    first, *changes = str(error).splitlines()
    assert re.match(r"rank 3, step 12: the device ran out of memory. Planned were 1\d\d\.", first)
    assert "GiB of the 79.2 GiB: weights 7.5, gradients 7.5, optimizer 15.0, activations 8" in first
    assert first.endswith("What would fit, cheapest first:")
    assert [line[:5] for line in changes] == ["  1. ", "  2. ", "  3. "]


def test_every_change_fits_and_the_cheapest_comes_first():
    changes = cheapest_changes(*situation(ParallelPlan(dp_shard=4), micro_batch_size=4))

    assert len(changes) == 3
    costs = [round(change.cost, 2) for change in changes]
    assert costs == sorted(costs)
    for change in changes:
        assert change.candidate.fits


def test_a_smaller_micro_batch_keeps_the_global_batch():
    changes = cheapest_changes(*situation(ParallelPlan(dp_shard=4), micro_batch_size=4))
    smaller = [c for c in changes if "micro_batch_size" in c.keys]

    assert smaller
    for change in smaller:
        micro = int(change.keys["micro_batch_size"])
        assert micro * int(change.keys["gradient_accumulation_steps"]) == 4
    (fixed, *_) = cheapest_changes(
        *situation(ParallelPlan(dp_shard=4), micro_batch_size=4, global_batch_size=16)
    )
    assert "gradient_accumulation_steps" not in fixed.keys


def test_copies_are_turned_into_shards():
    changes = cheapest_changes(*situation(ParallelPlan(dp_replicate=8)))

    assert {"dp_replicate_size": "1", "dp_shard_size": "8"} in [c.keys for c in changes]


def test_a_change_must_need_less_than_what_was_not_enough():
    recipe, facts, setting, cluster, constants = situation(ParallelPlan(dp_shard=4))
    changes = cheapest_changes(recipe, facts, setting, cluster, constants)

    planned = evaluate(facts, setting, cluster, constants).memory.total
    assert changes  # this setting was predicted to fit, and yet ran out
    for change in changes:
        assert change.candidate.memory.total <= 0.95 * planned


def test_single_changes_that_are_enough_are_not_offered_in_company():
    keys = [set(c.keys) for c in cheapest_changes(*situation(ParallelPlan(dp_shard=4)))]

    enough = [one for one in keys if len(one) == 1]
    assert enough
    assert not any(one < other for one in enough for other in keys)


def test_where_one_change_is_not_enough_several_are_put_together():
    changes = cheapest_changes(
        *situation(ParallelPlan(dp_shard=4), micro_batch_size=2, sequence_len=65536)
    )

    assert changes
    for change in changes:
        assert change.candidate.fits
        assert {"micro_batch_size", "context_parallel_size", "tiled_mlp"} & set(change.keys)
        assert len(set(change.keys) - {"gradient_accumulation_steps"}) > 1


def test_the_same_keys_are_offered_once():
    for batch in (4, 8, 16):
        keys = [
            frozenset(c.keys)
            for c in cheapest_changes(*situation(ParallelPlan(dp_shard=4), micro_batch_size=batch))
        ]
        assert len(keys) == len(set(keys)) == 3


def test_an_optimizer_in_the_backward_pass_is_not_told_to_accumulate():
    changes = cheapest_changes(
        *situation(
            ParallelPlan(dp_shard=4),
            micro_batch_size=4,
            optimizer_in_backward=True,
            max_grad_norm=None,
        )
    )

    assert changes
    assert all(change.candidate.setting.accumulation == 1 for change in changes)


def test_what_is_offered_is_a_recipe(tmp_path):
    for keys in ({}, {"micro_batch_size": 4}, {"sequence_len": 131072}):
        recipe, *rest = situation(ParallelPlan(dp_shard=4), **keys)
        for change in cheapest_changes(recipe, *rest):
            path = tmp_path / "recipe.yaml"
            given = {"base_model": "m", "learning_rate": 1e-4, "sequence_len": 8192, **keys}
            given |= {"dp_shard_size": 4, "datasets": [{"path": "synthetic"}]}
            path.write_text("".join(f"{key}: {json.dumps(v)}\n" for key, v in given.items()))

            changed = load_recipe(path, [f"{key}={v}" for key, v in change.keys.items()]).recipe

            assert plan_mesh(changed, 4).world_size == 4


def test_rows_are_split_over_ranks_with_the_same_global_batch():
    recipe, facts, setting, cluster, constants = situation(
        ParallelPlan(dp_shard=4), sequence_len=100_000, gradient_checkpointing=True
    )
    changes = cheapest_changes(recipe, facts, setting, cluster, constants)

    rows = setting.micro_batch * setting.accumulation * setting.parallel.data_ranks
    assert any("context_parallel_size" in change.keys for change in changes)
    for change in changes:
        after = change.candidate.setting
        assert after.micro_batch * after.accumulation * after.parallel.data_ranks == rows


def test_on_a_host_the_share_of_a_rank_is_named():
    recipe = Recipe(base_model="m", learning_rate=1e-4, sequence_len=8192, device="cpu")
    cluster = build_host("cpu", memory_gib=12, world_size=2)
    plan = ParallelPlan(dp_shard=2)
    setting = setting_of(recipe, LLAMA, plan, BatchPlan(1, 1, 2), on_cuda=False)
    error = explain_out_of_memory(
        recipe, LLAMA, setting, cluster, calibration(), cause="it tried to allocate 2.0 GiB"
    )

    assert error.message.startswith(
        "the host ran out of memory (it tried to allocate 2.0 GiB). Planned were "
    )
    assert "GiB of the 12 GiB that are this rank's share: weights 15.0," in error.message


def test_where_nothing_helps_it_says_so():
    error = explain_out_of_memory(*situation(ParallelPlan(), gpu="l4"))

    assert error.hint == (
        "No smaller setting of this mesh fits: use more GPUs, or an adapter (adapter: lora)."
    )


def test_long_rows_are_told_of_tiled_mlps():
    changes = cheapest_changes(
        *situation(ParallelPlan(dp_shard=8), sequence_len=98304, gradient_checkpointing=True)
    )
    assert {"tiled_mlp": "true"} in [change.keys for change in changes]
