"""Warnings about meshes that work and yet waste, each with its numbers."""

from ndtrain.plan.advice import advise_memory, advise_placement, advise_sizes
from ndtrain.plan.facts import facts_from_config
from ndtrain.plan.hardware import build_cluster
from ndtrain.plan.plan import ParallelPlan

TWO_NODES = build_cluster("h100-80", world_size=16, nodes=2)
PCIE = build_cluster("l40s", world_size=8, nodes=1)


def test_tensor_parallelism_across_nodes():
    assert advise_placement(ParallelPlan(tp=16), TWO_NODES)[0] == (
        "tensor_parallel_size 16 crosses nodes of 8 GPUs: its traffic, several exchanges a layer, "
        "would pass over ib-ndr (50 GB/s a GPU). Keep it at 8 or below, and a divisor of 8."
    )


def test_tensor_parallelism_over_pcie():
    assert advise_placement(ParallelPlan(dp_shard=4, tp=2), PCIE) == [
        "tensor_parallel_size 2 over pcie4 (32 GB/s): every layer waits for it. Use dp_shard_size "
        "instead unless the model does not fit."
    ]


def test_a_shard_group_wider_than_a_node():
    assert advise_placement(ParallelPlan(dp_shard=16), TWO_NODES) == [
        "the shard group of 16 ranks is wider than a node of 8: all weights are gathered over "
        "ib-ndr in every pass. dp_shard_size × context_parallel_size × tensor_parallel_size = 8 "
        "with dp_replicate_size 2 keeps that inside the node, if the model fits."
    ]


def test_copies_that_share_nodes():
    four = build_cluster("h100-80", world_size=24, nodes=3)

    (warning,) = advise_placement(ParallelPlan(dp_replicate=2, dp_shard=12), four)

    assert warning == (
        "a copy of the model takes 12 ranks, which is not a multiple of the node's 8: copies "
        "share nodes. Choose sizes so that it is."
    )


def test_a_mesh_that_lies_well_gets_no_warning():
    assert advise_placement(ParallelPlan(dp_replicate=2, dp_shard=4, tp=2), TWO_NODES) == []
    assert advise_placement(ParallelPlan(dp_shard=8), PCIE) == []


def test_context_parallelism_where_one_sequence_fits_anyway():
    mesh = ParallelPlan(dp_shard=2, cp=2)

    (warning,) = advise_memory(mesh, needed_gib=30, limit_gib=74, alone_gib=41)

    assert warning == (
        "context_parallel_size 2 is not needed: one whole sequence fits a GPU (41 of 74 GiB). "
        "dp_shard_size would use the ranks without the exchange of every layer."
    )
    assert advise_memory(mesh, needed_gib=60, limit_gib=74, alone_gib=90) == []


def test_replication_where_the_model_does_not_fit():
    (warning,) = advise_memory(
        ParallelPlan(dp_replicate=8), needed_gib=140.2, limit_gib=74.4, alone_gib=None
    )

    assert warning == (
        "dp_replicate_size 8 keeps whole copies, and one does not fit: 140 GiB of 74. Shard "
        "instead: dp_shard_size 8, dp_replicate_size 1."
    )


def test_any_other_mesh_that_does_not_fit():
    (warning,) = advise_memory(
        ParallelPlan(dp_shard=2), needed_gib=100, limit_gib=74, alone_gib=None
    )

    assert warning == (
        "predicted memory is 100 GiB a GPU, of which 74 can be used: it will run out. `ndtrain "
        "plan` shows what fits."
    )


def test_tensor_parallelism_of_a_small_model():
    config = {"model_type": "llama", "intermediate_size": 112}
    facts = facts_from_config(config, name="m", source="recipe")

    assert advise_sizes(facts, ParallelPlan(tp=4)) == [
        "tensor_parallel_size 4 leaves 28 of 112 feed-forward rows a rank: too few to be worth "
        "the exchange."
    ]
    assert advise_sizes(facts, ParallelPlan()) == []
