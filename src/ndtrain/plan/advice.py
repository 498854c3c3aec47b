"""Warnings about meshes that work and yet waste: the rules of thumb, with this mesh's numbers."""

from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.hardware import Cluster
from ndtrain.plan.plan import ParallelPlan

_SMALLEST_SHARE = 64
"""Fewest rows of a weight matrix that are worth splitting over tensor-parallel ranks."""


def advise_placement(parallel: ParallelPlan, cluster: Cluster) -> list[str]:
    """How the axes lie on nodes and links."""
    per_node, tp = cluster.gpus_per_node, parallel.tp
    group = parallel.dp_shard * parallel.cp * tp
    warnings = []
    if tp > per_node or (cluster.nodes > 1 and per_node % tp):
        warnings.append(
            f"tensor_parallel_size {tp} crosses nodes of {per_node} GPUs: its traffic, several "
            f"exchanges a layer, would pass over {cluster.inter.name} "
            f"({cluster.inter.gbs:g} GB/s a GPU). Keep it at {per_node} or below, and a divisor "
            f"of {per_node}."
        )
    elif tp > 1 and not cluster.intra.is_fast:
        warnings.append(
            f"tensor_parallel_size {tp} over {cluster.intra.name} ({cluster.intra.gbs:g} GB/s): "
            "every layer waits for it. Use dp_shard_size instead unless the model does not fit."
        )
    if cluster.nodes > 1 and group > per_node and parallel.dp_replicate == 1:
        warnings.append(
            f"the shard group of {group} ranks is wider than a node of {per_node}: all weights "
            f"are gathered over {cluster.inter.name} in every pass. dp_shard_size × "
            f"context_parallel_size × tensor_parallel_size = {per_node} with dp_replicate_size "
            f"{cluster.nodes} keeps that inside the node, if the model fits."
        )
    elif cluster.nodes > 1 and parallel.dp_replicate > 1 and group > per_node and group % per_node:
        warnings.append(
            f"a copy of the model takes {group} ranks, which is not a multiple of the node's "
            f"{per_node}: copies share nodes. Choose sizes so that it is."
        )
    return warnings


def advise_sizes(facts: ModelFacts, parallel: ParallelPlan) -> list[str]:
    """Sizes that split a small thing too finely."""
    warnings = []
    share = facts.intermediate_size // parallel.tp
    if parallel.tp > 1 and share < _SMALLEST_SHARE:
        warnings.append(
            f"tensor_parallel_size {parallel.tp} leaves {share} of {facts.intermediate_size} "
            "feed-forward rows a rank: too few to be worth the exchange."
        )
    return warnings


def advise_memory(
    parallel: ParallelPlan, *, needed_gib: float, limit_gib: float, alone_gib: float | None
) -> list[str]:
    """What the predicted memory says about the axes.

    Args:
        needed_gib: predicted memory of a rank on this mesh.
        limit_gib: what a GPU offers.
        alone_gib: the same without splitting the sequence, when it is split.
    """
    warnings = []
    if needed_gib > limit_gib and not (parallel.dp_replicate > 1 and parallel.dp_shard == 1):
        warnings.append(
            f"predicted memory is {needed_gib:.0f} GiB a GPU, of which {limit_gib:.0f} can be "
            "used: it will run out. `ndtrain plan` shows what fits."
        )
    elif needed_gib > limit_gib:
        warnings.append(
            f"dp_replicate_size {parallel.dp_replicate} keeps whole copies, and one does not fit: "
            f"{needed_gib:.0f} GiB of {limit_gib:.0f}. Shard instead: dp_shard_size "
            f"{parallel.dp_replicate}, dp_replicate_size 1."
        )
    if alone_gib is not None and alone_gib <= limit_gib and needed_gib <= limit_gib:
        warnings.append(
            f"context_parallel_size {parallel.cp} is not needed: one whole sequence fits a GPU "
            f"({alone_gib:.0f} of {limit_gib:.0f} GiB). dp_shard_size would use the ranks without "
            "the exchange of every layer."
        )
    return warnings
