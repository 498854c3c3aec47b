"""Attention over documents of different length: one call of torch's kernel, or a call for each."""

import inspect
from typing import Any

import torch
from torch.nn import functional
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


def run_by_run_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    *,
    window: int,
    scaling: float | None,
) -> torch.Tensor:
    """The same on a CPU, where torch has no such kernel; the arguments are those above."""
    queries = segments.query_starts.diff().tolist()
    keys = segments.key_starts.diff().tolist()
    runs = zip(
        torch.split(query, queries), torch.split(key, keys), torch.split(value, keys), strict=True
    )
    return torch.cat([_attend(*run, window, scaling) for run in runs if len(run[0])])


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scaling: float | None
) -> torch.Tensor:
    """One run: queries [Q, H, D] that are the last of its keys [K, H, D]."""
    num_queries, num_keys = len(query), len(key)
    plain = num_queries == num_keys and (window < 0 or window >= num_keys - 1)
    mask = None
    if not plain:
        places = torch.arange(num_keys)
        distance = places[num_keys - num_queries :, None] - places[None, :]
        mask = (distance >= 0) & (distance <= (window if window >= 0 else num_keys))
    output = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=plain,
        scale=scaling,
        enable_gqa=has_grouped_heads(query, key),
    )
    return output[0].transpose(0, 1)
