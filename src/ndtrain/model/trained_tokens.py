"""The tokens whose losses count: the head is computed for them alone.

Of rows of questions and answers a third and more is not trained, and the head of a small model is
a fifth of its arithmetic. Which tokens they are is known on the host before the rows leave it, so
a device never waits for their number.

Shape letters: T tokens, N those of them that are selected, H hidden features.
"""

from typing import Any

import torch
from torch.autograd.function import Function

from ndtrain.data.batch import IGNORED


def trained_places(targets: torch.Tensor, *, multiple: int = 1) -> torch.Tensor | None:
    """Places of the tokens with a target, ascending, int64 [N]; None when they are all.

    Args:
        targets: next tokens of a rank's part of the rows, on the host.
        multiple: N is rounded up to it with tokens that have no target, so that a device sees few
            different sizes. There is at least one place: every rank computes with its head.
    """
    trained = targets.flatten() != IGNORED
    found = trained.nonzero().squeeze(1)
    missing = max(1, -(-len(found) // multiple)) * multiple - len(found)
    if len(found) + missing >= trained.numel():
        return None
    others = (~trained).nonzero().squeeze(1)[:missing]
    return torch.cat([found, others]).sort().values


def select_tokens(hidden: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """The hidden states at some places [N, H] out of all [T, H]."""
    if places is None:
        return hidden
    selected: torch.Tensor = _Selection.apply(hidden, places)  # type: ignore[no-untyped-call]
    return selected


class _Selection(Function):
    """No place is selected twice, so gradients are put where they belong and not added up."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.tokens = hidden.shape[0]
        return hidden.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = ctx.saved_tensors
        whole = gradient.new_zeros(ctx.tokens, gradient.shape[1])
        return whole.index_copy_(0, places, gradient), None
