"""Bytes of the states one rank holds, exactly: weights, gradients and moments.

The rule of the engine: tensor parallelism splits a parameter along one dim, then sharding splits
the rows of what is left over dp_shard × cp, both in `torch.chunk` fashion: all parts but the last
ones are as long as the first, and the last may be empty.
"""

from collections.abc import Sequence
from math import prod

from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.plan import ParallelPlan
from ndtrain.plan.setting import Precision
from ndtrain.plan.shapes import ParamShape, model_parameters


def chunk_length(total: int, parts: int, index: int) -> int:
    """Length of part `index` when `torch.chunk` cuts `total` into `parts`; 0 where none is left."""
    step = -(-total // parts)
    return max(0, min(step, total - index * step))


def local_shape(
    parameter: ParamShape, parallel: ParallelPlan, rank: int, *, num_kv_heads: int
) -> tuple[int, ...]:
    """Shape of the part of a parameter that `rank` holds.

    Args:
        parallel: the mesh.
        rank: number of the rank in the whole mesh.
        num_kv_heads: key/value heads of the model; k and v stay whole where tp does not divide
            them.
    """
    place = parallel.coordinates(rank)
    shape = list(parameter.shape)
    whole = parameter.style == "whole"
    if parameter.style == "kv" and num_kv_heads % parallel.tp:
        whole = True
    if not whole:
        dim = parameter.tp_dim
        shape[dim] = chunk_length(shape[dim], parallel.tp, place["tp"])
    row = place["dp_shard"] * parallel.cp + place["cp"]
    shape[0] = chunk_length(shape[0], parallel.dp_shard * parallel.cp, row)
    return tuple(shape)


def local_elements(
    parameters: Sequence[ParamShape], parallel: ParallelPlan, rank: int, *, num_kv_heads: int
) -> int:
    """Elements of all parameters that `rank` holds."""
    return sum(
        prod(local_shape(parameter, parallel, rank, num_kv_heads=num_kv_heads))
        for parameter in parameters
    )


def state_bytes(
    facts: ModelFacts, parallel: ParallelPlan, rank: int, precision: Precision
) -> dict[str, int]:
    """Bytes of weights, gradients and moments of a fully trained model on `rank`."""
    elements = local_elements(
        model_parameters(facts), parallel, rank, num_kv_heads=facts.num_kv_heads
    )
    return {
        "weights": int(elements * precision.weight),
        "gradients": int(elements * precision.gradient),
        "optimizer": int(elements * precision.optimizer),
    }
