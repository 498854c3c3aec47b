"""Attention whose scores are shaped by the model, through torch's FlexAttention on CUDA.

Shape letters: B rows, H heads, Q queries, K keys, D head features.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ndtrain.model.grouped_heads import has_grouped_heads


def flexible_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: BlockMask,
    *,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Output [B, H, Q, D]; no matrix of all pairs exists when it runs compiled.

    Args:
        query: queries [B, H, Q, D].
        key: keys, with as many or fewer heads.
        value: values.
        blocks: who sees whom.
        scaling: factor of the scores; 1 / sqrt(D) when None.
        softcap: scores are squashed to +-softcap.
        sinks: one extra logit per head [H] that takes weight and gives nothing.
    """
    # on its own it would build all pairs of scores; a compiled block compiles it along
    alone = query.is_cuda and not torch.compiler.is_compiling()
    attend = _compiled() if alone else flex_attention
    result: Any = attend(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=blocks,
        scale=scaling,
        enable_gqa=has_grouped_heads(query, key),
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        plain: torch.Tensor = result
        return plain
    output, aux = result
    # with the sink, the sum of weights grows from exp(lse) to exp(lse) + exp(sink)
    kept = torch.sigmoid(aux.lse - sinks[None, :, None].to(aux.lse.dtype))
    weighted: torch.Tensor = (output * kept[..., None]).to(output.dtype)
    return weighted


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def cap(
        score: torch.Tensor,
        row: torch.Tensor,
        head: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
    ) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap
