"""The attention function every model runs with: document masks, windows, soft caps and sinks.

It is registered with transformers under the name `ndtrain`. Models call it with queries, keys and
values that already carry their rotary positions; what it must know of the rows arrives as the
keyword `rows` through the model's own keyword arguments, so there is no state beside the call.

Shape letters: B rows, H heads, Q queries, K keys, D head features.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from ndtrain.errors import MeshError
from ndtrain.model.flexible import flexible_attention
from ndtrain.model.grouped_heads import has_grouped_heads
from ndtrain.model.varlen import run_by_run_attention, varlen_attention
from ndtrain.parallel.context import AttentionRows, from_whole_rows, to_whole_rows
from ndtrain.parallel.segments import Segments
from ndtrain.plan.families import USE_A_TESTED_ONE

NAME = "ndtrain"
LEAST_FLEXIBLE = 16
"""Features of a head below which FlexAttention has no kernel on CUDA: toy models read a mask."""


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    rows: AttentionRows | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within documents, over whatever part of the row this rank holds.

    Args:
        module: the attention module, for transformers' interface.
        query: queries [B, H, Q, D] of this rank's tokens.
        key: keys, with as many or fewer heads.
        value: values.
        attention_mask: always None: the mask follows from `rows`.
        rows: where the tokens stand.
        scaling: factor of the scores; 1 / sqrt(D) when None.
        dropout: share of attention weights dropped; only without context parallelism.
        sliding_window: how many tokens back a query sees, itself included.
        softcap: scores are squashed to +-softcap (Gemma 2).
        s_aux: one extra logit per head that takes weight and gives nothing (gpt-oss).

    Returns:
        Output [B, Q, H, D] and None in place of the weights.

    Raises:
        MeshError: the model does not hand `rows` on.
    """
    if rows is None:
        raise untold(module)
    num_heads = query.shape[1]
    query, key, value = to_whole_rows(query, key, value, rows.split)
    longest = key.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < longest else None
    sinks = None if s_aux is None else _own_heads(s_aux, num_heads, query.shape[1], rows)
    shaped = softcap is not None or sinks is not None
    if window in rows.blocks and not dropout and (shaped or not _is_plain(rows, window)):
        output = flexible_attention(
            query,
            key,
            value,
            rows.blocks[window],
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
        )
    elif shaped:
        output = _explicit(query, key, value, rows, window, scaling, softcap, sinks)
    else:
        output = _fused(query, key, value, rows, window, scaling, dropout)
    output = from_whole_rows(output, rows.split)
    return output.transpose(1, 2).contiguous(), None


def untold(module: nn.Module) -> MeshError:
    """The error for an attention module that hands on nothing about the rows."""
    config = getattr(module, "config", None)
    model_type = getattr(config, "model_type", type(module).__name__)
    return MeshError(
        f"the attention of '{model_type}' is not told where the tokens of a row stand: its layers "
        "do not hand their keyword arguments on.",
        where="base_model",
        hint=USE_A_TESTED_ONE,
    )


def _own_heads(
    per_head: torch.Tensor, num_heads: int, wanted: int, rows: AttentionRows
) -> torch.Tensor:
    """The entries of a per-head parameter for the heads that this rank attends with."""
    if wanted == num_heads:
        return per_head
    return per_head.narrow(0, rows.split.rank * wanted, wanted)


def _is_plain(rows: AttentionRows, window: int | None) -> bool:
    """Whether causality alone says who sees whom."""
    whole_rows = rows.split.group is None or rows.split.method == "ulysses"
    return rows.single_document and window is None and whole_rows


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: AttentionRows,
    window: int | None,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Torch's fused kernels; without a mask where plain causality says it all."""
    plain = _is_plain(rows, window)
    if not plain and rows.segments is not None and dropout == 0.0:
        return _by_segments(query, key, value, rows.segments, window, scaling)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if plain else rows.mask(window),
        dropout_p=dropout,
        is_causal=plain,
        scale=scaling,
        enable_gqa=has_grouped_heads(query, key),
    )


def _by_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """A kernel of variable length over all documents at once, or one by one; no mask exists."""
    attend = run_by_run_attention if query.device.type == "cpu" else varlen_attention
    rows, length = query.shape[0], query.shape[2]
    flat_query, flat_key, flat_value = (
        tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)
    )
    if segments.key_places is not None:
        flat_key = flat_key.index_select(0, segments.key_places)
        flat_value = flat_value.index_select(0, segments.key_places)
    output = attend(
        flat_query,
        flat_key,
        flat_value,
        segments,
        window=-1 if window is None else window - 1,
        scaling=scaling,
    )
    return output.reshape(rows, length, *output.shape[1:]).transpose(1, 2)


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: AttentionRows,
    window: int | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention written out, for scores that no fused kernel can shape."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~rows.mask(window), torch.finfo(scores.dtype).min)
    if sinks is not None:
        extra = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, extra], -1)
    weights = scores.float().softmax(-1).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights @ value


def block_windows(config: PretrainedConfig, *, fused: bool) -> tuple[int | None, ...]:
    """The windows for which a model on CUDA wants block masks.

    Args:
        config: the language model's configuration.
        fused: documents are read by a kernel of variable length wherever scores are not shaped.
    """
    shaped = getattr(config, "attn_logit_softcapping", None) is not None
    # gpt-oss names its sinks nowhere in the configuration
    shaped = shaped or config.model_type == "gpt_oss"
    if fused and not shaped:
        return ()
    if _head_features(config) < LEAST_FLEXIBLE:
        return ()
    window = getattr(config, "sliding_window", None)
    return (None,) if window is None else (None, window)


def _head_features(config: PretrainedConfig) -> int:
    """D, of queries and keys."""
    features = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    return int(features or config.hidden_size // config.num_attention_heads)


def describe_attention(
    *, fused: bool, windows: tuple[int | None, ...], flash: str | None = None
) -> str:
    """Which kernels attention runs through on CUDA, in one line.

    Args:
        fused: documents are read by a kernel of variable length.
        windows: those for which block masks are made.
        flash: the implementation in the place of torch's flash attention, if any.
    """
    whole = "torch's fused kernels (cuDNN on Hopper) for whole rows"
    if windows and fused:
        return "attention runs through FlexAttention: this model shapes its scores"
    own = f"{flash}'s" if flash else "its"
    if fused:
        packed = f"{own} kernel for documents of variable length"
    else:
        packed = "FlexAttention" if windows else "a mask of all pairs"
    return f"attention runs through {whole}, {packed} for packed rows and windows"


def use_attention(model: PreTrainedModel) -> None:
    """Let `model` run with this attention function.

    A name that transformers knows no mask function for makes models build no mask at all.
    """
    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
