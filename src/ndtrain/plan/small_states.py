"""Blocks of 8-bit optimizer states: how many elements share a scale, and which meshes cut one."""

import math
from collections.abc import Callable, Sequence

from ndtrain.errors import MeshError, NdtrainError
from ndtrain.plan.facts import ModelFacts
from ndtrain.plan.shapes import ParamShape, model_parameters
from ndtrain.plan.state_bytes import chunk_length
from ndtrain.recipe.schema import Recipe

LONGEST_BLOCK = 256
_SHORTEST_BLOCK = 16
_SMALLEST = 4096
"""Tensors with fewer elements are not worth a scale."""
_MOST_TP = 8


def block_length(shape: Sequence[int]) -> int | None:
    """Elements that share a scale, along the last dim; None for tensors that are kept in fp32.

    Where it can, it divides an eighth of the last dim, so that tensor parallelism over 2, 4 or 8
    ranks cuts no block.

    Args:
        shape: of the whole tensor.
    """
    if len(shape) < 2 or math.prod(shape) < _SMALLEST:
        return None
    last = shape[-1]
    if last % _MOST_TP == 0:
        shared = math.gcd(last // _MOST_TP, LONGEST_BLOCK)
        if shared >= _SHORTEST_BLOCK:
            return shared
    length = math.gcd(last, LONGEST_BLOCK)
    return length if length >= _SHORTEST_BLOCK else None


def check_small_states(
    recipe: Recipe, facts: ModelFacts, tp: int, where: Callable[[str], str]
) -> list[NdtrainError]:
    """8-bit states against tensor parallelism, which cuts some rows."""
    if recipe.optimizer_state_dtype != "8bit" or recipe.adapter is not None or tp == 1:
        return []
    cut = next((one for one in model_parameters(facts) if _cuts_a_block(one, tp)), None)
    if cut is None:
        return []
    return [
        MeshError(
            f"8-bit states of '{cut.name}' share a scale over {block_length(cut.shape)} elements, "
            f"and tensor_parallel_size {tp} leaves ranks rows of {_row(cut, tp)}.",
            where=where("optimizer_state_dtype"),
            hint="Use optimizer_state_dtype: bf16, or dp_shard_size instead.",
        )
    ]


def _row(parameter: ParamShape, tp: int) -> int:
    """Length of the rows that a rank holds of a parameter."""
    last = parameter.shape[-1]
    splits_rows = parameter.style != "whole" and parameter.tp_dim == len(parameter.shape) - 1
    return chunk_length(last, tp, 0) if splits_rows else last


def _cuts_a_block(parameter: ParamShape, tp: int) -> bool:
    length = block_length(parameter.shape)
    return length is not None and _row(parameter, tp) % length > 0
