"""Sequence parallelism inside tensor parallelism (Korthikanti et al. 2022, section 4.2.2).

What tensor parallelism splits by features, attention and MLP, needs all tokens. Everything between
is done token by token: norms, residual sums, dropout. There each tp rank holds its share of the
tokens only, instead of repeating the work of the others. One all-reduce becomes the two halves
it is made of, with the work between them divided: tokens are gathered on the way into attention
or MLP, and summed and dealt out again on the way out.

Tokens are dealt from the rows laid end to end, so that no share is ever copied into place.

Shape letters: B rows, L tokens of a row, T = B x L, H hidden features.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ndtrain.parallel.collectives import gather_parts, sum_parts


def gather_tokens(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All tokens [1, T, H] from the ranks' shares [1, T / tp, H]; gradients are summed."""
    return gather_parts(share, 1, group, sum_in=share.dtype)


def gather_rows(share: torch.Tensor, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All tokens [B, L, H] of `rows` rows from the ranks' shares [1, T / tp, H].

    The compiler would keep what arrived, but what a checkpoint holds it computes again.
    """
    if torch.compiler.is_compiling():
        whole: torch.Tensor = checkpoint(
            gather_tokens, share, group, use_reentrant=False, preserve_rng_state=False
        )
    else:
        whole = gather_tokens(share, group)
    return whole.view(rows, -1, share.shape[-1])


def sum_tokens(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's share [1, T / tp, H] of the sum over the ranks' [B, L, H]."""
    return sum_parts(parts.reshape(1, -1, parts.shape[-1]), 1, group)


def own_tokens(keys: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """The entries [1, T / tp] of the tokens that a rank holds, out of one a token [B, L]."""
    return keys.reshape(1, size, -1)[:, rank]


class GathersAhead(Protocol):
    """Gathers tokens, and does at the same time what the module will do with them."""

    def gather(self, share: torch.Tensor, rows: int) -> torch.Tensor:
        """All tokens [B, L, H] of `rows` rows from the ranks' shares [1, T / tp, H]."""

    def forget(self) -> None:
        """Let go of what the module did not take."""


def gather_input(
    module: nn.Module, group: dist.ProcessGroup, ahead: GathersAhead | None = None
) -> None:
    """Let a module that works on a share of the features have all tokens, in place.

    A compiled module keeps its share of them and gathers once more in the backward pass: keeping
    all would cost what is spared by sharing.

    Args:
        module: takes hidden states [1, T / tp, H] from now on; its `forward` is replaced.
            Attention, known by its `rows`, gets all as [B, L, H]; an MLP, for which rows do not
            matter, as [1, T, H], or slice by slice where it is tiled.
        group: the ranks that hold the other tokens.
        ahead: what gathers them instead.
    """
    module.forward = partial(_with_all_tokens, group, ahead, module.forward)


def _with_all_tokens(
    group: dist.ProcessGroup,
    ahead: GathersAhead | None,
    forward: Callable[..., Any],
    *arguments: Any,
    **named: Any,
) -> Any:
    share = arguments[0] if arguments else named["hidden_states"]
    rows = named["rows"].num_rows if "rows" in named else 1
    whole = gather_rows(share, rows, group) if ahead is None else ahead.gather(share, rows)
    try:
        if arguments:
            return forward(whole, *arguments[1:], **named)
        return forward(**{**named, "hidden_states": whole})
    finally:
        # a block that is recomputed is left by an exception, as soon as all it kept is there
        if ahead is not None:
            ahead.forget()
