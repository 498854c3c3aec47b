"""Token cross-entropy without whole logits: by chunks of tokens, over parts of the vocabulary.

The loss of a step is the sum of its token losses over the count of its trained tokens, so this
module returns sums. Only `chunk` tokens have logits at one time; their gradients are taken at
once and kept as the gradient of the hidden states and of the head's parameters.

Shape letters: T tokens, C tokens of a chunk, H hidden features, V vocabulary of this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import Function

from ndtrain.data.batch import IGNORED
from ndtrain.parallel.collectives import reduce_over


@dataclass(frozen=True)
class Vocabulary:
    """The part of the vocabulary whose logits this rank computes.

    Attributes:
        group: ranks that hold the other parts; None when this rank holds all of it.
    """

    first: int
    count: int
    group: dist.ProcessGroup | None = None


def _whole_loss(
    logits: torch.Tensor, targets: torch.Tensor, *, loss_only: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss sum and its gradient by the logits [C, V], in few passes over them."""
    trained = targets != IGNORED
    own = targets.masked_fill(~trained, 0)[:, None]
    scores = torch.log_softmax(logits.float(), -1)
    loss = -scores.gather(-1, own).squeeze(-1).masked_fill(~trained, 0.0).sum()
    if loss_only:
        return loss, logits
    gradient = scores.exp_()
    gradient.scatter_add_(-1, own, gradient.new_full(own.shape, -1.0))
    gradient.masked_fill_(~trained[:, None], 0.0)
    return loss, gradient.to(logits.dtype)


def _split_loss(
    logits: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from one part of the vocabulary (Megatron-LM's parallel cross-entropy)."""
    trained = targets != IGNORED
    own = targets - vocabulary.first
    here = trained & (own >= 0) & (own < vocabulary.count)
    own = own.masked_fill(~here, 0)[:, None]
    wide = logits.float()
    shifted = wide - reduce_over(wide.amax(-1), "max", group)[:, None]
    picked = shifted.gather(-1, own).squeeze(-1).masked_fill(~here, 0.0)
    both = torch.stack([shifted.exp().sum(-1), picked])
    total, picked = reduce_over(both, "sum", group).unbind()
    loss = (total.log() - picked).masked_fill(~trained, 0.0).sum()
    hit = torch.arange(logits.shape[-1], device=logits.device)[None] == own
    gradient = shifted.exp() / total[:, None] - (hit & here[:, None]).float()
    return loss, (gradient * trained[:, None]).to(logits.dtype)


def loss_and_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocabulary: Vocabulary,
    *,
    loss_only: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the losses of the trained tokens in fp32, and its gradient by the logits.

    Args:
        logits: this rank's logits [C, V]; on CUDA the gradient may be written over them.
        targets: next tokens [C], `IGNORED` where nothing is trained.
        vocabulary: which part of the vocabulary the logits belong to.
        loss_only: the gradient is not read.
    """
    if vocabulary.group is not None:
        return _split_loss(logits, targets, vocabulary, vocabulary.group)
    if logits.device.type == "cuda":
        # Triton is there where CUDA is
        from ndtrain.model.loss_kernel import loss_in_place

        return loss_in_place(logits.contiguous(), targets, gradient=not loss_only)
    return _whole_loss(logits, targets, loss_only=loss_only)


Head = Callable[[torch.Tensor, slice], torch.Tensor]
"""Maps hidden states [C, H] and their place among the tokens to logits [C, V]."""


class _ChunkedLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        head: Head,
        vocabulary: Vocabulary,
        chunk: int,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        needs_hidden = ctx.needs_input_grad[0]
        total = hidden.new_zeros((), dtype=torch.float32)
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        sums: list[torch.Tensor | None] = [None] * len(wanted)
        for start in range(0, hidden.shape[0], chunk):
            place = slice(start, min(start + chunk, hidden.shape[0]))
            with torch.enable_grad():
                part = hidden[place].detach().requires_grad_(needs_hidden)
                logits = head(part, place)
            loss, gradient = loss_and_gradient(logits.detach(), targets[place], vocabulary)
            total += loss
            sources = ([part] if needs_hidden else []) + wanted
            gradients = list(torch.autograd.grad(logits, sources, gradient)) if sources else []
            # or these of two chunks would exist at one time
            del logits, gradient
            if hidden_gradient is not None:
                hidden_gradient[place] = gradients.pop(0)
            for index, found in enumerate(gradients):
                before = sums[index]
                sums[index] = found.float() if before is None else before.add_(found)
        ctx.hidden_gradient = hidden_gradient
        ctx.sums = sums
        ctx.kinds = [(parameter.requires_grad, parameter.dtype) for parameter in parameters]
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden = ctx.hidden_gradient
        if hidden is not None:
            hidden = hidden * gradient.to(hidden.dtype)
        sums = iter(ctx.sums)
        results = [
            (total * gradient).to(dtype) if wanted and (total := next(sums)) is not None else None
            for wanted, dtype in ctx.kinds
        ]
        ctx.hidden_gradient = ctx.sums = None
        return (hidden, None, None, None, None, *results)


def chunked_loss_sum(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    parameters: Sequence[torch.Tensor],
    vocabulary: Vocabulary,
    *,
    chunk: int,
) -> torch.Tensor:
    """Sum of token losses without ever holding the logits of all tokens.

    Args:
        hidden: hidden states [T, H] before the head.
        targets: next tokens [T], `IGNORED` where nothing is trained.
        head: the head as a function; `parameters` are all that it trains.
        parameters: parameters that `head` reads; frozen ones get no gradient computed.
        vocabulary: which part of the vocabulary `head` gives logits of.
        chunk: tokens whose logits exist at one time.

    Returns:
        The sum over the trained tokens, fp32 scalar; the same on all ranks of the vocabulary.
    """
    if not torch.is_grad_enabled():
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            place = slice(start, min(start + chunk, hidden.shape[0]))
            logits = head(hidden[place], place)
            total += loss_and_gradient(logits, targets[place], vocabulary, loss_only=True)[0]
            del logits
        return total
    loss: torch.Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, targets, head, vocabulary, chunk, *parameters
    )
    return loss
