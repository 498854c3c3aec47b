"""Attention over documents of different length in one call, through torch's own kernel."""

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from ndtrain.model.grouped_heads import has_grouped_heads
from ndtrain.parallel.segments import Segments

# since torch 2.13 grouped heads must be asked for; before, they were understood
_NAMES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    *,
    window: int,
    scaling: float | None,
) -> torch.Tensor:
    """Causal attention within each run.

    Args:
        query: all queries [T, H, D], bf16 or fp16 on CUDA.
        key: the keys of the runs, one run after the other, with as many or fewer heads.
        value: the values likewise.
        segments: where the runs start.
        window: how many tokens back a query sees beside itself; -1 for all.
        scaling: factor of the scores; 1 / sqrt(D) when None.
    """
    options: dict[str, Any] = {}
    if _NAMES_GROUPS:
        options["enable_gqa"] = has_grouped_heads(query, key)
    output = varlen_attn(
        query,
        key,
        value,
        segments.query_starts,
        segments.key_starts,
        segments.longest_query,
        segments.longest_key,
        scale=scaling,
        window_size=(window, 0),
        **options,
    )
    assert isinstance(output, torch.Tensor)
    return output
